"""Which nodes of a quantised graph share a stage, because ONNX Runtime runs them as one kernel."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from gpipe_compiler.ir import Graph, Op
from gpipe_compiler.onnx.frontend.nodes import node_of
from gpipe_compiler.onnx.frontend.reading import DEQUANTIZE
from gpipe_compiler.passes.atoms import Tie

_QUANTIZE = "QuantizeLinear"

_MOVES = frozenset(
    {"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Gather", "MaxPool"}
    | {"Expand", "Split", "Resize", "DepthToSpace", "SpaceToDepth"}
)
"""Operators that ONNX Runtime moves quantisation across, as no number changes in them."""

_CLIPS = frozenset({"Relu", "Clip"})
"""Operators that ONNX Runtime leaves to the quantisation that follows."""


def quantised_units(graph: Graph, copied: Collection[str]) -> Iterator[Tie]:
    """The nodes between a dequantisation and the next quantisation, without these in other stages.

    ONNX Runtime runs `DequantizeLinear`, an operator and `QuantizeLinear` as one kernel of
    integers (its "QDQ node units"), which rounds, and on processors without VNNI saturates,
    otherwise than the operator does in floating point. Cut apart, the operator would run in
    floating point. So only what is quantised, or lies between operators that no quantisation
    touches, crosses a boundary.

    Args:
        copied: ops that every stage has for itself.
    """
    for op in graph.ops:
        if op.name in copied:
            continue
        kind = node_of(op).op_type
        if kind == DEQUANTIZE:
            yield from _tied(op, _readers(graph, op), copied)
        elif kind == _QUANTIZE:
            yield from _tied(op, _makers(graph, op), copied)


def _tied(op: Op, others: Collection[str], copied: Collection[str]) -> Iterator[Tie]:
    names = {op.name, *others}.difference(copied)
    if len(names) > 1:
        yield Tie(frozenset(names), op.name, "ONNX Runtime runs them as one kernel of integers")


def _readers(graph: Graph, op: Op) -> set[str]:
    """The ops that read what an op makes, and those behind them as far as they move it alone."""
    found: set[str] = set()
    pending = [op]
    while pending:
        for name in pending.pop().outputs:
            for reader in graph.consumers.get(name, ()):
                if reader.name not in found:
                    found.add(reader.name)
                    if node_of(reader).op_type in _MOVES:
                        pending.append(reader)
    return found


def _makers(graph: Graph, op: Op) -> set[str]:
    """The op that makes what an op quantises, and those before as far as they move or clip it."""
    found: set[str] = set()
    maker = graph.producer.get(op.inputs[0])
    while maker is not None and maker.name not in found:
        found.add(maker.name)
        if node_of(maker).op_type not in _MOVES | _CLIPS:
            break
        maker = graph.producer.get(maker.inputs[0]) if maker.inputs else None
    return found
