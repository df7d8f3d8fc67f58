"""The way of the data: trace, plan, emit, validate; and all of it in one call.

graph = trace(model, args, target=target, loss_fn=loss_fn)   # the model as ops and values
plan_ = plan(graph, stages=4)                                # in stages, with a prediction
emit(plan_, Path("model_x4"))                                # the package
compile(subject, options, directory)         # the same, and the proof that it equals the model
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import nn

from gpipe_compiler.cluster import Cluster, local_cluster
from gpipe_compiler.codegen.package import PLAN, emit, failed_place, refuse_taken
from gpipe_compiler.errors import UsageError, ValidationError
from gpipe_compiler.frontend import auto
from gpipe_compiler.frontend.batch_dims import Found, find_batch_dims
from gpipe_compiler.frontend.materialise import real_example
from gpipe_compiler.frontend.subject import LossFunction, Subject
from gpipe_compiler.ir import Graph
from gpipe_compiler.ir.legality import check
from gpipe_compiler.options.choices import SEARCH_SECONDS, Frontend, LossChoice, Objective
from gpipe_compiler.options.constraints import NO_CONSTRAINTS, Constraints
from gpipe_compiler.options.optimizer_state import AnyOptimizer
from gpipe_compiler.options.policy import CUT_INSIDE, Auto, Policy, RematChoice
from gpipe_compiler.passes.own_optimizer import own_optimizer
from gpipe_compiler.passes.shapes import annotate
from gpipe_compiler.plan import Plan
from gpipe_compiler.plan.pareto import Frontier
from gpipe_compiler.planner.batch_outputs import refuse_apart
from gpipe_compiler.planner.infeasible import refuse_too_large
from gpipe_compiler.planner.measured import clocked
from gpipe_compiler.planner.memory_advice import what_if
from gpipe_compiler.planner.one_piece import in_one_piece
from gpipe_compiler.planner.search import explore
from gpipe_compiler.planner.search_space import Wish
from gpipe_compiler.planner.workbench import Workbench
from gpipe_compiler.report.html import write_report
from gpipe_compiler.runtime.spec import BatchNorm, OptimizerKind, Precision, ScheduleKind
from gpipe_compiler.validate.cross_sample import refuse_mixing
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

Progress = Callable[[str], None]
"""Told, in a few words, what is about to be done."""

MOST_IN_PLAN = 40
"""Settings beside those on the frontier that go into a plan's JSON."""


def silent(_: str) -> None:
    """The progress of one who does not watch."""


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """What to compile to.

    Attributes:
        stages, microbatches, schedule: AUTO where the best is to be found (`planner/search.py`);
            then `remat` AUTO also compares recomputing everywhere and nowhere.
        microbatches: None for the largest divisor of the batch up to four per stage.
        training: False for a package that only infers.
        measured: time the ops on this machine, instead of estimating them; and then the stages of
            the package.
        validate: hold the package against the model.
        force: replace a package that stands where this one goes.
        per_microbatch: accept that the loss of a mini-batch is that of its micro-batches, one by
            one, where they cannot give that of the whole.
        objective: what the stages are to make short.
        constraints: what the stages are to keep to.
        data_parallel: replicas of the pipeline that are planned for.
        optimizer: whose memory and time count; None for that of the user's file, else plain SGD.
        must_fit: refuse a plan that does not fit the memory of its devices.
        search_s: seconds after which no further setting is looked at.
        in_place: let ops write over what nobody needs any more (`passes.inplace`).
        cut_inside: the share of the best step that may be given for cuts which open fewer modules
            of the model; 0 for cuts anywhere.
        prove: find out how far the cut may be from the best, however long that takes.
        remedies: tell in the plan what other settings would save of memory.
    """

    stages: int | Auto
    microbatches: int | Auto | None = None
    schedule: ScheduleKind | Auto = ScheduleKind.GPIPE
    remat: RematChoice = RematChoice.NONE
    batchnorm: BatchNorm = BatchNorm.MICRO
    precision: Precision = Precision.FP32
    training: bool = True
    frontend: Frontend = Frontend.AUTO
    measured: bool = False
    cluster: Cluster = field(default_factory=local_cluster)
    validate: bool = True
    force: bool = False
    seed: int = 0
    per_microbatch: bool = False
    objective: Objective = Objective.STEP
    constraints: Constraints = NO_CONSTRAINTS
    data_parallel: int = 1
    optimizer: AnyOptimizer | None = None
    must_fit: bool = False
    search_s: float = SEARCH_SECONDS
    in_place: bool = True
    cut_inside: float = CUT_INSIDE
    prove: bool = False
    remedies: bool = False

    def __post_init__(self) -> None:
        self.policy  # noqa: B018  # refuses choices that do not go together
        if not self.training and (self.remat, self.batchnorm) != (
            RematChoice.NONE,
            BatchNorm.MICRO,
        ):
            raise UsageError(
                "--remat and --batchnorm are for training, and with --mode infer there is none",
                hint="leave them out, or compile with --mode train",
            )

    @property
    def policy(self) -> Policy:
        """How the pipeline trains; with GPipe's schedule where the best is to be found.

        Raises:
            UsageError: for choices that do not go together; so does making these options.
        """
        return Policy(
            ScheduleKind.GPIPE if isinstance(self.schedule, Auto) else self.schedule,
            self.remat,
            self.batchnorm,
            self.precision,
            self.data_parallel,
            self.optimizer or OptimizerKind.SGD,
            self.objective,
            self.in_place,
            self.cut_inside,
            self.prove,
        )


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
        return f"{self.plan}\n{self.directory or 'dry run: nothing written'}"


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
    return check(annotate(graph, graph.batch_size), after="shapes"), used


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
    bench = Workbench(graph, cluster or local_cluster(), measured, constraints)
    if make_optimizer is None or graph.loss is None:
        return bench.plan(bench.choose(stages, microbatches, policy), policy)
    found = own_optimizer(graph, make_optimizer)
    if isinstance(found, str):
        raise UsageError(
            f"what make_optimizer() remembers is not known: {found}",
            hint="name an optimizer that remembers as much: Policy(optimizer=OptimizerKind.ADAM)",
        )
    policy = dataclasses.replace(policy, optimizer=found)
    made = bench.plan(bench.choose(stages, microbatches, policy), policy)
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
    bench = Workbench(graph, options.cluster, options.measured, options.constraints)
    made, frontier = plan_on(bench, options, progress)
    made = dataclasses.replace(made, optimizer=words)
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
        made = dataclasses.replace(made, what_if=what_if(bench, made, options.policy))
    found: list[Validation] = []
    refused = ""

    def hold(folder: Path) -> None:
        nonlocal made, refused
        if options.validate:
            progress("validating the package against the model")
            held = _validated(subject, made, options, frontend, folder, launch)
            if isinstance(held, Validation):
                found.append(held)
                write_report(made, folder / "report.html", held)
                refuse_failed(held)
            else:
                refused = held
        if options.measured and not on_meta(graph):
            made = clocked(made, folder, progress)
            (folder / PLAN).write_text(made.to_json(), encoding="utf-8")
            write_report(made, folder / "report.html", found[0] if found else None)

    try:
        placed = emit(
            made,
            directory,
            hooks=subject.hooks,
            force=options.force,
            progress=progress,
            check=hold,
            example=real_example(subject) if on_meta(graph) else None,
        )
    except ValidationError as error:
        raise left_aside(error, directory) from error
    held = found[0] if found else None
    return Compiled(frontend, made, placed, held, refused, frontier, batch.note)


