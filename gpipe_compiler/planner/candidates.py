"""Cuts a graph into stages that recompute as asked, and says what to expect of them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from itertools import chain

from gpipe_compiler.cluster import Cluster, Device, Link
from gpipe_compiler.errors import PlanError
from gpipe_compiler.options import NO_CONSTRAINTS, Constraints, Policy, RematChoice
from gpipe_compiler.passes.cross_sample_ops import mixing_ops
from gpipe_compiler.passes.cut import Cut, cut
from gpipe_compiler.passes.cut.ground import Known
from gpipe_compiler.passes.cut.inside import cut_inside
from gpipe_compiler.passes.cut.problem import CutProblem
from gpipe_compiler.passes.cut.setting import CutSetting
from gpipe_compiler.passes.cut.solve import WORK
from gpipe_compiler.passes.random_ops import random_ops
from gpipe_compiler.passes.remat import FEW, MANY
from gpipe_compiler.passes.written_once import sample_writers
from gpipe_compiler.plan import Stage
from gpipe_compiler.plan.pareto import Choice
from gpipe_compiler.planner.constrain import constrain
from gpipe_compiler.planner.cut_problem import CutFacts, MicrobatchGraph, problem_of, run_again
from gpipe_compiler.planner.planning import peer_link, setting_for, with_gathering
from gpipe_compiler.planner.predict import Candidate, predict, shared
from gpipe_compiler.planner.remat import (
    RematOptions,
    as_written,
    run_again_anyhow,
    runs,
)
from gpipe_compiler.planner.stage_table import StageTable, stage_of_cut, tabulate, with_asked
from gpipe_compiler.runtime.core.full_batch import joint_of
from gpipe_compiler.runtime.spec import BatchNorm, Remat

_WORTH_A_CUT = 1e-3
"""The share of a step from which on the sums of shared gradients are tried to be avoided."""

_MOST_PREFIXES = 8
"""Stages up to which every number of first stages is tried to recompute."""

_MOST_ALONE = 4
"""Shared parameters that are each tried in one stage; of more, all together are."""

_AS_GOOD = 1e-3
"""A step that is longer by this share than with memory for anything needs no better one."""

_ROUNDS = 4
"""How often stages are balanced anew with what they recompute, at most."""


@dataclass(frozen=True)
class CandidateBuilder:
    """What every candidate of a graph is made from.

    Attributes:
        setting: in which nothing is recomputed.
        cluster: whose devices the slots of the setting are.
        work: of every cut, as in `passes.cut.cut`.
        whole: the ops that exact BatchNorm runs on the whole mini-batch, where it is asked for.
        inside: the share of the best time that may be given for cuts which open fewer modules.
        remats: what stages can do to recompute.
        again: the ops that run again wherever the cuts are, because the model checkpoints them.
        cuts: those made so far; `candidates`: what came of them; `known`: what they have found out
            about the graph.
    """

    facts: CutFacts
    problem: CutProblem
    setting: CutSetting
    cluster: Cluster
    choice: Choice
    policy: Policy
    constraints: Constraints
    work: int
    cost_source: str
    whole: frozenset[str]
    random: bool
    inside: float
    remats: RematOptions
    again: frozenset[str] = frozenset()
    cuts: dict[Hashable, Cut] = field(default_factory=dict, compare=False)
    candidates: dict[Hashable, Candidate] = field(default_factory=dict, compare=False)
    known: Known = field(default_factory=Known, compare=False)

    @classmethod
    def of(
        cls,
        prepared: MicrobatchGraph,
        cluster: Cluster,
        choice: Choice,
        policy: Policy,
        constraints: Constraints = NO_CONSTRAINTS,
        work: int = WORK,
    ) -> CandidateBuilder:
        """The problem of a graph, which is trained when it has a loss.

        Raises:
            UsageError: for constraints that cannot be met, or too few devices for the replicas.
            PlanError: when the schedule cannot have that many stages.
        """
        graph, facts, costs = prepared.graph, prepared.facts, prepared.costs
        setting = setting_for(cluster, choice, policy, training=graph.loss is not None)
        whole: frozenset[str] = frozenset()
        exact = policy.batchnorm is BatchNorm.EXACT and graph.loss is not None
        if exact and setting.microbatches > 1:
            whole = mixing_ops(graph) | sample_writers(graph).keys()
        problem = problem_of(facts, costs[1:], policy.counted_optimizer, policy.division)
        if policy.division.always and graph.loss is not None:
            problem = with_gathering(problem, facts, peer_link(cluster, choice, policy), policy)
        seconds = tuple({n: op.forward_s for n, op in cost.ops.items()} for cost in costs)
        most = FEW if work < WORK else MANY
        return cls(
            facts=facts,
            problem=constrain(problem, facts, constraints, setting.stages),
            setting=setting,
            cluster=cluster.sized(len(setting.slots)),
            choice=choice,
            policy=policy,
            constraints=constraints,
            work=work,
            cost_source="; ".join(dict.fromkeys(cost.source for cost in costs)),
            whole=whole,
            random=bool(whole and random_ops(graph)),
            inside=policy.cut_inside,
            remats=RematOptions(facts, seconds, setting.splits_backward, most),
            again=run_again_anyhow(facts, seconds[0]) if graph.loss is not None else frozenset(),
        )

    @property
    def training(self) -> bool:
        return self.facts.graph.loss is not None

    @property
    def remat(self) -> RematChoice:
        """What is to be recomputed."""
        return self.choice.remat if self.training else RematChoice.NONE

    def facts_of(self, candidate: Candidate) -> CutFacts:
        """What is known of the graph as the stages of a candidate run it."""
        return self.facts.in_stages([stage.ops for stage in candidate.stages])

    def choose(self, choice: RematChoice, like: Candidate | None = None) -> Candidate:
        """The cut into stages that recompute as asked, with the shortest step that fits; or one
        that opens fewer modules, and takes at most the share `inside` longer.

        AUTO recomputes as little as fits (`_tried`). The lower bound of what recomputes only in
        part, or waits for whole mini-batches, is that of stages which do neither, on devices that
        hold anything.

        Args:
            like: one under other limits; AUTO tries first what recomputes in it, and not all.
        """
        if not self.inside or not self.facts.modules:
            return self._chosen(choice, like)
        best = self.anywhere()._chosen(choice, like)
        return self.preferred(best, self.closed(best, choice))

    def closed(self, best: Candidate, choice: RematChoice) -> Candidate:
        """A candidate nearly as good as one with cuts anywhere, which may open fewer modules."""
        if choice is not RematChoice.AUTO:
            return self._chosen(choice, None)
        again = best.recomputing
        found = [self._unlimited()._cut(again)]
        if any(again):
            found = self._fitted(self._rebalanced(best))
        if all(self._merit(candidate)[0] for candidate in found):
            found += self._fitted(self._cut(again))
        return min(found, key=self._merit).bounded_by(best)

    def anywhere(self) -> CandidateBuilder:
        """The same with cuts anywhere."""
        return dataclasses.replace(self, inside=0.0)

    def preferred(self, anywhere: Candidate, inside: Candidate) -> Candidate:
        """The one that opens fewer modules, if it is nearly as good as that with cuts anywhere.

        Both say how long the latter takes.
        """
        best_s = anywhere.prediction.objective_s
        worse = self._merit(inside)[0] > self._merit(anywhere)[0]
        worse |= inside.prediction.objective_s > best_s * (1 + self.inside)
        taken = anywhere if worse else inside
        prediction = dataclasses.replace(taken.prediction, anywhere_s=best_s)
        return dataclasses.replace(taken, prediction=prediction)

    def _chosen(self, choice: RematChoice, like: Candidate | None) -> Candidate:
        nothing = (False,) * self.setting.stages
        if choice is RematChoice.NONE:
            return self._cut(nothing)
        if choice is RematChoice.FULL:
            full = self._cut((True,) * self.setting.stages)
            return full.bounded_by(self._cut(nothing)) if full.joint else full
        free = self._unlimited()._cut(nothing)
        if not self._merit(free)[0]:
            return free
        best: Candidate | None = None
        for candidate in self._tried(free, like):
            best = min(best or candidate, candidate, key=self._merit)
            if self._merit(best) <= (0.0, free.prediction.step_s * (1 + _AS_GOOD)):
                return best.bounded_by(free)
        assert best is not None
        return self._balanced(best).bounded_by(free)

    def leanest(self) -> list[Candidate]:
        """On devices that hold nothing, two cuts, as if all stages recomputed and as if none did,
        whose stages recompute in the way that needs the least."""
        both = [(again,) * self.setting.stages for again in (True, False)]
        return [self._fitted(self.anywhere()._cut(again))[0] for again in both]

    def _tried(self, free: Candidate, like: Candidate | None) -> Iterator[Candidate]:
        """What AUTO tries where the best cut does not fit as it is.

        Cuts under the memory limit in which nothing is recomputed, in which the first stages are
        (1F1B holds the most there), and those that did not fit in the cut before; each with the
        fastest segments that fit, and with none.
        """
        nothing = (False,) * self.setting.stages
        yield from self._fitted(free)
        count = self.setting.stages
        patterns = [] if like is None else [like.recomputing]
        if like is None and count <= _MOST_PREFIXES:
            patterns = [(True,) * n + (False,) * (count - n) for n in range(1, count + 1)]
        for again in dict.fromkeys((nothing, *patterns)):
            segmented, whole = self._fitted(self._cut(again))
            yield from (segmented, whole)
        asked = nothing
        while True:
            pairs = zip(asked, whole.recomputing, strict=True)
            wanted = tuple(known or again for known, again in pairs)
            if wanted == asked:
                return
            asked = wanted
            segmented, whole = self._fitted(self._cut(asked))
            yield from (segmented, whole)

    def _balanced(self, best: Candidate) -> Candidate:
        """The candidate, or a better one in which what is recomputed counts for what it takes."""
        for _ in range(_ROUNDS):
            again = self._fitted(self._rebalanced(best))
            better = min((best, *again), key=self._merit)
            if better is best:
                break
            best = better
        return best

    def _rebalanced(self, candidate: Candidate) -> Candidate:
        """A cut of devices that hold anything, for the ops that a candidate runs again."""
        often: dict[str, float] = {}
        for order in candidate.orders:
            for stage in (candidate.stages[number] for number in {a.stage for a in order}):
                times = runs(order, stage.index, stage.remat, candidate.joint)
                segments = (stage.ops,) if stage.remat is Remat.FULL else stage.segments
                often.update(dict.fromkeys(chain(*segments), times / self.setting.microbatches))

        heavier = run_again(self.problem, often)
        free = self._unlimited()
        best = self._opening_less(heavier, free.setting, self._best_cut(heavier, free.setting))
        return free._cut_so(self._judged(best, free.setting), (False,) * self.setting.stages)

    def _unlimited(self) -> CandidateBuilder:
        """The same on devices that hold anything."""
        return dataclasses.replace(self, setting=self.setting.unlimited())

    def _merit(self, candidate: Candidate) -> tuple[float, float, int]:
        """How far one is from fitting its devices, its step, and how many stages recompute."""
        pairs = zip(candidate.prediction.device_bytes, candidate.found.slots, strict=True)
        over = (size - self.setting.slots[slot].memory for size, slot in pairs)
        excess = sum(max(0.0, size) for size in over)
        return excess, candidate.prediction.step_s, sum(candidate.recomputing)

    def _fitted(self, candidate: Candidate) -> list[Candidate]:
        """The same cut, whose stages recompute as fast as fits: in segments too, or not."""
        slots = [self.setting.slots[slot] for slot in candidate.found.slots]
        devices = [(slot.memory, slot.kind) for slot in slots]
        fitted = self.remats.fitted(candidate.stages, candidate.orders, candidate.joint, devices)
        return [self._draft(candidate.found, candidate.table, stages) for stages in fitted]

    def devices_of(self, candidate: Candidate) -> list[Device]:
        """The devices of the pipeline, by rank."""
        return [self.cluster.devices[slot] for slot in candidate.found.slots]

    def _cut(self, recompute: tuple[bool, ...]) -> Candidate:
        """The best cut found into stages of which these recompute.

        The search does not see what it takes to sum the gradients of parameters that several
        stages hold. So it is also made with all ops of such a parameter in one stage, and the
        shorter step is taken. Nor does it see what stages are given only for the number of samples
        in it, so it is also made where the ops which need that read it.
        """
        apart = self._cut_of(self.problem, recompute)
        candidates = [apart]
        problem = self.problem
        for _ in range(_ROUNDS):
            widened = with_asked(self.facts, problem, candidates[-1].table)
            if widened is problem:
                break
            problem = widened
            candidates.append(self._cut_of(problem, recompute))
        for names in self._tied(apart):
            together = dataclasses.replace(
                self.problem, groups=(*self.problem.groups, *map(self._users, names))
            )
            # Where what lies between them leaves too few stages, they cannot be in one.
            with contextlib.suppress(PlanError):
                candidates.append(self._cut_of(together, recompute))
        best = min(candidates, key=self._merit)
        return best if best is apart else best.bounded_by(apart)

    def _tied(self, candidate: Candidate) -> list[list[str]]:
        """The shared parameters to be tried in one stage: each by itself, and all of them."""
        names = [name for name, _ in shared(self.facts.graph, candidate.stages)]
        costly = candidate.prediction.step_s * _WORTH_A_CUT
        if candidate.prediction.shared_sum_s < costly:
            return []
        alone = [[name] for name in names[:_MOST_ALONE]]
        return [*alone, names] if len(names) > 1 else alone

    def _users(self, name: str) -> tuple[int, ...]:
        """The nodes of the problem that use a parameter."""
        graph = self.facts.graph
        ops = (graph.op_of[node.name] for node in self.problem.nodes)
        return tuple(i for i, op in enumerate(ops) if name in op.states(graph.modules))

    def _cut_of(self, problem: CutProblem, recompute: tuple[bool, ...]) -> Candidate:
        setting = dataclasses.replace(self.setting, recompute=recompute)
        asked = run_again(problem, dict.fromkeys(self.again, 1.0)) if self.again else problem
        key: Hashable = asked, setting, self.inside
        if key not in self.candidates:
            prove = self.policy.prove and self.work >= WORK
            best = self._best_cut(asked, setting, prove=prove)
            found = self._opening_less(asked, setting, best)
            if problem.values is not self.problem.values:
                found = self._judged(found, setting)
            elif self.again:
                plain = self._judged(found, setting)
                found = dataclasses.replace(plain, lower_bound_s=found.lower_bound_s, proved=False)
            self.candidates[key] = self._cut_so(found, recompute)
        return self.candidates[key]

    def _best_cut(self, problem: CutProblem, setting: CutSetting, *, prove: bool = False) -> Cut:
        key: Hashable = problem, setting, prove
        if key not in self.cuts:
            self.cuts[key] = cut(problem, setting, work=self.work, prove=prove, known=self.known)
        return self.cuts[key]

    def _judged(self, found: Cut, setting: CutSetting) -> Cut:
        """A cut of a problem with more about it, as one of the graph's own problem."""
        return cut(self.problem, setting, hint=found.stage_of, search=False, known=self.known)

    def _opening_less(self, problem: CutProblem, setting: CutSetting, best: Cut) -> Cut:
        modules, share = self.facts.modules, self.inside
        return cut_inside(problem, setting, modules, best, share, work=self.work, known=self.known)

    def _cut_so(self, found: Cut, recompute: tuple[bool, ...]) -> Candidate:
        pairs = zip(self.problem.nodes, found.stage_of, strict=True)
        stage_of = {node.name: stage for node, stage in pairs}
        table = tabulate(self.facts, stage_of, self.setting.stages)
        widened = with_asked(self.facts, self.problem, table)
        if widened is not self.problem:
            setting = dataclasses.replace(self.setting, recompute=recompute)
            exact = cut(widened, setting, hint=found.stage_of, search=False, known=self.known)
            best = found.proved and exact.fits and exact.objective_s <= found.objective_s
            found = dataclasses.replace(exact, lower_bound_s=found.lower_bound_s, proved=best)
        optimizer = self.policy.counted_optimizer, self.policy.division
        stages = [
            stage_of_cut(self.facts, table, index, found.times[index], again, *optimizer)
            for index, again in enumerate(recompute)
        ]
        if self.again:
            stages = [self._as_written(found, stage) for stage in stages]
        return self._draft(found, table, tuple(stages))

    def _as_written(self, found: Cut, stage: Stage) -> Stage:
        """A stage that runs what the model itself checkpoints again."""
        kind = self.setting.slots[found.slots[self.setting.placement[stage.index]]].kind
        again = stage.remat is Remat.FULL
        option = as_written(self.facts, stage, self.remats.seconds[kind], again=again)
        return option.of(stage, split=self.setting.splits_backward)

    def _draft(self, found: Cut, table: StageTable, stages: tuple[Stage, ...]) -> Candidate:
        needed = [not self.whole.isdisjoint(stage.ops) for stage in stages]
        joint = tuple(sorted(joint_of(needed, random=self.random)))

        def between(one: int, other: int) -> Link:
            places = (found.slots[self.setting.placement[stage]] for stage in (one, other))
            return self.cluster.between(*places)

        orders = self.setting.orders_with(joint) if joint else self.setting.orders
        expected = predict(self.facts.graph, stages, orders, found, between, joint)
        return Candidate(found, table, stages, orders, joint, expected)
