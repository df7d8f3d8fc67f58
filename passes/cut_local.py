"""Betters a cut by moving one boundary at a time: a good incumbent makes the search short."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gpipe_compiler.passes.cut_space import Floats, Integers, Space

Chain = tuple[int, ...]

NEAREST = 150
"""Down-sets tried on each side of a boundary, nearest in computing time first."""

SWEEPS = 20
"""Times every boundary is tried, at most."""


def chain_times(space: Space, chain: Chain) -> Floats:
    """Shape (stages, 4): forward, backward, receive and gradient seconds."""
    times = np.empty((len(chain) - 1, 4))
    for stage in range(len(chain) - 1):
        times[stage] = _between(space, chain[stage], np.array([chain[stage + 1]]))[0]
    return times


def improve_chain(space: Space, chain: Chain, steps: Callable[[Floats], Floats]) -> Chain:
    """The chain after no single boundary can be moved to a shorter step, within the family.

    Args:
        steps: the steps of pipelines, as `simulate.step_times`.
    """
    times = chain_times(space, chain)
    best = float(steps(times[None])[0])
    boundaries = list(chain)
    for _ in range(SWEEPS):
        before = best
        for position in range(1, len(chain) - 1):
            moved = _move(space, boundaries, position, times, steps)
            if moved is not None and moved[0] < best * (1 - 1e-12):
                best, boundaries[position], times = moved
        if not best < before:
            break
    return tuple(boundaries)


def _move(
    space: Space,
    boundaries: list[int],
    position: int,
    times: Floats,
    steps: Callable[[Floats], Floats],
) -> tuple[float, int, Floats] | None:
    """The best place for one boundary between its neighbours: step, down-set and stage times."""
    start, here, end = boundaries[position - 1 : position + 2]
    ends = space.row(start).ends
    middle = int(np.searchsorted(ends, here))
    near = ends[max(0, middle - NEAREST) : middle + NEAREST]
    places, after = [], []
    for place in near[near < end]:
        row = space.row(int(place))
        at = int(np.searchsorted(row.ends, end))
        if at < len(row.ends) and row.ends[at] == end:
            places.append(int(place))
            after.append(_between(space, int(place), row.ends[at : at + 1])[0])
    if not places:
        return None
    tried = np.repeat(times[None], len(places), axis=0)
    tried[:, position - 1] = _between(space, start, np.array(places))
    tried[:, position] = after
    found = steps(tried)
    best = int(np.argmin(found))
    return float(found[best]), places[best], tried[best]


def _between(space: Space, start: int, ends: Integers) -> Floats:
    """The times of the stages from one down-set to each of several, shape (ends, 4)."""
    row = space.row(start)
    at = np.searchsorted(row.ends, ends)
    return np.stack(
        (
            space.forward_s[ends] - space.forward_s[start],
            space.backward_s[ends] - space.backward_s[start],
            row.receive_s[at],
            row.gradient_s[at],
        ),
        axis=1,
    )
