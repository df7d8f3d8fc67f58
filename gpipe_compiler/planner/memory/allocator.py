"""What PyTorch's caching allocator reserves for the memory that a program holds.

The model of `c10/cuda/CUDACachingAllocator.cpp` (its rules are the same in PyTorch 1.3 and 2.13, as
long as `PYTORCH_CUDA_ALLOC_CONF` is not set): requests are rounded up to 512 bytes and served from
segments that the device gave. Those of at most 1 MiB share segments of 2 MiB, those under 10 MiB
segments of 20 MiB, larger ones get a segment of their own, rounded up to 2 MiB. A request takes the
smallest free block that holds it, which is split where enough would be left over; a freed block
joins its free neighbours. Every stream has segments of its own.

Not modelled: that segments are given back when the device is out of memory; `record_stream`, which
delays a free until another stream has come so far (here it takes effect at once); and what the CUDA
context itself takes (some 500 MB on most devices).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

from gpipe_compiler.planner.memory.job import DeviceJob
from gpipe_compiler.planner.memory.simulator import MemorySimulator
from gpipe_compiler.planner.memory.storages import Own, SharedBuffer

SMALLEST_BLOCK = 512
"""Bytes (kMinBlockSize); every request is rounded up to a multiple."""
SMALL_REQUEST = 2**20
"""Bytes (kSmallSize): larger requests come from large segments."""
SMALL_SEGMENT = 2 * 2**20
"""Bytes (kSmallBuffer)."""
LARGE_SEGMENT = 20 * 2**20
"""Bytes (large_segment_size): shared by requests of more than 1 MiB and less than `OWN_SEGMENT`."""
OWN_SEGMENT = 10 * 2**20
"""Bytes (kMinLargeAlloc): requests of so much have segments made for them."""
SEGMENT_UNIT = 2 * 2**20
"""Bytes (kRoundLarge): segments made for one request are a multiple."""

_NOWHERE = 0
"""The address of a request for nothing, which takes nothing."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """The most that a device held, in bytes.

    Attributes:
        live: of the blocks in use, as long as they were asked for.
        allocated: of the blocks in use, with what rounding and unsplit rests add
            (`torch.cuda.max_memory_allocated`).
        reserved: of all segments (`torch.cuda.max_memory_reserved`).
    """

    live: int
    allocated: int
    reserved: int


class _Pool:
    """The free blocks of the small or of the large segments of one stream, smallest first."""

    __slots__ = ("free", "least_rest")

    def __init__(self, *, small: bool) -> None:
        self.free: list[tuple[int, int]] = []
        """(size, address) in order."""
        self.least_rest = SMALLEST_BLOCK if small else SMALL_REQUEST + SMALLEST_BLOCK
        """A block is split when so much is left over; sizes are multiples of 512 bytes."""


class _Block:
    """Consecutive bytes of a segment, in use or free, between its neighbours."""

    __slots__ = ("address", "after", "asked", "before", "pool", "size")

    def __init__(self, address: int, size: int, pool: _Pool) -> None:
        self.address = address
        self.size = size
        self.pool = pool
        self.asked = 0
        """Bytes of the request that it serves; 0 while it is free."""
        self.before: _Block | None = None
        self.after: _Block | None = None


class CachingAllocator:
    """The allocator of one device.

    Attributes:
        reserved, allocated, live: bytes now, as in `Footprint`.
    """

    def __init__(self) -> None:
        self.reserved = self.allocated = self.live = 0
        self._most_reserved = self._most_allocated = self._most_live = 0
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._blocks: dict[int, _Block] = {}
        self._next_address = SEGMENT_UNIT

    @property
    def footprint(self) -> Footprint:
        return Footprint(self._most_live, self._most_allocated, self._most_reserved)

    def allocate(self, size: int, stream: int = 0) -> int:
        """Takes bytes for use on a stream.

        Returns:
            Their address, to give to `free`. Addresses of blocks in use are those of bytes that do
            not overlap.
        """
        if size <= 0:
            return _NOWHERE
        rounded = -(-size // SMALLEST_BLOCK) * SMALLEST_BLOCK
        small = rounded <= SMALL_REQUEST
        pool = self._pools.get((stream, small))
        if pool is None:
            pool = self._pools[stream, small] = _Pool(small=small)
        free = pool.free
        at = bisect_left(free, (rounded, 0))
        if at < len(free):
            block = self._blocks[free.pop(at)[1]]
        else:
            block = self._new_segment(rounded, pool)
        rest = block.size - rounded
        if rest >= pool.least_rest:
            self._split(block, rounded, rest)
        block.asked = size
        self.live += size
        self.allocated += block.size
        if self.live > self._most_live:
            self._most_live = self.live
        if self.allocated > self._most_allocated:
            self._most_allocated = self.allocated
        return block.address

    def free(self, address: int) -> None:
        """Lets go the block that `allocate` gave.

        Raises:
            KeyError: when no block in use is there.
        """
        if address == _NOWHERE:
            return
        block = self._blocks[address]
        if not block.asked:
            raise KeyError(address)
        self.live -= block.asked
        self.allocated -= block.size
        block.asked = 0
        pool, after, before = block.pool, block.after, block.before
        if after is not None and not after.asked:
            self._remove(after)
            self._absorb(block, after)
        if before is not None and not before.asked:
            self._remove(before)
            self._absorb(before, block)
            block = before
        insort(pool.free, (block.size, block.address))

    def _new_segment(self, rounded: int, pool: _Pool) -> _Block:
        size = _segment(rounded)
        block = self._blocks[self._next_address] = _Block(self._next_address, size, pool)
        self._next_address += size
        self.reserved += size
        self._most_reserved = max(self._most_reserved, self.reserved)
        return block

    def _split(self, block: _Block, size: int, rest: int) -> None:
        """Leaves `size` bytes of the block and makes its rest a free block."""
        remaining = _Block(block.address + size, rest, block.pool)
        remaining.before, remaining.after = block, block.after
        if block.after is not None:
            block.after.before = remaining
        block.after = remaining
        block.size = size
        self._blocks[remaining.address] = remaining
        insort(block.pool.free, (rest, remaining.address))

    @staticmethod
    def _remove(block: _Block) -> None:
        """Takes a block from the free ones of its pool."""
        free = block.pool.free
        del free[bisect_left(free, (block.size, block.address))]

    def _absorb(self, block: _Block, following: _Block) -> None:
        """Makes one block of two that follow one another."""
        block.size += following.size
        block.after = following.after
        if following.after is not None:
            following.after.before = block
        del self._blocks[following.address]


def _segment(rounded: int) -> int:
    if rounded <= SMALL_REQUEST:
        return SMALL_SEGMENT
    if rounded < OWN_SEGMENT:
        return LARGE_SEGMENT
    return -(-rounded // SEGMENT_UNIT) * SEGMENT_UNIT


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
