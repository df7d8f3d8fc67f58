"""Whether the samples of a batch meet anywhere in an ONNX model, be it for other numbers or sizes.

Outputs alone do not tell: what a mean over the batch makes may count from some number on only, or
in the branch that a run does not take. So all values are looked at, in bodies too. A value that
follows from samples has to have rows for them, which stay the same to the last bit where other
samples of the batch change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from onnx import ModelProto, NodeProto, ValueInfoProto
from onnxruntime import OrtValue

from gpipe_compiler.errors import ModelError
from gpipe_compiler.onnx.frontend.nodes import captured, title
from gpipe_compiler.onnx.frontend.number_shapes import number_shapes
from gpipe_compiler.onnx.frontend.reading import OnnxModel, session_of
from gpipe_compiler.onnx.frontend.sizes import InputSizes
from gpipe_compiler.onnx.frontend.unfolded import Body, unfolded
from gpipe_compiler.onnx.runtime.arrays import array_of
from gpipe_compiler.onnx.runtime.batches import Arrays
from gpipe_compiler.onnx.runtime.stage import run_values

Run: TypeAlias = Callable[[Arrays, Sequence[str]], list["np.ndarray | None"]]
"""Gives values of a call, by name; None for what is no tensor."""

_SAMPLES = 4

_MIXED = (((1, 3), (0, 2)), ((2, 3), (0, 1)))
"""Samples of a second batch that are put into a first one, and those that are kept: any two samples
are once of both batches. The rows of each are compared with those in its own batch."""

_SHAPE_ALONE = frozenset(
    {"Shape", "Size", "EyeLike", "RandomNormalLike", "RandomUniformLike", "SequenceLength"}
    | {"OptionalHasElement"}
)
"""Operators that read nothing but the shape of what they are given."""

_MEMORY = 3 << 27
"""Bytes that half a batch has of the values asked for at once; three batches are held."""


def refuse_mixing(model: OnnxModel, sizes: InputSizes, *, seed: int) -> None:
    """Makes sure that no node lets the samples of a batch meet.

    Nodes that do not run, on random numbers or the user's, are not looked at.

    Raises:
        ModelError: naming the first that does.
    """
    bodies = list(unfolded(model.proto.graph.node))
    if not _tried(model, sizes, bodies, seed) and bodies:
        for some in ([], *([body] for body in bodies)):
            _tried(model, sizes, some, seed)


def _tried(model: OnnxModel, sizes: InputSizes, bodies: Sequence[Body], seed: int) -> bool:
    """Whether the model runs with these bodies beside it; raises as `refuse_mixing` does."""
    asked = ModelProto()
    asked.CopyFrom(model.proto)
    beside = {id(node): node for body in bodies for node in body.nodes}
    asked.graph.node.extend(beside.values())
    asked.graph.initializer.extend({t.name: t for b in bodies for t in b.weights}.values())
    makers = _following(asked, sizes.batch_dims, len(beside))
    del asked.graph.output[:]
    asked.graph.output.extend(ValueInfoProto(name=name) for name in makers)
    try:
        session = session_of(model, asked)
    except Exception:  # noqa: BLE001  # onnxruntime's errors have no common class
        return False

    def run(inputs: Arrays, names: Sequence[str]) -> list[np.ndarray | None]:
        return [_array(value) for value in run_values(session, inputs, names)]

    drawn = [dataclasses.replace(sizes, data={})] if sizes.data else []
    for chosen in (*drawn, sizes):
        try:
            _compare(run, chosen, makers, seed)
        except ModelError:
            raise
        except Exception:  # noqa: BLE001  # as above
            continue
        return True
    return False


def _array(value: object) -> np.ndarray | None:
    if isinstance(value, OrtValue):
        return array_of(value) if value.has_value() and value.is_tensor() else None
    return value if isinstance(value, np.ndarray) else None


def _following(proto: ModelProto, samples: Collection[str], beside: int) -> Mapping[str, NodeProto]:
    """The values that follow from the numbers in samples, each with its node, in order.

    Without those whose shapes follow from numbers, and those of which nothing follows.

    Args:
        samples: the inputs that hold them.
        beside: how many of the last nodes are needed though no output follows.
    """
    nodes, shapes = list(proto.graph.node), number_shapes(proto)
    needed = {result.name for result in proto.graph.output}
    for at, node in reversed([*enumerate(nodes)]):
        if at >= len(nodes) - beside:
            needed.update(node.output)
        if not needed.isdisjoint(node.output):
            needed.update((*_read(node), *captured(node)))
    follows = set(samples)
    for node in nodes:
        read = {*_read(node), *captured(node)}
        read |= set(node.input) & shapes if node.op_type in _SHAPE_ALONE else set()
        if not read.isdisjoint(follows):
            follows.update(name for name in node.output if name)
    kept = (follows & needed) - shapes
    return {name: node for node in nodes for name in node.output if name in kept}


def _read(node: NodeProto) -> tuple[str, ...]:
    """The inputs whose numbers a node reads."""
    if node.op_type in _SHAPE_ALONE:
        return ()
    return tuple(node.input[:1] if node.op_type == "CastLike" else node.input)


def _compare(run: Run, sizes: InputSizes, makers: Mapping[str, NodeProto], seed: int) -> None:
    names = list(makers)
    few = run(sizes.arrays(_SAMPLES // 2, seed), names)
    one, other = sizes.arrays(_SAMPLES, seed), sizes.arrays(_SAMPLES, seed + 1)
    for part in _parts({n: a for n, a in zip(names, few, strict=True) if a is not None}):
        known, known_other = run(one, list(part)), run(other, list(part))
        dims = {}
        for (name, size), array in zip(part.items(), known, strict=True):
            dim = None if array is None else _rows_of(size, array.shape)
            if dim is None:
                raise _meeting(makers[name])
            dims[name] = dim
        for changed, kept in _MIXED:
            mixed = {
                name: _mixed(array, other[name], sizes.batch_dims.get(name), changed)
                for name, array in one.items()
            }
            found = zip(part, known, known_other, run(mixed, list(part)), strict=True)
            for name, first, last, both in found:
                dim = dims[name]
                if _same(first, both, dim, kept) and _same(last, both, dim, changed):
                    continue
                (again,) = run(one, [name])  # or it is never twice the same
                if _same(first, again, dim, range(_SAMPLES)):
                    raise _meeting(makers[name])


def _meeting(node: NodeProto) -> ModelError:
    return ModelError(
        f"{title(node)} lets the samples of a batch meet", hint="compile with --microbatches 1"
    )


def _parts(arrays: Mapping[str, np.ndarray]) -> Iterator[dict[str, tuple[int, ...]]]:
    """The shapes of arrays, in groups that are not too large to be held at once."""
    part: dict[str, tuple[int, ...]] = {}
    held = 0
    for name, array in arrays.items():
        part[name] = array.shape
        held += array.nbytes
        if held > _MEMORY:
            yield part
            part, held = {}, 0
    if part:
        yield part


def _rows_of(few: tuple[int, ...], many: tuple[int, ...]) -> int | None:
    """The one dimension that grows with the samples, by as many rows for each; None for none."""
    grown = [dim for dim, (a, b) in enumerate(zip(few, many, strict=False)) if a != b]
    if len(few) != len(many) or len(grown) != 1:
        return None
    rows = many[grown[0]]
    return grown[0] if rows == 2 * few[grown[0]] and not rows % _SAMPLES else None


def _mixed(
    array: np.ndarray, other: np.ndarray, dim: int | None, changed: Sequence[int]
) -> np.ndarray:
    """Samples of one array, but for some that are those of another."""
    if dim is None:
        return array
    found = array.copy()
    at = (slice(None),) * dim + (list(changed),)
    found[at] = other[at]
    return found


def _same(
    one: np.ndarray | None, other: np.ndarray | None, dim: int, samples: Sequence[int]
) -> bool:
    """Whether the rows of some samples are the same, wherever these lie in a dimension."""
    if one is None or other is None or one.shape != other.shape:
        return False
    rows = one.shape[dim] // _SAMPLES
    for outer in (n for n in range(1, rows + 1) if not rows % n):
        shape = (*one.shape[:dim], outer, _SAMPLES, rows // outer, *one.shape[dim + 1 :])
        first, second = (np.moveaxis(array.reshape(shape), dim + 1, 0) for array in (one, other))
        if all(_equal(first[sample], second[sample]) for sample in samples):
            return True
    return False


def _equal(one: np.ndarray, other: np.ndarray) -> bool:
    """To the last bit."""
    if one.dtype.kind == "O":
        return np.array_equal(one, other)
    if one.itemsize > _LARGEST_INTEGER:
        return one.tobytes() == other.tobytes()
    bits = f"u{one.itemsize}"
    return np.array_equal(one.view(bits), other.view(bits))


_LARGEST_INTEGER = 8
"""Bytes of it in numpy."""
