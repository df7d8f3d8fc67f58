"""Floating-point operations of ONNX nodes: of products, convolutions, attention, recurrence.

As in `passes.cost`, a multiply-add counts as two and other arithmetic is not counted. Integer
products count like others: they take the same units.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from onnx import AttributeProto, NodeProto, helper

Shape: TypeAlias = "tuple[int, ...] | None"
"""None where it is not known, or the input is left out."""

Formula: TypeAlias = Callable[[NodeProto, Sequence[Shape], Sequence[Shape]], int]


def flops(node: NodeProto, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """Those of one node, without its subgraphs; 0 where shapes that it takes are not known."""
    formula = _FORMULAS.get(node.op_type)
    if formula is None:
        return 0
    try:
        return formula(node, inputs, outputs)
    except (TypeError, IndexError):  # a shape that is needed is None or not there
        return 0


def attribute(node: NodeProto, name: str, default: int) -> int:
    """An integer attribute of a node."""
    for item in node.attribute:
        if item.name == name and item.type == AttributeProto.INT:
            return int(item.i)
    return default


def _text(node: NodeProto, name: str) -> str:
    for item in node.attribute:
        if item.name == name:
            return str(helper.get_attribute_value(item).decode())
    return ""


def _conv(at: int) -> Formula:
    """A convolution whose weights are the input of this number: outputs x fan-in."""

    def formula(node: NodeProto, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
        return 2 * math.prod(outputs[0] or ()) * math.prod((inputs[at] or ())[1:])

    return _known(formula, at)


def _conv_transpose(node: NodeProto, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    return 2 * math.prod(inputs[0] or ()) * math.prod((inputs[1] or ())[1:])


def _known(formula: Formula, *needed: int) -> Formula:
    def careful(node: NodeProto, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
        if any(inputs[at] is None for at in needed) or outputs[0] is None:
            return 0
        return formula(node, inputs, outputs)

    return careful


def _matmul(left: int) -> Formula:
    """A product whose left side is the input of this number: outputs x its last dimension."""

    def formula(node: NodeProto, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
        return 2 * math.prod(outputs[0] or ()) * (inputs[left] or (1,))[-1]

    return _known(formula, left)


def _gemm(node: NodeProto, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    rows = 0 if attribute(node, "transA", 0) else 1
    return 2 * math.prod(outputs[0] or ()) * (inputs[0] or ())[rows]


def _einsum(node: NodeProto, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """Two operands: all the letters that occur, once each."""
    equation = _text(node, "equation").replace(" ", "")
    operands = equation.split("->")[0].split(",")
    if len(operands) != 2 or "." in equation:
        return 2 * math.prod(outputs[0] or ())
    sizes = {
        letter: size
        for letters, shape in zip(operands, inputs, strict=False)
        for letter, size in zip(letters, shape or (), strict=False)
    }
    return 2 * math.prod(sizes.values())


def _recurrent(node: NodeProto, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """Both products of every step: of the input and of the state, in every direction."""
    steps_by_batch = math.prod((inputs[0] or ())[:2])
    weights = math.prod(inputs[1] or ()) + math.prod(inputs[2] or ())
    return 2 * steps_by_batch * weights


def _attention(node: NodeProto, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """ONNX's Attention (opset 23): scores, and the values they weigh; batch x heads x q x k x d."""
    query, key, value = (shape or () for shape in inputs[:3])
    if len(query) == 4:
        pairs = math.prod(query[:3]) * key[2]
        return 2 * pairs * (query[3] + value[3])
    pairs = query[0] * query[1] * key[1]
    return 2 * pairs * (query[2] + value[2])


_FORMULAS: Mapping[str, Formula] = {
    "Conv": _conv(1),
    "FusedConv": _conv(1),
    "NhwcFusedConv": _conv(1),
    "ConvInteger": _conv(1),
    "QLinearConv": _conv(3),
    "DeformConv": _conv(1),
    "ConvTranspose": _known(_conv_transpose, 0, 1),
    "MatMul": _matmul(0),
    "FusedMatMul": _matmul(0),
    "MatMulInteger": _matmul(0),
    "DynamicQuantizeMatMul": _matmul(0),
    "MatMulIntegerToFloat": _matmul(0),
    "MatMulNBits": _matmul(0),
    "QLinearMatMul": _matmul(0),
    "Gemm": _known(_gemm, 0),
    "FusedGemm": _known(_gemm, 0),
    "QGemm": _known(_gemm, 0),
    "Einsum": _einsum,
    "LSTM": _known(_recurrent, 0, 1, 2),
    "GRU": _known(_recurrent, 0, 1, 2),
    "RNN": _known(_recurrent, 0, 1, 2),
    "Attention": _known(_attention, 0, 1, 2),
    "MultiHeadAttention": _known(_attention, 0, 1, 2),
}
"""By operator; those of ONNX Runtime's own domain have names that the standard ones do not."""
