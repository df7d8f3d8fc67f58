"""Stages as torch modules, run by the package's own runtime: what a torch model is compiled to."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, Self

import torch

from gpipe_compiler.codegen.package import Progress, place, write_package
from gpipe_compiler.errors import EmitError, ModelError, Notice
from gpipe_compiler.frontend import tracing
from gpipe_compiler.frontend.batch_dims import FoundBatch, find_batch_dims
from gpipe_compiler.frontend.comparable_runs import settles_in_eval
from gpipe_compiler.frontend.materialise import materialised, real_example
from gpipe_compiler.frontend.probing import on_meta
from gpipe_compiler.frontend.signature import resized, with_state
from gpipe_compiler.frontend.subject import Hooks, Subject
from gpipe_compiler.frontend.user_code import NEEDS_NUMBERS
from gpipe_compiler.ir import Graph
from gpipe_compiler.ir.branches import required_lines
from gpipe_compiler.options import CompileOptions
from gpipe_compiler.passes.footprint import own_optimizer
from gpipe_compiler.passes.shapes import annotate
from gpipe_compiler.passes.written_once import (
    refuse_overlaps,
    refuse_written_in_eval,
    refuse_written_weights,
)
from gpipe_compiler.plan import Plan
from gpipe_compiler.plan.pareto import Frontier
from gpipe_compiler.planner.batch_outputs import in_one_piece, refuse_apart
from gpipe_compiler.planner.measured import clocked
from gpipe_compiler.planner.planner import Planner
from gpipe_compiler.report.html import write_report
from gpipe_compiler.runtime.spec import OptimizerKind, Precision, WeightSharding
from gpipe_compiler.targets.planning import plan_as_asked, planner_of
from gpipe_compiler.validate.cross_sample import refuse_mixing
from gpipe_compiler.validate.large_models import (
    too_large_to_fill,
    validate_shortened,
    why_not_materialised,
)
from gpipe_compiler.validate.launching import Launch
from gpipe_compiler.validate.loss_splitting import refuse_listed, refuse_unsplit
from gpipe_compiler.validate.package import Validation, validate
from gpipe_compiler.validate.reference import reference_of
from gpipe_compiler.validate.some_samples import with_limit


@dataclass(frozen=True, eq=False)
class TorchStages:
    """A torch model, to be compiled to torch modules; see `Target`.

    Attributes:
        found: the model, its batch dimensions known.
        optimizer: the one whose memory and time count, as the plan shows it.
        launch: runs the package for its comparison with the model.
    """

    under_torchrun: ClassVar[bool] = True

    options: CompileOptions
    found: FoundBatch
    planner: Planner
    optimizer: str
    launch: Launch

    @classmethod
    def open(
        cls, subject: Subject, options: CompileOptions, progress: Progress, launch: Launch
    ) -> Self:
        """Traces a model; an `OpenTarget`."""
        progress("tracing")
        found = find_batch_dims(subject)
        graph = _traced(found.subject, options.precision)
        if subject.free.at:
            found = dataclasses.replace(found, subject=resized(found.subject, graph))
            graph = _traced(found.subject, options.precision)
        if options.microbatches != 1:
            refuse_listed(graph)
        if graph.loss is not None:
            over = dataclasses.replace(graph.loss, over_batch=options.loss_over_batch)
            graph = graph.replace(loss=over)
        if options.per_microbatch:
            graph = graph.replace(one_by_one=True)
        if subject.state:
            values = annotate(graph, graph.batch_size).values
            graph = with_state(graph, subject.state, values)
        options, words = _with_optimizer(options, graph, found.subject)
        planner = planner_of(graph, options)
        return cls(options, found, planner, words, launch)

    @property
    def batch(self) -> str:
        return self.found.note

    @property
    def _example(self) -> Mapping[str, torch.Tensor] | None:
        return real_example(self.found.subject) if self.planner.graph.on_meta else None

    def plan(self, progress: Progress) -> tuple[Plan, Frontier | None]:
        made, frontier = plan_as_asked(self.planner, self.options, progress)
        made = dataclasses.replace(made, optimizer=self.optimizer)
        refuse_overlaps(made.known_graph, self.found.subject.model)
        try:
            refuse_written_in_eval(made.known_graph)
        except ModelError:
            if self.planner.graph.on_meta or not settles_in_eval(self.found.subject):
                raise
        if made.microbatches > 1:
            refuse_written_weights(made.known_graph)
        if not self.options.per_microbatch:
            refuse_mixing(self.found, made)
            refuse_apart(made)
            refuse_unsplit(made)
            progress("looking whether micro-batches give what the batch does")
            made = in_one_piece(made, self._refuse_parts)
        for line in required_lines(made.known_graph.ops):
            text = f"{line}: the stages hold what this comes to for the example alone"
            warnings.warn(
                Notice(f"{text}; a step refuses a batch for which it differs"), stacklevel=2
            )
        return with_limit(made), frontier

    def _refuse_parts(self, plan: Plan) -> None:
        """Raises ModelError where micro-batches do not give the batch's."""
        refuse_written_weights(plan.known_graph)
        refuse_mixing(self.found, plan)
        refuse_unsplit(plan)
        if self.options.validate:
            reference_of(self.found.subject, plan, self.options.seed)

    def write(self, plan: Plan, folder: Path, progress: Progress) -> None:
        subject = self.found.subject
        example, pretrained = self._example, subject.pretrained
        write_package(plan, folder, subject.hooks, progress, example, pretrained)
        write_report(plan, folder / "report.html")

    def validate(self, plan: Plan, folder: Path) -> Validation | str:
        subject, options = self.found.subject, self.options
        seed, accepted = options.seed, options.per_microbatch
        too_large = why_not_materialised(plan) if self.planner.graph.on_meta else ""
        if not too_large:
            return validate(
                subject, plan, folder, seed=seed, per_microbatch=accepted, launch=self.launch
            )
        held = validate_shortened(
            subject,
            plan,
            partial(self._packaged_alike, plan),
            seed=seed,
            per_microbatch=accepted,
            launch=self.launch,
        )
        return held if isinstance(held, Validation) else f"{too_large}; {held}"

    def _packaged_alike(
        self, like: Plan, subject: Subject, microbatches: int, folder: Path
    ) -> Plan:
        """Writes the package of a subject in the schedule and number of stages of another plan."""
        policy = dataclasses.replace(
            self.options,
            schedule=like.schedule,
            data_parallel=1,
            sharding=WeightSharding.NONE,
        )
        planner = Planner(tracing.trace(subject), self.options.cluster)
        made = planner.plan(planner.choose(len(like.stages), microbatches, policy), policy)
        emit(made, folder, example=real_example(subject))
        return made

    def timed(self, plan: Plan, folder: Path, progress: Progress) -> Plan:
        timed = self.options.measured and not self.planner.graph.on_meta
        return clocked(plan, folder, progress) if timed else plan


