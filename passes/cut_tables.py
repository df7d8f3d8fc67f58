"""What the stages before a down-set cost at least, however that down-set is cut."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gpipe_compiler.passes.cut_space import Floats, Space

EXACT_PAIRS = 1_500_000
"""Up to so many pairs of down-sets the tables are worked out exactly."""


@dataclass(frozen=True)
class Tables:
    """Lower bounds over all cuts of down-set I into exactly j stages, indexed [j, I].

    Infinite where I has no such cut.

    Attributes:
        forward_s: of the slowest machine of the forward line (receiving or computing).
        backward_s: of the slowest machine of the backward line, recomputing included.
        device_s: of the largest forward + backward of a stage, recomputing included.
        transfer_s: of the sum of all receiving and sending of gradients.
    """

    forward_s: Floats
    backward_s: Floats
    device_s: Floats
    transfer_s: Floats


def tables(space: Space, stages: int, again: Floats) -> Tables:
    """The tables, exact where there are few pairs, otherwise from sums and single nodes.

    Args:
        again: for every stage, 1 where it recomputes, else 0.
    """
    rough = _rough(space, stages, again)
    pairs = 0
    for start in range(space.size - 1):
        pairs += len(space.row(start).ends)
        if pairs > EXACT_PAIRS:
            return rough
    return _exact(space, stages, again)


def _rough(space: Space, stages: int, again: Floats) -> Tables:
    counts = np.arange(stages + 1)[:, None]
    nodes = space.member.sum(axis=0)
    possible = (nodes[None, :] >= counts) & ((counts > 0) | (nodes[None, :] == 0))

    def table(total: Floats, largest: Floats) -> Floats:
        shared = np.maximum(total[None, :] / np.maximum(counts, 1), largest[None, :])
        return np.where(possible, shared, np.inf)

    # What the first j stages all do at least.
    least = np.array([again[:count].min(initial=1.0) for count in range(stages + 1)])[:, None]
    forward = np.array(space.graph.forward_s)
    backward = np.array(space.graph.backward_s)
    both = space.forward_s + space.backward_s
    return Tables(
        table(space.forward_s, _largest(space, forward)),
        np.where(
            least > 0,
            table(both, _largest(space, forward + backward)),
            table(space.backward_s, _largest(space, backward)),
        ),
        np.where(
            least > 0,
            table(both + space.forward_s, _largest(space, 2 * forward + backward)),
            table(both, _largest(space, forward + backward)),
        ),
        np.where(possible, 0.0, np.inf),
    )


def _largest(space: Space, cost: Floats) -> Floats:
    """For every down-set, the dearest node in it."""
    largest = np.zeros(space.size)
    for node in range(space.graph.size):
        np.maximum(largest, np.where(space.member[node], cost[node], 0.0), out=largest)
    return largest


def _exact(space: Space, stages: int, again: Floats) -> Tables:
    table = np.full((4, stages + 1, space.size), np.inf)
    table[:, 0, 0] = 0.0
    for start in range(space.size - 1):
        before = table[:, :-1, start]
        counts = np.flatnonzero(np.isfinite(before[0]))
        if not len(counts):
            continue
        row = space.row(start)
        low, high = counts[0], counts[-1] + 1
        forward = space.forward_s[row.ends] - space.forward_s[start]
        backward = space.backward_s[row.ends] - space.backward_s[start]
        back = backward + again[low:high, None] * forward
        machine = np.stack(
            (
                np.broadcast_to(np.maximum(forward, row.receive_s), back.shape),
                np.maximum(back, row.gradient_s),
                forward + back,
            )
        )
        reached = np.empty((4, high - low, len(row.ends)))
        np.maximum(before[:3, low:high, None], machine, out=reached[:3])
        transfer = row.receive_s + row.gradient_s
        np.add(before[3, low:high, None], transfer[None, :], out=reached[3])
        view = table[:, low + 1 : high + 1]
        view[..., row.ends] = np.minimum(view[..., row.ends], reached)
    return Tables(*table)


def bottleneck_chain(space: Space, stages: int, again: Floats) -> tuple[int, ...] | None:
    """A cut whose slowest stage, transfers beside computing, is as fast as possible.

    Args:
        again: for every stage, 1 where it recomputes, else 0.

    Returns:
        `stages` + 1 down-sets, the empty one first; None where the family has no such cut.
    """
    best = np.full((stages + 1, space.size), np.inf)
    best[0, 0] = 0.0
    parent = np.zeros((stages + 1, space.size), dtype=np.int64)
    for start in range(space.size - 1):
        counts = np.flatnonzero(np.isfinite(best[:-1, start]))
        if not len(counts):
            continue
        row = space.row(start)
        forward = space.forward_s[row.ends] - space.forward_s[start]
        backward = space.backward_s[row.ends] - space.backward_s[start]
        there = np.maximum(forward, row.receive_s)
        for count in counts:
            back = np.maximum(backward + again[count] * forward, row.gradient_s)
            reached = np.maximum(best[count, start], there + back)
            better = reached < best[count + 1, row.ends]
            ends = row.ends[better]
            best[count + 1, ends] = reached[better]
            parent[count + 1, ends] = start
    if not np.isfinite(best[stages, -1]):
        return None
    chain = [space.size - 1]
    for made in range(stages, 0, -1):
        chain.append(int(parent[made, chain[-1]]))
    return tuple(reversed(chain))
