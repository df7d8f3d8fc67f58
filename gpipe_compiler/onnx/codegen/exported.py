"""The ONNX model of each stage of a torch model: its emitted module, exported by torch.onnx.

The module is that of `stage_<k>.py`, with the model's own weights, in eval mode. Boundary values
keep their names and weights those of the model; what is inside a stage is named after it, so that
no name of one stage means something else in another.
"""

from __future__ import annotations

import importlib.util
import re
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import GraphProto
from torch import nn
from torch.export import Dim

from gpipe_compiler.codegen.facts import CodeFacts
from gpipe_compiler.codegen.stage import StageSource, write_stages
from gpipe_compiler.errors import EmitError
from gpipe_compiler.ir import FunctionCall, Graph, MethodCall, ModuleCall, Op, ValueKind
from gpipe_compiler.onnx.codegen.stages import boundary, stage_file
from gpipe_compiler.onnx.codegen.weights import INLINE, save
from gpipe_compiler.onnx.frontend.nodes import subgraphs
from gpipe_compiler.plan import Plan, Stage
from gpipe_compiler.quiet import quiet
from gpipe_compiler.runtime.core.building import put

OPSET = 20
"""Of all exported stages: the first that has GELU and grid sampling of volumes."""


def export_stages(plan: Plan, folder: Path, progress: Callable[[str], None]) -> None:
    """Writes the model of every stage, checked by onnx.checker.

    Large weights go into `stage_<k>.onnx.data`.

    Raises:
        EmitError: naming the stage, and the user's line where one is known, that has no ONNX.
    """
    graph = plan.known_graph
    facts = CodeFacts.of(graph)
    for stage in plan.stages:
        progress(f"exporting stage {stage.index} of {len(plan.stages)}")
        _refuse_other_kinds(graph, stage)
        (source,) = write_stages(plan, facts, [stage]).stages
        path = folder / stage_file(stage)
        # What the exporter logs on its way is not told; what is wrong is raised.
        unlogged = quiet("torch.onnx", "onnxscript")
        with tempfile.TemporaryDirectory(prefix="gpipe-export-") as scratch, unlogged:
            file = Path(scratch, f"stage_{stage.index}.py")
            file.write_text(source.text, encoding="utf-8")
            module = _module(graph, source, file)
            try:
                _export(graph, stage, module, path)
            except EmitError:
                raise
            except Exception as error:  # the exporter's errors have no common class
                raise _refused(graph, stage, source, file, error) from error
        _rename(graph, stage, source, path)


def _refuse_other_kinds(graph: Graph, stage: Stage) -> None:
    """Raises EmitError for values that a session can neither take nor give."""
    for name in (*stage.inputs, *stage.outputs):
        if graph.values[name].kind is ValueKind.TENSOR:
            continue
        maker = graph.producer.get(name)
        raise EmitError(
            f"{name}, which stage {stage.index} takes or gives, is a Python object and no tensor, "
            "and ONNX stages hand on tensors alone",
            location=maker.source if maker is not None else None,
            hint="compute it again where it is used, or keep its ops together with --colocate",
        )


