"""A node of an ONNX graph as something that an op calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from onnx import AttributeProto, GraphProto, NodeProto


@dataclass(frozen=True, eq=False, slots=True)
class OnnxNode:
    """What an op of an ONNX graph calls.

    The arguments of the call are the node's inputs in order, None where one is left out, and after
    them what its subgraphs read of the graph around them.

    Attributes:
        proto: the node, as it is.
    """

    proto: NodeProto

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
    """A node, in words: `Conv /layer1/conv` or, without a name, `Conv that makes y`."""
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
