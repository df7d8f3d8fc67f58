"""The model of PyTorch's caching allocator: compared with its header, hand-worked cases and a naive
second model (lists that are searched from end to end), over random series of requests."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpipe_compiler.planner.memory import allocator
from gpipe_compiler.planner.memory.allocator import CachingAllocator, Footprint

KIB, MIB = 2**10, 2**20

SIZES = st.one_of(
    st.integers(0, 5 * 512),
    st.integers(MIB - 1024, MIB + 1024),
    st.integers(10 * MIB - 1024, 10 * MIB + 1024),
    st.integers(0, 25 * MIB),
    st.sampled_from([512, 64 * KIB, MIB, MIB + 1, 2 * MIB, 10 * MIB, 20 * MIB]),
)
REQUESTS = st.lists(
    st.one_of(st.tuples(SIZES, st.integers(0, 2)), st.integers(0, 30)), min_size=1, max_size=80
)
"""(bytes, stream) to take, or which of the blocks in use to let go."""


def footprint(events: Iterable[tuple[int, int]]) -> Footprint:
    """What is reserved over a series of (number of a block, its bytes)."""
    one = CachingAllocator()
    for _, size in events:
        one.allocate(size)
    return one.footprint


def segments(one: CachingAllocator) -> Iterator[list[tuple[int, int, int]]]:
    """Every segment, as (address, bytes, bytes asked for or 0) of its blocks in order."""
    for block in one._blocks.values():
        if block.before is None:
            blocks, at = [], block
            while at is not None:
                blocks.append((at.address, at.size, at.asked))
                at = at.after
            yield blocks


@dataclass
class Naive:
    """The allocator again: a segment is (stream, small, its blocks as [bytes, in use])."""

    segments: list[tuple[int, bool, list[list[int]]]] = field(default_factory=list)

    def allocate(self, size: int, stream: int) -> list[int]:
        size = max(512, (size + 511) // 512 * 512)
        small = size <= MIB
        fits = [
            (block[0], number, at)
            for number, (its, kind, blocks) in enumerate(self.segments)
            if (its, kind) == (stream, small)
            for at, block in enumerate(blocks)
            if not block[1] and block[0] >= size
        ]
        if fits:
            _, number, at = min(fits)
            blocks = self.segments[number][2]
        else:
            whole = 2 * MIB if small else 20 * MIB
            if size >= 10 * MIB:
                whole = (size + 2 * MIB - 1) // (2 * MIB) * (2 * MIB)
            blocks, at = [[whole, 0]], 0
            self.segments.append((stream, small, blocks))
        rest = blocks[at][0] - size
        if rest >= 512 if small else rest > MIB:
            blocks.insert(at + 1, [rest, 0])
            blocks[at][0] = size
        blocks[at][1] = 1
        return blocks[at]

    def free(self, block: list[int]) -> None:
        block[1] = 0
        for _, _, blocks in self.segments:
            for at in range(len(blocks) - 1, 0, -1):
                if not blocks[at][1] and not blocks[at - 1][1]:
                    blocks[at - 1][0] += blocks.pop(at)[0]

    @property
    def sizes(self) -> list[list[tuple[int, bool]]]:
        return [[(size, bool(used)) for size, used in blocks] for *_, blocks in self.segments]


def test_constants_are_those_of_torchs_header() -> None:
    header = Path(torch.__file__).parent / "include/c10/core/AllocatorConfig.h"
    text = header.read_text()
    found = dict(re.findall(r"constexpr size_t (k\w+) = (\d+);", text))
    (large,) = re.findall(r"large_segment_size_\{(\d+)\}", text)
    assert int(found["kMinBlockSize"]) == allocator.SMALLEST_BLOCK
    assert int(found["kSmallSize"]) == allocator.SMALL_REQUEST
    assert int(found["kSmallBuffer"]) == allocator.SMALL_SEGMENT
    assert int(found["kMinLargeAlloc"]) == allocator.OWN_SEGMENT
    assert int(found["kRoundLarge"]) == allocator.SEGMENT_UNIT
    assert int(large) == allocator.LARGE_SEGMENT


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        # Of a segment of its own no more than 1 MiB is left over: it stays with the block.
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),
        (0, 0, 0),
    ],
)
def test_one_request(size: int, allocated: int, reserved: int) -> None:
    assert footprint([(0, size)]) == allocator.Footprint(size, allocated, reserved)


def test_small_requests_share_a_segment() -> None:
    found = footprint((number, 512 * KIB) for number in range(4))
    assert found.reserved == 2 * MIB
    assert footprint((number, 512 * KIB) for number in range(5)).reserved == 4 * MIB


def test_the_smallest_block_that_fits_is_taken() -> None:
    one = CachingAllocator()
    held = [one.allocate(size) for size in (3 * MIB, MIB + 512, 5 * MIB, MIB + 512)]
    # Free: blocks of 3 MiB and 5 MiB, and the rest of the segment, 10 MiB less 1 KiB.
    one.free(held[0])
    one.free(held[2])
    assert one.allocate(4 * MIB) == held[2]
    assert one.allocate(2 * MIB) == held[0]
    assert one.reserved == 20 * MIB


def test_freed_neighbours_join() -> None:
    one = CachingAllocator()
    held = [one.allocate(6 * MIB) for _ in range(3)]
    for address in held:
        one.free(address)
    assert one.allocate(18 * MIB) == held[0]
    assert one.reserved == 20 * MIB
    # A hole between blocks in use joins nothing.
    apart = CachingAllocator()
    held = [apart.allocate(6 * MIB) for _ in range(3)]
    apart.free(held[0])
    apart.free(held[2])
    apart.allocate(12 * MIB)
    assert apart.reserved == 32 * MIB


def test_every_stream_has_its_own_segments() -> None:
    one = CachingAllocator()
    one.free(one.allocate(4 * MIB, stream=1))
    one.free(one.allocate(4 * MIB, stream=2))
    one.allocate(4 * MIB, stream=1)
    assert one.reserved == 40 * MIB


def test_a_block_is_freed_once() -> None:
    one = CachingAllocator()
    address = one.allocate(KIB)
    one.free(address)
    with pytest.raises(KeyError):
        one.free(address)


@given(REQUESTS)
def test_as_the_naive_model(requests: list[tuple[int, int] | int]) -> None:
    one, naive = CachingAllocator(), Naive()
    held: list[tuple[int, list[int], int]] = []
    live, most, allocated = 0, 0, 0
    for request in requests:
        if isinstance(request, tuple):
            size, stream = request
            if size:
                held.append((one.allocate(*request), naive.allocate(size, stream), size))
            else:
                one.free(one.allocate(0))
            live = sum(size for *_, size in held)
        elif held:
            address, block, size = held.pop(request % len(held))
            one.free(address)
            naive.free(block)
            live -= size
        most = max(most, live)
        blocks = [
            [(size, asked > 0) for _, size, asked in segment]
            for segment in sorted(segments(one), key=lambda blocks: blocks[0][0])
        ]
        assert blocks == naive.sizes
        inside = [block for blocks in naive.sizes for block in blocks]
        assert one.live == live
        assert one.allocated == sum(size for size, used in inside if used)
        assert one.reserved == sum(size for size, _ in inside)
        allocated = max(allocated, one.allocated)
    assert one.footprint.live == most
    assert one.footprint.allocated == allocated
    assert one.footprint.live <= one.footprint.allocated <= one.footprint.reserved


@given(REQUESTS)
def test_blocks_lie_side_by_side(requests: list[tuple[int, int] | int]) -> None:
    one = CachingAllocator()
    held: dict[int, int] = {}
    for request in requests:
        if isinstance(request, tuple):
            address = one.allocate(*request)
            if request[0]:
                assert address not in held
                held[address] = request[0]
        elif held:
            address = list(held)[request % len(held)]
            one.free(address)
            del held[address]
    for (start, size), (following, _) in pairwise(sorted(held.items())):
        assert start + size <= following
    for segment in segments(one):
        for (address, size, asked), (following, _, asked_there) in pairwise(segment):
            assert address + size == following
            assert asked or asked_there, "free neighbours were left apart"
    asked = {address: asked for blocks in segments(one) for address, _, asked in blocks if asked}
    assert asked == held
