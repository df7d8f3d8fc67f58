"""Safetensors files: written out of the memory that tensors lie in, and read one by one."""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import safetensors
import safetensors.torch
import torch

from ..errors import WeightsError
from .same_host import memory_of
from .storing import place, place_text

INDEX = "index.json"
ONE_FILE = "model.safetensors"

_SUMS = "gpipe.checksums"
"""In the metadata of the safetensors files that `save_file` writes: by name, as JSON."""
_DAMAGED = "bring an undamaged copy of the file, or write it anew: compile, or save, once more"
_READ_AT_ONCE = 16 << 20
"""Bytes after which a file is opened anew: what was read of it stays in memory while it is open."""
_ALIGNMENT = 64
"""Bytes; what torch's CPU allocator gives."""
_LENGTH = struct.Struct("<Q")
"""What a safetensors file begins with: the bytes of its header."""


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor where torch would have put it.

    In a file it lies at any multiple of 8 bytes. Kernels then sum in another order than on memory
    of torch's own, and read more slowly.
    """
    return tensor if tensor.data_ptr() % _ALIGNMENT == 0 else tensor.clone()


def save_weights(
    tensors: Mapping[str, torch.Tensor], directory: Path, *, shard_bytes: int = 4 << 30
) -> None:
    """Write tensors into a folder, with an index; files hold up to `shard_bytes` each."""
    directory.mkdir(parents=True, exist_ok=True)
    files: dict[str, str] = {}
    for file, shard in by_file(tensors, shard_bytes).items():
        save_file(shard, directory / file)
        files.update(dict.fromkeys(shard, file))
    text = json.dumps({"weight_map": files}, indent=1) + "\n"
    place_text(directory / INDEX, text)


def by_file(
    tensors: Mapping[str, torch.Tensor], shard_bytes: int
) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors in order, by the file that they go to, which holds so many bytes at most."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    if len(shards) == 1:
        return {ONE_FILE: shards[0]}
    count = len(shards)
    return {f"model-{n:05d}-of-{count:05d}.safetensors": own for n, own in enumerate(shards, 1)}


def save_file(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write tensors into one safetensors file; those that share memory are written each.

    Raises:
        OSError, WeightsError: naming the file, when it cannot be written.
    """
    plain = apart(tensors)
    sums = json.dumps({name: checksum([(name, tensor)]) for name, tensor in plain.items()})
    try:
        place(path, lambda file: write_file(plain, file, {_SUMS: sums}))
    except safetensors.SafetensorError as error:
        raise WeightsError(f"cannot write {path}: {error}") from error


def write_file(
    tensors: Mapping[str, torch.Tensor],
    path: Path,
    metadata: Mapping[str, str] | None = None,
    read: Callable[[str], torch.Tensor] | None = None,
) -> None:
    """Write tensors as `apart` gives them into a safetensors file, out of the memory they lie in.

    The library copies each twice, which takes five times as long. Here those that fill cache lines
    come first, and begin with one: they lie as `aligned` has it, and need not be copied when read.
    Of the others wider types come first, as with the library, so that all are aligned.

    Args:
        read: gives the numbers of each in turn, where `tensors` have only types and shapes.

    Raises:
        OSError, SafetensorError: when it cannot be written.
    """

    def rank(item: tuple[str, torch.Tensor]) -> tuple[bool, int, str]:
        name, tensor = item
        return tensor.nbytes % _ALIGNMENT > 0, -tensor.itemsize, name

    ordered = dict(sorted(tensors.items(), key=rank))
    kinds = {tensor.dtype for tensor in tensors.values()}
    names = {kind: _name_of(kind) for kind in kinds}
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in ordered.items():
        begin, end = end, end + tensor.nbytes
        shape = list(tensor.shape)
        header[name] = {
            "dtype": names[tensor.dtype],
            "shape": shape,
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(len(text) + _LENGTH.size) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(_LENGTH.pack(len(text)) + text)
        for name in (name for name, tensor in ordered.items() if tensor.numel()):
            tensor = ordered[name] if read is None else read(name).contiguous()
            file.write(memory_of(tensor.reshape(-1).view(torch.uint8)))


def _name_of(kind: torch.dtype) -> str:
    """What the library calls a type.

    Raises:
        SafetensorError: for a type that files do not have.
    """
    try:
        data = safetensors.torch.save({"": torch.empty(0, dtype=kind)})
    except (KeyError, ValueError) as error:
        raise safetensors.SafetensorError(f"there is no type for {kind}") from error
    return str(json.loads(data[_LENGTH.size :])[""]["dtype"])


def apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors as a file takes them: dense ones on the host, no two in the same memory."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        memory = plain.untyped_storage().data_ptr()
        found[name] = plain.clone() if memory in seen else plain
        seen.add(memory)
    return found


def load_file(path: Path, names: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
    """Tensors of a safetensors file, on the CPU; see `read_tensors`."""
    return dict(read_tensors(path, names))


def read_tensors(
    path: Path, names: Iterable[str] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a safetensors file, held against the checksums of `save_file`, if any.

    They lie in the file itself, and take memory once they are looked at, as long as they are held.

    Args:
        names: of those to read; None for all.

    Raises:
        WeightsError: when it cannot be read, or is damaged.
    """
    try:
        with safetensors.safe_open(path, framework="pt") as opened:
            sums = json.loads((opened.metadata() or {}).get(_SUMS, "{}"))
            left = list({**dict.fromkeys(opened.keys()), **sums} if names is None else names)
        while left:
            size = 0
            with safetensors.safe_open(path, framework="pt") as opened:
                while left and size < _READ_AT_ONCE:
                    name = left.pop(0)
                    tensor = opened.get_tensor(name)
                    size += tensor.nbytes
                    if name in sums and checksum([(name, tensor)]) != sums[name]:
                        problem = f"{path} is damaged: {name} is not what was saved"
                        raise WeightsError(problem, hint=_DAMAGED)
                    yield name, tensor
                    del tensor
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise WeightsError(f"cannot read {path}: {error}", hint=_DAMAGED) from error


def shapes_in(path: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a safetensors file, of which the header alone is read.

    Raises:
        WeightsError: when it cannot be read.
    """
    try:
        with safetensors.safe_open(path, framework="pt") as opened:
            names = opened.keys()
            return {name: tuple(opened.get_slice(name).get_shape()) for name in names}
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise WeightsError(f"cannot read {path}: {error}", hint=_DAMAGED) from error


def checksum(tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
    """64 bits of tensors' names, types, shapes and the CRC-32 of their bytes, wherever they lie."""
    told = hashlib.blake2b(digest_size=8)
    for name, tensor in tensors:
        whole = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
        row = whole.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
        crc = zlib.crc32(memory_of(row)) if row.numel() else 0
        told.update(repr((name, str(tensor.dtype), tuple(tensor.shape), crc)).encode())
    return int.from_bytes(told.digest(), "big")