open_target = TorchStages.open


def _with_optimizer(
    options: CompileOptions, graph: Graph, subject: Subject
) -> tuple[CompileOptions, str]:
    """The options with the optimizer that counts, and its name for the plan."""
    make = subject.make_optimizer
    if graph.loss is None:
        return options, ""
    if options.optimizer is not None or make is None:
        kind = options.counted_optimizer
        name = kind.value if isinstance(kind, OptimizerKind) else str(kind)
        own = " (make_optimizer() is there, and not counted)" if make is not None else ""
        return options, name + own
    found = own_optimizer(graph, make)
    if isinstance(found, str):
        return options, f"sgd: what make_optimizer() remembers is not known ({found})"
    return dataclasses.replace(options, optimizer=found), str(found)


def emit(
    plan: Plan,
    directory: Path,
    *,
    hooks: Hooks | None = None,
    force: bool = False,
    progress: Progress | None = None,
    example: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """Writes the package of a plan.

    Args:
        plan: with its graph, which holds the weights.
        hooks: the user's own file, for the data and the optimizer.
        force: replace the package that stands there already.
        example: a real tensor for every input, by name; that of the graph unless given.

    Returns:
        The absolute path of the package.

    Raises:
        EmitError: when something stands there already, when it cannot be written (permissions, a
            full disk), or when an op has no spelling as source code. Nothing is left behind.
    """
    if plan.graph is None:
        raise EmitError(
            "the plan has no graph, so there is no code to write",
            hint="plan the graph again: a plan read from JSON has no graph",
        )

    def write(folder: Path) -> None:
        write_package(plan, folder, hooks, progress or (lambda _: None), example)
        write_report(plan, folder / "report.html")

    return place(directory, write, force=force)


def _traced(subject: Subject, precision: Precision) -> Graph:
    """The graph of a model.

    One on meta whose code reads numbers, as a check of labels does, is filled with some, if it is
    not too large.
    """
    try:
        return tracing.trace(subject, precision)
    except ModelError as error:
        if error.hint != NEEDS_NUMBERS or too_large_to_fill(subject.model):
            raise
    graph = tracing.trace(materialised(subject, seed=0), precision)
    bare = {name: on_meta(tensor) for name, tensor in graph.tensors.items()}
    return graph.replace(tensors=bare)
