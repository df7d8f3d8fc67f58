"""The nodes of an ONNX graph: as something that an op calls, and which of them are constant."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

import torch
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, TypeProto, helper

from gpipe_compiler.ir import FunctionCall, Graph, Op, ValueKind


@dataclass(frozen=True, eq=False, slots=True)
class OnnxNode:
    """What an op of an ONNX graph calls.

    The arguments of the call are the node's inputs in order, None where one is left out, and after
    them what its subgraphs read of the graph around them.

    Attributes:
        types: those of its outputs for which torch has no dtype: strings, sequences, optionals.
    """

    proto: NodeProto
    types: Mapping[str, TypeProto] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Its operator, with the domain where that is not the standard one."""
        return operator_of(self.proto)

    def __call__(self, *_: object) -> NoReturn:
        """Raises NotImplementedError: an ONNX graph is never run by torch."""
        raise NotImplementedError(f"{title(self.proto)} runs in ONNX Runtime only")

    def __str__(self) -> str:
        return title(self.proto)


def operator_of(node: NodeProto) -> str:
    """The operator of a node, with the domain where that is not the standard one."""
    standard = node.domain in ("", "ai.onnx")
    return node.op_type if standard else f"{node.domain}.{node.op_type}"


def title(node: NodeProto) -> str:
    """A node in a message: `Conv /layer1/conv` or, without a name, `Conv that makes y`."""
    kind = operator_of(node)
    if node.name:
        return f"{kind} {node.name}"
    made = [name for name in node.output if name]
    return f"{kind} that makes {made[0]}" if made else kind


def subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    """The bodies of an If, Loop or Scan."""
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == AttributeProto.GRAPHS:
            yield from attribute.graphs


def with_inner(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """Nodes, and those in their subgraphs."""
    for node in nodes:
        yield node
        for graph in subgraphs(node):
            yield from with_inner(graph.node)


def captured(node: NodeProto) -> tuple[str, ...]:
    """What the subgraphs of a node read of the graph around them, each name once."""
    return tuple(dict.fromkeys(name for graph in subgraphs(node) for name in _free(graph)))


def _free(graph: GraphProto) -> Iterator[str]:
    """The names that a subgraph reads and does not make."""
    own = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    own.update(tensor.values.name for tensor in graph.sparse_initializer)
    for node in graph.node:
        for name in (*node.input, *captured(node)):
            if name and name not in own:
                yield name
        own.update(node.output)
    yield from (value.name for value in graph.output if value.name not in own)


_RANDOM = frozenset(
    {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial"}
    | {"Bernoulli"}
)


def node_of(op: Op) -> NodeProto:
    assert isinstance(op.call, FunctionCall)
    assert isinstance(op.call.function, OnnxNode)
    proto: NodeProto = op.call.function.proto
    return proto


def other_type(graph: Graph, name: str) -> TypeProto | None:
    """The type of a value that is of no dtype of torch; None for any other."""
    maker = graph.producer.get(name)
    if maker is None:
        strings = any(item.name == name and item.dtype is None for item in graph.inputs)
        sizes = [None] * len(graph.values[name].shape)
        return helper.make_tensor_type_proto(TensorProto.STRING, sizes) if strings else None
    node = maker.call.function if isinstance(maker.call, FunctionCall) else None
    return node.types.get(name) if isinstance(node, OnnxNode) else None


_QUANTISED = (
    *("QuantizeLinear", "DynamicQuantize", "MatMulInteger", "ConvInteger"),
    *("QLinear", "QGemm", "QAttention", "QEmbedLayerNormalization"),
)
"""How operators begin that round to integers."""


def is_quantised(graph: Graph) -> bool:
    """Whether some node rounds to integers."""
    nodes = with_inner(map(node_of, graph.ops))
    return any(node.op_type.startswith(_QUANTISED) for node in nodes)


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
    return any(inner.op_type in _RANDOM for inner in with_inner([node]))


def tensor_sizes(graph: Graph) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and type of every value and weight of which they are known."""
    found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        name: (state.shape, state.dtype) for name, state in graph.state.items()
    }
    for name, value in graph.values.items():
        if value.kind is ValueKind.TENSOR and value.dtype is not None:
            found[name] = value.shape, value.dtype
    return found
