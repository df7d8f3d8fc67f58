"""What a run on real tensors takes of the host's memory, as torch's own allocator tells it.

Nothing that the compiler knows is in it: the profiler records every allocation, and which op it is
for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from gpipe_compiler.no_gc import uncollected

Delta = tuple[int, ...]
"""Bytes of blocks that come (positive) or go (negative), next to each other in time, in order of
size: in which order one kernel takes its results is its own business."""

_MARK = "action "

_NUMBER = 8
"""Bytes of the largest number."""

_GENERATOR = torch.default_generator.get_state().nbytes
"""Bytes of what a generator is put back to after a draw."""


def measured(actions: Iterable[tuple[str, Callable[[], object]]]) -> dict[str, list[Delta]]:
    """The blocks that each of some actions takes and gives back, in order, by its name.

    They run one after the other, and those without a name are not told. What a kernel takes and
    gives back within itself (workspaces) is left out, a kernel being an op that dispatch does not
    take apart into others; so are states of generators, and single numbers, as which torch wraps
    those of Python. Garbage of whoever ran before is not collected meanwhile.
    """
    with (
        uncollected(),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen,
    ):
        for name, action in actions:
            with record_function(f"{_MARK}{name}"):
                action()
    found = {}
    for event in seen.profiler.kineto_results.experimental_event_tree():
        name = event.name.removeprefix(_MARK)
        if name and name != event.name:
            deltas: list[int] = []
            for kernel in _kernels(event.children):
                deltas.extend(_net(kernel))
            found[name] = grouped(deltas)
    return found


def grouped(deltas: list[int]) -> list[Delta]:
    """Neighbours that all come, or all go, together."""
    groups: list[list[int]] = []
    for delta in deltas:
        if abs(delta) <= _NUMBER or abs(delta) == _GENERATOR:
            continue
        if groups and (groups[-1][0] > 0) == (delta > 0):
            groups[-1].append(delta)
        else:
            groups.append([delta])
    return [tuple(sorted(group)) for group in groups]


def peak(deltas: list[Delta]) -> int:
    """The most bytes at a time, above those at the beginning."""
    now = most = 0
    for group in deltas:
        now += sum(group)
        most = max(most, now)
    return most


def _kernels(events: Any) -> Iterator[list[tuple[int, int]]]:
    """The address and signed bytes of every allocation of each kernel, or outside of all."""
    pending = list(reversed(events))
    while pending:
        event = pending.pop()
        if _is_allocation(event):
            yield [_allocation(event)]
        elif event.name.startswith("aten::") and not _is_taken_apart(event.name):
            yield list(_allocations(event))
        else:
            pending.extend(sorted(event.children, key=_start, reverse=True))


def _allocations(event: Any) -> Iterator[tuple[int, int]]:
    for child in sorted(event.children, key=_start):
        if _is_allocation(child):
            yield _allocation(child)
        else:
            yield from _allocations(child)


def _net(kernel: list[tuple[int, int]]) -> list[int]:
    """What is left of what a kernel took, then what it let go of others."""
    taken: dict[int, int] = {}
    freed: list[int] = []
    for address, size in kernel:
        if size > 0:
            taken[address] = size
        elif taken.pop(address, None) is None:
            freed.append(size)
    return [*taken.values(), *freed]


def _is_allocation(event: Any) -> bool:
    return event.typed[0] == torch._C._profiler._EventType.Allocation


def _allocation(event: Any) -> tuple[int, int]:
    fields = event.typed[1]
    return fields.ptr, fields.alloc_size


def _start(event: Any) -> int:
    return event.start_time_ns


@cache
def _is_taken_apart(name: str) -> bool:
    """Whether dispatch sees the parts of an op in its place."""
    return any(
        torch._C._dispatch_has_kernel_for_dispatch_key(known, "CompositeImplicitAutograd")
        for known in torch._C._dispatch_get_all_op_names()
        if known.partition(".")[0] == name
    )
