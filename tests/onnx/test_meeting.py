"""Samples that meet only for some numbers or sizes: seen in what nodes make, not in outputs.

Held against ONNX Runtime on the whole batch, with numbers for which the samples do meet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import odd_models
import onnx_models
import packages
import pytest
from loading import load_package
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper

from gpipe_compiler.compile import Compiled
from gpipe_compiler.errors import ModelError
from gpipe_compiler.onnx.frontend.reading import read_model
from gpipe_compiler.onnx.frontend.sizes import input_sizes
from gpipe_compiler.onnx.meeting import refuse_mixing

Compile = Callable[..., Compiled]
node, value, array = helper.make_node, odd_models.value, odd_models.array
INT64, BOOL = TensorProto.INT64, TensorProto.BOOL
LOUD = 50
"""Times as large as the random numbers that are tried."""


def _after(nodes: Sequence[NodeProto], **weights: object) -> ModelProto:
    """Layers, then these nodes, which make `y` of `r1`, then layers again."""
    proto = onnx_models.chain(2)
    proto.graph.node.extend([*nodes, node("MatMul", ["y", "w0"], ["z"])])
    weights |= {"large": np.float32(30), "zero": np.int64(0), "one": np.int64(1)}
    proto.graph.initializer.extend(
        array(name, number, np.asarray(number).dtype.type) for name, number in weights.items()
    )
    proto.graph.output[0].name = "z"
    return proto


def _where_loud(nodes: Sequence[NodeProto], **weights: object) -> ModelProto:
    """What the nodes make of `r1` counts where a number of the input is large."""
    gate = [node("Greater", ["x", "large"], ["loud"]), node("Where", ["loud", "m", "r1"], ["y"])]
    return _after([*nodes, *gate], **weights)


def _branches(read: str) -> dict[str, GraphProto]:
    """Of an If: what is left without the mean over the batch, and what is there."""
    mean = node("ReduceMean", [read], ["mean"], axes=[0])
    nodes = [mean, node("Sub", [read, "mean"], ["centred"])]
    same = node("Identity", [read], ["same"])
    return {
        "then_branch": helper.make_graph(nodes, "centre", [], [value("centred")]),
        "else_branch": helper.make_graph([same], "keep", [], [value("same")]),
    }


def _branch_by_an_input() -> ModelProto:
    proto = _after(
        [
            node("Greater", ["mode", "five"], ["other"]),
            node("If", ["other"], ["y"], **_branches("r1")),
        ],
        five=np.int64(5),
    )
    proto.graph.input.append(value("mode", INT64, []))
    return proto


def _branch_by_sizes() -> ModelProto:
    """More samples than columns."""
    sizes = [node("Shape", ["x"], ["s"])]
    picks = [node("Gather", ["s", at], [f"s_{at}"]) for at in ("zero", "one")]
    less = node("Less", ["s_one", "s_zero"], ["many"])
    return _after([*sizes, *picks, less, node("If", ["many"], ["y"], **_branches("r1"))])


def _late_in_a_loop() -> ModelProto:
    body = helper.make_graph(
        [
            node("Identity", ["again"], ["again_out"]),
            node("Greater", ["number", "five"], ["late"]),
            node("If", ["late"], ["state_out"], **_branches("state")),
        ],
        "body",
        [value("number", INT64, []), value("again", BOOL, []), value("state")],
        [value("again_out", BOOL, []), value("state_out")],
    )
    loop = node("Loop", ["trips", "", "r1"], ["y"], body=body)
    return _after([loop], five=np.int64(5), trips=np.int64(2))


def _loud_at_all() -> ModelProto:
    """The largest number of the batch, where it is large."""
    return _after(
        [
            node("ReduceMax", ["x"], ["most"], keepdims=0),
            node("Sub", ["most", "large"], ["over"]),
            node("Relu", ["over"], ["more"]),
            node("Add", ["r1", "more"], ["y"]),
        ]
    )


_LOUD: dict[str, Callable[[], ModelProto]] = {
    "maximum": _loud_at_all,
    "softmax": lambda: _where_loud([node("Softmax", ["r1"], ["m"], axis=0)]),
    "sums": lambda: _where_loud([node("CumSum", ["r1", "zero"], ["m"])]),
    "first": lambda: _where_loud([node("Gather", ["x", "zero"], ["m"])]),
    "pairs": lambda: _where_loud(
        [
            node("Transpose", ["r1"], ["turned"]),
            node("MatMul", ["r1", "turned"], ["alike"]),
            node("MatMul", ["alike", "r1"], ["m"]),
        ]
    ),
}
_OTHER = {"input": _branch_by_an_input, "sizes": _branch_by_sizes, "loop": _late_in_a_loop}


def _refuse(proto: ModelProto, folder: Path) -> None:
    model = read_model(onnx_models.write(proto, folder / "model.onnx"))
    refuse_mixing(model, input_sizes(model), seed=0)


@pytest.mark.parametrize("kind", [*_LOUD, *_OTHER])
def test_the_node_is_named(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="lets the samples of a batch meet"):
        _refuse({**_LOUD, **_OTHER}[kind](), tmp_path)


@pytest.mark.parametrize("kind", ["maximum", "sums"])
def test_such_a_model_is_run_in_whole_calls(
    kind: str, compile_model: Compile, tmp_path: Path
) -> None:
    compiled = compile_model(_LOUD[kind]())

    assert compiled.directory is not None
    assert "lets the samples of a batch meet" in compiled.batch
    for samples in (8, 3):
        arrays = packages.random(compiled.directory, samples)
        loud = {name: LOUD * numbers for name, numbers in arrays.items()}
        packages.assert_equal(compiled.directory, tmp_path / "model.onnx", loud)
    with pytest.raises(ModelError, match="lets the samples of a batch meet"):
        compile_model(_LOUD[kind](), 3, microbatches=4)


def _own_rows() -> ModelProto:
    """Of each sample the row that it names, as texts are pooled; rows are numbered."""
    proto = _after(
        [
            node("ArgMax", ["r1"], ["most"], axis=1),
            node("Shape", ["r1"], ["s"]),
            node("Gather", ["s", "zero"], ["count"]),
            node("Range", ["zero", "count", "one"], ["numbers"]),
            node("Unsqueeze", ["numbers", "axis"], ["column"]),
            node("Concat", ["column", "most"], ["places"], axis=1),
            node("GatherND", ["r1", "places"], ["picked"]),
            node("Unsqueeze", ["picked", "axis"], ["rows"]),
            node("Add", ["r1", "rows"], ["y"]),
        ],
        axis=np.array([1]),
    )
    proto.opset_import[0].version = 17
    return proto


def _batch_inside() -> ModelProto:
    """Heads before samples, in one dimension."""
    return _after(
        [
            node("Reshape", ["r1", "apart"], ["heads"]),
            node("Transpose", ["heads"], ["turned"], perm=[1, 0, 2]),
            node("Reshape", ["turned", "flat"], ["rows"]),
            node("Softmax", ["rows"], ["shares"], axis=1),
            node("Reshape", ["shares", "back"], ["again"]),
            node("Transpose", ["again"], ["kept"], perm=[1, 0, 2]),
            node("Reshape", ["kept", "wide"], ["y"]),
        ],
        apart=np.array([0, 4, 4]),
        flat=np.array([-1, 4]),
        back=np.array([4, -1, 4]),
        wide=np.array([-1, 16]),
    )


def _shape_of_the_first() -> ModelProto:
    """Of the first sample nothing but its size is read."""
    return _after(
        [
            node("Gather", ["r1", "zero"], ["first"]),
            node("Shape", ["first"], ["s"]),
            node("Cast", ["s"], ["columns"], to=TensorProto.FLOAT),
            node("Div", ["r1", "columns"], ["y"]),
        ]
    )


@pytest.mark.parametrize("make", [_own_rows, _batch_inside, _shape_of_the_first])
def test_samples_by_themselves_are_split(
    make: Callable[[], ModelProto], compile_model: Compile, tmp_path: Path
) -> None:
    compiled = compile_model(make())

    assert compiled.directory is not None
    assert load_package(compiled.directory).SPEC.inputs[0].batch_dim == 0
    for samples in (8, 3):
        arrays = packages.random(compiled.directory, samples)
        packages.assert_equal(compiled.directory, tmp_path / "model.onnx", arrays)
