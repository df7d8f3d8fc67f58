"""From an ONNX model to a package of ONNX stages that is proved equal to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from gpipe_compiler.cluster import Device, is_here, this_machine
from gpipe_compiler.codegen.package import Progress, refuse_taken
from gpipe_compiler.compile import (
    Compiled,
    plan_on,
    silent,
)
from gpipe_compiler.compile_options import CompileOptions
from gpipe_compiler.errors import (
    GPipeCompilerError,
    ModelError,
    PlanError,
    UsageError,
)
from gpipe_compiler.ir import Graph
from gpipe_compiler.onnx.codegen.package import emit_onnx
from gpipe_compiler.onnx.frontend.constants import node_of
from gpipe_compiler.onnx.frontend.graph import graph_of, unshaped
from gpipe_compiler.onnx.frontend.reading import OnnxModel, read_model
from gpipe_compiler.onnx.frontend.sizes import InputSizes, input_sizes
from gpipe_compiler.onnx.passes.cost import onnx_rooflines
from gpipe_compiler.onnx.passes.facts import onnx_facts
from gpipe_compiler.onnx.passes.measure import onnx_measured
from gpipe_compiler.onnx.validate import random_inputs, refuse_meeting, validate_onnx
from gpipe_compiler.passes.cost import Costs
from gpipe_compiler.passes.costs_by_kind import on_kinds
from gpipe_compiler.plan import Plan
from gpipe_compiler.planner.batch_outputs import check_rows
from gpipe_compiler.planner.one_piece import in_one_piece
from gpipe_compiler.planner.planner import MICROBATCHES_PER_STAGE, Planner, Prepared
from gpipe_compiler.runtime.spec import Precision
from gpipe_compiler.validate.held import Held, left_aside


def compile_onnx(
    path: Path,
    options: CompileOptions,
    directory: Path | None,
    *,
    inputs: Sequence[str] = (),
    custom_ops: Sequence[Path] = (),
    progress: Progress = silent,
) -> Compiled:
    """A package that runs an ONNX model as a pipeline in ONNX Runtime.

    Args:
        path: of the model.
        options: for inference, in the precision of the model.
        directory: where the package goes; None is a dry run, which writes nothing.
        inputs: shapes of the inputs, as `--input` takes them.
        custom_ops: libraries of custom operators that the model needs.

    Raises:
        ValidationError: when the package does not reproduce the model; it then stands beside
            `directory`, named `<directory>.failed`.
        GPipeCompilerError: whatever else is wrong; nothing has been written then.
    """
    _refuse_unfit(options)
    options = dataclasses.replace(options, training=False)
    if directory is not None:
        refuse_taken(directory, force=options.force)
    progress("reading the model")
    model = read_model(path, custom_ops)
    sizes = input_sizes(model, inputs)
    progress("planning")
    options = _microbatches(options, sizes)
    planner = planner_of(model, sizes, options)
    try:
        made, frontier = plan_on(planner, options, progress)
    except PlanError as error:
        raise _explained(error, planner.graph) from error
    _refuse_parts(made)

    def refuse(halved: Plan) -> None:
        _refuse_parts(halved)
        if options.validate and not sizes.fixed:
            refuse_meeting(model, sizes, halved, seed=options.seed)

    made = in_one_piece(made, refuse)
    if directory is None:
        return Compiled(None, made, None, None, frontier=frontier)
    compare = partial(validate_onnx, model, sizes, made, seed=options.seed)
    held = Held(made, progress, compare if options.validate else None)
    with left_aside(directory):
        placed = emit_onnx(
            made,
            model,
            directory,
            sizes=sizes,
            force=options.force,
            progress=progress,
            check=held.hold,
        )
    return Compiled(None, made, placed, held.found, frontier=frontier)


def _refuse_parts(plan: Plan) -> None:
    """Raises ModelError for outputs that have no rows for the samples of micro-batches."""
    assert plan.graph is not None
    check_rows(plan, {op.name for op in plan.graph.ops if node_of(op).op_type in _SHAPES})


def _explained(error: PlanError, graph: Graph) -> GPipeCompilerError:
    """The error, which tells too what cannot be cut, where that may be why."""
    nodes = unshaped(graph)
    if not nodes:
        return error
    more = f" and {len(nodes) - _MOST} more" if len(nodes) > _MOST else ""
    return ModelError(
        f"{error.problem}; what {', '.join(nodes[:_MOST])}{more} makes has no known shape, so it "
        "cannot be handed from stage to stage",
        hint=error.hint or "ask for fewer stages, or keep such nodes out of the model",
    )


_MOST = 5
"""Nodes that a message names."""

_SHAPES = ("Shape", "Size")
"""Operators that read nothing but a shape."""


def _microbatches(options: CompileOptions, sizes: InputSizes) -> CompileOptions:
    """The options, with a number of micro-batches where the model itself gives their size.

    A mini-batch of such a model is as many micro-batches as are asked for, not a given number of
    samples.
    """
    if not sizes.fixed or isinstance(options.microbatches, int):
        return options
    stages = options.stages if isinstance(options.stages, int) else 1
    return dataclasses.replace(options, microbatches=MICROBATCHES_PER_STAGE * stages)


def planner_of(model: OnnxModel, sizes: InputSizes, options: CompileOptions) -> Planner:
    """What plans an ONNX model."""
    kinds = options.cluster.kinds

    def analysed(samples: int, _: Precision) -> Prepared:
        graph = graph_of(model, sizes, samples)
        costs = tuple(
            _measured(model, sizes, graph, kinds)
            if options.measured
            else onnx_rooflines(graph, kinds)
        )
        return Prepared(graph, costs, onnx_facts(graph, costs[0]))

    whole = graph_of(model, sizes, sizes.batch)
    if sizes.fixed:
        assert isinstance(options.microbatches, int)
        whole = whole.replace(batch_size=sizes.batch * options.microbatches)
    return Planner(whole, options.cluster, options.measured, options.constraints, analysed)


def _measured(
    model: OnnxModel, sizes: InputSizes, graph: Graph, kinds: Sequence[Device]
) -> list[Costs]:
    """Costs on each kind of device, by the clock of this machine."""
    here = next(filter(is_here, kinds), None) or this_machine()
    estimated = onnx_rooflines(graph, [here, *kinds])
    inputs = random_inputs(sizes, graph.batch_size, seed=0)
    return on_kinds(onnx_measured(model, graph, inputs, estimated[0]), estimated, kinds)


def _refuse_unfit(options: CompileOptions) -> None:
    """Raises UsageError for what says something about training, or about another precision."""
    if options.precision is not Precision.FP32:
        raise UsageError(
            f"--precision {options.precision.value}: an ONNX model computes in its own types",
            hint="leave it out; onnxconverter-common converts models to 16 bits",
        )
    if options.data_parallel != 1:
        raise UsageError(
            "--data-parallel: an ONNX model is not trained, so there is nothing to keep equal",
            hint="start the package several times",
        )
