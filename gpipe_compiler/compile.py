"""The way of the data: trace, plan, emit, validate; and all of it in one call.

graph = trace(model, args, target=target, loss_fn=loss_fn)   # the model as ops and values
plan_ = plan(graph, stages=4)                                # in stages, with a prediction
emit(plan_, Path("model_x4"))                                # the package
compile(subject, options, directory)         # the same, and the proof that it equals the model
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from gpipe_compiler.cluster import Cluster, local_cluster
from gpipe_compiler.codegen.package import PLAN, Progress, failed_place, place, refuse_taken
from gpipe_compiler.errors import UsageError, ValidationError
from gpipe_compiler.frontend import tracing
from gpipe_compiler.frontend.batch_dims import find_batch_dims
from gpipe_compiler.frontend.free_sizes import say_fixed
from gpipe_compiler.frontend.subject import LossFunction, Subject, Wish
from gpipe_compiler.frontend.trace_settings import as_written
from gpipe_compiler.ir import Graph
from gpipe_compiler.ir.legality import check
from gpipe_compiler.options import NO_CONSTRAINTS, CompileOptions, Constraints, LossChoice, Policy
from gpipe_compiler.passes.footprint import own_optimizer
from gpipe_compiler.passes.free_sizes import FixedSizeError
from gpipe_compiler.passes.pipeline import PassPipeline
from gpipe_compiler.passes.shapes import annotate
from gpipe_compiler.passes.written_once import refuse_overlaps
from gpipe_compiler.plan import Plan
from gpipe_compiler.plan.pareto import Frontier
from gpipe_compiler.plan.plan import Origin, SweepPoint
from gpipe_compiler.planner.memory_advice import what_if
from gpipe_compiler.planner.planner import Planner
from gpipe_compiler.report.html import write_report
from gpipe_compiler.report.text import format_plan
from gpipe_compiler.targets import Target, load
from gpipe_compiler.targets.planning import sweep
from gpipe_compiler.targets.torch_stages import emit
from gpipe_compiler.validate.launching import Launch, fresh
from gpipe_compiler.validate.package import Validation

__all__ = ["CompileOptions", "Compiled", "compile", "emit", "plan", "trace", "trace_subject"]

_Planned = TypeVar("_Planned")


def silent(_: str) -> None:
    """The progress of one who does not watch."""


@dataclass(frozen=True, eq=False)
class Compiled:
    """What a compile gives.

    Attributes:
        directory: the package; None after a dry run.
        validation: what was compared; None when nothing was.
        not_validated: why nothing was compared, where that was not what the user asked for.
        frontier: all settings that were compared, where they were not given.
        batch: which dimensions are the batch, where they are others than 0 or not proven.
        under_torchrun: the package may be run with one process for each device.
    """

    plan: Plan
    directory: Path | None
    validation: Validation | None
    not_validated: str = ""
    frontier: Frontier | None = None
    batch: str = ""
    under_torchrun: bool = True

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
    batch_dims: Mapping[str, int | None] | None = None,
    free: Sequence[str] = (),
    fix: Sequence[str] = (),
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
        free: the dimensions of inputs that have to be free, as `--free` names them.
        fix: those that are to be fixed, as `--fix` names them.

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
        free=Wish.parse(free, fix),
    )
    return trace_subject(subject)


@as_written()
def trace_subject(subject: Subject) -> Graph:
    """The graph of a subject, every value described at the example's batch size.

    Raises:
        TraceError, ModelError: naming the user's line.
    """
    found = find_batch_dims(subject).subject
    try:
        graph = _described(found)
    except FixedSizeError as error:
        if not found.free.everything:
            raise
        graph = _described(found.fixed())
        say_fixed(error.problem, error.location)
    refuse_overlaps(graph, subject.model)
    return graph


def _described(subject: Subject) -> Graph:
    graph = tracing.trace(subject)
    return check(annotate(graph, graph.batch_size), after="shapes")


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
        return planner.planned(stages, microbatches, policy)[1]
    found = own_optimizer(graph, make_optimizer)
    if isinstance(found, str):
        raise UsageError(
            f"what make_optimizer() remembers is not known: {found}",
            hint="name an optimizer that remembers as much: Policy(optimizer=OptimizerKind.ADAM)",
        )
    policy = dataclasses.replace(policy, optimizer=found)
    _, made = planner.planned(stages, microbatches, policy)
    return dataclasses.replace(made, optimizer=str(found))


@as_written()
def compile(  # noqa: A001  # the word for what it does, in a namespace of its own
    model: Any,
    options: CompileOptions,
    directory: Path | None,
    progress: Progress = silent,
    launch: Launch = fresh,
) -> Compiled:
    """From a model to a package that is proved equal to it.

    Args:
        model: a `Subject`, or an `OnnxFile` for the target `onnx`.
        directory: where the package goes; None is a dry run, which writes nothing.
        launch: runs the package where it is compared with the model.

    Raises:
        ValidationError: when the package does not reproduce the model; it then stands beside
            `directory`, named `<directory>.failed`.
        GPipeCompilerError: whatever else is wrong; nothing has been written then.
    """
    PassPipeline().asked(options.print_after, options.pass_options)  # refuses unknown names at once
    if directory is not None:
        refuse_taken(directory, force=options.force)

    def planned(target: Target) -> tuple[Plan, Frontier | None]:
        progress("planning")
        return target.plan(progress)

    target, (made, frontier) = _of_free_sizes(model, options, progress, launch, planned)
    made = dataclasses.replace(made, origin=Origin.here(options.words))
    if target.options.remedies:
        progress("looking at what would save memory")
        made = dataclasses.replace(made, what_if=what_if(target.planner, made, target.options))
    if directory is None:
        return Compiled(made, None, None, frontier=frontier, batch=target.batch)
    package = _Package(target, made, progress)
    try:
        placed = place(directory, package.write, force=options.force, check=package.check)
    except ValidationError as error:
        left = f"the package is left in {failed_place(directory)} to look at; do not train with it"
        hint = f"{error.hint}; {left}" if error.hint else left
        raise ValidationError(error.problem, location=error.location, hint=hint) from error
    return Compiled(
        package.plan,
        placed,
        package.validation,
        package.not_validated,
        frontier,
        target.batch,
        target.under_torchrun,
    )


@as_written()
def compare(
    model: Any,
    options: CompileOptions,
    devices: Sequence[int],
    *,
    largest_batch: bool,
    progress: Progress = silent,
    launch: Launch = fresh,
) -> tuple[SweepPoint, ...]:
    """Plans of one trace, for several numbers of devices and sizes of mini-batches; see `sweep`.

    Args:
        model: a `Subject`, or an `OnnxFile` for the target `onnx`.

    Raises:
        GPipeCompilerError: where the model cannot be traced. What cannot be planned is told in the
            points.
    """

    def planned(target: Target) -> tuple[SweepPoint, ...]:
        planner, asked = target.planner, target.options
        return sweep(planner, asked, devices, largest_batch=largest_batch, progress=progress)

    return _of_free_sizes(model, options, progress, launch, planned)[1]


def _of_free_sizes(
    model: Any,
    options: CompileOptions,
    progress: Progress,
    launch: Launch,
    planned: Callable[[Target], _Planned],
) -> tuple[Target, _Planned]:
    """The model opened, and what is planned of it: with no size free, where not all can be."""
    open_target = load(options.target)
    target = open_target(model, options, progress, launch)
    try:
        return target, planned(target)
    except FixedSizeError as error:
        if not isinstance(model, Subject) or not model.free.everything:
            raise
        target = open_target(model.fixed(), options, progress, launch)
        made = planned(target)
        say_fixed(error.problem, error.location)
        return target, made


@dataclass
class _Package:
    """A package that is written, and compared with its model before it is put in its place."""

    target: Target
    plan: Plan
    progress: Progress
    validation: Validation | None = None
    not_validated: str = ""

    def write(self, folder: Path) -> None:
        self.target.write(self.plan, folder, self.progress)

    def check(self, folder: Path) -> None:
        """Raises ValidationError where it does not equal the model; then times it, if asked."""
        if self.target.options.validate:
            self._validate(folder)
        timed = self.target.timed(self.plan, folder, self.progress)
        if timed is not self.plan:
            self.plan = timed
            (folder / PLAN).write_text(timed.to_json(), encoding="utf-8")
            write_report(timed, folder / "report.html", self.validation)

    def _validate(self, folder: Path) -> None:
        self.progress("validating the package against the model")
        found = self.target.validate(self.plan, folder)
        if isinstance(found, str):
            self.not_validated = found
            return
        self.validation = found
        write_report(self.plan, folder / "report.html", found)
        if not found.passed:
            faults = [f"{row.what} {fault}" for row in found.rows for fault in row.faults]
            listing = "".join(f"\n  - {fault}" for fault in faults[:20])
            more = f"\n  and {len(faults) - 20} more" if len(faults) > 20 else ""
            raise ValidationError(f"the package does not reproduce the model:{listing}{more}")
