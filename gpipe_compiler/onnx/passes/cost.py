"""Estimates the time of each node of an ONNX graph by the roofline of a device; see `passes.cost`.

FLOPs are counted of products, convolutions, attention and recurrence. As in `passes.cost`, a
multiply-add counts as two and other arithmetic is not counted. Integer products count like others:
they take the same units.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from onnx import ModelProto, NodeProto, helper

from gpipe_compiler.cluster import Arithmetic, Device
from gpipe_compiler.errors import ModelError
from gpipe_compiler.ir import Graph, Op, Ref, StateRef
from gpipe_compiler.onnx.frontend.nodes import constant_ops, node_of, subgraphs, tensor_sizes
from gpipe_compiler.onnx.frontend.reading import OnnxModel, session_of, whole_session
from gpipe_compiler.onnx.runtime.stage import run_session
from gpipe_compiler.passes.cost import Costs, KernelCost, OpCost

Sizes: TypeAlias = Mapping[str, tuple[tuple[int, ...], torch.dtype]]

_FREE = frozenset(
    {"Constant", "Identity", "Shape", "Size", "Reshape", "Squeeze", "Unsqueeze", "Flatten"}
    | {"SequenceAt", "SequenceConstruct", "OptionalGetElement"}
)
"""Operators that touch no element."""

_LOOK_UPS = frozenset({"Gather", "GatherND", "GatherElements", "Slice", "Split", "SequenceInsert"})
"""Operators that read only as much of their first input as they return."""


def onnx_rooflines(graph: Graph, devices: Sequence[Device]) -> list[Costs]:
    """Costs of a graph on each of several devices.

    What is constant costs nothing, as it is folded when a stage is loaded. A node with subgraphs
    costs what it reads and writes, and one launch for each node of its bodies: how often they run
    is not known.
    """
    constant = constant_ops(graph)
    sizes = tensor_sizes(graph)
    tables: list[dict[str, OpCost]] = [{} for _ in devices]
    for op in graph.ops:
        kernel = None if op.name in constant else _kernel(op, sizes)
        launches = _inner_nodes(op)
        for costs, device in zip(tables, devices, strict=True):
            costs[op.name] = OpCost() if kernel is None else _on(kernel, launches, device)
    return [
        Costs(costs, f"roofline on {device.name}", graph.batch_size)
        for costs, device in zip(tables, devices, strict=True)
    ]


def _on(kernel: KernelCost, launches: int, device: Device) -> OpCost:
    return OpCost(
        forward_s=kernel.seconds(device) + launches * device.launch_s,
        flops=kernel.flops,
        bytes=kernel.bytes,
    )


def _kernel(op: Op, sizes: Sizes) -> KernelCost | None:
    node = node_of(op)
    if node.op_type in _FREE:
        return None
    names = [item.name if isinstance(item, Ref | StateRef) else "" for item in op.call.args]
    inputs = [sizes.get(name) for name in names]
    outputs = [sizes.get(name) for name in op.outputs]
    written = sum(map(_bytes, outputs))
    read = sum(map(_bytes, inputs))
    if node.op_type in _LOOK_UPS:
        read = min(read, written + sum(map(_bytes, inputs[1:])))
    return KernelCost(
        _flops(node, [item and item[0] for item in inputs], [item and item[0] for item in outputs]),
        read + written,
        _arithmetic([item[1] for item in (*inputs, *outputs) if item is not None]),
    )


def _bytes(known: tuple[tuple[int, ...], torch.dtype] | None) -> int:
    return math.prod(known[0]) * known[1].itemsize if known is not None else 0


def _arithmetic(dtypes: Sequence[torch.dtype]) -> Arithmetic:
    if torch.bfloat16 in dtypes:
        return Arithmetic.BF16
    return Arithmetic.FP16 if torch.float16 in dtypes else Arithmetic.FP32


def _inner_nodes(op: Op) -> int:
    return sum(len(graph.node) for graph in subgraphs(node_of(op)))


# --- FLOPs ------------------------------------------------------------------------------------

Shape: TypeAlias = tuple[int, ...]
"""() also where it is not known, or the input is left out."""

Formula: TypeAlias = Callable[[NodeProto, Sequence[Shape], Shape], int]
"""From a node, the shapes of its inputs and that of its first output."""


def _flops(node: NodeProto, inputs: Sequence[Shape | None], outputs: Sequence[Shape | None]) -> int:
    """Those of one node, without its subgraphs; 0 where shapes that it takes are not known."""
    if node.op_type not in _FORMULAS:
        return 0
    formula, needed = _FORMULAS[node.op_type]
    taken = [*outputs[:1], *inputs[:needed]]
    if len(taken) <= needed or None in taken:
        return 0
    try:
        return formula(node, [shape or () for shape in inputs], outputs[0] or ())
    except IndexError:  # a shape has fewer dimensions than it takes
        return 0


def _attribute(node: NodeProto, name: str, default: Any) -> Any:
    found = (helper.get_attribute_value(item) for item in node.attribute if item.name == name)
    return next(found, default)


def _conv(at: int) -> Formula:
    """A convolution whose weights are the input of this number: outputs x fan-in."""
    return lambda node, inputs, output: 2 * math.prod(output) * math.prod(inputs[at][1:])


def _conv_transpose(node: NodeProto, inputs: Sequence[Shape], output: Shape) -> int:
    return 2 * math.prod(inputs[0]) * math.prod(inputs[1][1:])


def _matmul(node: NodeProto, inputs: Sequence[Shape], output: Shape) -> int:
    """Outputs x the last dimension of the left side."""
    return 2 * math.prod(output) * (inputs[0] or (1,))[-1]


def _gemm(node: NodeProto, inputs: Sequence[Shape], output: Shape) -> int:
    rows = 0 if _attribute(node, "transA", 0) else 1
    return 2 * math.prod(output) * inputs[0][rows]


def _einsum(node: NodeProto, inputs: Sequence[Shape], output: Shape) -> int:
    """Two operands: all the letters that occur, once each."""
    equation = _attribute(node, "equation", b"").decode().replace(" ", "")
    operands = equation.split("->")[0].split(",")
    if len(operands) != 2 or "." in equation:
        return 2 * math.prod(output)
    sizes = {
        letter: size
        for letters, shape in zip(operands, inputs, strict=False)
        for letter, size in zip(letters, shape, strict=False)
    }
    return 2 * math.prod(sizes.values())


def _recurrent(node: NodeProto, inputs: Sequence[Shape], output: Shape) -> int:
    """Both products of every step: of the input and of the state, in every direction."""
    steps_by_batch = math.prod(inputs[0][:2])
    return 2 * steps_by_batch * (math.prod(inputs[1]) + math.prod(inputs[2]))


def _attention(node: NodeProto, inputs: Sequence[Shape], output: Shape) -> int:
    """ONNX's Attention (opset 23): scores, and the values they weigh; batch x heads x q x k x d."""
    query, key, value = inputs[:3]
    if len(query) == 4:
        pairs = math.prod(query[:3]) * key[2]
        return 2 * pairs * (query[3] + value[3])
    pairs = query[0] * query[1] * key[1]
    return 2 * pairs * (query[2] + value[2])


