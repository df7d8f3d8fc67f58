"""From a torch model to a package of ONNX stages that is proved equal to it."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

from gpipe_compiler.codegen.package import Progress, refuse_taken
from gpipe_compiler.compile import (
    Compiled,
    on_meta,
    plan_as_asked,
    silent,
)
from gpipe_compiler.compile_options import CompileOptions
from gpipe_compiler.errors import ModelError, UsageError
from gpipe_compiler.frontend import auto
from gpipe_compiler.frontend.batch_dims import Found, find_batch_dims
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.ir import ValueKind
from gpipe_compiler.onnx.codegen.package import emit_exported
from gpipe_compiler.onnx.validate_exported import validate_exported
from gpipe_compiler.plan import Plan
from gpipe_compiler.planner.batch_outputs import check_rows
from gpipe_compiler.planner.one_piece import in_one_piece
from gpipe_compiler.runtime.spec import Precision
from gpipe_compiler.validate.cross_sample import refuse_mixing
from gpipe_compiler.validate.held import Held, left_aside
from gpipe_compiler.validate.reference import reference_of


def compile_exported(
    subject: Subject,
    options: CompileOptions,
    directory: Path | None,
    progress: Progress = silent,
) -> Compiled:
    """A package that runs a torch model as a pipeline in ONNX Runtime.

    It is planned as for torch; then every stage is exported by torch.onnx.

    Args:
        directory: where the package goes; None is a dry run, which writes nothing.

    Raises:
        EmitError: when a stage cannot be exported.
        ValidationError: when the package does not reproduce the model; it then stands beside
            `directory`, named `<directory>.failed`.
        GPipeCompilerError: whatever else is wrong; nothing has been written then.
    """
    _refuse_unfit(options)
    # ONNX has no writes in place, and its runtime finds its own.
    options = dataclasses.replace(options, in_place=False)
    if directory is not None:
        refuse_taken(directory, force=options.force)
    progress("tracing")
    found = find_batch_dims(subject)
    if options.microbatches != 1:
        _refuse_other_dims(found)
    batch = Found(subject) if _other_dims(found) else found
    subject = batch.subject
    graph, frontend = auto.choose(subject, options.frontend)
    if on_meta(graph):
        raise ModelError(
            "the model is on the meta device, so there are no weights to export",
            hint="build it on the processor, or compile it with --target torch",
        )
    progress("planning")
    made, frontier = plan_as_asked(graph, options, progress)
    _refuse_parts(found, made)
    made = in_one_piece(made, partial(_refuse_parts, found, validate=options.validate))
    if directory is None:
        return Compiled(frontend, made, None, None, frontier=frontier, batch=batch.note)
    compare = partial(validate_exported, subject, made)
    held = Held(made, progress, compare if options.validate else None)
    with left_aside(directory):
        placed = emit_exported(
            made, directory, force=options.force, progress=progress, check=held.hold
        )
    return Compiled(frontend, made, placed, held.found, frontier=frontier, batch=batch.note)


def _refuse_parts(found: Found, plan: Plan, *, validate: bool = False) -> None:
    """Raises ModelError or ValidationError where micro-batches do not give what the batch does.

    Args:
        validate: whether to compare numbers, too: the model in plain PyTorch.
    """
    if plan.microbatches == 1:
        return
    _refuse_other_dims(found)
    try:
        refuse_mixing(found, plan)
    except ModelError as error:
        hint = "compile with --microbatches 1, or with --target torch"
        raise ModelError(error.problem, location=error.location, hint=hint) from error
    check_rows(plan, _numbers(plan))
    if validate:
        reference_of(found.subject, plan, seed=0)


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
