"""Placements, boundary values and shared parameters of any kind, to hold schedules against."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from hypothesis import strategies as st

from gpipe_compiler.runtime.schedule import placement_for
from gpipe_compiler.runtime.spec import Crossing, ScheduleKind


def crossing(value: str, source: int, targets: Sequence[int], gradient: bool = True) -> Crossing:
    return Crossing(value, source, tuple(targets), (2, 3), torch.float32, gradient=gradient)


def chain(stages: int) -> list[Crossing]:
    return [crossing(f"v{s}", s, (s + 1,)) for s in range(stages - 1)]


@st.composite
def values(draw, stages):
    """Boundary values, skips among them, and parameters that several stages own."""
    crossings = [c for c in chain(stages) if draw(st.integers(0, 4))]
    for number in range(draw(st.integers(0, 5)) if stages > 1 else 0):
        source = draw(st.integers(0, stages - 2))
        targets = draw(st.sets(st.integers(source + 1, stages - 1), min_size=1))
        crossings.append(crossing(f"w{number}", source, sorted(targets), draw(st.booleans())))
    owners = draw(st.sets(st.integers(0, stages - 1), min_size=2)) if stages > 1 else set()
    shared = {"tied": tuple(sorted(owners))} if owners else {}
    return crossings, shared


@st.composite
def pipelines(draw):
    stages = draw(st.integers(1, 6))
    steps = draw(st.lists(st.booleans(), min_size=stages - 1, max_size=stages - 1))
    placement = [0]
    for step in steps:
        placement.append(placement[-1] + step)
    crossings, shared = draw(values(stages))
    return tuple(placement), crossings, shared, draw(st.integers(1, 7))


def placements(kind: ScheduleKind, devices: int) -> Iterator[tuple[int, ...]]:
    """Those with up to three stages a device that a schedule can have."""
    for each in (1, 2, 3):
        with contextlib.suppress(ValueError):
            yield placement_for(kind, each * devices, devices)


@st.composite
def scheduled(draw):
    """Any schedule of training with stages and micro-batches that it can have.

    Returns the kind, the placement, crossings, shared parameters and the number of micro-batches.
    """
    kind = draw(st.sampled_from(list(ScheduleKind)))
    devices = draw(st.integers(1, 6))
    placement = draw(st.sampled_from(list(placements(kind, devices))))
    crossings, shared = draw(values(len(placement)))
    return kind, placement, crossings, shared, draw(st.integers(1, 12))
