"""What of an ONNX graph depends on no input: any stage can compute it for itself."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from onnx import NodeProto

from gpipe_compiler.ir import FunctionCall, Graph, Op, ValueKind
from gpipe_compiler.onnx.frontend.nodes import OnnxNode, subgraphs

_RANDOM = frozenset(
    {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial"}
    | {"Bernoulli"}
)


def node_of(op: Op) -> NodeProto:
    """The node that an op of an ONNX graph calls."""
    assert isinstance(op.call, FunctionCall)
    assert isinstance(op.call.function, OnnxNode)
    proto: NodeProto = op.call.function.proto
    return proto


_QUANTISED = (
    *("QuantizeLinear", "DynamicQuantize", "MatMulInteger", "ConvInteger"),
    *("QLinear", "QGemm", "QAttention", "QEmbedLayerNormalization"),
)
"""How operators begin that round to integers."""


def is_quantised(graph: Graph) -> bool:
    """Whether some node rounds to integers."""
    return any(_rounds(node_of(op)) for op in graph.ops)


def _rounds(node: NodeProto) -> bool:
    return node.op_type.startswith(_QUANTISED) or any(
        _rounds(inner) for graph in subgraphs(node) for inner in graph.node
    )


def constant_ops(graph: Graph) -> frozenset[str]:
    """Names of the ops that follow from constants and weights alone, or from which nothing follows.

    ONNX Runtime folds the first and drops the others when it loads a model. So a stage that reads
    what constants make has them itself, nothing of them crosses a boundary, and no stage has what
    nobody reads. What draws random numbers is no constant.
    """
    needed = graph.ancestors(graph.output_values)
    found = {op.name for op in graph.ops if op.name not in needed}
    varying = {source.name for source in graph.inputs}
    for op in graph.ops:
        if varying.isdisjoint(op.inputs) and not draws(node_of(op)):
            found.add(op.name)
        else:
            varying.update(op.outputs)
    return frozenset(found)


def draws(node: NodeProto) -> bool:
    """Whether a node draws random numbers, or one in its subgraphs does."""
    return node.op_type in _RANDOM or any(
        draws(inner) for graph in subgraphs(node) for inner in graph.node
    )


def tensor_sizes(graph: Graph) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and type of every value and weight of which they are known."""
    found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        name: (state.shape, state.dtype) for name, state in graph.state.items()
    }
    for name, value in graph.values.items():
        if value.kind is ValueKind.TENSOR and value.dtype is not None:
            found[name] = value.shape, value.dtype
    return found
