"""ONNX stages of a torch model: its emitted stages, exported by torch.onnx."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from gpipe_compiler.codegen.package import Progress
from gpipe_compiler.errors import ModelError, UsageError, ValidationError, summary
from gpipe_compiler.frontend import tracing
from gpipe_compiler.frontend.batch_dims import FoundBatch, find_batch_dims
from gpipe_compiler.frontend.entry import Entry
from gpipe_compiler.frontend.state import state_restored
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.frontend.trace_errors import by_values
from gpipe_compiler.ir import Autocast, Graph, ModuleCall, ValueKind
from gpipe_compiler.ir.arguments import value_names
from gpipe_compiler.ir.branches import required_lines
from gpipe_compiler.ir.interpret import lacks
from gpipe_compiler.onnx.codegen.package import closeness, write_exported
from gpipe_compiler.onnx.runtime.batches import Arrays
from gpipe_compiler.onnx.validate import WholeModel, batch_sizes, validate_stages
from gpipe_compiler.options import CompileOptions
from gpipe_compiler.plan import Plan
from gpipe_compiler.plan.pareto import Frontier
from gpipe_compiler.planner.batch_outputs import check_rows, in_one_piece
from gpipe_compiler.planner.planner import Planner
from gpipe_compiler.runtime.spec import Precision
from gpipe_compiler.runtime.train.comparison import flat_tensors
from gpipe_compiler.targets.planning import plan_as_asked, planner_of
from gpipe_compiler.validate.cross_sample import refuse_mixing
from gpipe_compiler.validate.launching import Launch
from gpipe_compiler.validate.package import Validation
from gpipe_compiler.validate.reference import reference_of
from gpipe_compiler.validate.some_samples import with_limit


@dataclass(frozen=True, eq=False)
class ExportedStages:
    """A torch model, to be compiled to ONNX stages that torch.onnx exports; see `Target`.

    It is planned as for torch.

    Attributes:
        found: the model, as its batch dimensions were found.
        subject: the same, batched as the package takes it.
    """

    under_torchrun: ClassVar[bool] = True

    options: CompileOptions
    found: FoundBatch
    subject: Subject
    planner: Planner
    batch: str

    @classmethod
    def open(
        cls, subject: Subject, options: CompileOptions, progress: Progress, _: Launch
    ) -> ExportedStages:
        """Traces a model; an `OpenTarget`."""
        _refuse_unfit(options)
        if subject.free.must or subject.free.at:
            raise UsageError(
                "--free and --at: stages for ONNX Runtime are for the sizes of the example",
                hint="leave them out, or compile with --target torch",
            )
        if subject.state:
            raise UsageError(
                "--state: stages for ONNX Runtime hold the state of an ONNX file alone",
                hint="leave it out, compile with --target torch, or export the model to a file",
            )
        subject = subject.fixed()
        # ONNX has no writes in place, and its runtime finds its own.
        options = dataclasses.replace(options, in_place=False, remedies=False)
        progress("tracing")
        found = find_batch_dims(subject)
        if options.microbatches != 1:
            _refuse_other_dims(found)
        batch = FoundBatch(subject) if _other_dims(found) else found
        graph = tracing.trace(batch.subject)
        if graph.on_meta:
            raise ModelError(
                "the model is on the meta device, so there are no weights to export",
                hint="build it on the processor, or compile it with --target torch",
            )
        _refuse_unknown_to_onnx(graph)
        planner = planner_of(graph, options)
        return cls(options, found, batch.subject, planner, batch.note)

    def plan(self, progress: Progress) -> tuple[Plan, Frontier | None]:
        made, frontier = plan_as_asked(self.planner, self.options, progress)
        for where in required_lines(made.known_graph.ops).values():
            raise by_values(where, "a stage of ONNX refuses no batch that goes another way")
        self._refuse_parts(made)
        return with_limit(in_one_piece(made, self._refuse)), frontier

    def _refuse(self, plan: Plan) -> None:
        """Raises ModelError where micro-batches do not give the batch's."""
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
        check_rows(plan.known_graph, _numbers(plan))

    def write(self, plan: Plan, folder: Path, progress: Progress) -> None:
        write_exported(plan, folder, progress)

    def validate(self, plan: Plan, folder: Path) -> Validation:
        return validate_exported(self.subject, plan, folder)

    def timed(self, plan: Plan, folder: Path, progress: Progress) -> Plan:
        """As in `Target`: the times of the ops are all there is."""
        return plan


