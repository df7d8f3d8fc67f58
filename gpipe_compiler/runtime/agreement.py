"""What the ranks agree on before they run: the work, the micro-batches and their weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .distributed import Network
from .errors import UsageError
from .job import Work

_WORKS = tuple(Work)


@dataclass(frozen=True, slots=True)
class Call:
    """What a call of the pipeline is about. No micro-batches: the inputs were refused.

    Attributes:
        sizes: samples in each micro-batch.
        loss_weights: of each micro-batch, what its loss's mean is taken over; () without a loss.
    """

    work: Work
    sizes: tuple[int, ...] = ()
    loss_weights: tuple[float, ...] = ()


def agree(network: Network | None, call: Call, most: int) -> Call:
    """Rank 0's call, on every rank.

    Args:
        call: what this rank knows of it; other ranks than 0 know the work alone.
        most: micro-batches that a call has at most.

    Raises:
        UsageError: when rank 0 has refused its inputs, or ranks do not make the same call.
    """
    if network is None:
        return call
    header = torch.zeros(2 + 2 * most, dtype=torch.float64)
    count = len(call.sizes)
    header[0], header[1] = _WORKS.index(call.work), count
    header[2 : 2 + count] = torch.tensor(call.sizes)
    if call.loss_weights:
        header[2 + most : 2 + most + count] = torch.tensor(call.loss_weights, dtype=torch.float64)
    numbers = network.broadcast(header, 0, "the call").tolist()
    work, count = _WORKS[int(numbers[0])], int(numbers[1])
    if work is not call.work:
        raise UsageError(
            f"rank {network.rank} and rank 0 do not make the same call: {call.work.value} here, "
            f"{work.value} there",
            hint="every rank calls step, or evaluate, or the pipeline itself",
        )
    if count == 0 and network.rank != 0:
        raise UsageError("rank 0 refused its inputs; its own message says why")
    weights = numbers[2 + most : 2 + most + count] if work.makes_loss else ()
    return Call(work, tuple(map(int, numbers[2 : 2 + count])), tuple(weights))
