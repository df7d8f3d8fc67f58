"""Where an ONNX model may tell samples apart by how many there are, or by their numbers.

The number of samples comes from the shapes of values, and numbers of samples from ranges, sums and
positions made of it. A constant that meets such a value, or ends a slice along the first dimension,
is a number of samples from which on the model may do something else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from gpipe_compiler.ir.sizes import LARGEST_BATCH
from gpipe_compiler.onnx.frontend.nodes import title, with_inner
from gpipe_compiler.onnx.frontend.reading import tensors_of

_FEW = 64
"""Entries of a constant up to which it may be compared with a number of samples."""

_SHAPED = frozenset(
    {"Reshape", "Expand", "Tile", "Resize", "Upsample", "Pad", "Slice", "Squeeze", "Unsqueeze"}
)
"""Operators whose further inputs say of which shape the first is to be."""

_NO_RULES = _SHAPED | {"Mul", "Concat", "Gather", "ScatterND", "ScatterElements", "Range"}
"""Operators that make no other thing of a number of samples beyond a constant than below it."""


def sample_rules(model: ModelProto) -> Mapping[int, str]:
    """The numbers of samples from which on a model may do something else, each with a node."""
    graph = model.graph
    small = (t for t in tensors_of(graph) if _size(t) <= _FEW and not t.external_data)
    known = {t.name: numpy_helper.to_array(t) for t in small if t.name}
    weights = {tensor.name for tensor in tensors_of(graph)}
    counted: set[str] = set()
    found: dict[int, str] = {}
    for node in with_inner(graph.node):
        first, others = "".join(node.input[:1]), node.input[1:]
        if node.op_type == "Constant":
            known.update(_constant(node))
        elif node.op_type in ("Cast", "Identity", "Squeeze", "Unsqueeze") and first in known:
            known[node.output[0]] = known[first]
        elif node.op_type in ("Shape", "Size"):
            counted.update(node.output if first not in weights else ())
        elif node.op_type == "Slice" and first not in counted:
            ends, axes = (known.get("".join(node.input[at : at + 1])) for at in (2, 3))
            given = _numbers_of(node)  # before opset 10
            ends, axes = given.get("ends", ends), given.get("axes", axes)
            if ends is not None and (axes is None or 0 in axes):
                found.update((number, title(node)) for number in _numbers(ends))
        elif first in counted or (node.op_type not in _SHAPED and not counted.isdisjoint(others)):
            picked = known.get(node.input[1]) if node.op_type == "Gather" else None
            if picked is None or (picked <= 0).any():  # else other dimensions than the first
                counted.update(node.output)
            constants = [known[name] for name in node.input if name in known]
            constants += _numbers_of(node).values() if node.op_type == "Clip" else ()  # opset 6
            for constant in constants if node.op_type not in _NO_RULES else ():
                found.update((number, title(node)) for number in _numbers(constant))
    return dict(sorted(found.items()))


def _size(tensor: TensorProto) -> int:
    return int(np.prod(tensor.dims, dtype=np.int64))


def _constant(node: NodeProto) -> Iterator[tuple[str, np.ndarray]]:
    for attribute in node.attribute:
        value = helper.get_attribute_value(attribute)
        if isinstance(value, TensorProto) and _size(value) <= _FEW:
            yield node.output[0], numpy_helper.to_array(value)
        elif isinstance(value, int | float | list):
            yield node.output[0], np.asarray(value)


def _numbers_of(node: NodeProto) -> dict[str, np.ndarray]:
    """The numbers in the attributes of a node."""
    found = {item.name: helper.get_attribute_value(item) for item in node.attribute}
    return {n: np.asarray(v) for n, v in found.items() if isinstance(v, int | float | list)}


def _numbers(constant: np.ndarray) -> Iterator[int]:
    """The numbers in a constant that may be one of samples."""
    if np.issubdtype(constant.dtype, np.number) and not np.iscomplexobj(constant):
        whole = np.ceil(np.abs(constant[np.isfinite(constant)].astype(np.float64)))
        yield from (int(number) for number in whole.flat if 1 < number <= LARGEST_BATCH)
