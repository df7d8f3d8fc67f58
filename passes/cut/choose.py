"""Chooses the stages: the cut of a problem into consecutive down-sets with the shortest step.

The time of a step is `simulate/step.py`'s. The search looks at few places to cut, and then at those
about the best: what it takes does not grow with the square of the nodes. With `prove` it goes on
through all down-sets, where they are not too many.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gpipe_compiler.errors import PlanError, UsageError
from gpipe_compiler.options import Objective
from gpipe_compiler.passes.cut.contract import Contracted
from gpipe_compiler.passes.cut.device_order import DeviceOrder, ideal, slot_orders
from gpipe_compiler.passes.cut.evaluator import CutEvaluator
from gpipe_compiler.passes.cut.ground import Ground, Known
from gpipe_compiler.passes.cut.orders import down_sets, masks_between
from gpipe_compiler.passes.cut.problem import CutProblem
from gpipe_compiler.passes.cut.setting import CutSetting
from gpipe_compiler.passes.cut.solve import WORK, Solver
from gpipe_compiler.passes.cut.space import Floats, Space
from gpipe_compiler.runtime.spec import ScheduleKind
from gpipe_compiler.simulate.in_flight import Load
from gpipe_compiler.simulate.step import StageTimes

MOST_DOWN_SETS = 20_000
"""Above this number a proof is no longer by the search of all of them."""

ROUNDS = 6
"""How often the places about the best cut are looked at, at most."""

CLOSER = 8
"""How many times closer to the best cut the places of every round are."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Stages, and how good they are.

    Attributes:
        stage_of: the stage of every node of the problem.
        times: seconds of one micro-batch in every stage.
        step_s: the simulated time of the step.
        lower_bound_s: no cut into as many stages, on any of the devices there are, takes less;
            of `step_s` or `bottleneck_s`, whichever is the objective.
        proved: whether a proof was asked for, and the objective is the least possible, to within
            1e-9 of it, among the cuts that fit, or where none does, among those that exceed a
            device's memory by the least.
        down_sets: how many places to cut were looked at.
        bottleneck_s: the longest stage, transfers included (`Objective.BOTTLENECK`).
        slots: for every device of the pipeline, which of the setting's slots it is.
        excess_bytes: for every device of the pipeline, by how much its memory is too small.
    """

    stage_of: tuple[int, ...]
    times: tuple[StageTimes, ...]
    step_s: float
    lower_bound_s: float
    proved: bool
    down_sets: int
    bottleneck_s: float = 0.0
    slots: tuple[int, ...] = ()
    excess_bytes: tuple[int, ...] = ()
    objective: Objective = Objective.STEP

    @property
    def objective_s(self) -> float:
        """The time that was to be short."""
        return self.step_s if self.objective is Objective.STEP else self.bottleneck_s

    @property
    def fits(self) -> bool:
        return not any(self.excess_bytes)

    @property
    def gap(self) -> float:
        """How far the cut may be from the best, as a share of the lower bound."""
        if self.objective_s <= self.lower_bound_s:
            return 0.0
        if self.lower_bound_s <= 0:
            return math.inf
        return self.objective_s / self.lower_bound_s - 1


class TooFewPartsError(PlanError):
    """What goes together leaves fewer parts than there are to be stages."""


def cut(
    problem: CutProblem,
    setting: CutSetting,
    *,
    work: int = WORK,
    hint: Sequence[int] = (),
    prove: bool = False,
    search: bool = True,
    known: Known | None = None,
    within_s: float = math.inf,
) -> Cut:
    """The best cut found into stages that are not empty.

    Where nothing fits into memory, it is the one that exceeds it by the least: first the largest
    excess of a device counts, then the objective.

    For inference the backward times and gradients of the problem do not count.

    Args:
        work: how much all searches of a proof may work out whose length is not known beforehand,
            counted in numbers, so that the answer is the same on every machine.
        hint: for every node, its stage in a cut that may be good.
        prove: whether to find out how far from the best the cut is, whatever that takes.
        search: whether to look for any cut beside the hint.
        known: what other cuts have found out about the same problems.
        within_s: what the objective may be; it is looked for where no bound is above that.

    Raises:
        UsageError: for no stages or no micro-batches.
        PlanError: when the problem has fewer parts than stages, is none, constraints contradict
            each other, or all cuts are seen at once to take longer than `within_s`.
    """
    stages, microbatches = setting.stages, setting.microbatches
    if stages < 1 or microbatches < 1:
        what, count = ("stages", stages) if stages < 1 else ("micro-batches", microbatches)
        raise UsageError(f"{count} {what}: at least one is needed")
    if setting.kind is None:
        problem = problem.forward_only()
    known = known or Known()
    if setting.limited and _fits_anyhow(problem, setting, known.timing(setting).held):
        setting = setting.unlimited()
    ground = known.of(
        problem,
        stages,
        memory=setting.limited,
        updates=any(slot.update_s_per_byte or slot.update_latency_s for slot in setting.slots),
    )
    graph = ground.graph
    if graph.parts < stages:
        asked = bool(problem.pinned or problem.apart)
        raise TooFewPartsError(
            f"{stages} stages are more than the {graph.parts} parts that the model's "
            f"{len(problem.nodes)} ops can be cut into" + ", pinned and split as is asked" * asked,
            hint=f"ask for at most {graph.parts}" + ", or pin and split less" * asked,
        )
    cutter = _Cutter(ground, setting, work, within_s)
    if cutter.simple_s > within_s:
        raise PlanError(f"no cut takes less than {cutter.simple_s} s")
    return cutter.best(hint, prove=prove, search=search)


def _fits_anyhow(problem: CutProblem, setting: CutSetting, loads: Sequence[Load]) -> bool:
    """Whether every device could hold all there is, in each of its stages."""
    given = float(sum(value.bytes for value in problem.values))
    state = float(sum(kept.bytes for kept in problem.kept))
    saved = float(sum(kept.microbatch_bytes for kept in problem.kept))
    least = min(slot.memory for slot in setting.slots)
    for load in loads:
        count = len(load.stages)
        if count * state + load.peak([given] * count, [saved] * count) > least:
            return False
    return True


@dataclass(frozen=True, slots=True)
class _Looked:
    """What a search has seen: a lower bound on all cuts, 0 for none, and how many places."""

    bound_s: float
    looked: int


class _Cutter:
    """One run of the cut."""

    def __init__(self, ground: Ground, setting: CutSetting, work: int, within_s: float) -> None:
        problem, graph = ground.problem, ground.graph
        self.ground, self.problem, self.graph = ground, problem, graph
        self.setting, self.within_s = setting, within_s
        timing = ground.known.timing(setting)
        repeats, held, again = timing.repeats, timing.held, timing.again
        m, shared = setting.microbatches, len(set(setting.placement)) < setting.stages
        line = setting.kind in (None, ScheduleKind.GPIPE) and not shared
        counted = again
        if setting.objective is Objective.STEP and not line:
            counted = np.array([float(count == m) for count in repeats])
        orders, complete = slot_orders(setting)
        device_orders = [DeviceOrder.of(setting, order, held, counted) for order in orders]
        best = (
            device_orders[0]
            if complete and len(device_orders) == 1
            else ideal(setting, held, counted)
        )
        self.simple_s = simple_bound(graph, setting, best)
        self.complete = complete
        evaluator = CutEvaluator(problem, setting, timing)
        total_s = float(graph.least_s.sum())
        self.solver = Solver(setting, evaluator, device_orders, repeats, total_s, work)

    def best(self, hint: Sequence[int], *, prove: bool, search: bool) -> Cut:
        solver = self.solver
        if hint:
            solver.consider(hint)
            if solver.found and not search:
                return self._cut(_Looked(0.0, 1), prove=False)
        found = self._quick(solver.device_orders[0])
        if prove and not solver.reaches(max(found.bound_s, self.simple_s)):
            found = self._proof(found)
        if not solver.found:
            raise self._nothing()
        return self._cut(found, prove=prove)

    def _quick(self, device_order: DeviceOrder) -> _Looked:
        """Searches all places to cut where they are few, else some, and those about the best cut.

        Args:
            device_order: whose links count where places are chosen.
        """
        ground, graph = self.ground, self.graph
        space = ground.first(device_order)
        if ground.few is not None:
            return _Looked(self._family(space, whole=True), len(ground.few))
        places, looked, share = ground.places(device_order), 0, 1.0
        for turn in range(ROUNDS):
            before = self._rank
            looked += space.size
            self._family(space)
            if not self.solver.found:
                self._family(Space(graph, places.everywhere(len(places.rows) * graph.size)))
            settled = turn > 1 and not self._rank < (before[0], before[1] * (1 - 1e-6))
            if not self.solver.found or settled or self._out_of_reach(before):
                break
            share /= CLOSER
            best = masks_between(graph, self.solver.score.stage_of)
            family = {*best, *places.near(best, share, ground.most // 2)}
            space = Space(graph, family | places.beside(best, ground.most))
        return _Looked(0.0, looked)

    @property
    def _rank(self) -> tuple[float, float]:
        """Excess and objective of the best cut so far, the less the better."""
        if not self.solver.found:
            return math.inf, math.inf
        return self.solver.score.rank(self.setting.objective)

    def _out_of_reach(self, before: tuple[float, float]) -> bool:
        """Whether another round that gains no more than the last one ends above `within_s`."""
        (excess, value), (excess_before, value_before) = self._rank, before
        gained = value_before - value if excess == excess_before else math.inf
        return value - gained > self.within_s

    def _family(self, space: Space, *, whole: bool = False) -> float:
        """Searches these places to cut; returns a lower bound on all cuts there.

        Args:
            whole: whether they are all that there are.
        """
        if not any(device_order.limited for device_order in self.solver.device_orders):
            space.limit(self.solver.longest_stage())
        return self.solver.search(space, last=whole)

    def _proof(self, found: _Looked) -> _Looked:
        """The search of all there is, or a bound where that is too much."""
        solver = self.solver
        solver.proves = True
        masks = down_sets(self.graph, MOST_DOWN_SETS)
        if masks is None:
            return _Looked(0.0, found.looked)
        return _Looked(self._family(Space(self.graph, masks), whole=True), len(masks))

    def _nothing(self) -> PlanError:
        constrained = sorted({node for node, _ in self.problem.pinned})
        constrained += sorted({node for pair in self.problem.apart for node in pair})
        names = ", ".join(dict.fromkeys(self.problem.nodes[node].name for node in constrained))
        what = f" under the constraints on {names}" if names else ""
        return PlanError(
            f"the model cannot be cut into {self.setting.stages} stages that all hold something"
            f"{what}",
            hint="ask for fewer stages" + (", or drop a constraint" if names else ""),
        )

    def _cut(self, found: _Looked, *, prove: bool) -> Cut:
        score, value = self.solver.score, self.solver.value
        known = found.bound_s if self.complete and self.solver.least_excess else 0.0
        # Plain numbers: a plan writes them as JSON, which knows none of numpy's truths.
        value = float(value)
        bound = float(min(max(known, self.simple_s), value))
        met = bound >= value * (1 - 1e-9) and self.solver.least_excess
        return Cut(
            score.stage_of,
            score.times,
            score.step_s,
            value if met else bound,
            met and prove,
            found.looked,
            score.bottleneck_s,
            score.slots,
            score.excess,
            self.setting.objective,
        )


# --- bounds from outside of the search ------------------------------------------------------------


def simple_bound(graph: Contracted, setting: CutSetting, device_order: DeviceOrder) -> float:
    """The busiest device or stage, and what fills and drains the line.

    Args:
        device_order: the only order of devices there is, or the ideal one.
    """
    m, stages = setting.microbatches, setting.stages
    seconds = graph.seconds
    kinds = {slot.kind for slot in device_order.devices}
    if kinds != {-1}:
        seconds = seconds[sorted(kinds)]
    forward, backward = seconds[:, 0].min(axis=0), seconds[:, 1].min(axis=0)
    first = (seconds[:, 1] - seconds[:, 2] * setting.splits_backward).min(axis=0)
    own = (1 + float(device_order.again.min())) * forward + backward
    largest, whole = float(own.max(initial=0.0)), float(own.sum())
    if setting.objective is Objective.BOTTLENECK:
        return max(whole / stages, largest)
    device = max(whole / len(device_order.devices), largest)
    # Where some stages compute again: what the others save is a share of their own time.
    twice = float((2 * forward + backward).sum()) if device_order.again.any() else 0.0
    spared = (device_order.again == 0) * _forward_share(forward, backward)
    device = max(device, twice / (len(device_order.devices) + float(spared.sum())))
    way = float(forward.sum() + first.sum())
    if setting.kind in (None, ScheduleKind.GPIPE) and not device_order.shared:
        return way + (m - 1) * device
    # A stage begins when all before it have forwarded, and after its end they still go backward.
    plain = forward + first
    again = float(device_order.again.min()) * forward
    node = plain + (m - 1) * (plain + again) + ways_before(graph, plain)
    bound = max(m * device, way, float(node.max(initial=0.0)))
    if setting.kind is ScheduleKind.ONE_F_ONE_B and not device_order.shared:
        # For stage s with R after it: step >= total - R + (M-1) own and >= total + R + (M-w) own.
        # Half the sum of both, weighed so that the stages' own times add up to the total.
        warm = [min(stages - s, m) for s in range(stages)]
        repeats = [m - (w + 1) / 2 for w in warm]
        if all(repeats):
            bound = max(bound, way + way / sum(1 / r for r in repeats))
        if m > stages:
            # The same with what is computed again, which both take m - (w + 1) / 2 times too.
            shares = sum((1 + share) / r for share, r in zip(spared.tolist(), repeats, strict=True))
            bound = max(bound, way + twice / shares)
    return bound


def _forward_share(forward: Floats, backward: Floats) -> float:
    """The most that the forward of a stage is of its forward and backward."""
    both = forward + backward
    return float((forward[both > 0] / both[both > 0]).max(initial=0.0))


def ways_before(graph: Contracted, seconds: Floats) -> Floats:
    """For every node, seconds that all which must come before it takes at least.

    It is all that comes before where nothing can stand beside the node, else a longest path.
    """
    needed = np.zeros(graph.size, dtype=np.bool_)
    needed[-1:] = True  # nodes that the last one does not need may stand beside any
    for node in range(graph.size - 1, -1, -1):
        if needed[node]:
            needed[list(graph.before[node])] = True
    found = np.zeros(graph.size)
    whole, open_ends = 0.0, 0
    followed = np.zeros(graph.size, dtype=np.bool_)
    for node, before in enumerate(graph.before):
        if before:
            found[node] = max(found[source] + seconds[source] for source in before)
        if not needed[node]:
            continue
        sources = list(before)
        open_ends += 1 - int((~followed[sources]).sum())
        followed[sources] = True
        if open_ends == 1:
            found[node] = whole
        whole += float(seconds[node])
    return found
