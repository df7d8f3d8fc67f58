"""Models that do something else from a number of samples on: tried beyond it, or limited to it.

Held against ONNX Runtime on the whole batch, which micro-batches do not give.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_models
import packages
import pytest
from loading import load_package
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from gpipe_compiler.compile import Compiled
from gpipe_compiler.errors import ModelError
from gpipe_compiler.onnx.frontend.sample_rules import sample_rules

Compile = Callable[..., Compiled]
Made = tuple[list[NodeProto], dict[str, object]]

COUNT = [
    helper.make_node("Shape", ["r2"], ["sizes"]),
    helper.make_node("Gather", ["sizes", "zero"], ["count"]),
]


def masked(limit: int) -> Made:
    """Samples from a number on are zero."""
    nodes = [
        *COUNT,
        helper.make_node("Range", ["zero", "count", "one"], ["numbers"]),
        helper.make_node("Less", ["numbers", "limit"], ["known"]),
        helper.make_node("Cast", ["known"], ["mask"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["mask", "axis"], ["column"]),
        helper.make_node("Mul", ["r2", "column"], ["y"]),
    ]
    return nodes, {"limit": np.int64(limit), "axis": np.array([1])}


def divided(limit: int) -> Made:
    """By how many samples there are, but no less than a number."""
    nodes = [
        *COUNT,
        helper.make_node("Max", ["count", "limit"], ["least"]),
        helper.make_node("Cast", ["least"], ["divisor"], to=TensorProto.FLOAT),
        helper.make_node("Div", ["r2", "divisor"], ["y"]),
    ]
    return nodes, {"limit": np.int64(limit)}


def cut(limit: int) -> Made:
    """The first samples only."""
    nodes = [helper.make_node("Slice", ["r2", "first", "limit", "first"], ["y"])]
    return nodes, {"limit": np.array([limit]), "first": np.array([0])}


def reshaped(limit: int) -> Made:
    """By the number of samples, as exporters write views; and a number that is none of samples."""
    nodes = [
        *COUNT,
        helper.make_node("Unsqueeze", ["count", "axis"], ["counts"]),
        helper.make_node("Concat", ["counts", "rest"], ["shape"], axis=0),
        helper.make_node("Reshape", ["r2", "shape"], ["view"]),
        helper.make_node("Div", ["view", "limit"], ["y"]),
    ]
    return nodes, {"axis": np.array([0]), "rest": np.array([-1]), "limit": np.float32(limit)}


def limited(limit: int) -> Made:
    """By a function of the model's own, which is given the number."""
    nodes = [helper.make_node("Limited", ["r2", "zero", "limit"], ["y"], domain="own")]
    return nodes, {"limit": np.int64(limit)}


LIMITED = helper.make_function(
    "own",
    "Limited",
    ["x", "first", "most"],
    ["result"],
    [
        helper.make_node("Shape", ["x"], ["sizes"]),
        helper.make_node("Gather", ["sizes", "first"], ["samples"]),
        helper.make_node("Max", ["samples", "most"], ["least"]),
        helper.make_node("Cast", ["least"], ["divisor"], to=TensorProto.FLOAT),
        helper.make_node("Div", ["x", "divisor"], ["result"]),
    ],
    [helper.make_opsetid("", 18)],
)


def model(make: Callable[[int], Made], limit: int) -> ModelProto:
    proto = onnx_models.chain(3)
    nodes, constants = make(limit)
    proto.graph.node.extend(nodes)
    constants |= {"zero": np.int64(0), "one": np.int64(1)}
    for name, value in constants.items():
        proto.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
    proto.graph.output[0].name = "y"
    return proto


def test_what_a_function_of_the_model_compares_is_tried(compile_model: Compile) -> None:
    proto = model(limited, 100)
    proto.functions.append(LIMITED)
    proto.opset_import.append(helper.make_opsetid("own", 1))
    with pytest.raises(ModelError, match="the samples of a batch meet"):
        compile_model(proto, 2)


@pytest.mark.parametrize("make", [masked, divided, cut])
def test_what_is_another_beyond_the_batch_is_refused(
    make: Callable[[int], Made], compile_model: Compile
) -> None:
    assert [*sample_rules(model(make, 100))] == [100]
    with pytest.raises(ModelError, match="the samples of a batch meet") as refused:
        compile_model(model(make, 100), 2)
    assert "--microbatches 1" in refused.value.hint


def test_what_takes_too_long_to_be_tried_limits_the_package(compile_model: Compile) -> None:
    made = compile_model(model(masked, 800_000), 2)
    assert made.directory is not None
    package = load_package(made.directory)
    arrays = {name: array[:1] for name, array in packages.random(made.directory, 8).items()}
    many = {name: np.broadcast_to(a, (800_001, *a.shape[1:])) for name, a in arrays.items()}
    pipe = package.Pipeline()
    with pytest.raises(Exception, match="takes up to 799999 samples in several") as refused:
        pipe(many, microbatches=2)
    assert "Less that makes known" in str(refused.value)
    assert "microbatches=1" in str(refused.value)
    pipe({name: array[:800] for name, array in many.items()}, microbatches=2)


def test_numbers_that_are_none_of_samples_are_no_rules() -> None:
    assert not sample_rules(model(reshaped, 100))
