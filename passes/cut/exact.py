"""The search through all chains of down-sets, for what no closed form or label describes.

Stages are put one behind another, first stage first, so that of every stage it is known which
device sends it what. A beginning is dropped when a lower bound of all that can follow is not below
the best cut known; whole chains are simulated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from gpipe_compiler.cluster import Link
from gpipe_compiler.options import Objective
from gpipe_compiler.passes.cut.device_order import DeviceOrder
from gpipe_compiler.passes.cut.evaluator import CutEvaluator, excess_of
from gpipe_compiler.passes.cut.problem import GRAPH_INPUT
from gpipe_compiler.passes.cut.search import TOLERANCE
from gpipe_compiler.passes.cut.setting import CutSetting
from gpipe_compiler.passes.cut.space import (
    BACKWARD,
    FORWARD,
    GRADIENT,
    RECEIVE,
    SEND,
    UPDATE,
    WEIGHT,
    Booleans,
    Floats,
    Integers,
    Space,
    StageRow,
)
from gpipe_compiler.passes.cut.tables import tails
from gpipe_compiler.runtime.spec import ScheduleKind

CHILDREN = 60_000
"""Beginnings that are worked out at once, about."""


class Goal(Enum):
    """What is to be least: the objective among cuts that fit, or what they do not fit by."""

    OBJECTIVE = "objective"
    EXCESS = "excess"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the search has found.

    Attributes:
        chain: down-sets from the empty one to the whole; None when nothing is better than what was
            known.
        bound: nothing is less than this, nor than what was known if that is less.
    """

    chain: tuple[int, ...] | None
    bound: float


@dataclass(frozen=True)
class _Block:
    """Beginnings of as many stages each.

    Attributes:
        chain: shape (n, stages so far + 1).
        times, held: as in `StageRow`, (n, 7 or 3, stages).
        pending: what the stages have still to send, at least.
        bounds: of what can follow.
    """

    chain: Integers
    times: Floats
    held: Floats
    pending: Floats
    bounds: Floats

    def take(self, chosen: Integers | slice) -> _Block:
        return _Block(
            self.chain[chosen],
            self.times[chosen],
            self.held[chosen],
            self.pending[chosen],
            self.bounds[chosen],
        )


