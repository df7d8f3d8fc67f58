"""Which shapes follow from the numbers in the inputs of an ONNX model, and not from shapes alone.

Such a shape is another for every input (`NonZero`, a `Reshape` to a computed size), so one run of
the model does not show it. All others are functions of the shapes of the inputs.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping
from enum import Flag, auto

from onnx import GraphProto, ModelProto, NodeProto

from gpipe_compiler.onnx.frontend.nodes import captured, draws, subgraphs

_STANDARD = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft", "com.microsoft.nchwc")
"""Domains whose operators take the shapes of their results from shapes, but for those below."""

_FROM_NUMBERS = frozenset(
    {"NonZero", "Unique", "Compress", "NonMaxSuppression", "StringSplit", "ImageDecoder"}
    | {
        "BeamSearch",
        "GreedySearch",
        "Sampling",
        "SequenceAt",
        "SequenceErase",
        "OptionalGetElement",
    }
)
"""Operators whose results are as long as numbers say."""

_SIZES: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("Reshape", "Expand", "Squeeze", "Unsqueeze", "OneHot"), (1,)),
    **dict.fromkeys(("TopK", "Split", "CenterCropPad", "AffineGrid", "SplitToSequence"), (1,)),
    **dict.fromkeys(("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd"), (1,)),
    **dict.fromkeys(("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp"), (1,)),
    **dict.fromkeys(("ReduceSumSquare", "Upsample", "SequenceAt", "ExpandDims"), (1,)),
    **dict.fromkeys(("Tile", "DFT", "Col2Im"), (1, 2)),
    **dict.fromkeys(("Slice", "DynamicSlice"), (1, 2, 3, 4)),
    **dict.fromkeys(("Pad", "Resize", "STFT"), (1, 2, 3)),
    **dict.fromkeys(("ConstantOfShape", "HannWindow", "HammingWindow", "BlackmanWindow"), (0,)),
    **dict.fromkeys(("Range", "MelWeightMatrix"), (0, 1, 2)),
    "MaxUnpool": (2,),
}
"""By operator, the inputs whose numbers say how large its results are."""


class _Known(Flag):
    """What of a value follows from the numbers in the inputs."""

    NUMBERS = auto()
    SHAPE = auto()


_NUMBERS, _SHAPE = _Known.NUMBERS, _Known.SHAPE
_NEITHER, _BOTH = _Known(0), _NUMBERS | _SHAPE


def number_shapes(model: ModelProto) -> frozenset[str]:
    """The values of the main graph whose shape may follow from the numbers in its inputs."""
    graph = model.graph
    weights = {tensor.name for tensor in graph.initializer}
    known = {item.name: _NUMBERS for item in graph.input if item.name not in weights}
    _follow(graph.node, known)
    return frozenset(name for name, found in known.items() if _SHAPE in found)


def _follow(nodes: Iterable[NodeProto], known: dict[str, _Known]) -> None:
    """Adds what the nodes make; what is not known is a weight."""
    for node in nodes:
        made = zip(node.output, _results(node, known), strict=False)
        known.update((name, found) for name, found in made if name)


def _results(node: NodeProto, known: Mapping[str, _Known]) -> Iterable[_Known]:
    inputs = [known.get(name, _NEITHER) for name in node.input]
    every = _joined([*inputs, *(known.get(name, _NEITHER) for name in captured(node))])
    count = len(node.output)
    bodies = list(subgraphs(node))
    if node.op_type == "If":
        branches = [_of_body(body, {}, known) for body in bodies]
        made = [_joined(outputs) for outputs in zip(*branches, strict=False)]
        return [found | (_BOTH if _NUMBERS in inputs[0] else _NEITHER) for found in made]
    if node.op_type in ("Loop", "Scan"):
        return _of_loop(node, bodies[0], inputs, known)
    if node.op_type in ("Shape", "Size"):
        return [_NUMBERS if _SHAPE in inputs[0] else _NEITHER]
    if node.domain not in _STANDARD or bodies:
        return [_BOTH if _NUMBERS in every else every] * count
    sizes = [inputs[at] for at in _SIZES.get(node.op_type, ()) if at < len(inputs)]
    given = node.op_type in _FROM_NUMBERS and _NUMBERS in every
    if given or _SHAPE in every or _NUMBERS in _joined(sizes):
        return [_BOTH] * count
    return [_NUMBERS if _NUMBERS in every or draws(node) else _NEITHER] * count


def _of_body(
    body: GraphProto, given: Mapping[str, _Known], known: Mapping[str, _Known]
) -> list[_Known]:
    """What a body makes of the values around it and of its own inputs."""
    inner = {**known, **given}
    _follow(body.node, inner)
    return [inner.get(item.name, _NEITHER) for item in body.output]


def _of_loop(
    node: NodeProto, body: GraphProto, inputs: list[_Known], known: Mapping[str, _Known]
) -> list[_Known]:
    """Of a Loop or Scan: its state goes round until nothing more is found of it."""
    # Of a Loop: trips and condition; of its body: number and condition.
    extra = 2 if node.op_type == "Loop" else 0
    ends = 1 if extra else 0  # a Loop's body gives its condition first
    rounds = _NUMBERS in _joined(inputs[:extra])
    given = list(inputs)
    given[:extra] = [_NEITHER, *inputs[1:2]][:extra]
    given += [_NEITHER] * (len(body.input) - len(given))
    while True:
        names = [item.name for item in body.input]
        made = _of_body(body, dict(zip(names, given, strict=False)), known)
        rounds = rounds or (bool(ends) and _NUMBERS in made[0])
        states = made[ends : ends + max(0, len(given) - extra)]
        after = list(given)
        for at, found in enumerate(states[: len(after) - extra], extra):
            after[at] |= found
        if after == given:
            break
        given = after
    return [found | (_BOTH if rounds else _NEITHER) for found in made[ends:]]


def _joined(found: Iterable[_Known]) -> _Known:
    return functools.reduce(operator.or_, found, _NEITHER)
