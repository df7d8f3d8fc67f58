"""What the inputs of an ONNX model may hold: positions in a table, bytes, rates; words."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import TypeAlias

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper

from gpipe_compiler.onnx.frontend.nodes import subgraphs, with_inner

Range: TypeAlias = tuple[int, int]
"""The first integer, and the one after the last."""

PLAIN: Range = (0, 2)
"""Of an input of which nothing is known: 0 and 1 are a mask, and places in nearly any table."""

_PASSING = frozenset(
    {"Cast", "Identity", "Unsqueeze", "Squeeze", "Reshape", "Flatten", "Transpose", "Expand"}
    | {"Concat", "Slice", "Gather", "Clip"}
)
"""Operators whose results are numbers of their first input."""

_BYTES: Mapping[int, Range] = {TensorProto.UINT8: (0, 256), TensorProto.INT8: (-128, 128)}

_LARGEST = 1 << 16
"""Entries of a constant that is looked at."""


def integer_ranges(model: ModelProto) -> Mapping[str, Range]:
    """By input, the integers that the graph allows; inputs that it leaves free are left out.

    An input that selects rows of tables may be as large as the smallest of them allows; one that is
    compared with a constant equals it (a sample rate); bytes are bytes.
    """
    tensors = {t.name: t for t in _weights(model.graph)}
    found: dict[str, Range] = {}
    for source in model.graph.input:
        if source.name in tensors:
            continue
        ranges = list(_uses(model.graph, {source.name}, tensors))
        if ranges:
            low, high = max(r[0] for r in ranges), min(r[1] for r in ranges)
            found[source.name] = (low, high) if low < high else ranges[0]
        elif (kind := source.type.tensor_type.elem_type) in _BYTES:
            found[source.name] = _BYTES[kind]
    return found


_OF_STRINGS = ("StringNormalizer", "TfIdfVectorizer")

_WORDS = 64
"""That are kept of those that a model knows."""


def known_words(model: ModelProto) -> tuple[str, ...]:
    """Strings that a model compares with or looks up, so that inputs of them tell samples apart."""
    found: dict[bytes, None] = {}
    for tensor in _weights(model.graph):
        found.update(dict.fromkeys(tensor.string_data))
    for node in with_inner(model.graph.node):
        for attribute in node.attribute:
            if node.domain == "ai.onnx.ml" or node.op_type in _OF_STRINGS:
                found.update(dict.fromkeys(attribute.strings))
    words = (word.decode(errors="ignore") for word in found)
    return tuple(itertools.islice((word for word in words if word.isprintable()), _WORDS))


def _weights(graph: GraphProto) -> Iterator[TensorProto]:
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if node.op_type == "Constant" and attribute.HasField("t"):
                named = TensorProto()
                named.CopyFrom(attribute.t)
                named.name = node.output[0]
                yield named
        for inner in subgraphs(node):
            yield from _weights(inner)


def _uses(
    graph: GraphProto, names: set[str], tensors: Mapping[str, TensorProto]
) -> Iterator[Range]:
    """What nodes ask of these values, and of what passes their numbers on."""
    names = set(names)
    for node in graph.node:
        for inner in subgraphs(node):
            yield from _uses(inner, names, tensors)
        read = [at for at, name in enumerate(node.input) if name in names]
        if not read:
            continue
        yield from _asked(node, read, tensors)
        if node.op_type in _PASSING and 0 in read:
            names.update(node.output)


def _asked(node: NodeProto, read: list[int], tensors: Mapping[str, TensorProto]) -> Iterator[Range]:
    kind = node.op_type
    if kind in ("Gather", "GatherElements") and 1 in read and node.input[0] in tensors:
        axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
        yield 0, tensors[node.input[0]].dims[axis]
    elif kind in ("OneHot", "Equal"):
        other = node.input[1 if kind == "OneHot" or 0 in read else 0]
        if 0 not in read and kind == "OneHot":
            return
        numbers = _numbers(tensors.get(other))
        if kind == "OneHot" and len(numbers) == 1:
            yield 0, int(numbers[0])
        elif kind == "Equal" and len(numbers) and numbers.max() > 1:
            yield int(numbers.min()), int(numbers.max()) + 1


def _numbers(tensor: TensorProto | None) -> np.ndarray:
    """The whole numbers in a small constant; none where it is none."""
    if tensor is None or tensor.external_data or np.prod(tensor.dims, dtype=int) > _LARGEST:
        return np.zeros(0)
    numbers = numpy_helper.to_array(tensor).reshape(-1)
    return numbers if np.issubdtype(numbers.dtype, np.integer) else np.zeros(0)
