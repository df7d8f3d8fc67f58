"""The dynamo frontend: one mode of a model, captured from its bytecode.

Dynamo follows Python where tensors don't, and records the torch functions that forward calls, under
the names of forward's own variables. It needs a private part of torch and is asked last.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from gpipe_compiler.errors import GPipeCompilerError, TraceError
from gpipe_compiler.frontend.aten_to_python import aten_to_python
from gpipe_compiler.frontend.entry import Entry, make_entry
from gpipe_compiler.frontend.export_errors import refuse_fixed_batch
from gpipe_compiler.frontend.exported import (
    SMALLEST_BATCH,
    find_sources,
    pull_state_into_regions,
    regions,
    replace_by_state,
    tracing_settings,
)
from gpipe_compiler.frontend.free_sizes import trial_sizes
from gpipe_compiler.frontend.locate import line_of, line_of_trace
from gpipe_compiler.frontend.lower import lower
from gpipe_compiler.frontend.precisions import in_others
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.frontend.surroundings import ambient, kind_of
from gpipe_compiler.ir import Graph
from gpipe_compiler.runtime.core.precision import lower_dtype
from gpipe_compiler.runtime.spec import Precision
from gpipe_compiler.runtime.wording import text_of

_INDEX = re.compile(r"\[['\"]?(\w+)['\"]?\]")
"""A step into a list of modules, as dynamo writes paths."""


def trace_dynamo(subject: Subject, training: bool, precision: Precision = Precision.FP32) -> Graph:
    """The model's graph in one mode, by dynamo.

    Args:
        precision: one in which the model is another program than in fp32; the graph is for that
            precision alone.

    Raises:
        TraceError: with the construct that cannot be captured, its line, and what to do about it;
            also where this version of torch has no such capture.
        ModelError: when the model raises on its example inputs.
    """
    entry = make_entry(subject, training)
    with ambient(lower_dtype(precision), kind_of(entry)):
        captured = _capture(entry)
    _tidy(captured.module.graph)
    _write_assigned_data(captured.module.graph)
    module = _with_regions(captured.module)
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    inputs = _name_inputs(module.graph, placeholders, captured, entry)
    _name_outputs(module.graph, captured, inputs)
    refuse_fixed_batch(entry, inputs)
    pull_state_into_regions(module)
    graphs = [region.graph for region in regions(module)]
    find_sources(graphs[::-1])
    aten_to_python(graphs)
    lowered = lower(module.graph, module, entry)
    return lowered.replace(
        unlike=in_others(entry, precision),
        trial_sizes=trial_sizes(entry.signature, inputs, ()),
    )


@dataclass(frozen=True)
class _Captured:
    """What dynamo gives.

    Attributes:
        module: flat tensors in, flat tensors out.
        taken: what each placeholder stands for: an example input, a parameter, a buffer.
        returned: the list that forward returns; integers are places in the graph's output.
    """

    module: fx.GraphModule
    examples: Sequence[torch.Tensor]
    taken: Sequence[object]
    returned: Sequence[object]


def _capture(entry: Entry) -> _Captured:
    """Runs dynamo on the entry.

    Raises:
        TraceError: when it fails.
    """
    capture = _capture_function()
    signature = entry.signature
    examples = signature.samples(max(signature.batch_size, SMALLEST_BATCH))
    for example, source in zip(examples, signature.inputs, strict=True):
        if source.batch_dim is not None:
            torch._dynamo.maybe_mark_dynamic(example, source.batch_dim)
    try:
        with tracing_settings(), torch.enable_grad(), torch._dynamo.config.patch(**_settings()):
            module = capture(entry)(*examples)
            taken = module._dynamo_bytecode_flatten(*examples)
            marks = tuple(torch.empty(()) for _ in _returned_nodes(module.graph))
            returned = module._dynamo_bytecode_unflatten(marks, tuple(examples))
    except GPipeCompilerError:
        raise
    except Exception as error:  # whatever the user's code or dynamo raises
        raise _explained(error) from error
    finally:
        torch._dynamo.reset()
    places = {id(mark): place for place, mark in enumerate(marks)}
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return _Captured(
        fx.GraphModule(module, graph),
        examples,
        taken,
        [places.get(id(item), item) for item in returned],
    )


def _settings() -> dict[str, Any]:
    """Dynamo's settings: recurrent layers are followed too."""
    return {"allow_rnn": True} if hasattr(torch._dynamo.config, "allow_rnn") else {}


