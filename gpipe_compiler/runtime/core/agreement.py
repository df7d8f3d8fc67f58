"""What the ranks agree on before they run: the work, the micro-batches and their weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..errors import AgreedError, UsageError
from .job import Work
from .replicas import Replicas
from .weighing import Counts, summed

_WORKS = tuple(Work)
_NUMBERS = 7
"""In the header before sizes and weights: work, mode, micro-batches, the bytes of a refusal, the
wanted gradients, and the halves of a checksum."""


@dataclass(frozen=True, slots=True)
class Call:
    """What a call of the pipeline is about, in this replica of it.

    Attributes:
        training: whether the stages are in training mode.
        sizes: samples in each micro-batch; none where the inputs were refused, or where this
            replica's share of the mini-batch is empty.
        loss_weights: of each micro-batch, what the terms of its loss are means over; () without a
            loss.
        refusal: what is wrong with the inputs.
        wanted: the inputs whose gradients the caller wants: bit i for input i.
        read: a checksum of the whole mini-batches that this replica has taken its share of since
            the last call; 0 where it has not.
        first: the number in the mini-batch of this replica's first micro-batch.
        total: the loss weights of the mini-batch, over all replicas; () without any.
    """

    work: Work
    training: bool
    sizes: tuple[int, ...] = ()
    loss_weights: tuple[Counts, ...] = ()
    refusal: UsageError | None = None
    wanted: int = 0
    read: int = 0
    first: int = 0
    total: Counts = ()


def agree(replicas: Replicas | None, call: Call, most: int, terms: int, number: int) -> Call:
    """The call of this rank's replica, on every rank, with what it needs to know of the others'.

    Args:
        call: what this rank knows of it; all ranks but the first of each replica know no more
            than the work and the mode.
        most: micro-batches that a replica has at most.
        terms: of the loss.
        number: of the mini-batch, from 1, for messages.

    Raises:
        AgreedError: on every rank, when a replica has taken its share of another mini-batch.
        UsageError: on every rank, when a replica has refused its inputs, when there are fewer
            samples than replicas, or when ranks do not make the same call.
    """
    if replicas is None:
        if call.refusal is not None:
            raise call.refusal
        return dataclasses.replace(call, total=summed(call.loss_weights))
    calls = _exchange(replicas, call, most, terms)
    firsts = range(0, replicas.world.size, replicas.pipeline.size)
    for rank, (other, _) in zip(firsts, calls, strict=True):
        _check_same(replicas.world.rank, call, rank, other)
    for rank, (_, refused) in zip(firsts, calls, strict=True):
        if refused:
            _refuse(replicas, call.refusal, rank, refused)
    for rank, (other, _) in zip(firsts, calls, strict=True):
        if other.read and calls[0][0].read and other.read != calls[0][0].read:
            raise _other_data(rank, number)
    if not all(other.sizes for other, _ in calls):
        samples = sum(sum(other.sizes) for other, _ in calls)
        raise UsageError(f"a batch of {samples} is too small for {replicas.count} replicas")
    before = [other for other, _ in calls[: replicas.number]]
    return dataclasses.replace(
        calls[replicas.number][0],
        first=sum(len(other.sizes) for other in before),
        total=summed([counts for other, _ in calls for counts in other.loss_weights]),
    )


def _exchange(replicas: Replicas, call: Call, most: int, terms: int) -> list[tuple[Call, int]]:
    """The calls of all replicas, with the length of their refusals, on every rank."""
    length = _NUMBERS + most + terms * most
    rows = torch.zeros(replicas.count, length, dtype=torch.float64)
    if replicas.pipeline.rank == 0:
        rows = torch.stack(
            replicas.peers.gathered(_header(call, most, length), "the calls of the replicas")
        )
    rows = replicas.pipeline.broadcast(rows, 0, "the call")
    found = []
    for work, training, count, refused, wanted, upper, lower, *numbers in rows.tolist():
        kind = _WORKS[int(work)]
        sizes = tuple(map(int, numbers[: int(count)]))
        counts: list[Counts] = []
        if kind.makes_loss:
            counts = [tuple(numbers[most + terms * m :][:terms]) for m in range(int(count))]
        read = int(upper) << 32 | int(lower)
        own = Call(kind, bool(training), sizes, tuple(counts), wanted=int(wanted), read=read)
        found.append((own, int(refused)))
    return found


def _check_same(own_rank: int, own: Call, rank: int, other: Call) -> None:
    if other.work is not own.work:
        raise UsageError(
            f"rank {own_rank} and rank {rank} do not make the same call: {own.work.value} here, "
            f"{other.work.value} there",
            hint="every rank calls step, or evaluate, or the pipeline itself",
        )
    if other.training is not own.training:
        modes = {True: "training", False: "evaluation"}
        raise UsageError(
            f"rank {own_rank} is in {modes[own.training]} mode, and rank {rank} in "
            f"{modes[other.training]} mode",
            hint="every rank calls train() and eval()",
        )


def _other_data(rank: int, number: int) -> AgreedError:
    return AgreedError(
        f"mini-batch {number}, as rank {rank} has read it, is not that of rank 0",
        hint="every replica reads the same mini-batches, whole, and takes its share of each: use "
        "the same seed on every rank and a sampler that does not know the rank; samples that only "
        "one replica reads are passed to step() without shard()",
    )


def _header(call: Call, most: int, length: int) -> torch.Tensor:
    header = torch.zeros(length, dtype=torch.float64)
    count = len(call.sizes)
    halves = call.read >> 32, call.read & 0xFFFFFFFF  # each is exact in 64 bits of floating point
    refused = len(_text(call.refusal))
    _put(header, 0, (_WORKS.index(call.work), call.training, count, refused, call.wanted))
    _put(header, _NUMBERS - len(halves), halves)
    _put(header, _NUMBERS, call.sizes)
    _put(header, _NUMBERS + most, [count for counts in call.loss_weights for count in counts])
    return header


def _put(header: torch.Tensor, start: int, numbers: Sequence[float]) -> None:
    header[start : start + len(numbers)] = torch.tensor(numbers, dtype=torch.float64)


def _refuse(replicas: Replicas, own: UsageError | None, rank: int, length: int) -> None:
    """Raise the refusal of a rank, on every rank; one that has refused too raises its own."""
    text = torch.zeros(length, dtype=torch.uint8)
    if replicas.world.rank == rank:
        text = torch.tensor(list(_text(own)), dtype=torch.uint8)
    text = replicas.world.broadcast(text, rank, f"what rank {rank} refuses")
    if own is not None:
        raise own
    problem, hint = bytes(text.tolist()).decode().split("\0")
    raise UsageError(f"rank {rank} refused its inputs: {problem}", hint=hint)


def _text(refusal: UsageError | None) -> bytes:
    return b"" if refusal is None else f"{refusal.problem}\0{refusal.hint}".encode()
