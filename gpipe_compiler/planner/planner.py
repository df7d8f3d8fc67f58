"""Plans one graph again and again: described, costed and analysed once per size of micro-batch."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from gpipe_compiler.cluster import Cluster, Device
from gpipe_compiler.errors import GPipeCompilerError, ModelError, PlanError
from gpipe_compiler.ir import Graph, ValueKind
from gpipe_compiler.no_gc import uncollected
from gpipe_compiler.options import NO_CONSTRAINTS, Calibration, Constraints, Policy, RematChoice
from gpipe_compiler.passes.batch_rules import taken_together, takes_several
from gpipe_compiler.passes.cost import rooflines
from gpipe_compiler.passes.cut.inside import opened
from gpipe_compiler.passes.cut.setting import CutSetting
from gpipe_compiler.passes.cut.solve import WORK
from gpipe_compiler.passes.kernel_times import kernel_times
from gpipe_compiler.passes.measure import costs_by_kind, scaled
from gpipe_compiler.passes.pass_setting import PassSetting
from gpipe_compiler.passes.pipeline import INPLACE, PassPipeline
from gpipe_compiler.passes.remat import FEW, MANY
from gpipe_compiler.passes.shapes import annotate
from gpipe_compiler.passes.unknown_sizes import selection_behind
from gpipe_compiler.plan import Plan
from gpipe_compiler.plan.pareto import Choice
from gpipe_compiler.planner.candidates import CandidateBuilder
from gpipe_compiler.planner.constrain import check_names, ops_of
from gpipe_compiler.planner.cut_problem import MicrobatchGraph
from gpipe_compiler.planner.memory_fit import choose_exactly, with_memory
from gpipe_compiler.planner.microbatch_count import MicrobatchCount, likely_microbatches
from gpipe_compiler.planner.planning import microbatch_size, pipeline_devices
from gpipe_compiler.planner.predict import Candidate, shared
from gpipe_compiler.planner.too_few_parts import saying_what_goes_together
from gpipe_compiler.runtime.schedule import lower
from gpipe_compiler.runtime.spec import Precision
from gpipe_compiler.runtime.wording import counted

Analysis: TypeAlias = Callable[[int, Precision], MicrobatchGraph]
"""Describes and costs a graph for a number of samples, in a precision."""


@dataclass
class Planner:
    """A graph to be planned, and what is known of it so far.

    Attributes:
        graph: at the batch size of its example.
        measured: time the ops on this machine, instead of estimating them.
        analysis: of a graph that torch cannot run; None for all others.
        pipeline: the passes that describe and transform the graph.
        samples: of the mini-batch to plan for; None for the example's.
        calibration: by which op times are scaled; None for none.
    """

    graph: Graph
    cluster: Cluster
    measured: bool = False
    constraints: Constraints = NO_CONSTRAINTS
    analysis: Analysis | None = None
    pipeline: PassPipeline = field(default_factory=PassPipeline)
    samples: int | None = None
    calibration: Calibration | None = None
    _prepared: dict[tuple[int, Precision, bool], MicrobatchGraph] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_names(self.graph, self.constraints)

    @property
    def batch_size(self) -> int:
        return self.samples or self.graph.batch_size

    def with_memory(self, size: int) -> Planner:
        cluster = self.cluster.with_memory(size)
        alike = len(cluster.kinds) == len(self.cluster.kinds)
        known = self._prepared if alike else {}  # costs on each kind, in their order
        return dataclasses.replace(self, cluster=cluster, _prepared=known)

    def choose(self, stages: int, microbatches: int | None, policy: Policy) -> Choice:
        """What is given, as a choice, on as many devices as its schedule needs.

        Args:
            microbatches: None for as many as are worth it, up to four per stage.

        Raises:
            PlanError, UsageError: when there can be no such pipeline on these devices.
        """
        most = len(self.graph.ops)
        if stages > most:
            raise PlanError(
                f"{stages:,} stages are more than the model's {counted(most, 'op')}",
                hint=f"ask for at most {most}" if most else "what it returns it does not compute",
            )
        training = self.graph.loss is not None
        if microbatches is None:
            microbatches = self.default_microbatches(stages, policy)
        devices = pipeline_devices(self.cluster, stages, policy, training=training)
        return Choice(stages, devices, policy.schedule_kind, microbatches, policy.remat)

    def planned(self, stages: int, microbatches: int | None, policy: Policy) -> tuple[Choice, Plan]:
        """What is given, as a choice, and the best plan found for it; as `choose` and `plan`.

        Where no number of micro-batches is given and the one by default does not fit, it is the
        next larger one that does, if any.
        """
        choice = self.choose(stages, microbatches, policy)
        made = self.plan(choice, policy)
        if microbatches is not None or made.fits or self.analysis is not None:
            return choice, made
        for count in self._counts(stages, policy).above(choice.microbatches):
            smaller = replace(choice, microbatches=count)
            with contextlib.suppress(GPipeCompilerError):
                other = self.plan(smaller, policy)
                if other.fits:
                    return smaller, other
        return choice, made

    def usual_microbatches(self, stages: int, policy: Policy) -> list[int]:
        """The number by default, and the larger ones that are taken where that does not fit.

        Raises:
            ModelError: as `default_microbatches`.
        """
        count = self.default_microbatches(stages, policy)
        if self.analysis is not None:
            return [count]
        return [count, *self._counts(stages, policy).above(count)]

    def default_microbatches(self, stages: int, policy: Policy) -> int:
        """As many as are worth it; see `MicrobatchCount`.

        Raises:
            ModelError: naming the op that cannot run on the samples of any.
        """
        if self.analysis is not None:
            return likely_microbatches(self.batch_size // policy.data_parallel, stages)[0]
        return self._counts(stages, policy).fastest()

    def _counts(self, stages: int, policy: Policy) -> MicrobatchCount:
        return MicrobatchCount(
            self.graph,
            self.batch_size // policy.data_parallel,
            stages,
            policy,
            self.cluster.link.latency_s,
            lambda count: self.prepare(count, policy),
        )

    @uncollected()
    def prepare(self, microbatches: int, policy: Policy) -> MicrobatchGraph:
        """The graph at the size of one of this number of micro-batches.

        Raises:
            ModelError: naming the op that cannot run on so few samples.
            PlanError, UsageError: when the batch does not split into that many.
        """
        size = microbatch_size(self.batch_size, microbatches, policy.data_parallel)
        if size == 1 and self.graph.alone:
            raise _another_alone(self.graph, policy.data_parallel)
        key = size, policy.precision, policy.in_place
        if key not in self._prepared:
            if self.analysis is not None:
                self._prepared[key] = self.analysis(size, policy.precision)
            else:
                self._prepared[key] = self._by_torch(*key)
        return self._prepared[key]

    @uncollected()
    def resized(
        self, samples: int, microbatches: int, policy: Policy, kinds: Sequence[Device]
    ) -> MicrobatchGraph:
        """The graph of these micro-batches at another number of samples, and on other devices.

        Measured times are as much longer or shorter as rooflines say.

        Args:
            microbatches: that the graph is or was prepared for.
        """
        if self.analysis is not None:
            return self.analysis(samples, policy.precision)
        prepared = self.prepare(microbatches, policy)
        known = prepared.graph
        graph = known
        if samples != known.batch_size:
            graph = annotate(known, samples, policy.precision, alike=known.values)
        costs = rooflines(graph, kinds, None if self.measured else kernel_times)
        if self.measured:
            (at_home,) = rooflines(known, self.cluster.kinds[:1])
            costs = [scaled(prepared.costs[0], at_home, there) for there in costs]
        else:
            costs = [each.calibrated(self.calibration) for each in costs]
        return MicrobatchGraph.of(graph, costs)

    def _by_torch(self, samples: int, precision: Precision, in_place: bool) -> MicrobatchGraph:
        try:
            plain, graph = self.described(samples, precision, in_place=in_place)
        except ModelError:
            self._refuse_torn(samples)
            raise
        if not all(value.splittable for value in graph.values.values()):
            self._refuse_torn(samples)
        costs = costs_by_kind(graph, self.cluster.kinds, measured=self.measured)
        costs = [each.calibrated(self.calibration) for each in costs]
        return MicrobatchGraph.of(graph, costs, plain)

    def _refuse_torn(self, samples: int) -> None:
        """Refuses micro-batches of this many samples, where the model takes others together."""
        if samples == self.batch_size:
            return
        rule = taken_together(annotate(self.graph, self.batch_size))
        if samples % rule.samples:
            raise ModelError(
                f"samples are taken {rule.samples} at a time: micro-batches of {samples} would "
                "tear them apart",
                location=rule.source,
                hint=f"use micro-batches of {rule.samples} samples or a multiple of that: the "
                f"example makes {self.batch_size // rule.samples} or fewer; or --microbatches 1",
            )

    def described(
        self, samples: int, precision: Precision, *, in_place: bool
    ) -> tuple[Graph, Graph]:
        """The graph at a size of micro-batch, without costs; of one that torch can run.

        Returns:
            It before any op writes in place that need not, and the graph to be planned.
        """
        at = PassSetting(samples, precision, in_place=in_place)
        plain, graph = self._transformed(at)
        lost = [name for name in self.constraints.names if not ops_of(plain, name)]
        if not lost:
            return plain, graph
        kept = frozenset(op.name for name in lost for op in ops_of(self.graph, name))
        return self._transformed(replace(at, kept=kept))

    def _transformed(self, at: PassSetting) -> tuple[Graph, Graph]:
        plain = graph = self.graph
        for name, graph in self.pipeline.run(self.graph, at):
            if name != INPLACE:
                plain = graph
        return plain, graph

    @uncollected()
    def plan(
        self, choice: Choice, policy: Policy, work: int = WORK, *, exact_memory: bool | None = None
    ) -> Plan:
        """The best plan found for a choice, which says how to schedule and what to recompute.

        Args:
            work: how much every cut may work out (`passes.cut.cut`).
            exact_memory: whether to trace what devices truly take, and to fit that; by default
                where a cut may take all the work. Never of a graph that torch cannot run.

        Raises:
            PlanError, UsageError: when there can be no such plan.
            ModelError: when the model does not run on so few samples.
        """
        exact = work >= WORK if exact_memory is None else exact_memory
        builder = self.builder(choice, policy, work)
        return make_plan(builder, self.batch_size, exact_memory=exact and self.analysis is None)

    def builder(self, choice: Choice, policy: Policy, work: int = WORK) -> CandidateBuilder:
        """What makes the candidates of a choice; as for `plan`."""
        prepared = self.prepare(choice.microbatches, policy)
        return CandidateBuilder.of(prepared, self.cluster, choice, policy, self.constraints, work)


def make_plan(builder: CandidateBuilder, batch_size: int, *, exact_memory: bool = True) -> Plan:
    """The plan with the shortest simulated step that was found.

    The schedule is lowered, in which nobody may wait for ever.

    Args:
        exact_memory: whether what the devices take is found out by tracing the stages, which
            torch must be able to run; else it is what the search counts (`in_flight`).

    Raises:
        PlanError: for an output that micro-batches cannot give, or more stages than ops.
    """
    choice, policy, training = builder.choice, builder.policy, builder.training
    _check_outputs(builder.facts.graph, choice.microbatches)
    with saying_what_goes_together(builder.facts):
        exact = choose_exactly(builder) if exact_memory else None
        candidate = builder.choose(builder.remat) if exact is None else exact.candidate
    if exact is not None:
        devices = builder.devices_of(candidate)
        prediction = with_memory(candidate.prediction, exact.memory, choice.stages, devices)
    else:
        prediction = candidate.prediction
        pairs = zip(prediction.device_bytes, builder.devices_of(candidate), strict=True)
        needed = tuple(device.needed(math.ceil(size)) for size, device in pairs)
        prediction = dataclasses.replace(prediction, device_bytes=needed)
    candidate = _with_frontiers(builder, candidate)
    graph = builder.facts_of(candidate).graph
    _prove(graph, candidate, builder.setting)
    return Plan(
        name=graph.name,
        stages=candidate.stages,
        crossings=candidate.table.crossings,
        schedule=choice.schedule,
        microbatches=choice.microbatches,
        batch_size=batch_size,
        training=training,
        orders=candidate.orders,
        cluster=builder.cluster,
        cost_source=builder.cost_source,
        prediction=prediction,
        batchnorm=policy.batchnorm,
        precision=policy.precision,
        joint=candidate.joint,
        placement=builder.setting.placement,
        slots=candidate.found.slots,
        constraints=builder.constraints,
        replicas=policy.data_parallel,
        sharding=policy.sharding_planned,
        sizes=tuple((size.name, size.example) for size in graph.sizes),
        tied=builder.facts.tied([stage.ops for stage in candidate.stages]),
        cut_inside=policy.cut_inside,
        opened=_opened(builder, candidate),
        graph=graph,
    )


def _with_frontiers(builder: CandidateBuilder, candidate: Candidate) -> Candidate:
    """The same, with every stage's frontier of time against memory; for a plan to be used.

    Where it was not chosen from such a frontier, this one is for people to look at, and found among
    fewer places.
    """
    if not builder.training or builder.work < WORK:
        return candidate
    stages, most = list(candidate.stages), MANY if builder.remat is RematChoice.AUTO else FEW
    for device, order in enumerate(candidate.orders):
        kind = builder.setting.slots[candidate.found.slots[device]].kind
        known = builder.remats.all(candidate.stages, order, candidate.joint, kind, most)
        for stage in known.stages:
            frontier = known.frontier(stage.index)
            stages[stage.index] = dataclasses.replace(stages[stage.index], frontier=frontier)
    return dataclasses.replace(candidate, stages=tuple(stages))


def _opened(builder: CandidateBuilder, candidate: Candidate) -> tuple[str, ...]:
    """The modules that lie in several stages, of those that count."""
    found = opened(builder.facts.modules, candidate.found.stage_of)
    return tuple(dict.fromkeys(module.path for module in found if module.depth))


def _another_alone(graph: Graph, replicas: int) -> ModelError:
    """The error for micro-batches of one sample, of which the model computes something else."""
    most = graph.batch_size // (2 * replicas)
    return ModelError(
        "the model computes something else of a single sample, which micro-batches would have",
        location=next(iter(graph.alone.values())).source,
        hint=f"use at most {most} micro-batches" if most else "give an example of two samples",
    )


def _check_outputs(graph: Graph, microbatches: int) -> None:
    """Makes sure that the outputs of a batch are those of its micro-batches put together."""
    if microbatches == 1 or graph.whole_batch:  # then a micro-batch is a mini-batch of its own
        return
    for name in graph.output_values:
        value = graph.values[name]
        if value.kind is ValueKind.TENSOR and not value.splittable:
            selection = selection_behind(graph, name)
            if selection is not None:
                raise PlanError(
                    f"how many elements the output {name} has depends on the values that "
                    f"{selection.name} is given: which samples they belong to is not known",
                    location=selection.source,
                    hint="return all rows, as by torch.where(mask, x, 0), or with a mask beside "
                    "them; or compile with --microbatches 1",
                )
            maker = graph.producer.get(name)
            if graph.batch_size == 1 and takes_several(graph):
                raise PlanError(
                    f"the output {name} of shape {value.shape} for a single sample has no row for "
                    "it: squeeze() takes out every dimension of one, the batch too",
                    location=maker.source if maker else None,
                    hint=f"say which dimension, as squeeze(-1); or use at most {microbatches // 2} "
                    "micro-batches",
                )
            raise PlanError(
                f"the output {name} of shape {value.shape} for {graph.batch_size} samples pairs "
                "samples with one another: micro-batches cannot give that of the batch",
                location=maker.source if maker else None,
                hint="return what has one row per sample, or compile with --microbatches 1",
            )


def _prove(graph: Graph, candidate: Candidate, setting: CutSetting) -> None:
    """Makes sure that the schedule ends: nobody waits for ever, and everything read is there."""
    owners = dict(shared(graph, candidate.stages))
    lower(candidate.orders, setting.placement, candidate.table.crossings, owners, candidate.joint)