def _returned_nodes(graph: fx.Graph) -> Sequence[Any]:
    (output,) = [node for node in graph.nodes if node.op == "output"]
    returned: Any = output.args[0]
    return returned if isinstance(returned, tuple | list) else (returned,)


def _capture_function() -> Callable[..., Callable[..., Any]]:
    try:
        module = importlib.import_module("torch._dynamo.functional_export")
        function: Callable[..., Callable[..., Any]] = module.dynamo_graph_capture_for_export
    except (ImportError, AttributeError) as error:
        raise TraceError(
            f"torch {torch.__version__} has no dynamo_graph_capture_for_export",
            hint="use --frontend export, or torch 2.11 and later",
        ) from error
    return function


def _with_regions(module: fx.GraphModule) -> fx.GraphModule:
    """The module with `no_grad` and autocast regions as whole calls.

    Dynamo records where they begin and end; torch.export has the passes that gather them.

    Raises:
        TraceError: when this version of torch does not have them.
    """
    switches = [node for node in module.graph.nodes if _switches_context(node)]
    if not switches:
        return module
    try:
        for name in ("set_grad", "autocast"):
            passes = importlib.import_module(f"torch._export.passes.replace_{name}_with_hop_pass")
            module, _ = getattr(passes, f"replace_{name}_with_hop_pass")(module, None)
    except (ImportError, AttributeError) as error:
        raise TraceError(
            f"torch {torch.__version__} cannot gather the region that dynamo has recorded",
            location=line_of_trace(switches[0].stack_trace),
            hint="use --frontend export",
        ) from error
    return module


def _switches_context(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") in (
        "_set_grad_enabled",
        "_enter_autocast",
    )


def _name_inputs(
    graph: fx.Graph, placeholders: Sequence[fx.Node], captured: _Captured, entry: Entry
) -> list[fx.Node]:
    """Reads state by its names; gives the placeholders of the inputs, in the entry's order."""
    names = {
        id(tensor): f"{prefix}{name}"
        for prefix, owner in (("model.", entry.model), ("loss_fn.", entry.loss_fn))
        if isinstance(owner, nn.Module)
        for name, tensor in (*owner.named_parameters(), *owner.named_buffers())
    }
    given: dict[int, fx.Node] = {}
    sizes: list[fx.Node] = []
    for node, tensor in zip(placeholders, captured.taken, strict=True):
        if id(tensor) in names:
            replace_by_state(graph, node, names[id(tensor)])
            continue
        places = [place for place, item in enumerate(captured.examples) if item is tensor]
        if places:
            given[places[0]] = node
        elif isinstance(tensor, int):
            sizes.append(node)
        elif node.users:
            raise TraceError(
                f"dynamo takes {node.target}, which is neither an input nor part of the model",
                location=line_of_trace(node.stack_trace),
                hint="keep it in the model, as a parameter or buffer",
            )
        else:
            graph.erase_node(node)
    inputs = _in_order(graph, given, entry)
    for node in sizes:
        _take_from_inputs(graph, node, inputs)
    return inputs


def _take_from_inputs(graph: fx.Graph, node: fx.Node, inputs: Sequence[fx.Node]) -> None:
    """Computes a size that older versions of dynamo take as an input of its own."""
    symbol = str(node.meta.get("val"))
    for source in inputs:
        value = source.meta.get("val")
        shape = value.shape if isinstance(value, torch.Tensor) else ()
        for dim, size in enumerate(shape):
            if node.users and str(size) == symbol:
                with graph.inserting_after(inputs[-1]):
                    found = graph.call_method("size", (source, dim))
                found.meta = dict(node.meta)
                node.replace_all_uses_with(found)
    if node.users:
        raise TraceError(
            f"dynamo takes the size {symbol}, which no input has",
            hint="use --frontend export",
        )
    graph.erase_node(node)


