"""How a step's time follows from its stages along the orders of any schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from gpipe_compiler.passes.cut.criteria import promise
from gpipe_compiler.passes.cut.search import Criterion, Extensions
from gpipe_compiler.passes.cut.space import Floats, Integers, Space
from gpipe_compiler.passes.cut.tables import BoundTables
from gpipe_compiler.runtime.schedule.actions import Compute, Orders, Phase


@dataclass(frozen=True, slots=True)
class _Shape:
    """What of a stage's order the quick bounds use.

    Attributes:
        warm, cool: forwards before the first backward, backwards after the last forward.
        last_in, first_out: the micro-batch of the last forward, of the first backward.
        in_turn: whether micro-batches leave as they came, after as long a warm-up as cool-down,
            and with all of their gradients.
        rank_out: for every micro-batch, how many come back before it.
        gate: for every micro-batch, the one whose backward must be done first; -1 for none.
    """

    warm: int
    cool: int
    last_in: int
    first_out: int
    in_turn: bool
    rank_out: tuple[int, ...]
    gate: tuple[int, ...]


def _shape(order: Sequence[Compute]) -> _Shape:
    phases = [action.phase for action in order]
    forward = [action.microbatch for action in order if action.phase is Phase.FORWARD]
    backward = [action.microbatch for action in order if action.phase is Phase.BACKWARD]
    warm = phases.index(Phase.BACKWARD)
    after = phases[len(phases) - phases[::-1].index(Phase.FORWARD) :]
    cool = after.count(Phase.BACKWARD)
    whole = Phase.WEIGHT not in phases
    in_turn = forward == backward and warm == cool and whole
    gate = [-1] * len(forward)
    latest = -1
    for action in order:
        if action.phase is Phase.BACKWARD:
            latest = action.microbatch
        elif action.phase is Phase.FORWARD:
            gate[action.microbatch] = latest
    rank = tuple(backward.index(m) for m in range(len(backward)))
    return _Shape(warm, cool, forward[-1], backward[0], in_turn, rank, tuple(gate))


@dataclass(frozen=True)
class Ordered(Criterion):
    """Any schedule with one device per stage whose micro-batches arrive in one order everywhere.

    The last stages, seen from the stage before them, turn the times at which micro-batches arrive
    into the times at which gradients come back: a matrix in (max, +). A label is that matrix, row
    by row: entry [m, a] is the longest way from the arrival of micro-batch a to the gradient of m,
    minus infinity where there is none; one more row is for the end of all actions and updates.
    Putting a stage before is following its order of actions
    with every arrival in turn; the matrix of no stages gives back what it gets.

    Attributes:
        again: for every stage, 1 where it recomputes every micro-batch, else 0.
        redone: the backwards before which a stage runs its forward again.
        split: whether the weights' part of a backward comes later.
    """

    orders: Orders
    microbatches: int
    beam: int
    again: Floats
    redone: frozenset[Compute]
    split: bool
    _shapes: tuple[_Shape, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_shapes", tuple(map(_shape, self.orders)))

    @property
    def most_extensions(self) -> int | None:
        return 4 * self.beam

    def initial(self) -> Floats:
        identity = np.full((self.microbatches + 1, self.microbatches), -np.inf)
        np.fill_diagonal(identity, 0.0)
        return identity.reshape(-1)

    def promise(self, space: Space, tables: BoundTables, stage: int, stages: int) -> Floats:
        return promise(space, tables, stage, stages, self.microbatches, split=self.split)

    def cheap(
        self, space: Space, tables: BoundTables, stage: int, new: Extensions, labels: Floats
    ) -> Floats:
        """See `Criterion`: rounds of single micro-batches, and this stage's own work."""
        m = self.microbatches
        matrix = labels.reshape(-1, m + 1, m)
        shape = self._shapes[stage]
        ahead, whole, receive, gradient, weight, update, _ = new.times
        first = whole - weight * self.split
        own = ahead + first
        again = self.again[stage] * ahead
        both = first + again
        way = tables.way_s[stage, new.start] + receive + gradient
        last_round = matrix[new.label, shape.last_in, shape.last_in]
        first_round = matrix[new.label, shape.first_out, shape.first_out]
        forward = last_round + (m - 1) * np.maximum(ahead, receive)
        backward = first_round + (m - 1) * np.maximum(both, gradient)
        bound = way + np.maximum(own + np.maximum(forward, backward), m * (own + again))
        if shape.in_turn and shape.warm < m:
            start = np.maximum(shape.warm * ahead + again, ahead + first_round)
            end = np.maximum(shape.cool * both, first + last_round)
            inner = (m - shape.warm) * ahead + (m - shape.cool) * both - again
            bound = np.maximum(bound, way + start + inner + end)
        busy = m * (ahead + whole + again) + update
        bound = np.maximum(bound, busy)
        return np.asarray(np.maximum(bound, m * tables.device_s[stage, new.start]))

    def extend(self, stage: int, new: Extensions, labels: Floats) -> Floats:
        if not len(labels):
            return labels
        size = self.microbatches
        later = labels.reshape(-1, size + 1, size)
        reaches = np.isfinite(later[0])  # the same for all labels of a stage
        extended = np.full_like(later, -np.inf)
        forward, whole, receive, gradient, weight, update, _ = new.times[:, :, None]
        first = whole - weight * self.split
        idle = np.full((len(later), size), -np.inf)
        device = received = returned = idle
        ends = np.full((len(later), size, size), -np.inf)  # [extension, micro-batch, arrival]
        for action in self.orders[stage]:
            m = action.microbatch
            if action.phase is Phase.FORWARD:
                arrival = received.copy()
                arrival[:, m] = np.maximum(arrival[:, m], 0.0)
                received = arrival + receive
                device = np.maximum(received, device) + forward
                ends[:, m] = device
            elif action.phase is Phase.WEIGHT:
                device = device + weight
            else:
                sources = np.flatnonzero(reaches[m])
                back = (later[:, m, sources, None] + ends[:, sources]).max(axis=1)
                ready = device + forward if action in self.redone else device
                device = np.maximum(back, ready) + first
                returned = np.maximum(device, returned) + gradient
                extended[:, m] = returned
        extended[:, size] = device + update
        sources = np.flatnonzero(reaches[size])
        if len(sources):
            last = (later[:, size, sources, None] + ends[:, sources]).max(axis=1)
            extended[:, size] = np.maximum(extended[:, size], last)
        return extended.reshape(len(later), -1)

    def bound(
        self, space: Space, tables: BoundTables, stage: int, start: Integers, labels: Floats
    ) -> Floats:
        """See `Criterion`: what the stages before do at least, however they are cut.

        They are a flow line on the way in and on the way out, and stage 0 takes a micro-batch in
        only after an earlier one has come back. And for any of them with w warm-up forwards
        (`cool` alike) and R after it, the step takes at least whole - R + (M-1) own and
        whole + R + (M-w) own, where `whole` is one round; half the sum of both, weighed so that
        their own times sum up, bounds the step.
        """
        size = self.microbatches
        matrix = labels.reshape(-1, size + 1, size)
        inside = space.inside[-1][0, start] + space.inside[-1][1, start]
        round_s = tables.way_s[stage, start]
        line_in = tables.forward_s[stage, start]
        line_out = tables.backward_s[stage, start]
        step: Floats = self.microbatches * tables.device_s[stage, start]
        if not len(labels):
            return step
        reaches = np.isfinite(matrix[0])
        gate = self._shapes[0].gate if stage else ()
        arrivals = np.zeros((len(labels), size))
        returns: dict[int, Floats] = {}
        for action in self.orders[stage - 1 if stage else 0]:
            m = action.microbatch
            if action.phase is Phase.FORWARD:
                if m:
                    arrivals[:, m] = arrivals[:, m - 1] + line_in
                if m < len(gate) and gate[m] in returns:
                    again = returns[gate[m]] + round_s
                    arrivals[:, m] = np.maximum(arrivals[:, m], again)
            elif action.phase is Phase.BACKWARD:
                sources = np.flatnonzero(reaches[m])
                returns[m] = (matrix[:, m, sources] + arrivals[:, sources]).max(axis=1)
                after = size - 1 - self._shapes[stage].rank_out[m]
                step = np.maximum(step, round_s + returns[m] + after * line_out)
        ended = np.flatnonzero(reaches[size])
        there = space.inside[-1][0, start] if stage else 0.0
        last = (matrix[:, size, ended] + arrivals[:, ended]).max(axis=1)
        step = np.maximum(step, there + last)
        if stage and all(shape.in_turn for shape in self._shapes[:stage]):
            whole = round_s + (matrix[:, 0, 0] + matrix[:, size - 1, -1]) / 2
            share = sum(1 / (size - (s.warm + 1) / 2) for s in self._shapes[:stage])
            step = np.maximum(step, whole + inside / share)
        return np.asarray(step)