def _refuse_parts(found: Found, options: CompileOptions, plan: Plan) -> None:
    """Raises ModelError or ValidationError where micro-batches do not give what the batch does."""
    refuse_mixing(found, plan)
    refuse_unsplit(plan)
    if options.validate:
        reference_of(found.subject, plan, options.seed)


def _validated(
    subject: Subject,
    made: Plan,
    options: CompileOptions,
    frontend: Frontend,
    folder: Path,
    launch: Launch,
) -> Validation | str:
    """The comparison of a package with its model; or why none was made."""
    assert made.graph is not None
    seed, accepted = options.seed, options.per_microbatch
    too_large = why_not_materialised(made) if on_meta(made.graph) else ""
    if not too_large:
        hold = validate_materialised if on_meta(made.graph) else validate
        return hold(subject, made, folder, seed=seed, per_microbatch=accepted, launch=launch)
    held = validate_shortened(
        subject,
        made,
        options.policy,
        options.cluster,
        frontend,
        seed=seed,
        per_microbatch=accepted,
        launch=launch,
    )
    return held if isinstance(held, Validation) else f"{too_large}; {held}"


def plan_as_asked(
    graph: Graph, options: CompileOptions, progress: Progress = silent
) -> tuple[Plan, Frontier | None]:
    """The plan, and the settings that it was chosen from where these are not all given.

    Raises:
        DoesNotFitError: when nothing fits the devices, and that is asked or explored.
        PlanError, UsageError: when there can be no plan.
    """
    bench = Workbench(graph, options.cluster, options.measured, options.constraints)
    return plan_on(bench, options, progress)


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
    bench: Workbench, options: CompileOptions, progress: Progress = silent
) -> tuple[Plan, Frontier | None]:
    """The same, for a graph on its workbench."""
    policy, stages, microbatches = options.policy, options.stages, options.microbatches
    if not (
        isinstance(stages, Auto)
        or isinstance(microbatches, Auto)
        or isinstance(options.schedule, Auto)
    ):
        choice = bench.choose(stages, microbatches, policy)
        made = bench.plan(choice, policy)
        if options.must_fit:
            refuse_too_large(bench, made, policy, choice)
        return made, None
    wish = Wish.of(options.cluster, stages, microbatches, options.schedule, policy)
    found = explore(bench, wish, policy, seconds=options.search_s, progress=progress)
    frontier = found.frontier
    if not found.fits:
        progress("looking for settings nearby that fit")
        nearest = frontier.points[0].choice
        refuse_too_large(bench, found.plan, policy, nearest, wish.free, len(frontier.points))
    return dataclasses.replace(found.plan, frontier=frontier.shortened(MOST_IN_PLAN)), frontier


def left_aside(error: ValidationError, directory: Path) -> ValidationError:
    """The error, which tells too where the package is."""
    left = f"the package is left in {failed_place(directory)} to look at; do not train with it"
    hint = f"{error.hint}; {left}" if error.hint else left
    return ValidationError(error.problem, location=error.location, hint=hint)


def on_meta(graph: Graph) -> bool:
    """Whether the model has no numbers to compare."""
    return any(tensor.is_meta for tensor in graph.tensors.values())


def refuse_failed(validation: Validation) -> None:
    """Raises the ValidationError of a validation that failed."""
    if validation.passed:
        return
    faults = [f"{row.what} {fault}" for row in validation.rows for fault in row.faults]
    listing = "".join(f"\n  - {fault}" for fault in faults[:20])
    more = f"\n  and {len(faults) - 20} more" if len(faults) > 20 else ""
    raise ValidationError(f"the package does not reproduce the model:{listing}{more}")
