"""The way of the data: trace, plan, emit, validate; and all of it in one call.

graph = trace(model, args, target=target, loss_fn=loss_fn)   # the model as ops and values
plan_ = plan(graph, stages=4)                                # in stages, with a prediction
emit(plan_, Path("model_x4"))                                # the package
compile(subject, options, directory)         # the same, and the proof that it equals the model
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from gpipe_compiler.cluster import Cluster, local_cluster
from gpipe_compiler.codegen.package import PLAN, Progress, emit, refuse_taken
from gpipe_compiler.compile_options import CompileOptions
from gpipe_compiler.errors import UsageError
from gpipe_compiler.frontend import auto
from gpipe_compiler.frontend.batch_dims import Found, find_batch_dims
from gpipe_compiler.frontend.materialise import real_example
from gpipe_compiler.frontend.subject import LossFunction, Subject
from gpipe_compiler.ir import Graph
from gpipe_compiler.ir.legality import check
from gpipe_compiler.options.choices import Frontend, LossChoice
from gpipe_compiler.options.constraints import NO_CONSTRAINTS, Constraints
from gpipe_compiler.options.policy import Auto, Policy
from gpipe_compiler.passes.overlaps import refuse_overlaps
from gpipe_compiler.passes.own_optimizer import own_optimizer
from gpipe_compiler.passes.shapes import annotate
from gpipe_compiler.plan import Plan
from gpipe_compiler.plan.pareto import Frontier
from gpipe_compiler.planner.batch_outputs import refuse_apart
from gpipe_compiler.planner.infeasible import refuse_too_large
from gpipe_compiler.planner.measured import clocked
from gpipe_compiler.planner.memory_advice import what_if
from gpipe_compiler.planner.one_piece import in_one_piece
from gpipe_compiler.planner.planner import Planner
from gpipe_compiler.planner.search import explore
from gpipe_compiler.planner.search_space import Wish
from gpipe_compiler.report.html import write_report
from gpipe_compiler.report.text import format_plan
from gpipe_compiler.runtime.spec import OptimizerKind
from gpipe_compiler.validate.cross_sample import refuse_mixing
from gpipe_compiler.validate.held import Held, left_aside
from gpipe_compiler.validate.launching import Launch, fresh
from gpipe_compiler.validate.loss_splitting import refuse_unsplit
from gpipe_compiler.validate.package import (
    Validation,
    validate,
    validate_materialised,
    why_not_materialised,
)
from gpipe_compiler.validate.reference import reference_of
from gpipe_compiler.validate.shortened import validate_shortened

MOST_IN_PLAN = 40
"""Settings beside those on the frontier that go into a plan's JSON."""


def silent(_: str) -> None:
    """The progress of one who does not watch."""


@dataclass(frozen=True, eq=False)
class Compiled:
    """What a compile gives.

    Attributes:
        frontend: the one that traced the model; None for an ONNX model.
        directory: the package; None after a dry run.
        validation: what was compared; None when nothing was.
        not_validated: why nothing was compared, where that was not what the user asked for.
        frontier: all settings that were compared, where they were not given.
        batch: which dimensions are the batch, where they are others than 0 or not proven.
    """

    frontend: Frontend | None
    plan: Plan
    directory: Path | None
    validation: Validation | None
    not_validated: str = ""
    frontier: Frontier | None = None
    batch: str = ""

    @property
    def graph(self) -> Graph | None:
        """The graph of the plan, its values described at the size of a micro-batch."""
        return self.plan.graph

    def __str__(self) -> str:
        return f"{format_plan(self.plan)}\n{self.directory or 'dry run: nothing written'}"


def trace(
    model: nn.Module,
    args: tuple[object, ...] | torch.Tensor = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    target: object = None,
    loss_fn: LossFunction | None = None,
    training: bool = True,
    loss: LossChoice = LossChoice.MODEL,
    frontend: Frontend = Frontend.AUTO,
    batch_dims: Mapping[str, int | None] | None = None,
) -> Graph:
    """The graph of a model that is called as `model(*args, **kwargs)`.

    Args:
        args: a single tensor stands for `(tensor,)`.
        target, loss_fn: training minimises `loss_fn(output, target)`; without a loss function,
            the `loss` that the model returns.
        training: False traces the model without any loss.
        loss: SUM_OF_SQUARES, for experiments, minimises that of the outputs.
        batch_dims: by the name of an input as the graph prints it, its dimension that is the batch,
            None for one that all samples share; all others are found out.

    Raises:
        TraceError, ModelError: naming the user's line; also where there is no loss to train on.
    """
    args = (args,) if isinstance(args, torch.Tensor) else args
    subject = Subject(
        type(model).__name__,
        model,
        args,
        dict(kwargs or {}),
        target,
        loss_fn,
        training,
        loss,
        batch_dims=batch_dims or {},
    )
    return trace_subject(subject, frontend)[0]


