"""How a step's time follows from its stages: in closed form, or along any schedule's orders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from gpipe_compiler.passes.cut_search import Extensions
from gpipe_compiler.passes.cut_space import Floats, Integers, Space
from gpipe_compiler.passes.cut_tables import Tables
from gpipe_compiler.runtime.schedule.actions import Compute, Orders, Phase

TIE = 1e-7
"""With one micro-batch no machine's speed matters; the faster slowest one is then preferred."""


@dataclass(frozen=True)
class FillDrain:
    """GPipe's step, and inference: `simulate.fill_drain_time`.

    A label is (slowest forward machine, slowest backward machine, sum of transfers).

    Attributes:
        total_s: computing of the whole graph once, which no cut changes.
        again: for every stage, 1 where it recomputes, else 0.
    """

    microbatches: int
    total_s: float
    again: Floats
    beam: int = 200_000
    most_extensions: int | None = None

    @property
    def _repeats(self) -> float:
        return self.microbatches - 1 or TIE

    def initial(self) -> Floats:
        """See `Criterion`."""
        return np.zeros(3)

    def promise(self, space: Space, tables: Tables, stage: int, stages: int) -> Floats:
        """See `Criterion`."""
        after = stages - stage
        forward = (space.forward_s[-1] - space.forward_s) / after
        backward = (space.backward_s[-1] - space.backward_s) / after
        backward = backward + self.again[stage:].min() * forward
        slowest = np.maximum(tables.forward_s[stage], forward) + np.maximum(
            tables.backward_s[stage], backward
        )
        return np.asarray(self.total_s + tables.transfer_s[stage] + self._repeats * slowest)

    def cheap(
        self, space: Space, tables: Tables, stage: int, new: Extensions, labels: Floats
    ) -> Floats:
        """See `Criterion`: extending costs nothing, so nothing is held back."""
        return np.zeros(len(new.start))

    def extend(self, stage: int, new: Extensions, labels: Floats) -> Floats:
        """See `Criterion`."""
        extended = np.empty((len(labels), 3))
        np.maximum(labels[:, 0], np.maximum(new.forward_s, new.receive_s), out=extended[:, 0])
        back = new.backward_s + self.again[stage] * new.forward_s
        np.maximum(labels[:, 1], np.maximum(back, new.gradient_s), out=extended[:, 1])
        np.add(labels[:, 2], new.receive_s + new.gradient_s, out=extended[:, 2])
        return extended

    def bound(
        self, space: Space, tables: Tables, stage: int, start: Integers, labels: Floats
    ) -> Floats:
        """See `Criterion`."""
        slowest = np.maximum(labels[:, 0], tables.forward_s[stage, start]) + np.maximum(
            labels[:, 1], tables.backward_s[stage, start]
        )
        return np.asarray(
            self.total_s + labels[:, 2] + tables.transfer_s[stage, start] + self._repeats * slowest
        )


