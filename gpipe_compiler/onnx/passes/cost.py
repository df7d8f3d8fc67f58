"""How long each node of an ONNX graph takes, by the roofline of a device; see `passes.cost`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch

from gpipe_compiler.cluster import Arithmetic, Device
from gpipe_compiler.ir import Graph, Op, Ref, StateRef
from gpipe_compiler.onnx.frontend.constants import constant_ops, node_of, tensor_sizes
from gpipe_compiler.onnx.frontend.nodes import subgraphs
from gpipe_compiler.onnx.passes.flops import flops
from gpipe_compiler.passes.cost import Costs, Kernel, OpCost

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


def _on(kernel: Kernel, launches: int, device: Device) -> OpCost:
    return OpCost(
        forward_s=kernel.seconds(device) + launches * device.launch_s,
        flops=kernel.flops,
        bytes=kernel.bytes,
    )


def _kernel(op: Op, sizes: Sizes) -> Kernel | None:
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
    return Kernel(
        flops(node, [item and item[0] for item in inputs], [item and item[0] for item in outputs]),
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