def trace_subject(subject: Subject, frontend: Frontend = Frontend.AUTO) -> tuple[Graph, Frontend]:
    """The graph of a subject, every value described at the example's batch size; and its frontend.

    Raises:
        TraceError, ModelError: naming the user's line.
    """
    graph, used = auto.choose(find_batch_dims(subject).subject, frontend)
    graph = check(annotate(graph, graph.batch_size), after="shapes")
    refuse_overlaps(graph, subject.model)
    return graph, used


def plan(
    graph: Graph,
    *,
    stages: int,
    microbatches: int | None = None,
    policy: Policy = Policy(),  # noqa: B008  # frozen
    measured: bool = False,
    cluster: Cluster | None = None,
    constraints: Constraints = NO_CONSTRAINTS,
    make_optimizer: Callable[..., object] | None = None,
) -> Plan:
    """The best plan found for a graph, at the batch size of its example.

    Args:
        policy: the schedule, what is recomputed, how BatchNorm normalises, and the precision.
        measured: time every distinct op on this machine, instead of estimating it.
        cluster: the devices; by default this machine's.
        constraints: what the stages are to keep to.
        make_optimizer: gives the optimizer of some parameters, whose memory and time count in place
            of those of the policy's.

    Raises:
        PlanError, UsageError: when so many stages or micro-batches cannot be had, the constraints
            cannot be met, or what the optimizer remembers is not known.
    """
    planner = Planner(graph, cluster or local_cluster(), measured, constraints)
    if make_optimizer is None or graph.loss is None:
        return planner.plan(planner.choose(stages, microbatches, policy), policy)
    found = own_optimizer(graph, make_optimizer)
    if isinstance(found, str):
        raise UsageError(
            f"what make_optimizer() remembers is not known: {found}",
            hint="name an optimizer that remembers as much: Policy(optimizer=OptimizerKind.ADAM)",
        )
    policy = dataclasses.replace(policy, optimizer=found)
    made = planner.plan(planner.choose(stages, microbatches, policy), policy)
    return dataclasses.replace(made, optimizer=str(found))


def compile(  # noqa: A001  # the word for what it does, in a namespace of its own
    subject: Subject,
    options: CompileOptions,
    directory: Path | None,
    progress: Progress = silent,
    launch: Launch = fresh,
) -> Compiled:
    """From a model to a package that is proved equal to it.

    Args:
        directory: where the package goes; None is a dry run, which writes nothing.
        launch: runs the package where it is held against the model.

    Raises:
        ValidationError: when the package does not reproduce the model; it then stands beside
            `directory`, named `<directory>.failed`.
        GPipeCompilerError: whatever else is wrong; nothing has been written then.
    """
    if directory is not None:
        refuse_taken(directory, force=options.force)
    progress("tracing")
    batch = find_batch_dims(subject)
    subject = batch.subject
    # Not trace_subject: the plan describes the values itself, at the size of a micro-batch.
    graph, frontend = auto.choose(subject, options.frontend, options.precision)
    progress("planning")
    options, words = _with_optimizer(options, graph, subject)
    planner = Planner(graph, options.cluster, options.measured, options.constraints)
    made, frontier = plan_on(planner, options, progress)
    made = dataclasses.replace(made, optimizer=words)
    assert made.graph is not None
    refuse_overlaps(made.graph, subject.model)
    if not options.per_microbatch:
        refuse_mixing(batch, made)
        refuse_apart(made)
        refuse_unsplit(made)
        progress("looking whether micro-batches give what the batch does")
        made = in_one_piece(made, partial(_refuse_parts, batch, options))
    if directory is None:
        return Compiled(frontend, made, None, None, frontier=frontier, batch=batch.note)
    if options.remedies:
        progress("looking at what would save memory")
        made = dataclasses.replace(made, what_if=what_if(planner, made, options.policy))
    compare = partial(_compared, subject, made, options, frontend, launch)
    held = _HeldAndTimed(
        made,
        progress,
        compare if options.validate else None,
        timed=options.measured and not on_meta(graph),
    )
    with left_aside(directory):
        placed = emit(
            made,
            directory,
            hooks=subject.hooks,
            force=options.force,
            progress=progress,
            check=held.hold,
            example=real_example(subject) if on_meta(graph) else None,
        )
    return Compiled(frontend, held.plan, placed, held.found, held.refused, frontier, batch.note)