def _module(graph: Graph, source: StageSource, file: Path) -> nn.Module:
    """The stage's module, with the weights of the model."""
    spec = importlib.util.spec_from_file_location(f"_gpipe_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    with torch.random.fork_rng():
        module: nn.Module = getattr(loaded, source.class_name)()
    for own, name in source.state.items():
        tensor = graph.tensors[name].detach()
        held = dict(module.named_parameters(remove_duplicate=False))
        put(module, own, nn.Parameter(tensor, requires_grad=False) if own in held else tensor)
    return module.eval()


def _export(graph: Graph, stage: Stage, module: nn.Module, path: Path) -> None:
    args, shapes = _example(graph, stage)
    with torch.no_grad():
        program = torch.export.export(module, args, dynamic_shapes=shapes)
    # Only a graph without writes in place says what it would have written to.
    functional = program.run_decompositions({})
    written = [*functional.graph_signature.buffers_to_mutate.values()]
    if written:
        raise EmitError(
            f"stage {stage.index} writes to {written[0]} when it infers, and an ONNX model "
            "remembers nothing from call to call",
            hint="compile it with --target torch",
        )
    made = torch.onnx.export(program, dynamo=True, opset_version=OPSET, verbose=False)
    assert made is not None
    size = sum(tensor.nbytes for tensor in program.state_dict.values())
    made.save(path, external_data=size > INLINE)


def _example(graph: Graph, stage: Stage) -> tuple[tuple[torch.Tensor, ...], tuple[Any, ...]]:
    """Arguments to export with, of twice the planned samples, and which of their sizes are free.

    The exporter looks at types and sizes only, and takes a size of 1 for one that never changes.
    """
    values = [graph.values[name] for name in stage.inputs]
    odd = not all(value.splittable for value in values)
    args, shapes = [], []
    for value in values:
        shape = list(value.shape)
        free: dict[int, Any] = {}
        if odd:
            free = dict.fromkeys(range(len(shape)), Dim.AUTO)
        elif value.batch_dim is not None:
            shape[value.batch_dim] *= 2
            free = {value.batch_dim: Dim.DYNAMIC}
        args.append(torch.empty(shape, dtype=value.dtype))
        shapes.append(free)
    return tuple(args), tuple(shapes)


# --- what the exporter refuses ----------------------------------------------------------------


def _refused(
    graph: Graph, stage: Stage, source: StageSource, file: Path, error: Exception
) -> EmitError:
    """The error, in terms of the model and not of the emitted stage."""
    op = _culprit(graph, stage, source.text, file, error)
    what = f": {_shown(op)}" if op is not None else ""
    return EmitError(
        f"torch.onnx cannot export stage {stage.index}{what}: {_reason(error)}",
        location=op.source if op is not None else None,
        hint="write it in ops that ONNX has, or compile it with --target torch",
    )


def _shown(op: Op) -> str:
    return f"{_called(op)} in {op.module}" if op.module else _called(op)


def _called(op: Op) -> str:
    """The last word of what an op calls, as its emitted code spells it."""
    match op.call:
        case FunctionCall(function):
            return str(getattr(function, "__name__", function))
        case MethodCall(method):
            return method
        case ModuleCall(module):
            return module.rpartition(".")[2]


_REASONS = re.compile(r"<class '[\w.]+'>: (.+)")


def _reason(error: BaseException) -> str:
    """The first line that says what is wrong, from the bottom of a chain of errors."""
    summary = _REASONS.search(str(error))
    if summary is not None:
        return summary[1]
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _culprit(graph: Graph, stage: Stage, text: str, file: Path, error: Exception) -> Op | None:
    """The op at whose line of the stage's source the exporter stopped."""
    found = [
        int(number)
        for trace in _traces(error)
        for number in re.findall(rf'{re.escape(str(file))}", line (\d+)', trace)
    ]
    if not found:
        return None
    lines = text.splitlines()
    at = found[-1] - 1
    span = next((s for line in reversed(lines[:at]) if (s := _SPAN.search(line))), None)
    ops = [graph.op_of[name] for name in stage.ops if graph.op_of[name].source is not None]
    if span is not None:
        ops = [op for op in ops if _within(op, span)]
    words = set(re.findall(r"\w+", lines[at]))
    named = [op for op in ops if words & {_called(op), _called(op).rpartition("_")[2]}]
    return next(iter([*named, *ops]), None)


def _within(op: Op, span: re.Match[str]) -> bool:
    """Whether the user's line of an op is in the range of a comment."""
    assert op.source is not None
    first, last = int(span[2]), int(span[3] or span[2])
    return Path(op.source.file).name == span[1] and first <= op.source.line <= last


_SPAN = re.compile(r"^\s*#.*?([\w.-]+\.py):(\d+)(?:-(\d+))?")
"""The comment over a part of a stage, with its lines in the user's file."""


def _traces(error: BaseException) -> Iterator[str]:
    """Tracebacks of an error and its causes, and of the fx node that was being translated."""
    cause: BaseException | None = error
    while cause is not None:
        yield str(cause)
        yield "".join(traceback.format_tb(cause.__traceback__))
        for frame, _ in traceback.walk_tb(cause.__traceback__):
            node = frame.f_locals.get("node")
            if isinstance(node, torch.fx.Node) and node.stack_trace:
                yield node.stack_trace
        cause = cause.__cause__


# --- names ------------------------------------------------------------------------------------


def _rename(graph: Graph, stage: Stage, source: StageSource, path: Path) -> None:
    """Gives the values of a written model the names that the torch model has, and checks it."""
    proto = onnx.load(path, load_external_data=False)
    made = proto.graph
    names = dict(zip((value.name for value in made.input), stage.inputs, strict=True))
    fixed = {*names, *(tensor.name for tensor in made.initializer)}
    again: list[tuple[str, str]] = []
    for value, wanted in zip(made.output, stage.outputs, strict=True):
        if value.name in fixed or value.name in names:
            again.append((value.name, wanted))  # of several names for one value, the second
        else:
            names[value.name] = wanted
    taken = {*graph.values}
    for tensor in made.initializer:
        own = source.state.get(tensor.name, "")
        if own and own not in taken:
            names[tensor.name] = own
            taken.add(own)
    prefix = f"stage_{stage.index}."
    _apply(made, lambda name: names.get(name, prefix + name))
    made.node.extend(
        onnx.helper.make_node("Identity", [names.get(old, prefix + old)], [wanted])
        for old, wanted in again
    )
    for node in made.node:
        node.name = prefix + (node.name or node.output[0])
    for values, declared in ((made.input, stage.inputs), (made.output, stage.outputs)):
        del values[:]
        values.extend(boundary(graph, name, free=False) for name in declared)
    made.name = f"{prefix}{graph.name}"
    proto.producer_name = "gpipe-compiler"
    save(proto, path, f"the model of stage {stage.index}")


def _apply(made: GraphProto, new: Callable[[str], str]) -> None:
    """Renames all values of a graph and of the graphs in its nodes; "" is none."""
    for tensor in made.initializer:
        tensor.name = new(tensor.name)
    for value in (*made.input, *made.output, *made.value_info):
        value.name = new(value.name)
        del value.metadata_props[:]
    for node in made.node:
        for field in (node.input, node.output):
            field[:] = [new(name) if name else "" for name in field]
        del node.metadata_props[:]  # lines of files that are gone by now
        node.doc_string = ""
        for inner in subgraphs(node):
            _apply(inner, new)
