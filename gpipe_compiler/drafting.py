"""Cuts a graph into stages that recompute as asked, and says what to expect of them."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpipe_compiler.cluster import Cluster, Link
from gpipe_compiler.errors import PlanError
from gpipe_compiler.holding import loads
from gpipe_compiler.ir import Graph, StateKind
from gpipe_compiler.passes.constraints import NO_CONSTRAINTS, Constraints, constrain
from gpipe_compiler.passes.cost import Costs
from gpipe_compiler.passes.cut import Cut, cut
from gpipe_compiler.passes.cut.graph import Facts, StageTable, problem_of, tabulate
from gpipe_compiler.passes.cut.problem import CutProblem
from gpipe_compiler.passes.cut.setting import Setting
from gpipe_compiler.passes.footprint import held_bytes
from gpipe_compiler.passes.mixing import mixing_ops
from gpipe_compiler.passes.random_ops import random_ops
from gpipe_compiler.plan import Prediction, Stage
from gpipe_compiler.policy import Policy, RematChoice
from gpipe_compiler.prediction import peak_bytes, predict, shared
from gpipe_compiler.runtime.joint import joint_of
from gpipe_compiler.runtime.schedule.actions import Orders
from gpipe_compiler.runtime.spec import BatchNorm, Crossing, OptimizerKind, Remat
from gpipe_compiler.simulate import StageTimes

_WORTH_A_CUT = 1e-3
"""The share of a step from which on the sums of shared gradients are tried to be avoided."""

_MOST_PREFIXES = 8
"""Stages up to which every number of first stages is tried to recompute."""

_MOST_ALONE = 4
"""Shared parameters that are each tried in one stage; of more, all together are."""


@dataclass(frozen=True)
class Draft:
    """A cut, what its stages hold, and what to expect of them.

    Attributes:
        orders: each device's actions.
        joint: the stages that take all micro-batches as one.
    """

    found: Cut
    table: StageTable
    stages: tuple[Stage, ...]
    orders: Orders
    joint: tuple[int, ...]
    prediction: Prediction

    def bounded_by(self, other: Draft) -> Draft:
        """The same, of which no more is known than the lower bound of the other."""
        known = dataclasses.replace(
            self.prediction,
            lower_bound_s=min(other.prediction.lower_bound_s, self.prediction.objective_s),
            proved=False,
        )
        return dataclasses.replace(self, prediction=known)


@dataclass(frozen=True)
class Drafting:
    """What every draft of a graph is made from.

    Attributes:
        setting: in which nothing is recomputed.
        cluster: whose devices the seats of the setting are.
        most_down_sets, work: of every cut, as in `passes.cut.cut`.
        whole: the ops that exact BatchNorm runs on the whole mini-batch, where it is asked for.
        random: whether the model draws random numbers.
    """

    facts: Facts
    problem: CutProblem
    setting: Setting
    cluster: Cluster
    optimizer: OptimizerKind
    most_down_sets: int
    work: int
    whole: frozenset[str]
    random: bool

    @classmethod
    def of(
        cls,
        graph: Graph,
        costs: Sequence[Costs],
        cluster: Cluster,
        setting: Setting,
        policy: Policy,
        most_down_sets: int,
        work: int,
        constraints: Constraints = NO_CONSTRAINTS,
        facts: Facts | None = None,
    ) -> Drafting:
        """The problem of an annotated graph.

        Args:
            costs: on each kind of device of the cluster.
            facts: those of the graph and the first of the costs, where they are known.

        Raises:
            ModelError: naming an op that cannot run.
            UsageError: for constraints that cannot be met.
        """
        training = graph.loss is not None
        facts = facts or Facts.of(graph, costs[0])
        whole: frozenset[str] = frozenset()
        if policy.batchnorm is BatchNorm.EXACT and training and setting.microbatches > 1:
            whole = mixing_ops(graph) | facts.effects.state_writes.keys()
        problem = problem_of(facts, costs[1:], policy.optimizer)
        return cls(
            facts,
            constrain(problem, facts, constraints, setting.stages),
            setting,
            cluster,
            policy.optimizer,
            most_down_sets,
            work,
            whole,
            bool(whole and random_ops(graph)),
        )

    def choose(self, choice: RematChoice) -> Draft:
        """The cut into stages that recompute as asked, with the shortest step that fits.

        AUTO has as few stages recompute as fit their devices. What it tries, where the best cut
        does not fit as it is: cuts under the memory limit in which nothing is recomputed, in which
        the first stages are (1F1B holds the most there), and in which those are that did not fit
        in the cut before.

        The lower bound of what recomputes only in part, or waits for whole mini-batches, is that
        of stages which do neither, on devices that hold anything.
        """
        nothing = (False,) * self.setting.stages
        if choice is RematChoice.NONE:
            return self._cut(nothing)
        if choice is RematChoice.FULL:
            full = self._cut((True,) * self.setting.stages)
            return full.bounded_by(self._cut(nothing)) if full.joint else full
        free = self._unlimited()._cut(nothing)
        asked = self._too_large(free)
        if not any(asked):
            return free
        drafts = [self._with_recompute(free, asked), self._cut(nothing)]
        drafts.extend(self._least(self._cut(again)) for again in self._first_stages())
        while True:
            draft = self._cut(asked)
            needed = self._too_large(draft)
            drafts.append(self._with_recompute(draft, needed))
            wanted = tuple(map(operator.or_, needed, asked))
            if wanted == asked:
                break
            asked = wanted
        return min(drafts, key=self._merit).bounded_by(free)

    def _unlimited(self) -> Drafting:
        """The same on devices that hold anything."""
        seats = tuple(dataclasses.replace(seat, memory=math.inf) for seat in self.setting.seats)
        return dataclasses.replace(self, setting=dataclasses.replace(self.setting, seats=seats))

    def _first_stages(self) -> Iterator[tuple[bool, ...]]:
        count = self.setting.stages
        if count <= _MOST_PREFIXES:
            for first in range(1, count + 1):
                yield (True,) * first + (False,) * (count - first)

    def _least(self, draft: Draft) -> Draft:
        """The same cut, in which only those stages recompute that have to."""
        return self._with_recompute(draft, self._too_large(draft))

    def _merit(self, draft: Draft) -> tuple[float, float, int]:
        """How far a draft is from fitting its devices, its step, and how many stages recompute."""
        pairs = zip(draft.prediction.device_bytes, draft.found.seats, strict=True)
        over = (size - self.setting.seats[seat].memory for size, seat in pairs)
        again = sum(stage.remat is Remat.FULL for stage in draft.stages)
        return sum(max(0.0, excess) for excess in over), draft.prediction.step_s, again

    def _too_large(self, draft: Draft) -> tuple[bool, ...]:
        """For every stage, whether its device is too full, and recomputing makes it smaller."""
        found = [False] * self.setting.stages
        by_device = zip(loads(draft.orders, (), draft.joint), draft.found.seats, strict=True)
        for load, seat in by_device:
            full = peak_bytes(draft.stages, load) > self.setting.seats[seat].memory
            for stage in load.stages:
                alone = load.of(stage)
                smaller = draft.stages[stage].input_bytes < draft.stages[stage].saved_bytes
                found[stage] = (
                    full and smaller and stage not in draft.joint and alone.counts.max() > 1
                )
        return tuple(found)

    def _cut(self, recompute: tuple[bool, ...]) -> Draft:
        """The best cut found into stages of which these recompute.

        The search does not see what it takes to sum the gradients of parameters that several
        stages hold. So it is also made with all ops of such a parameter in one stage, and the
        shorter step is taken.
        """
        apart = self._cut_of(self.problem, recompute)
        drafts = [apart]
        for names in self._tied(apart):
            together = dataclasses.replace(
                self.problem, groups=(*self.problem.groups, *map(self._users, names))
            )
            # Where what lies between them leaves too few stages, they cannot be in one.
            with contextlib.suppress(PlanError):
                drafts.append(self._cut_of(together, recompute))
        best = min(drafts, key=self._merit)
        return best if best is apart else best.bounded_by(apart)

    def _tied(self, draft: Draft) -> list[list[str]]:
        """The shared parameters to be tried in one stage: each by itself, and all of them."""
        names = [name for name, _ in shared(self.facts.graph, draft.stages)]
        costly = draft.prediction.step_s * _WORTH_A_CUT
        if draft.prediction.shared_sum_s < costly:
            return []
        alone = [[name] for name in names[:_MOST_ALONE]]
        return [*alone, names] if len(names) > 1 else alone

    def _users(self, name: str) -> tuple[int, ...]:
        """The nodes of the problem that use a parameter."""
        graph = self.facts.graph
        return tuple(
            index
            for index, node in enumerate(self.problem.nodes)
            if name in graph.op_of[node.name].states(graph.modules)
        )

    def _cut_of(self, problem: CutProblem, recompute: tuple[bool, ...]) -> Draft:
        found = cut(
            problem,
            dataclasses.replace(self.setting, recompute=recompute),
            self.most_down_sets,
            work=self.work,
        )
        pairs = zip(self.problem.nodes, found.stage_of, strict=True)
        stage_of = {node.name: stage for node, stage in pairs}
        table = tabulate(self.facts, stage_of, self.setting.stages)
        stages = tuple(
            _stage(self.facts, table, index, found.times[index], again, self.optimizer)
            for index, again in enumerate(recompute)
        )
        return self._draft(found, table, stages)

    def _with_recompute(self, draft: Draft, recompute: Sequence[bool]) -> Draft:
        """The same cut, of whose stages these recompute."""
        stages = tuple(
            dataclasses.replace(stage, remat=Remat.FULL if again else Remat.NONE)
            for stage, again in zip(draft.stages, recompute, strict=True)
        )
        return self._draft(draft.found, draft.table, stages)

    def _draft(self, found: Cut, table: StageTable, stages: tuple[Stage, ...]) -> Draft:
        needed = [not self.whole.isdisjoint(stage.ops) for stage in stages]
        joint = tuple(sorted(joint_of(needed, random=self.random)))

        def between(one: int, other: int) -> Link:
            places = (found.seats[self.setting.placement[stage]] for stage in (one, other))
            return self.cluster.between(*places)

        orders = self.setting.orders_with(joint) if joint else self.setting.orders
        expected = predict(self.facts.graph, stages, orders, found, between, joint)
        return Draft(found, table, stages, orders, joint, expected)


def _stage(
    facts: Facts,
    table: StageTable,
    index: int,
    times: StageTimes,
    recompute: bool,
    optimizer: OptimizerKind,
) -> Stage:
    graph = facts.graph
    ops = table.ops[index]
    names = dict.fromkeys(name for op in ops for name in graph.op_of[op].states(graph.modules))
    if index == 0:
        names.update(dict.fromkeys(_unread(graph)))
    states = [graph.state[name] for name in names]
    received = [crossing for crossing in table.crossings if index in crossing.targets]
    return Stage(
        index=index,
        ops=ops,
        duplicates=table.duplicates[index],
        inputs=table.inputs[index],
        outputs=table.outputs[index],
        state=tuple(names),
        forward_s=times.forward_s,
        backward_s=times.backward_s,
        receive_bytes=_bytes(graph, received),
        gradient_bytes=_bytes(graph, [crossing for crossing in received if crossing.gradient]),
        parameter_bytes=sum(s.bytes for s in states if s.kind is StateKind.PARAMETER),
        parameter_count=sum(
            s.bytes // s.dtype.itemsize for s in states if s.kind is StateKind.PARAMETER
        ),
        saved_bytes=facts.saved.saved_bytes(ops) if graph.loss is not None else 0,
        input_bytes=sum(graph.values[name].bytes for name in table.inputs[index]),
        remat=Remat.FULL if recompute else Remat.NONE,
        state_bytes=sum(held_bytes(graph, state, optimizer) for state in states),
        weight_s=times.weight_s,
        update_s=times.update_s,
    )


def _unread(graph: Graph) -> list[str]:
    """The parameters and buffers that no op reads: the model's state all the same, so kept."""
    read = {name for op in graph.ops for name in op.states(graph.modules)}
    return [
        name
        for name, state in graph.state.items()
        if name not in read and state.kind is not StateKind.CONSTANT
    ]


def _bytes(graph: Graph, crossings: Sequence[Crossing]) -> int:
    return sum(graph.values[crossing.value].bytes for crossing in crossings)
