"""Models as files have them: what exporters of every age write, and where the batch may be.

Held against plain ONNX Runtime on the whole batch, for three numbers of samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import odd_models
import onnx
import onnx_models
import packages
import pytest
from loading import load_package
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper
from onnx_compiling import compile_onnx

from gpipe_compiler.compile import Compiled, CompileOptions
from gpipe_compiler.compile import compile as compile_any
from gpipe_compiler.errors import ModelError, UsageError
from gpipe_compiler.onnx import OnnxFile
from gpipe_compiler.onnx.frontend.integer_inputs import integer_ranges
from gpipe_compiler.onnx.frontend.number_shapes import number_shapes
from gpipe_compiler.onnx.frontend.reading import read_model
from gpipe_compiler.onnx.frontend.sample_rules import sample_rules
from gpipe_compiler.onnx.frontend.sizes import input_sizes
from gpipe_compiler.onnx.runtime.check import Closeness, compare

Compile = Callable[..., Compiled]
node, value, array = helper.make_node, odd_models.value, odd_models.array
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def _after(
    nodes: Sequence[NodeProto], weights: Sequence[TensorProto] = (), opset: int = 17
) -> ModelProto:
    """Layers, then these nodes, which make `y` of `r1`, then layers again."""
    proto = onnx_models.chain(2)
    proto.opset_import[0].version = opset
    proto.graph.node.extend(
        [*nodes, node("MatMul", ["y", "w0"], ["z"]), node("Relu", ["z"], ["o"])]
    )
    proto.graph.initializer.extend(weights)
    proto.graph.output[0].name = "o"
    return proto


def _assert_equal(compiled: Compiled, path: Path, *, dims: dict[str, int | None]) -> None:
    """For three numbers of samples, split along these dimensions."""
    assert compiled.directory is not None
    spec = load_package(compiled.directory).SPEC
    assert {source.name: source.batch_dim for source in spec.inputs} == dims
    for samples in (8, 3, 9):
        arrays = packages.random(compiled.directory, samples)
        packages.assert_equal(compiled.directory, path, arrays)


_SIZES = [
    node("Shape", ["r1"], ["sizes"]),
    node("Gather", ["sizes", "zero"], ["rows"]),
    node("Gather", ["sizes", "one"], ["columns"]),
]
_NUMBERS = [array(name, number, np.int64) for name, number in (("zero", 0), ("one", 1), ("two", 2))]


def _one(name: str) -> NodeProto:
    return node("Unsqueeze", [name, "axis"], [f"{name}_1"])


def _by_arithmetic() -> ModelProto:
    """A Reshape to sizes that went through every kind of arithmetic."""
    nodes = [
        *_SIZES,
        node("Mul", ["rows", "two"], ["m"]),
        node("Mod", ["columns", "three"], ["d"]),
        node("Max", ["d", "two"], ["e"]),
        node("Cast", ["m"], ["f"], to=FLOAT),
        node("Mul", ["f", "half"], ["g"]),
        node("Floor", ["g"], ["h"]),
        node("Cast", ["h"], ["n"], to=INT64),
        node("Div", ["columns", "e"], ["w"]),
        *map(_one, ("n", "e", "w", "columns")),
        node("Concat", ["n_1", "e_1", "w_1"], ["wide"], axis=0),
        node("Concat", ["n_1", "columns_1"], ["flat"], axis=0),
        node("Reshape", ["r1", "wide"], ["apart"]),
        node("Reshape", ["apart", "flat"], ["y"]),
    ]
    weights = [*_NUMBERS, array("three", 3, np.int64), array("half", 0.5, np.float32)]
    return _after(nodes, [*weights, array("axis", [0], np.int64)])


def _padded() -> ModelProto:
    """Filled up to a multiple of 12 columns, and cut to what was there."""
    nodes = [
        *_SIZES,
        node("Mod", ["columns", "twelve"], ["over"]),
        node("Sub", ["twelve", "over"], ["more"]),
        *map(_one, ("more", "columns")),
        node("Concat", ["nothing", "nothing", "nothing", "more_1"], ["pads"], axis=0),
        node("Pad", ["r1", "pads"], ["padded"]),
        node("Tanh", ["padded"], ["t"]),
        node("Slice", ["t", "nothing", "columns_1", "last"], ["y"]),
    ]
    weights = [array("twelve", 12, np.int64), array("nothing", [0], np.int64)]
    return _after(
        nodes, [*_NUMBERS, *weights, array("axis", [0], np.int64), array("last", [1], np.int64)]
    )


def _branching() -> ModelProto:
    """An If by a size, whose branches give the same shape."""

    def branch(kind: str) -> onnx.GraphProto:
        return helper.make_graph([node(kind, ["r1"], [kind])], kind, [], [value(kind)])

    nodes = [
        *_SIZES,
        node("Equal", ["columns", "one"], ["narrow"]),
        node("If", ["narrow"], ["y"], then_branch=branch("Neg"), else_branch=branch("Tanh")),
    ]
    return _after(nodes, _NUMBERS)


def _looping() -> ModelProto:
    """A Loop that goes round as often as there are columns, and collects one of each."""
    body = helper.make_graph(
        [
            node("Gather", ["r1", "number"], ["column"], axis=1),
            node("Identity", ["again"], ["again_out"]),
        ],
        "body",
        [value("number", INT64, []), value("again", TensorProto.BOOL, [])],
        [value("again_out", TensorProto.BOOL, []), value("column")],
    )
    nodes = [
        *_SIZES,
        node("Loop", ["columns", ""], ["all"], body=body),
        node("Transpose", ["all"], ["y"], perm=[1, 0]),
    ]
    return _after(nodes, _NUMBERS)


@pytest.mark.parametrize("make", [_by_arithmetic, _padded, _branching, _looping])
def test_shapes_that_follow_from_shapes(
    make: Callable[[], ModelProto], compile_model: Compile, tmp_path: Path
) -> None:
    proto = make()
    assert not number_shapes(proto)
    compiled = compile_model(proto, 3, validate=False)
    _assert_equal(compiled, tmp_path / "model.onnx", dims={"x": 0})


def _to_a_sum() -> ModelProto:
    """A Reshape by a number that is computed from the samples."""
    nodes = [
        node("ReduceMax", ["r1"], ["most"], keepdims=0),
        node("IsNaN", ["most"], ["never"]),
        node("Cast", ["never"], ["none"], to=INT64),
        node("Sub", ["none", "one"], ["minus"]),
        node("Unsqueeze", ["minus", "axis"], ["minus_1"]),
        node("Concat", ["minus_1", "wide"], ["sizes"], axis=0),
        node("Reshape", ["r1", "sizes"], ["y"]),
    ]
    weights = [
        array("one", 1, np.int64),
        array("axis", [0], np.int64),
        array("wide", [16], np.int64),
    ]
    return _after(nodes, weights)


def test_shapes_that_follow_from_numbers(compile_model: Compile, tmp_path: Path) -> None:
    """One run does not show them, so a batch is not split."""
    proto = _to_a_sum()
    assert {"y", "z", "o"} <= number_shapes(proto)
    with pytest.raises(ModelError, match="shape of o is not known"):
        compile_model(proto, 2, microbatches=4)
    compiled = compile_model(proto, 3)
    assert "a micro-batch is a whole call" in compiled.batch
    _assert_equal(compiled, tmp_path / "model.onnx", dims={"x": None})


def _loop_until(number: str) -> ModelProto:
    """A Loop whose state grows until a number is passed."""
    body = helper.make_graph(
        [
            node("Concat", ["state", "state"], ["state_out"], axis=0),
            node("ReduceSum", [number], ["total"], keepdims=0),
            node("Less", ["total", "limit"], ["again_out"]),
        ],
        "body",
        [value("number", INT64, []), value("again", TensorProto.BOOL, []), value("state")],
        [value("again_out", TensorProto.BOOL, []), value("state_out")],
    )
    nodes = [node("Loop", ["trips", "go", "r1"], ["y"], body=body)]
    weights = [array("trips", 2, np.int64), array("go", True, np.bool_)]
    return _after(nodes, [*weights, array("limit", 3.0, np.float32), array("fix", [1], np.float32)])


def test_loops_that_end_by_numbers() -> None:
    assert "y" in number_shapes(_loop_until("state"))
    assert "y" not in number_shapes(_loop_until("fix"))


def _old(opset: int) -> ModelProto:
    """Slices, limits and axes as attributes, as before opsets 10, 11 and 13."""
    unsqueeze = [node("Unsqueeze", ["s"], ["u"], axes=[1]), node("Squeeze", ["u"], ["q"], axes=[1])]
    clip = node("Clip", ["q"], ["y"], min=-1.0, max=1.0)
    cut = node("Slice", ["r1"], ["s"], axes=[1], starts=[0], ends=[16])
    weights = []
    if opset >= 10:
        cut = node("Slice", ["r1", "start", "end", "axis"], ["s"])
        weights = [array(n, [i], np.int64) for n, i in (("start", 0), ("end", 16), ("axis", 1))]
    if opset >= 11:
        clip = node("Clip", ["q", "low", "high"], ["y"])
        weights += [array("low", -1, np.float32), array("high", 1, np.float32)]
    return _after([cut, *unsqueeze, clip], weights, opset)


@pytest.mark.parametrize("opset", [7, 8, 9, 10, 11, 12])
def test_old_opsets_stay_what_they_are(opset: int, compile_model: Compile, tmp_path: Path) -> None:
    compiled = compile_model(_old(opset), 3, validate=False)
    assert compiled.directory is not None
    for stage in range(3):
        stored = onnx.load(compiled.directory / f"stage_{stage}.onnx")
        assert [item.version for item in stored.opset_import] == [opset]
    _assert_equal(compiled, tmp_path / "model.onnx", dims={"x": 0})


def test_nodes_in_any_order(compile_model: Compile, tmp_path: Path) -> None:
    """The checker of onnx refuses that, ONNX Runtime does not."""
    proto = odd_models.nested()
    nodes = list(proto.graph.node)[::-1]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    compiled = compile_model(proto, 2, validate=False)
    assert compiled.directory is not None
    for flag in (True, False):
        arrays = packages.random(compiled.directory, 5) | {"flag": np.array(flag)}
        packages.assert_equal(compiled.directory, tmp_path / "model.onnx", arrays)


def test_numbers_of_samples_in_attributes() -> None:
    """Before opset 10 and 11."""
    cut = node("Slice", ["r1"], ["y"], axes=[0], starts=[0], ends=[40])
    assert list(sample_rules(_after([cut], opset=9))) == [40]
    counted = [*_SIZES, node("Clip", ["rows"], ["few"], min=0.0, max=30.0)]
    assert 30 in sample_rules(_after([*counted, node("Identity", ["r1"], ["y"])], _NUMBERS, 9))


def _recurrent(batch: str) -> ModelProto:
    """A state (2, batch, 8) beside rows (batch, 16)."""
    nodes = [
        node("Split", ["state"], ["s0", "s1"], axis=0),
        node("MatMul", ["x", "w"], ["h"]),
        node("Add", ["h", "s0"], ["a"]),
        node("Tanh", ["a"], ["t"]),
        node("Mul", ["t", "s1"], ["m"]),
        node("Squeeze", ["m", "first"], ["y"]),
        node("Concat", ["t", "m"], ["after"], axis=0),
    ]
    weights = [onnx_models.weight("w", 16, 8), array("first", [0], np.int64)]
    inputs = [value("x", FLOAT, [batch, 16]), value("state", FLOAT, [2, batch, 8])]
    return onnx_models.model_of(nodes, weights, inputs, ["y", "after"])


def _nameless(proto: ModelProto) -> ModelProto:
    for source in proto.graph.input:
        for dim in source.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.Clear()
    return proto


def test_a_batch_in_another_dimension(compile_model: Compile, tmp_path: Path) -> None:
    compiled = compile_model(_recurrent("batch"), 2)
    assert compiled.batch == "the batch is dimension 1 of state"
    _assert_equal(compiled, tmp_path / "model.onnx", dims={"x": 0, "state": 1})


def test_a_batch_without_a_name(compile_model: Compile, tmp_path: Path) -> None:
    """It is as large as that of the first input."""
    compiled = compile_model(_nameless(_recurrent("batch")), 2, ("x=4x16", "state=2x4x8"))
    _assert_equal(compiled, tmp_path / "model.onnx", dims={"x": 0, "state": 1})


def test_a_batch_that_the_user_names(tmp_path: Path) -> None:
    path = onnx_models.write(_nameless(_recurrent("batch")), tmp_path / "model.onnx")

    def compiled(dims: dict[str, int | None]) -> Compiled:
        file = OnnxFile(path, ("x=2x16", "state=2x2x8"), batch_dims=dims)
        return compile_any(file, CompileOptions(2, target="onnx"), tmp_path / "package")

    with pytest.raises(UsageError, match="the model has no input nobody"):
        compiled({"nobody": 1})
    with pytest.raises(UsageError, match="state has 3 dimensions"):
        compiled({"state": 3})
    _assert_equal(compiled({"state": 1}), path, dims={"x": 0, "state": 1})


@pytest.mark.parametrize("sizes", [[1, 16], [16, 16]])
def test_calls_of_one_size(sizes: list[int], compile_model: Compile, tmp_path: Path) -> None:
    """Whose outputs have no rows of the batch: a micro-batch is a call."""
    proto = onnx_models.chain(3)
    proto.graph.input[0].CopyFrom(value("x", FLOAT, [*sizes]))
    proto.graph.node.append(node("Transpose", ["r2"], ["t"], perm=[1, 0]))
    proto.graph.node.append(node("Slice", ["t", "zero", "two"], ["y"]))
    proto.graph.initializer.extend([array("zero", [0], np.int64), array("two", [2], np.int64)])
    proto.graph.output[0].name = "y"
    compiled = compile_model(proto, 2)
    assert compiled.plan.microbatches == 8
    assert compiled.directory is not None
    arrays = packages.random(compiled.directory, 1)
    packages.assert_equal(compiled.directory, tmp_path / "model.onnx", arrays)
    with pytest.raises(Exception, match=f"not {sizes[0]}x16"):
        load_package(compiled.directory).Pipeline()({"x": np.zeros((5, 16), np.float32)})


def test_a_model_without_a_batch(compile_model: Compile, tmp_path: Path) -> None:
    """A sequence of any length, whose steps meet."""
    proto = onnx_models.chain(3)
    proto.graph.input[0].CopyFrom(value("x", FLOAT, ["time", 16]))
    proto.graph.node.append(node("CumSum", ["r2", "zero"], ["y"]))
    proto.graph.initializer.append(array("zero", 0, np.int64))
    proto.graph.output[0].name = "y"
    compiled = compile_model(proto, 2)
    assert "samples of a batch meet" in compiled.batch
    assert compiled.directory is not None
    for length in (8, 1, 13):
        x = np.random.default_rng(length).normal(size=(length, 16)).astype(np.float32)
        packages.assert_equal(compiled.directory, tmp_path / "model.onnx", {"x": x})


def _of_machine_learning() -> ModelProto:
    """A pipeline of the domain ai.onnx.ml, whose shapes nobody declares."""
    domain = "ai.onnx.ml"
    nodes = [
        node("Scaler", ["x"], ["s"], domain=domain, offset=[0.5] * 16, scale=[2.0] * 16),
        node("MatMul", ["s", "w"], ["m"]),
        node("Normalizer", ["m"], ["n"], domain=domain, norm="L2"),
        node(
            "LinearRegressor",
            ["n"],
            ["y"],
            domain=domain,
            coefficients=[0.1 * i for i in range(32)],
            intercepts=[0.5, -0.5],
            targets=2,
        ),
    ]
    return onnx_models.model_of(
        nodes, [onnx_models.weight("w", 16, 16)], [onnx_models.rows()], ["y"], domains=[domain]
    )


def test_operators_of_machine_learning(compile_model: Compile, tmp_path: Path) -> None:
    compiled = compile_model(_of_machine_learning(), 2, validate=False)
    _assert_equal(compiled, tmp_path / "model.onnx", dims={"x": 0})


def _integers(*inputs: ValueInfoProto) -> ModelProto:
    """A table of five rows, numbers of two to seven, and a rate."""
    nodes = [
        node("Cast", ["place"], ["at"], to=TensorProto.INT32),
        node("Gather", ["table", "at"], ["row"]),
        node("Equal", ["rate", "sixteen"], ["known"]),
        node("Cast", ["known"], ["scale"], to=FLOAT),
        node("Mul", ["row", "scale"], ["y"]),
        node("Unsqueeze", ["kind", "last"], ["kinds"]),
        node("Equal", ["kinds", "all_kinds"], ["chosen"]),
        node("Cast", ["chosen"], ["z"], to=FLOAT),
    ]
    weights = [
        onnx_models.weight("table", 5, 16),
        array("sixteen", 16000, np.int64),
        array("last", [1], np.int64),
        array("all_kinds", [[2, 3, 4, 5, 6, 7]], np.int64),
    ]
    return onnx_models.model_of(nodes, weights, inputs, ["y", "z"])


def test_integers_that_the_graph_allows(compile_model: Compile, tmp_path: Path) -> None:
    inputs = [
        value("place", INT64, ["batch"]),
        value("rate", INT64, []),
        value("kind", INT64, ["batch"]),
        value("picture", TensorProto.UINT8, ["batch", 4]),
    ]
    proto = _integers(*inputs)
    expected = {"place": (0, 5), "rate": (16000, 16001), "kind": (2, 8), "picture": (0, 256)}
    assert integer_ranges(proto) == expected
    compiled = compile_model(proto, 2)
    assert compiled.directory is not None
    drawn = packages.random(compiled.directory, 200)
    assert set(drawn["place"]) == set(range(5))
    assert set(drawn["kind"]) == set(range(2, 8))
    assert drawn["rate"] == 16000
    packages.assert_equal(compiled.directory, tmp_path / "model.onnx", drawn)


def test_numbers_that_the_user_gives(tmp_path: Path) -> None:
    """They say the sizes, and are what package and model are compared on."""
    path = onnx_models.write(onnx_models.sequence_model(), tmp_path / "model.onnx")
    generator = np.random.default_rng(0)
    given = {
        "tokens": generator.integers(0, 32, (6, 5)),
        "mask": np.zeros((6, 5), np.float32),
    }
    data = tmp_path / "data.npz"
    np.savez(data, **given)
    compiled = compile_onnx(path, CompileOptions(2), tmp_path / "package", inputs=[str(data)])
    assert compiled.plan.batch_size == 6
    assert compiled.validation is not None
    assert compiled.validation.passed
    np.savez(data, tokens=given["tokens"].astype(np.int32), mask=given["mask"])
    with pytest.raises(UsageError, match="gives tokens as int32, but it is int64"):
        compile_onnx(path, CompileOptions(2), None, inputs=[str(data)])
    np.savez(data, tokens=given["tokens"], other=given["mask"])
    with pytest.raises(UsageError, match="gives other, which is no input"):
        compile_onnx(path, CompileOptions(2), None, inputs=[str(data)])
    with pytest.raises(UsageError, match=r"none\.npz cannot be read"):
        compile_onnx(path, CompileOptions(2), None, inputs=[str(tmp_path / "none.npz")])


def test_samples_that_are_alike_hide_nothing(tmp_path: Path) -> None:
    """Their mean is each of them; of random numbers it is not."""
    proto = onnx_models.chain(3)
    proto.graph.node.append(node("ReduceMean", ["r2"], ["mean"], axes=[0], keepdims=1))
    proto.graph.node.append(node("Sub", ["r2", "mean"], ["y"]))
    proto.graph.output[0].name = "y"
    path = onnx_models.write(proto, tmp_path / "model.onnx")
    np.savez(tmp_path / "alike.npz", x=np.ones((8, 16), np.float32))
    inputs = [str(tmp_path / "alike.npz")]
    compiled = compile_onnx(path, CompileOptions(2), tmp_path / "package", inputs=inputs)
    assert "samples of a batch meet" in compiled.batch
    with pytest.raises(ModelError, match="samples of a batch meet"):
        compile_onnx(path, CompileOptions(2, microbatches=4), None, inputs=inputs)
    x = np.random.default_rng(0).normal(size=(9, 16)).astype(np.float32)
    assert compiled.directory is not None
    packages.assert_equal(compiled.directory, path, {"x": x})


def test_no_closer_than_onnx_runtime_is_to_itself() -> None:
    expected, other = {"y": np.array([1e-6, 2e-6])}, {"y": np.array([1e-6, 2.002e-6])}
    close = Closeness().with_rounding(expected, other)
    for factor, passes in ((1.003, True), (1.1, False)):
        (row,) = compare(expected, {"y": expected["y"] * factor}, close)
        assert (row.fault == "") == passes
    (row,) = compare({"i": np.array([1])}, {"i": np.array([2])}, close)
    assert row.fault


def test_an_empty_batch_of_the_user(tmp_path: Path) -> None:
    path = onnx_models.write(onnx_models.chain(), tmp_path / "model.onnx")
    np.savez(tmp_path / "none.npz", x=np.zeros((0, 16), np.float32))
    with pytest.raises(UsageError, match="empty batch"):
        compile_onnx(path, CompileOptions(2), None, inputs=[str(tmp_path / "none.npz")])


@pytest.mark.parametrize("name", ["batch_size", "samples"])
def test_a_batch_behind_a_size_that_is_given(
    name: str, compile_model: Compile, tmp_path: Path
) -> None:
    """Where the first dimension is a number, the batch is the one that is called or said so."""
    proto = onnx_models.chain(3)
    proto.graph.input[0].CopyFrom(value("x", FLOAT, [5, name, 16]))
    path = onnx_models.write(proto, tmp_path / "model.onnx")
    said = {} if "batch" in name else {"x": 1}
    sizes = input_sizes(read_model(path), ("x=5x8x16",), said)
    assert (sizes.batch, sizes.batch_dims, sizes.fixed) == (8, {"x": 1}, False)
    if not said:
        _assert_equal(compile_model(proto, 2), path, dims={"x": 1})


def test_noise_from_a_function_is_drawn_once(compile_model: Compile) -> None:
    """The first stage reads it, and the last one."""
    opset = helper.make_opsetid("", 17)
    noise = helper.make_function(
        "own", "Noise", [], ["n"], [node("RandomNormal", [], ["n"], shape=[16])], [opset]
    )
    proto = onnx_models.chain(4)
    proto.functions.append(noise)
    proto.opset_import.append(helper.make_opsetid("own", 1))
    for made in proto.graph.node:
        made.input[:] = ["x_n" if name == "x" else name for name in made.input]
    before = [node("Noise", [], ["noise"], domain="own"), node("Add", ["x", "noise"], ["x_n"])]
    nodes = [*before, *proto.graph.node, node("Add", ["r3", "noise"], ["late"])]
    del proto.graph.node[:], proto.graph.output[:]
    proto.graph.node.extend(nodes)
    proto.graph.output.extend([value("x_n"), value("r3"), value("late")])
    compiled = compile_model(proto, 3, validate=False)
    assert compiled.directory is not None
    stages = [onnx.load(file).graph.node for file in compiled.directory.glob("stage_*.onnx")]
    drawing = [n for nodes in stages for n in nodes if n.op_type in ("Noise", "RandomNormal")]
    assert len(drawing) == 1
    arrays = packages.random(compiled.directory, 8)
    found = load_package(compiled.directory).Pipeline()(arrays)
    first = (found["x_n"] - arrays["x"])[0]
    assert np.abs(first).max() > 0
    np.testing.assert_allclose((found["late"] - found["r3"])[0], first, atol=1e-5)
