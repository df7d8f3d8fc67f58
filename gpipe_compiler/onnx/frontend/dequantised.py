"""Gives every reader of a dequantised value a dequantisation of its own."""

from __future__ import annotations

import itertools

from onnx import GraphProto, NodeProto

from gpipe_compiler.onnx.frontend.nodes import captured

DEQUANTIZE = "DequantizeLinear"


def unshare_dequantised(graph: GraphProto) -> None:
    """Copies, in a graph, the nodes that dequantise for several readers, one for each.

    ONNX Runtime does the same when it loads a model: a `DequantizeLinear` and its reader become
    one kernel. So the readers can lie in several stages, and what crosses is quantised.
    """
    weights = {tensor.name for tensor in graph.initializer}
    taken = {name for node in graph.node for name in (node.name, *node.output)}
    taken |= weights | {value.name for value in graph.input}
    readers: dict[str, list[NodeProto]] = {}
    kept = {value.name for value in graph.output}
    for node in graph.node:
        kept.update(captured(node))
        for name in node.input:
            readers.setdefault(name, []).append(node)
    nodes: list[NodeProto] = []
    for node in graph.node:
        nodes.append(node)
        if node.op_type != DEQUANTIZE or node.input[0] in weights:
            continue
        (made,) = node.output
        each = list({id(reader): reader for reader in readers.get(made, [])}.values())
        for reader in each[made not in kept :]:
            copy = NodeProto()
            copy.CopyFrom(node)
            copy.name = _fresh(node.name, taken) if node.name else ""
            copy.output[0] = _fresh(made, taken)
            reader.input[:] = [copy.output[0] if n == made else n for n in reader.input]
            nodes.append(copy)
    if len(nodes) > len(graph.node):
        copies = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
        del graph.node[:]
        graph.node.extend(copies)


def _fresh(name: str, taken: set[str]) -> str:
    wish = next(w for n in itertools.count(1) if (w := f"{name}_{n}") not in taken)
    taken.add(wish)
    return wish
