"""ONNX stages of a torch model: its emitted stages, exported by torch.onnx."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from gpipe_compiler.codegen.package import Progress
from gpipe_compiler.compile_options import CompileOptions
from gpipe_compiler.errors import ModelError, UsageError
from gpipe_compiler.frontend import auto
from gpipe_compiler.frontend.batch_dims import Found, find_batch_dims
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.ir import ValueKind
from gpipe_compiler.onnx.codegen.package import write_exported
from gpipe_compiler.onnx.validate_exported import validate_exported
from gpipe_compiler.options.choices import Frontend
from gpipe_compiler.plan import Plan
from gpipe_compiler.plan.pareto import Frontier
from gpipe_compiler.planner.batch_outputs import check_rows, in_one_piece
from gpipe_compiler.planner.planner import Planner
from gpipe_compiler.runtime.spec import Precision
from gpipe_compiler.targets.planning import plan_as_asked, planner_of
from gpipe_compiler.targets.torch_stages import on_meta
from gpipe_compiler.validate.cross_sample import refuse_mixing
from gpipe_compiler.validate.launching import Launch
from gpipe_compiler.validate.package import Validation
from gpipe_compiler.validate.reference import reference_of


@dataclass(frozen=True, eq=False)
class ExportedStages:
    """A torch model, to be compiled to ONNX stages that torch.onnx exports; see `Target`.

    It is planned as for torch.

    Attributes:
        found: the model, as its batch dimensions were found.
        subject: the same, batched as the package takes it.
    """

    options: CompileOptions
    found: Found
    subject: Subject
    planner: Planner
    frontend: Frontend
    batch: str

    @classmethod
    def open(
        cls, subject: Subject, options: CompileOptions, progress: Progress, _: Launch
    ) -> ExportedStages:
        """Traces a model; an `OpenTarget`."""
        _refuse_unfit(options)
        # ONNX has no writes in place, and its runtime finds its own.
        options = dataclasses.replace(options, in_place=False, remedies=False)
        progress("tracing")
        found = find_batch_dims(subject)
        if options.microbatches != 1:
            _refuse_other_dims(found)
        batch = Found(subject) if _other_dims(found) else found
        graph, frontend = auto.choose(batch.subject, options.frontend)
        if on_meta(graph):
            raise ModelError(
                "the model is on the meta device, so there are no weights to export",
                hint="build it on the processor, or compile it with --target torch",
            )
        planner = planner_of(graph, options)
        return cls(options, found, batch.subject, planner, frontend, batch.note)

    def plan(self, progress: Progress) -> tuple[Plan, Frontier | None]:
        """As in `Target`."""
        made, frontier = plan_as_asked(self.planner, self.options, progress)
        self._refuse_parts(made)
        return in_one_piece(made, self._refuse), frontier

    def _refuse(self, plan: Plan) -> None:
        """Raises ModelError or ValidationError where micro-batches do not give the batch's."""
        self._refuse_parts(plan)
        if self.options.validate and plan.microbatches > 1:
            reference_of(self.found.subject, plan, seed=0)

    def _refuse_parts(self, plan: Plan) -> None:
        """The same, without looking at numbers."""
        if plan.microbatches == 1:
            return
        _refuse_other_dims(self.found)
        try:
            refuse_mixing(self.found, plan)
        except ModelError as error:
            hint = "compile with --microbatches 1, or with --target torch"
            raise ModelError(error.problem, location=error.location, hint=hint) from error
        check_rows(plan, _numbers(plan))

    def write(self, plan: Plan, folder: Path, progress: Progress) -> None:
        """As in `Target`."""
        write_exported(plan, folder, progress)

    def validate(self, plan: Plan, folder: Path) -> Validation:
        """As in `Target`."""
        return validate_exported(self.subject, plan, folder)

    def timed(self, plan: Plan, folder: Path, progress: Progress) -> Plan:
        """As in `Target`: the times of the ops are all there is."""
        return plan


open_target = ExportedStages.open


def _other_dims(found: Found) -> list[str]:
    return [f"{dim} of {name}" for name, dim in found.subject.batch_dims.items() if dim]


def _refuse_other_dims(found: Found) -> None:
    """Raises ModelError where the batch is another dimension than 0: ONNX stages take no other."""
    other = _other_dims(found)
    if other:
        raise ModelError(
            f"the batch is dimension {', '.join(other)}: packages for ONNX Runtime are cut along "
            "dimension 0 only",
            hint="compile with --microbatches 1 or with --target torch, or have build_model() "
            "return a model that takes its samples in dimension 0",
        )


def _numbers(made: Plan) -> frozenset[str]:
    """The ops that make no tensor: of what they are given they take sizes."""
    graph = made.graph
    assert graph is not None
    return frozenset(
        op.name
        for op in graph.ops
        if all(graph.values[name].kind is not ValueKind.TENSOR for name in op.outputs)
    )


def _refuse_unfit(options: CompileOptions) -> None:
    """Raises UsageError for what ONNX stages cannot do."""
    if options.training:
        raise UsageError(
            "--target onnxruntime: ONNX Runtime runs models and does not train them",
            hint="add --mode infer, or train with --target torch",
        )
    if options.precision is not Precision.FP32:
        raise UsageError(
            f"--precision {options.precision.value}: an ONNX model has no autocast",
            hint="leave it out, and have build_model() return the model in 16 bits",
        )
    if options.per_microbatch:
        raise UsageError(
            "--per-microbatch: a package for ONNX Runtime is held against the whole batch",
            hint="leave it out, and compile with --microbatches 1 where samples meet",
        )
    if options.data_parallel != 1:
        raise UsageError(
            "--data-parallel: replicas that only infer have nothing to keep equal",
            hint="leave it out, and start the package several times",
        )