@dataclass(frozen=True)
class Rounds:
    """A lower bound of 1F1B's step, `simulate.one_f_one_b_bound`, as if it were the step.

    A label is (one micro-batch's round through the later stages; the largest time, from when the
    first micro-batch reaches them to when the last gradient leaves them, that one of them asks).

    Attributes:
        again: for every stage, 1 where it recomputes every micro-batch, else 0.
    """

    microbatches: int
    stages: int
    again: Floats
    beam: int = 10_000
    most_extensions: int | None = None

    def initial(self) -> Floats:
        """See `Criterion`."""
        return np.zeros(2)

    def promise(self, space: Space, tables: Tables, stage: int, stages: int) -> Floats:
        """See `Criterion`."""
        return _promise(space, tables, stage, stages, self.microbatches)

    def cheap(
        self, space: Space, tables: Tables, stage: int, new: Extensions, labels: Floats
    ) -> Floats:
        """See `Criterion`: extending costs nothing, so nothing is held back."""
        return np.zeros(len(new.start))

    def extend(self, stage: int, new: Extensions, labels: Floats) -> Floats:
        """See `Criterion`."""
        m, warm = self.microbatches, min(self.microbatches, self.stages - stage)
        forward, backward = new.forward_s, new.backward_s
        own, rest = forward + backward, labels[:, 0]
        again = self.again[stage] * forward
        both = backward + again
        start = np.maximum(warm * forward + again, forward + rest)
        end = np.maximum(warm * both, backward + rest)
        if m > warm:
            phases = start + (m - warm) * (own + again) - again + end
        else:
            phases = np.maximum(start + warm * both - again, warm * forward + end)
        machine = np.maximum(np.maximum(forward, both), np.maximum(new.receive_s, new.gradient_s))
        asked = np.maximum(phases, own + rest + (m - 1) * machine)
        moved = new.receive_s + new.gradient_s
        return np.stack((own + rest + moved, moved + np.maximum(asked, own + labels[:, 1])), axis=1)

    def bound(
        self, space: Space, tables: Tables, stage: int, start: Integers, labels: Floats
    ) -> Floats:
        """See `Criterion`."""
        m = self.microbatches
        inside = space.forward_s[start] + space.backward_s[start]
        way = inside + tables.transfer_s[stage, start]
        line = np.maximum(tables.forward_s[stage, start], tables.backward_s[stage, start])
        step = np.maximum(way + labels[:, 1], m * tables.device_s[stage, start])
        step = np.maximum(step, way + labels[:, 0] + (m - 1) * line)
        repeats = [m - (min(m, self.stages - s) + 1) / 2 for s in range(stage)]
        if repeats and all(repeats):
            step = np.maximum(step, way + labels[:, 0] + inside / sum(1 / r for r in repeats))
        return np.asarray(step)


def _promise(space: Space, tables: Tables, stage: int, stages: int, microbatches: int) -> Floats:
    """The busiest device on either side of a down-set, and the flow lines before it."""
    inside = space.forward_s + space.backward_s
    device = np.maximum(tables.device_s[stage], (inside[-1] - inside) / (stages - stage))
    line = np.maximum(tables.forward_s[stage], tables.backward_s[stage])
    return np.asarray(
        np.maximum(
            microbatches * device,
            inside[-1] + tables.transfer_s[stage] + (microbatches - 1) * line,
        )
    )


