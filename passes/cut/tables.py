"""What the stages before a down-set cost at least, however that down-set is cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from gpipe_compiler.passes.cut.device_order import DeviceOrder, StageRates
from gpipe_compiler.passes.cut.space import Floats, Space, StageRow

EXACT_PAIRS = 1_500_000
"""Up to this number of pairs of down-sets the tables are computed exactly."""


@dataclass(frozen=True)
class BoundTables:
    """Lower bounds over all cuts of down-set I into exactly the first j stages, indexed [j, I].

    Infinite where I has no such cut.

    Attributes:
        forward_s: of the slowest machine of the forward line (receiving or computing).
        backward_s: of the slowest machine of the backward line, recomputing included.
        device_s: of the largest forward + backward of a stage, recomputing included.
        way_s: of one micro-batch's way there and back: all computing but recomputing and the
            split-off part of backward, receiving and sending of gradients.
        stage_s: of the largest sum of all of these of a stage, with what it sends on.
    """

    forward_s: Floats
    backward_s: Floats
    device_s: Floats
    way_s: Floats
    stage_s: Floats


def tables(space: Space, device_order: DeviceOrder) -> BoundTables:
    """The tables, exact where there are few pairs, otherwise from sums and single nodes."""
    pairs = 0
    rates = len(set(device_order.rates))
    for start in range(space.size - 1):
        pairs += len(space.row(start, device_order.rates[0]).ends)
        if pairs * rates > EXACT_PAIRS:
            return _rough(space, device_order)
    return _exact(space, device_order)


def boundaries(space: Space, device_order: DeviceOrder) -> Floats:
    """0 where a down-set may hold just the first j stages, else infinity; indexed [j, I]."""
    graph = space.graph
    held = np.zeros((device_order.stages + 1, space.size))
    free = not any(graph.first_stage[: graph.size - graph.last]) and all(
        last == device_order.stages - 1 for last in graph.last_stage
    )
    if not free:
        for boundary in range(device_order.stages + 1):
            held[boundary, ~space.allowed(boundary)] = np.inf
    held[~space.within(device_order.stages)] = np.inf
    held[0, 1:] = np.inf
    held[-1, :-1] = np.inf
    held[1:, 0] = np.inf
    held[:-1, -1] = np.inf
    return held


def _rough(space: Space, device_order: DeviceOrder) -> BoundTables:
    stages = device_order.stages
    counts = np.arange(stages + 1)[:, None]
    possible = boundaries(space, device_order)
    possible[space.nodes[None, :] < counts] = np.inf

    def table(total: Floats, largest: Floats) -> Floats:
        shared = np.maximum(total[None, :] / np.maximum(counts, 1), largest[None, :])
        return np.asarray(shared + possible)

    # What the first j stages all do at least.
    least = np.array([device_order.again[:count].min(initial=1.0) for count in range(stages + 1)])
    again = least[:, None] > 0
    nodes = space.graph.seconds
    forward, backward = nodes[:, 0].min(axis=0), nodes[:, 1].min(axis=0)
    first = (nodes[:, 1] - nodes[:, 2] * device_order.split).min(axis=0)
    fast = space.inside[-1]
    first_inside = fast[1] - fast[2] * device_order.split
    device = np.where(
        again,
        table(2 * fast[0] + fast[1], space.largest(2 * forward + backward)),
        table(fast[0] + fast[1], space.largest(forward + backward)),
    )
    return BoundTables(
        table(fast[0], space.largest(forward)),
        np.where(
            again,
            table(fast[0] + first_inside, space.largest(forward + first)),
            table(first_inside, space.largest(first)),
        ),
        device,
        np.asarray((fast[0] + first_inside)[None, :] + possible),
        device,
    )


def runs(device_order: DeviceOrder, low: int, high: int) -> Iterator[tuple[int, int, StageRates]]:
    """The stages from `low` to before `high`, in runs of equal rate."""
    for begin, end, rate in device_order.runs:
        if begin < high and end > low:
            yield max(begin, low), min(end, high), rate


def machines(device_order: DeviceOrder, low: int, high: int, row: StageRow) -> Floats:
    """What stages on devices of equal rate cost, as in `BoundTables`: (5, stages, ends)."""
    forward, backward, receive, gradient, weight, _, send = row.times
    found = np.empty((5, high - low, len(row.ends)))
    again = device_order.again[low:high, None] * forward
    first = backward - weight if device_order.split else backward
    found[0] = np.maximum(forward, receive)
    np.maximum(first + again, gradient, out=found[1])
    np.add(forward + backward, again, out=found[2])
    found[3] = forward + first + receive + gradient
    np.add(found[2], receive + gradient + send, out=found[4])
    if device_order.limited:
        found[:, device_order.excess(low, high - low, row.held) > 0] = np.inf
    return found


def _cycles(
    device_order: DeviceOrder, low: int, high: int, row: StageRow, *, apart: bool
) -> Floats:
    """The time of a micro-batch on the same stages, (stages, ends): see `bottleneck_chain`."""
    forward, backward, receive, gradient, weight, _, send = row.times
    again = device_order.again[low:high, None] * forward
    if apart:
        found = forward + backward + again + (receive + gradient + send)
    else:
        first = backward - weight if device_order.split else backward
        found = np.maximum(forward, receive) + np.maximum(first + again, gradient)
    if device_order.limited:
        found = np.where(device_order.excess(low, high - low, row.held) > 0, np.inf, found)
    return np.asarray(found)


def _exact(space: Space, device_order: DeviceOrder) -> BoundTables:
    table = np.full((5, device_order.stages + 1, space.size), np.inf)
    table[:, 0, 0] = 0.0
    possible = boundaries(space, device_order)
    for start in range(space.size):
        table[..., start] += possible[:, start]
        counts = np.flatnonzero(np.isfinite(table[0, :-1, start]))
        if not len(counts) or start == space.size - 1:
            continue
        for low, high, rate in runs(device_order, counts[0], counts[-1] + 1):
            row = space.row(start, rate)
            costs = machines(device_order, low, high, row)
            before = table[:, low:high, start, None]
            reached = np.maximum(costs, before)
            np.add(costs[3], before[3], out=reached[3])
            view = table[:, low + 1 : high + 1]
            view[..., row.ends] = np.minimum(view[..., row.ends], reached)
    return BoundTables(*table)


def bottleneck_chain(
    space: Space, device_order: DeviceOrder, *, apart: bool = False
) -> tuple[int, ...] | None:
    """A cut whose slowest stage is as fast as possible, of those in which each stage fits.

    Args:
        apart: whether transfers come after computing; otherwise they happen beside it.

    Returns:
        As many down-sets as stages and one, the empty one first; None where there is no such cut.
    """
    best = boundaries(space, device_order)
    stages = device_order.stages
    possible = best.copy()
    best[1:] = np.inf
    parent = np.zeros((stages + 1, space.size), dtype=np.int32)
    for start in range(space.size - 1):
        best[:, start] += possible[:, start]
        counts = np.flatnonzero(np.isfinite(best[:-1, start]))
        if not len(counts):
            continue
        for low, high, rate in runs(device_order, counts[0], counts[-1] + 1):
            row = space.row(start, rate)
            cost = _cycles(device_order, low, high, row, apart=apart)
            reached = np.maximum(best[low:high, start, None], cost)
            view, links, span = best[low + 1 : high + 1], parent[low + 1 : high + 1], row.ends
            better = reached < view[:, span]
            view[:, span] = np.where(better, reached, view[:, span])
            links[:, span] = np.where(better, start, links[:, span])
    if not math.isfinite(best[stages, -1] + possible[stages, -1]):
        return None
    chain = [space.size - 1]
    for made in range(stages, 0, -1):
        chain.append(int(parent[made, chain[-1]]))
    return tuple(reversed(chain))


def least_excess(space: Space, device_order: DeviceOrder) -> float:
    """By how many bytes some stage is too large for its device, at least, in any cut; or 0."""
    best = boundaries(space, device_order)
    possible = best.copy()
    best[1:] = np.inf
    for start in range(space.size - 1):
        best[:, start] += possible[:, start]
        counts = np.flatnonzero(np.isfinite(best[:-1, start]))
        if not len(counts):
            continue
        low, high = counts[0], counts[-1] + 1
        row = space.row(start, device_order.rates[low])
        over = device_order.excess(low, high - low, row.held)
        reached = np.maximum(best[low:high, start, None], over, out=over)  # which is never below 0
        view, span = best[low + 1 : high + 1], row.ends
        view[:, span] = np.minimum(view[:, span], reached)
    return float(best[-1, -1])


def tails(
    space: Space, device_order: DeviceOrder, cost: Callable[[int, int, StageRow], Floats]
) -> Floats:
    """The largest cost of a stage in the best cut of all outside a down-set, indexed [j, I].

    The stages j, j + 1, ... lie outside. Infinite where there is no such cut.

    Args:
        cost: of the stages from one to before another, all of equal rate: (stages, ends).
    """
    stages = device_order.stages
    possible = boundaries(space, device_order)
    best = np.full((stages + 1, space.size), np.inf)
    best[stages, -1] = 0.0
    for start in range(space.size - 2, -1, -1):
        for low, high, rate in runs(device_order, 0, stages):
            row = space.row(start, rate)
            if not len(row.ends):
                continue
            costs = cost(low, high, row)
            if device_order.limited:
                costs = np.where(device_order.excess(low, high - low, row.held) > 0, np.inf, costs)
            reached = np.maximum(costs, best[low + 1 : high + 1][:, row.ends])
            best[low:high, start] = reached.min(axis=1)
        best[:, start] += possible[:, start]
    return best