open_target = ExportedStages.open


def _other_dims(found: FoundBatch) -> list[str]:
    return [f"{dim} of {name}" for name, dim in found.subject.batch_dims.items() if dim]


def _refuse_other_dims(found: FoundBatch) -> None:
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
    graph = made.known_graph
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
            "--per-microbatch: a package for ONNX Runtime is compared with the whole batch",
            hint="leave it out, and compile with --microbatches 1 where samples meet",
        )
    if options.data_parallel != 1:
        raise UsageError(
            "--data-parallel: replicas that only infer have nothing to keep equal",
            hint="leave it out, and start the package several times",
        )


def _refuse_unknown_to_onnx(graph: Graph) -> None:
    """Raises ModelError where the model itself turns autocast on, or packs sequences."""
    for op in graph.ops:
        contexts = (region.context for region in op.regions)
        casts = [context for context in contexts if isinstance(context, Autocast)]
        if any(context.enabled and not lacks(context.device_type) for context in casts):
            raise ModelError(
                f"{op.name} runs under torch.autocast: an ONNX model has no autocast",
                location=op.source,
                hint="compile it with --target torch, or have build_model() return the model in "
                "16 bits",
            )
        if op.call.kwargs.get("lengths") is not None and isinstance(op.call, ModuleCall):
            raise ModelError(
                f"{op.name} packs sequences, which torch does not export to ONNX by their lengths",
                location=op.source,
                hint="compile it with --target torch, or pass padded sequences and mask what lies "
                "behind their ends",
            )


# --- validation -------------------------------------------------------------------------------


def _whole(entry: Entry, graph: Graph) -> WholeModel:
    """A torch model, by arrays. Its state stays as it is."""

    def run(inputs: Arrays) -> dict[str, np.ndarray]:
        tensors = [tensor_of(inputs[item.name], item.dtype).clone() for item in graph.inputs]
        try:
            with state_restored(entry.model), torch.no_grad():
                leaves = entry(*tensors)
        except Exception as error:  # whatever the user's code raises
            raise ModelError(summary(error), hint="--no-validate") from error
        found = list(flat_tensors(entry.outputs(leaves)).values())
        names = list(value_names(graph.outputs))
        if len(names) != len(found):
            raise ValidationError(
                "the model returns a parameter or a constant, which no stage makes"
            )
        return {name: array_of(tensor) for name, tensor in zip(names, found, strict=True)}

    dims = {item.name: item.batch_dim for item in graph.inputs if item.batch_dim is not None}
    return WholeModel(run, closeness(graph, quantised=False), dims)


def validate_exported(subject: Subject, plan: Plan, directory: Path) -> Validation:
    """Compares the package in `directory` with the model, on its example inputs.

    Raises:
        ValidationError: when the package cannot be run. Differences are reported, not raised.
        ModelError: when samples of a batch meet in the model.
    """
    graph = plan.known_graph
    entry = Entry(subject, training=False)
    names = [source.name for source in graph.inputs]
    calls = {
        samples: dict(zip(names, map(array_of, entry.signature.samples(samples)), strict=True))
        for samples in batch_sizes(plan)
    }
    return validate_stages(_whole(entry, graph), plan, directory, calls)


def array_of(tensor: torch.Tensor) -> np.ndarray:
    """The numbers of a tensor; bfloat16, which numpy does not have, as uint16."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    return np.array(tensor.numpy())


def tensor_of(array: np.ndarray, dtype: torch.dtype | None) -> torch.Tensor:
    """The tensor that `array_of` made an array of."""
    tensor = torch.from_numpy(array)
    return tensor.view(dtype) if dtype is torch.bfloat16 else tensor
