"""What PyTorch's caching allocator reserves on a GPU, over training steps played to their end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gpipe_compiler.planner.memory.allocator import CachingAllocator, Footprint
from gpipe_compiler.planner.memory.job import DeviceJob
from gpipe_compiler.planner.memory.simulator import MemorySimulator
from gpipe_compiler.planner.memory.storages import Own, SharedBuffer

_STEPS = 2
"""Steps that are played: in the second, the optimizer has what it remembers from step to step."""


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of what a device holds beside the storages of its program, piece by piece.

    Attributes:
        always: weights, workspaces, and the batch.
        remembered: by the optimizer, from the end of the first step on.
        updating: while it steps.
    """

    always: tuple[int, ...]
    remembered: tuple[int, ...] = ()
    updating: tuple[int, ...] = ()


def footprint_of(job: DeviceJob, held: Held, *, trains: bool) -> Footprint:
    """The most that is live, allocated and reserved; gradients are dropped after each step."""
    allocator = CachingAllocator()
    _allocate(allocator, held.always)
    for turn in range(_STEPS if trains else 1):
        addresses: dict[int, int] = {}

        def hear(
            number: int,
            size: int,
            _: SharedBuffer | Own,
            addresses: dict[int, int] = addresses,
        ) -> None:
            if size >= 0:
                addresses[number] = allocator.allocate(size)
            else:
                allocator.free(addresses.pop(number))

        MemorySimulator(job, hear).run()
        if not turn:
            _allocate(allocator, held.remembered)
        _free(allocator, _allocate(allocator, held.updating))
        _free(allocator, addresses.values())
    return allocator.footprint


def _allocate(allocator: CachingAllocator, sizes: Iterable[int]) -> list[int]:
    return [allocator.allocate(size) for size in sizes]


def _free(allocator: CachingAllocator, addresses: Iterable[int]) -> None:
    for address in addresses:
        allocator.free(address)