def _in_order(graph: fx.Graph, given: dict[int, fx.Node], entry: Entry) -> list[fx.Node]:
    """One placeholder for every input, those that the model does not read included."""
    # All before any is erased: the first of the graph may be among those.
    with graph.inserting_before(next(iter(graph.nodes))):
        ordered = [graph.placeholder(source.name) for source in entry.signature.inputs]
    for place, node in given.items():
        ordered[place].meta = dict(node.meta)
        node.replace_all_uses_with(ordered[place])
        graph.erase_node(node)
    return ordered


def _name_outputs(graph: fx.Graph, captured: _Captured, inputs: Sequence[fx.Node]) -> None:
    """Lets the graph return the list that forward returns."""
    nodes = _returned_nodes(graph)
    returned = []
    for item in captured.returned:
        if isinstance(item, int):
            returned.append(nodes[item])
            continue
        places = [place for place, example in enumerate(captured.examples) if example is item]
        if not places:
            raise TraceError(
                "the model returns a tensor that dynamo does not compute in the graph",
                hint="use --frontend export",
            )
        returned.append(inputs[places[0]])
    (output,) = [node for node in graph.nodes if node.op == "output"]
    output.args = (returned,)


def _tidy(graph: fx.Graph) -> None:
    """Makes the notes on nodes those of an exported graph."""
    for node in graph.nodes:
        if "example_value" in node.meta:
            node.meta["val"] = node.meta.pop("example_value")
        stack = node.meta.get("nn_module_stack") or {}
        node.meta["nn_module_stack"] = {
            key: (_INDEX.sub(r".\1", path.removeprefix("L['self']")).lstrip("."), cls)
            for key, (path, cls) in stack.items()
        }


def _write_assigned_data(graph: fx.Graph) -> None:
    """Writes into a tensor what is assigned to its `.data`; dynamo puts other memory under it.

    Raises:
        TraceError: where that would be another tensor than before, or the memory of another one.
    """
    nodes = list(graph.nodes)
    for node in nodes:
        name = getattr(node.target, "__name__", "")
        if name == "_lower_version_count_by_1":
            graph.erase_node(node)
        if name != "set_" or len(node.args) != 2:
            continue
        tensor, value = node.args
        old, new = tensor.meta["val"], value.meta["val"]
        before = (
            item.meta.get("val") for item in nodes[: nodes.index(value)] if item is not tensor
        )
        held = {x.untyped_storage()._cdata for x in before if isinstance(x, torch.Tensor)}
        if new.untyped_storage()._cdata in held or (old.shape, old.dtype) != (new.shape, new.dtype):
            raise TraceError(
                "the `.data` of a tensor becomes that of another one, or of another shape or type",
                location=line_of_trace(node.stack_trace),
                hint="write into the tensor, under torch.no_grad(): `tensor.copy_(value)`",
            )
        with graph.inserting_before(node):
            data = graph.call_function(getattr, (tensor, "data"))
            written = graph.call_method("copy_", (data, value))
        data.meta, written.meta = {**node.meta, "val": old}, {**node.meta, "val": old}
        node.replace_all_uses_with(tensor)
        graph.erase_node(node)


def _explained(error: Exception) -> TraceError:
    """The error in the words of the user's program: dynamo prints the user's lines itself."""
    text = text_of(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    hints = [line.removeprefix("Hint: ") for line in lines if line.startswith("Hint: ")]
    where = line_of_trace(text) or line_of(error)
    code = f" at `{where.code}`" if where and where.code else ""
    return TraceError(
        f"dynamo cannot capture the model{code}: {type(error).__name__}: "
        f"{lines[0] if lines else 'no message'}",
        location=where,
        hint=hints[0] if hints else "use --frontend export",
    )