class Enumeration:
    """One search through all chains of a space.

    Args:
        repeats: for every stage, how many micro-batches it computes again.
        work: about how many numbers may be worked out before it gives up.
    """

    def __init__(
        self,
        space: Space,
        device_order: DeviceOrder,
        evaluator: CutEvaluator,
        setting: CutSetting,
        repeats: tuple[int, ...],
        goal: Goal = Goal.OBJECTIVE,
    ) -> None:
        self.space, self.device_order, self.evaluator, self.setting = (
            space,
            device_order,
            evaluator,
            setting,
        )
        self.goal = goal
        self.repeats = np.array(repeats, dtype=np.float64)
        self.stages, self.microbatches = setting.stages, setting.microbatches
        self.bottleneck = setting.objective is Objective.BOTTLENECK
        self.split = float(setting.splits_backward)
        self.in_turn = setting.kind in (None, ScheduleKind.GPIPE)
        self.actions = sum(map(len, setting.orders))
        self._made = 0
        filtering = device_order if goal is Goal.OBJECTIVE else device_order.roomier(float("inf"))
        self.tail = tails(space, filtering, self._tail_cost)
        self.devices = [
            [s for s in range(self.stages) if device_order.placement[s] == device]
            for device in range(len(device_order.devices))
        ]

    def run(self, best: float, work: int) -> tuple[Outcome, int]:
        """The best chain, if better than what is known, and what work is left."""
        chain: tuple[int, ...] | None = None
        stack = [
            _Block(
                np.zeros((1, 1), dtype=np.int64),
                np.zeros((1, 7, self.stages)),
                np.zeros((1, 3, self.stages)),
                np.zeros((1, self.stages)),
                np.zeros(1),
            )
        ]
        while stack:
            block = stack.pop()
            ceiling = self._ceiling(best)
            block = block.take(np.flatnonzero(block.bounds < ceiling))
            if not len(block.bounds):
                continue
            if work <= 0:
                stack.append(block)
                break
            for children in self._expand(block, ceiling):
                work -= 30 * self.stages * self._made
                self._made = 0
                if children.chain.shape[1] <= self.stages:
                    stack.extend(self._split(children))
                    continue
                found = self._leaves(children, best)
                work -= self.actions * len(children.bounds)
                if found is not None:
                    best, chain = found
        bound = min((float(b.bounds.min()) for b in stack), default=best)
        return Outcome(chain, min(bound, best)), work

    def _ceiling(self, best: float) -> float:
        return best * (1 - TOLERANCE) if self.goal is Goal.OBJECTIVE else best

    def _split(self, block: _Block) -> Iterator[_Block]:
        """In parts, the most promising one last."""
        block = block.take(np.argsort(-block.bounds, kind="stable"))
        size = 256
        for begin in range(0, len(block.bounds), size):
            yield block.take(slice(begin, begin + size))

    def _leaves(self, block: _Block, best: float) -> tuple[float, tuple[int, ...]] | None:
        """The best of whole chains, if better than what is known."""
        block = block.take(np.argsort(block.bounds, kind="stable"))
        found = None
        for begin in range(0, len(block.bounds), 5_000):
            part = block.take(slice(begin, begin + 5_000))
            if part.bounds[0] >= self._ceiling(best):
                break
            excess, values = self.evaluator.score(self.device_order, part.times, part.held)
            values = excess if self.goal is Goal.EXCESS else np.where(excess > 0, np.inf, values)
            least = int(np.argmin(values))
            if values[least] < self._ceiling(best):
                best = float(values[least])
                found = best, tuple(map(int, part.chain[least]))
        return found

    def _expand(self, block: _Block, ceiling: float) -> Iterator[_Block]:
        """All with one stage more that may still be better than the ceiling."""
        stage = block.chain.shape[1] - 1
        order = np.argsort(block.chain[:, -1], kind="stable")
        borders = np.flatnonzero(np.diff(block.chain[order, -1])) + 1
        waiting: list[_Block] = []
        held = 0
        for group in np.split(order, borders):
            start = int(block.chain[group[0], -1])
            row = self.space.row(start, self.device_order.rates[stage])
            fits = np.isfinite(self.tail[stage + 1, row.ends])
            if self.goal is Goal.OBJECTIVE and self.device_order.limited:
                fits &= self.device_order.excess(stage, 1, row.held)[0] <= 0
            chosen = np.flatnonzero(fits)
            if not len(chosen):
                continue
            children = self._children(block.take(group), stage, start, (row, chosen))
            children = children.take(np.flatnonzero(children.bounds < ceiling))
            waiting.append(children)
            held += len(children.bounds)
            if held >= CHILDREN or self._made >= 20 * CHILDREN:
                yield _joined(waiting)
                waiting, held = [], 0
        if held:
            yield _joined(waiting)

    def _children(
        self, parents: _Block, stage: int, start: int, choice: tuple[StageRow, Integers]
    ) -> _Block:
        row, chosen = choice
        ends = row.ends[chosen]
        count = len(ends)
        self._made += 20 + count * len(parents.bounds)
        old = np.repeat(np.arange(len(parents.bounds)), count)
        new = np.tile(np.arange(count), len(parents.bounds))
        chain = np.concatenate((parents.chain[old], ends[new, None]), axis=1)
        times, held = parents.times[old], parents.held[old]
        times[:, :, stage] = row.times[:, chosen[new]].T
        held[:, :, stage] = row.held[:, chosen[new]].T
        pending = np.zeros((len(old), self.stages))
        if self.bottleneck:
            pending[:, stage] = times[:, SEND, stage]
        times[:, SEND, stage] = 0.0
        if stage and (self.bottleneck or not self.device_order.alike):
            self._move(parents, stage, (start, ends), times, pending)
        children = _Block(chain, times, held, pending, np.zeros(len(old)))
        bounds = np.maximum(self._bound(children, stage + 1), parents.bounds[old])
        return replace(children, bounds=bounds)

    def _move(
        self,
        parents: _Block,
        stage: int,
        place: tuple[int, Integers],
        times: Floats,
        pending: Floats,
    ) -> None:
        """Counts every value on the link from the stage that makes it."""
        start, ends = place
        values = self.space.live(start)
        count = len(ends)
        receive, gradient = np.zeros((2, len(parents.bounds), count))
        if len(values):
            sources = self._sources(parents.chain, values)
            used = np.stack([self.space.used(start, v, ends) for v in values]).astype(np.float64)
            through = np.stack([self.space.through(v, ends) for v in values]).astype(np.float64)
            for source in range(stage):
                from_here = sources == source
                link = self.device_order.between(source, stage)
                moved, returned = self._seconds(from_here, values, used, link)
                receive += moved
                gradient += returned
                if self.bottleneck:
                    sent = (moved + returned).reshape(-1)
                    times[:, SEND, source] += sent
                    link = self.device_order.rates[source].sends
                    there, back = self._seconds(from_here, values, through, link)
                    pending[:, source] = (there + back).reshape(-1)
        times[:, RECEIVE, stage] = receive.reshape(-1)
        times[:, GRADIENT, stage] = gradient.reshape(-1)

    def _seconds(
        self, made: Booleans, values: Integers, wanted: Floats, link: Link
    ) -> tuple[Floats, Floats]:
        """Forward and back of the values that each chain makes and each end wants."""
        sends, size, returns, returned = (
            (made * column) @ wanted for column in self.space.moving[values].T
        )
        latency_s, bandwidth = link.latency_s, link.bandwidth
        return sends * latency_s + size / bandwidth, returns * latency_s + returned / bandwidth

    def _sources(self, chain: Integers, values: Integers) -> Integers:
        """The stage that makes each value, shape (n, values)."""
        found = np.zeros((len(chain), len(values)), dtype=np.int64)
        for column, value in enumerate(values):
            producer = self.space.graph.values[value].producer
            if producer != GRAPH_INPUT:
                made: Booleans = self.space.member[producer][chain[:, 1:]]
                found[:, column] = np.argmax(made, axis=1)
        return found

    def _tail_cost(self, low: int, high: int, row: StageRow) -> Floats:
        own = row.times[FORWARD] + row.times[BACKWARD]
        if self.goal is Goal.EXCESS:
            return np.zeros((high - low, len(row.ends)))
        if self.bottleneck:
            moved = row.times[RECEIVE] + row.times[GRADIENT] + row.times[SEND]
            return np.asarray(
                self.evaluator.again[low:high, None] * row.times[FORWARD] + own + moved
            )
        busy = self.repeats[low:high, None] * row.times[FORWARD]
        return np.asarray(busy + self.microbatches * own)

    def _bound(self, block: _Block, known: int) -> Floats:
        """A lower bound of all chains that begin so."""
        end = block.chain[:, -1]
        if self.goal is Goal.EXCESS:
            return excess_of(self.device_order, block.held, known)
        bound = self.tail[known, end]
        if self.device_order.shared and self.device_order.limited:
            over = excess_of(self.device_order, block.held, known) > 0
            bound = np.where(over, np.inf, bound)
        if self.bottleneck:
            rows = (FORWARD, BACKWARD, RECEIVE, GRADIENT, SEND)
            stage = block.times[:, rows].sum(axis=1) + block.pending
            stage += block.times[:, FORWARD] * self.evaluator.again
            return np.asarray(np.maximum(bound, stage.max(axis=1)))
        return self._step_bound(block, known, bound)

    def _step_bound(self, block: _Block, known: int, tail: Floats) -> Floats:
        """What each device does between the ways to its first stage and back from it."""
        m, times = self.microbatches, block.times
        forward, weight = times[:, FORWARD], times[:, WEIGHT] * self.split
        first = times[:, BACKWARD] - weight
        receive, gradient = times[:, RECEIVE], times[:, GRADIENT]
        way_in = np.cumsum(forward + receive, axis=1)
        way_out = np.cumsum(first + gradient, axis=1)
        busy = m * (forward + first) + self.repeats * forward
        out = way_out[:, known - 1] if not self.split else 0.0
        bound = way_in[:, known - 1] + np.where(np.isfinite(tail), tail, 0.0) + out
        bound = np.where(np.isfinite(tail), bound, np.inf)
        for stages in self.devices:
            if stages[0] >= known:
                continue
            lowest = stages[0]
            start = way_in[:, lowest] - forward[:, lowest]
            end = way_out[:, lowest] - first[:, lowest]
            own, update = busy[:, stages].sum(axis=1), times[:, UPDATE, stages].sum(axis=1)
            last = m * weight[:, stages].sum(axis=1)
            bound = np.maximum(bound, start + own + np.maximum(end, last + update))
        rest = self.space.inside[-1][:, -1] - self.space.inside[-1][:, block.chain[:, -1]].T
        way = way_in[:, known - 1] + way_out[:, known - 1]
        way = way + rest[:, 0] + rest[:, 1] - rest[:, 2] * self.split
        there = np.maximum(forward, receive).max(axis=1)
        rate = first + (self.repeats >= (m - 1 if self.in_turn else m)) * (m > 1) * forward
        back = np.maximum(rate, gradient).max(axis=1)
        line = there + back if self.in_turn else np.maximum(there, back)
        return np.asarray(np.maximum(bound, way + (m - 1) * line))


def _joined(blocks: list[_Block]) -> _Block:
    names = _Block.__dataclass_fields__
    return _Block(*(np.concatenate([getattr(b, name) for b in blocks]) for name in names))
