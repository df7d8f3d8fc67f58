"""Functions of a model are written out with the meaning that ONNX Runtime gives them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import AttributeProto, FunctionProto, ModelProto, NodeProto, TensorProto, helper
from onnx_models import model_of, rows, weight

from gpipe_compiler.onnx.frontend.reading import read_model

OPSETS = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]


def reading(node: NodeProto, own: str, of: str) -> NodeProto:
    """A node whose attribute is what a function is given for its own."""
    attribute = AttributeProto(name=own, ref_attr_name=of, type=AttributeProto.FLOAT)
    node.attribute.append(attribute)
    return node


def function(
    name: str,
    nodes: Sequence[NodeProto],
    attributes: Sequence[str] = (),
    defaults: Sequence[AttributeProto] = (),
    domain: str = "own",
) -> FunctionProto:
    return helper.make_function(
        domain, name, ["x"], ["y"], nodes, OPSETS, list(attributes), list(defaults)
    )


def leaky(default: float | None) -> FunctionProto:
    node = reading(helper.make_node("LeakyRelu", ["x"], ["y"]), "alpha", "slope")
    if default is None:
        return function("Leaky", [node], ["slope"])
    return function("Leaky", [node], defaults=[helper.make_attribute("slope", default)])


def calling(source: str, made: str, **attributes: float) -> NodeProto:
    return helper.make_node("Leaky", [source], [made], domain="own", **attributes)


def twice(node: NodeProto) -> list[NodeProto]:
    """A loop around a node from "inner" to "done"."""
    ends = helper.make_node("Identity", ["go"], ["on"])
    body = helper.make_graph(
        [node, ends],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("inner", TensorProto.FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("done", TensorProto.FLOAT, None),
        ],
    )
    count = helper.make_node("Constant", [], ["count"], value_int=2)
    return [count, helper.make_node("Loop", ["count", "", "x"], ["y"], body=body)]


def passing(default: float | None) -> FunctionProto:
    """Passes its attribute on to another function, in a loop."""
    nodes = twice(reading(calling("inner", "done"), "slope", "own_slope"))
    if default is None:
        return function("Passing", nodes, ["own_slope"])
    return function("Passing", nodes, defaults=[helper.make_attribute("own_slope", default)])


def sine(domain: str, name: str) -> FunctionProto:
    return function(name, [helper.make_node("Sin", ["x"], ["y"])], domain=domain)


def called(operator: str, domain: str, **attributes: float) -> NodeProto:
    return helper.make_node(operator, ["h"], ["a"], domain=domain, **attributes)


MODELS = {
    "default": ([called("Leaky", "own")], [leaky(0.3)]),
    "given": ([called("Leaky", "own", slope=0.6)], [leaky(0.3)]),
    "the operator's own": ([called("Leaky", "own")], [leaky(None)]),
    "inner default": ([called("Passing", "own")], [leaky(0.3), passing(None)]),
    "outer default": ([called("Passing", "own")], [leaky(0.3), passing(0.6)]),
    "passed on": ([called("Passing", "own", own_slope=0.9)], [leaky(0.3), passing(0.6)]),
    "as a standard operator": ([called("Relu", "")], [sine("", "Relu")]),
    "as one of ONNX Runtime": ([called("Gelu", "com.microsoft")], [sine("com.microsoft", "Gelu")]),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_function_is_what_onnx_runtime_takes_it_for(case: str, tmp_path: Path) -> None:
    nodes, functions = MODELS[case]
    first = helper.make_node("MatMul", ["x", "w"], ["h"])
    last = helper.make_node("MatMul", ["a", "w"], ["y"])
    proto = model_of(
        [first, *nodes, last],
        [weight("w", 6, 6)],
        [rows(width=6)],
        ["y"],
        functions=functions,
        domains=["own", "com.microsoft"],
    )
    path = tmp_path / "model.onnx"
    onnx.save(proto, path)

    read = read_model(path).proto

    assert not read.functions
    np.testing.assert_array_equal(run(read), run(proto))


def run(proto: ModelProto) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options)
    x = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
    (found,) = session.run(None, {"x": x})
    return found