@dataclass(frozen=True, slots=True)
class _Shape:
    """What of a stage's order the quick bounds use.

    Attributes:
        warm, cool: forwards before the first backward, backwards after the last forward.
        last_in, first_out: the micro-batch of the last forward, of the first backward.
        in_turn: whether micro-batches leave as they came, after as long a warm-up as cool-down.
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
    cool = phases[::-1].index(Phase.FORWARD)
    in_turn = forward == backward and warm == cool
    gate = [-1] * len(forward)
    latest = -1
    for action in order:
        if action.phase is Phase.BACKWARD:
            latest = action.microbatch
        else:
            gate[action.microbatch] = latest
    rank = tuple(backward.index(m) for m in range(len(backward)))
    return _Shape(warm, cool, forward[-1], backward[0], in_turn, rank, tuple(gate))


@dataclass(frozen=True)
class Ordered:
    """Any schedule with one device per stage whose micro-batches arrive in one order everywhere.

    The last stages, seen from the stage before them, turn the times at which micro-batches arrive
    into the times at which gradients come back: a matrix in (max, +). A label is that matrix, row
    by row: entry [m, a] is the longest way from the arrival of micro-batch a to the gradient of m,
    minus infinity where there is none. Putting a stage before is following its order of actions
    with every arrival in turn; the matrix of no stages gives back what it gets.

    Attributes:
        orders: one per stage.
        again: for every stage, 1 where it recomputes every micro-batch, else 0.
    """

    orders: Orders
    microbatches: int
    beam: int
    again: Floats
    _shapes: tuple[_Shape, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_shapes", tuple(map(_shape, self.orders)))

    @property
    def most_extensions(self) -> int | None:
        """See `Criterion`."""
        return 4 * self.beam

    def initial(self) -> Floats:
        """See `Criterion`."""
        identity = np.full((self.microbatches, self.microbatches), -np.inf)
        np.fill_diagonal(identity, 0.0)
        return identity.reshape(-1)

    def promise(self, space: Space, tables: Tables, stage: int, stages: int) -> Floats:
        """See `Criterion`."""
        return _promise(space, tables, stage, stages, self.microbatches)

    def cheap(
        self, space: Space, tables: Tables, stage: int, new: Extensions, labels: Floats
    ) -> Floats:
        """See `Criterion`: rounds of single micro-batches, and this stage's own work."""
        m = self.microbatches
        matrix = labels.reshape(-1, m, m)
        shape = self._shapes[stage]
        own = new.forward_s + new.backward_s
        again = self.again[stage] * new.forward_s
        both = new.backward_s + again
        way = (space.forward_s + space.backward_s)[new.start] + tables.transfer_s[stage, new.start]
        way = way + new.receive_s + new.gradient_s
        last_round = matrix[new.label, shape.last_in, shape.last_in]
        first_round = matrix[new.label, shape.first_out, shape.first_out]
        forward = last_round + (m - 1) * np.maximum(new.forward_s, new.receive_s)
        backward = first_round + (m - 1) * np.maximum(both, new.gradient_s)
        bound = way + np.maximum(own + np.maximum(forward, backward), m * (own + again))
        if shape.in_turn and shape.warm < m:
            start = np.maximum(shape.warm * new.forward_s + again, new.forward_s + first_round)
            end = np.maximum(shape.cool * both, new.backward_s + last_round)
            inner = (m - shape.warm) * new.forward_s + (m - shape.cool) * both - again
            bound = np.maximum(bound, way + start + inner + end)
        return np.asarray(np.maximum(bound, m * tables.device_s[stage, new.start]))

    def extend(self, stage: int, new: Extensions, labels: Floats) -> Floats:
        """See `Criterion`."""
        if not len(labels):
            return labels
        size = self.microbatches
        later = labels.reshape(-1, size, size)
        reaches = np.isfinite(later[0])  # the same for all labels of a stage
        extended = np.empty_like(later)
        again = self.again[stage] * new.forward_s
        idle = np.full((len(later), size), -np.inf)
        device = received = returned = idle
        ends = np.full((len(later), size, size), -np.inf)  # [extension, micro-batch, arrival]
        for action in self.orders[stage]:
            m = action.microbatch
            if action.phase is Phase.FORWARD:
                arrival = received.copy()
                arrival[:, m] = np.maximum(arrival[:, m], 0.0)
                received = arrival + new.receive_s[:, None]
                device = np.maximum(received, device) + new.forward_s[:, None]
                ends[:, m] = device
            else:
                sources = np.flatnonzero(reaches[m])
                back = (later[:, m, sources, None] + ends[:, sources]).max(axis=1)
                device = np.maximum(back, device + again[:, None]) + new.backward_s[:, None]
                returned = np.maximum(device, returned) + new.gradient_s[:, None]
                extended[:, m] = returned
        return extended.reshape(len(later), -1)

    def bound(
        self, space: Space, tables: Tables, stage: int, start: Integers, labels: Floats
    ) -> Floats:
        """See `Criterion`: what the stages before do at least, however they are cut.

        They are a flow line on the way in and on the way out, and stage 0 takes a micro-batch in
        only after an earlier one has come back. And for any of them with w warm-up forwards
        (`cool` alike) and R after it, the step takes at least whole - R + (M-1) own and
        whole + R + (M-w) own, where `whole` is one round; half the sum of both, weighed so that
        their own times sum up, bounds the step.
        """
        size = self.microbatches
        matrix = labels.reshape(-1, size, size)
        inside = space.forward_s[start] + space.backward_s[start]
        round_s = inside + tables.transfer_s[stage, start]
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
            else:
                sources = np.flatnonzero(reaches[m])
                returns[m] = (matrix[:, m, sources] + arrivals[:, sources]).max(axis=1)
                after = size - 1 - self._shapes[stage].rank_out[m]
                step = np.maximum(step, round_s + returns[m] + after * line_out)
        if stage and all(shape.in_turn for shape in self._shapes[:stage]):
            whole = round_s + (matrix[:, 0, 0] + matrix[:, -1, -1]) / 2
            share = sum(1 / (size - (s.warm + 1) / 2) for s in self._shapes[:stage])
            step = np.maximum(step, whole + inside / share)
        return np.asarray(step)
