"""A number that tells one mini-batch from another: replicas compare what they have read by it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache

import torch

_WIDTH = 4096
"""Words that are summed up to one number."""

_ROWS_ON_CPU, _ROWS = 16, 1024
"""Sums that are made at a time: what lies in between stays in the processor's caches."""


def checksum(tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
    """64 bits of tensors' names, types, shapes and every byte: the same wherever they lie.

    Each 32-bit word is multiplied by a 64-bit number of its own; the products are summed modulo
    2^64, rows of words first and then the rows' sums alike. Whatever differs, the sums are equal
    with a probability of about 2^-33 (multilinear hashing), and it reads the memory once.
    """
    told = hashlib.blake2b(digest_size=8)
    for name, tensor in tensors:
        whole = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
        data = whole.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        words = data.numel() // 4
        if data.storage_offset() % 4:
            data = data.clone()
        total = _sum(data[: 4 * words].view(torch.int32)) if words else 0
        rest = data[4 * words :].tolist()
        told.update(repr((name, str(tensor.dtype), tuple(tensor.shape), total, rest)).encode())
    return int.from_bytes(told.digest(), "big")


def _sum(words: torch.Tensor) -> int:
    weights = _weights(words.device)
    rows = _ROWS_ON_CPU if words.device.type == "cpu" else _ROWS
    room = weights.new_empty(min(rows, words.numel() // _WIDTH), _WIDTH)
    while words.numel() > _WIDTH:
        full = words.numel() // _WIDTH
        head, tail = words[: full * _WIDTH].view(full, _WIDTH), words[full * _WIDTH :]
        sums = [torch.mul(p, weights, out=room[: len(p)]).sum(1) for p in torch.split(head, rows)]
        sums.append((tail * weights[: tail.numel()]).sum().reshape(1))
        words = torch.cat(sums).view(torch.int32)
    return int((words * weights[: words.numel()]).sum())


@cache
def _weights(device: torch.device) -> torch.Tensor:
    """Numbers without a pattern, the same in every process."""
    drawn = bytearray(hashlib.shake_128(b"mini-batch").digest(8 * _WIDTH))
    return torch.frombuffer(drawn, dtype=torch.int64).to(device)