@dataclass
class _HeldAndTimed(Held):
    """Times the package too, where that is asked; the plan has the measured times afterwards."""

    timed: bool = False

    def hold(self, folder: Path) -> None:
        """As `Held.hold`."""
        super().hold(folder)
        if self.timed:
            self.plan = clocked(self.plan, folder, self.progress)
            (folder / PLAN).write_text(self.plan.to_json(), encoding="utf-8")
            write_report(self.plan, folder / "report.html", self.found)


def _compared(
    subject: Subject,
    plan: Plan,
    options: CompileOptions,
    frontend: Frontend,
    launch: Launch,
    folder: Path,
) -> Validation | str:
    """The comparison of a package with its model; or why none was made."""
    assert plan.graph is not None
    seed, accepted = options.seed, options.per_microbatch
    too_large = why_not_materialised(plan) if on_meta(plan.graph) else ""
    if not too_large:
        hold = validate_materialised if on_meta(plan.graph) else validate
        return hold(subject, plan, folder, seed=seed, per_microbatch=accepted, launch=launch)
    held = validate_shortened(
        subject,
        plan,
        partial(_packaged_alike, plan, options, frontend),
        seed=seed,
        per_microbatch=accepted,
        launch=launch,
    )
    return held if isinstance(held, Validation) else f"{too_large}; {held}"


def _refuse_parts(found: Found, options: CompileOptions, plan: Plan) -> None:
    """Raises ModelError or ValidationError where micro-batches do not give what the batch does."""
    refuse_mixing(found, plan)
    refuse_unsplit(plan)
    if options.validate:
        reference_of(found.subject, plan, options.seed)


def _packaged_alike(
    like: Plan,
    options: CompileOptions,
    frontend: Frontend,
    subject: Subject,
    microbatches: int,
    folder: Path,
) -> Plan:
    """Writes the package of a subject, with the schedule and in as many stages as another plan."""
    policy = dataclasses.replace(options.policy, schedule=like.schedule, data_parallel=1)
    planner = Planner(auto.trace(subject, frontend), options.cluster)
    made = planner.plan(planner.choose(len(like.stages), microbatches, policy), policy)
    emit(made, folder, example=real_example(subject))
    return made


def plan_as_asked(
    graph: Graph, options: CompileOptions, progress: Progress = silent
) -> tuple[Plan, Frontier | None]:
    """The plan, and the settings that it was chosen from where these are not all given.

    Raises:
        DoesNotFitError: when nothing fits the devices, and that is asked or explored.
        PlanError, UsageError: when there can be no plan.
    """
    planner = Planner(graph, options.cluster, options.measured, options.constraints)
    return plan_on(planner, options, progress)


def _with_optimizer(
    options: CompileOptions, graph: Graph, subject: Subject
) -> tuple[CompileOptions, str]:
    """The options with the optimizer that counts, and which it is, in words for the plan."""
    make = subject.make_optimizer
    if graph.loss is None:
        return options, ""
    if options.optimizer is not None or make is None:
        kind = options.policy.optimizer
        name = kind.value if isinstance(kind, OptimizerKind) else str(kind)
        own = " (make_optimizer() is there, and not counted)" if make is not None else ""
        return options, name + own
    found = own_optimizer(graph, make)
    if isinstance(found, str):
        return options, f"sgd: what make_optimizer() remembers is not known ({found})"
    return dataclasses.replace(options, optimizer=found), str(found)


def plan_on(
    planner: Planner, options: CompileOptions, progress: Progress = silent
) -> tuple[Plan, Frontier | None]:
    """The same, for a graph in its planner."""
    policy, stages, microbatches = options.policy, options.stages, options.microbatches
    if not (
        isinstance(stages, Auto)
        or isinstance(microbatches, Auto)
        or isinstance(options.schedule, Auto)
    ):
        choice = planner.choose(stages, microbatches, policy)
        made = planner.plan(choice, policy)
        if options.must_fit:
            refuse_too_large(planner, made, policy, choice)
        return made, None
    wish = Wish.of(options.cluster, stages, microbatches, options.schedule, policy)
    found = explore(planner, wish, policy, seconds=options.search_s, progress=progress)
    frontier = found.frontier
    if not found.fits:
        progress("looking for settings nearby that fit")
        nearest = frontier.points[0].choice
        refuse_too_large(planner, found.plan, policy, nearest, wish.free, len(frontier.points))
    return dataclasses.replace(found.plan, frontier=frontier.shortened(MOST_IN_PLAN)), frontier


def on_meta(graph: Graph) -> bool:
    """Whether the model has no numbers to compare."""
    return any(tensor.is_meta for tensor in graph.tensors.values())