_PRODUCTS = (
    *("MatMul", "FusedMatMul", "MatMulInteger", "DynamicQuantizeMatMul", "MatMulIntegerToFloat"),
    *("MatMulNBits", "QLinearMatMul"),
)

_CONVOLUTIONS = ("Conv", "FusedConv", "NhwcFusedConv", "ConvInteger", "DeformConv")

_FORMULAS: Mapping[str, tuple[Formula, int]] = {
    **dict.fromkeys(_CONVOLUTIONS, (_conv(1), 2)),
    "QLinearConv": (_conv(3), 4),
    "ConvTranspose": (_conv_transpose, 2),
    **dict.fromkeys(_PRODUCTS, (_matmul, 1)),
    **dict.fromkeys(("Gemm", "FusedGemm", "QGemm"), (_gemm, 1)),
    "Einsum": (_einsum, 0),
    **dict.fromkeys(("LSTM", "GRU", "RNN"), (_recurrent, 3)),
    **dict.fromkeys(("Attention", "MultiHeadAttention"), (_attention, 3)),
}
"""By operator, each with the number of inputs whose shapes it takes.

Operators of ONNX Runtime's own domain have names that the standard ones do not.
"""


# --- times of nodes, by ONNX Runtime's own profiler ----------------------------------------------


RUNS = 5
"""Timed runs, after one that is not; medians count."""

_KERNEL = "_kernel_time"


def onnx_measured(
    model: OnnxModel, graph: Graph, inputs: Mapping[str, np.ndarray], estimated: Costs
) -> Costs:
    """Costs with measured times, in one thread on this machine's processor.

    The profiler sees single nodes only where ONNX Runtime does not fuse them, so nodes are timed
    without its optimiser; then all times are made shorter alike, to what the optimised model takes.

    Args:
        inputs: of the size that the graph is described for.
        estimated: by the roofline of this machine: their FLOPs and bytes, and the times of nodes
            that did not run (in a branch that was not taken).

    Raises:
        ModelError: when ONNX Runtime cannot run the model.
    """
    try:
        seconds = _profile(model, graph, inputs)
        share = _optimised_s(model, inputs) / max(sum(seconds.values()), 1e-12)
    except Exception as error:
        raise ModelError(
            f"ONNX Runtime cannot run {model.path}, so its nodes cannot be timed: {error}",
            hint="leave out --cost measured, or give it inputs of other sizes with --input",
        ) from error
    ops = {
        name: replace(cost, forward_s=seconds[name] * share) if name in seconds else cost
        for name, cost in estimated.ops.items()
    }
    return Costs(ops, "measured in ONNX Runtime on cpu, 1 thread", graph.batch_size)


def _profile(model: OnnxModel, graph: Graph, inputs: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Median seconds of every op that ran."""
    with tempfile.TemporaryDirectory(prefix="gpipe-profile-") as scratch:
        session = session_of(model, _named(model, graph), Path(scratch, "profile"))
        for _ in range(1 + RUNS):
            run_session(session, inputs)
        events = json.loads(Path(session.end_profiling()).read_text())
    times: dict[str, list[float]] = {}
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith(_KERNEL):
            name = event["name"].removesuffix(_KERNEL)
            times.setdefault(name, []).append(event["dur"] * 1e-6)
    known = {op.name for op in graph.ops}
    return {
        name: statistics.median(found[len(found) // (1 + RUNS) :]) * (len(found) / (1 + RUNS))
        for name, found in times.items()
        if name in known
    }


def _optimised_s(model: OnnxModel, inputs: Mapping[str, np.ndarray]) -> float:
    """Median seconds of the whole model as it will run."""
    whole = whole_session(model)
    seconds = []
    for _ in range(1 + RUNS):
        start = time.perf_counter()
        whole(inputs)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def _named(model: OnnxModel, graph: Graph) -> ModelProto:
    """The model, in which every node has the name of its op."""
    copy = ModelProto()
    copy.CopyFrom(model.proto)
    for node, op in zip(copy.graph.node, graph.ops, strict=True):
        node.name = op.name
    return copy
