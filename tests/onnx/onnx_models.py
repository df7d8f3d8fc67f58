"""Small ONNX models of every kind that goes wrong when it is cut."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

OPSET = 17


def weight(name: str, *shape: int, seed: int = 0) -> TensorProto:
    generator = np.random.default_rng(seed + sum(map(ord, name)))
    numbers = generator.standard_normal(shape) / np.sqrt(shape[0] if shape else 1)
    return numpy_helper.from_array(numbers.astype(np.float32), name)


def model_of(
    nodes: Sequence[NodeProto],
    weights: Sequence[TensorProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[str],
    *,
    functions: Sequence[onnx.FunctionProto] = (),
    domains: Sequence[str] = (),
    opset: int = OPSET,
) -> ModelProto:
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    graph = helper.make_graph(nodes, "small", inputs, results, weights)
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, 1) for d in domains)]
    return helper.make_model(graph, opset_imports=imports, functions=list(functions), ir_version=9)


def rows(name: str = "x", width: int = 16) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", width])


def chain(layers: int = 6, width: int = 16) -> ModelProto:
    """MatMul, Add, Relu again and again."""
    nodes, weights, last = [], [], "x"
    for layer in range(layers):
        weights += [weight(f"w{layer}", width, width), weight(f"b{layer}", width)]
        nodes += [
            helper.make_node("MatMul", [last, f"w{layer}"], [f"m{layer}"]),
            helper.make_node("Add", [f"m{layer}", f"b{layer}"], [f"a{layer}"]),
            helper.make_node("Relu", [f"a{layer}"], [f"r{layer}"], name=f"/block{layer}/Relu"),
        ]
        last = f"r{layer}"
    return model_of(nodes, weights, [rows(width=width)], [last])


def long_skip() -> ModelProto:
    """A value of the first stage that the last one uses, and one that is also an output."""
    proto = chain(6)
    proto.graph.node.append(helper.make_node("Concat", ["r5", "r0", "x"], ["y"], axis=1))
    del proto.graph.output[:]
    for name in ("y", "r2"):
        proto.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    return proto


def shared_weight() -> ModelProto:
    """One matrix in several places, and a constant table that several nodes read."""
    width = 16
    nodes, last = [helper.make_node("Mul", ["table", "two"], ["scale"])], "x"
    for layer in range(6):
        nodes += [
            helper.make_node("MatMul", [last, "w"], [f"m{layer}"]),
            helper.make_node("Mul", [f"m{layer}", "scale"], [f"s{layer}"]),
            helper.make_node("Tanh", [f"s{layer}"], [f"t{layer}"]),
        ]
        last = f"t{layer}"
    two = numpy_helper.from_array(np.array(2, dtype=np.float32), "two")
    return model_of(
        nodes, [weight("w", width, width), weight("table", width), two], [rows()], [last]
    )


def conditional() -> ModelProto:
    """An If whose branches read values and weights of the graph around them."""

    def branch(name: str, operator: str) -> onnx.GraphProto:
        made = helper.make_tensor_value_info(f"{name}_out", TensorProto.FLOAT, None)
        node = helper.make_node(operator, ["r1", "w_branch"], [f"{name}_out"])
        return helper.make_graph([node], name, [], [made])

    proto = chain(4)
    del proto.graph.node[6:]
    proto.graph.node.extend(
        [
            helper.make_node("ReduceSum", ["r1"], ["total"], keepdims=0),
            helper.make_node("Greater", ["total", "zero"], ["positive"]),
            helper.make_node(
                "If",
                ["positive"],
                ["chosen"],
                then_branch=branch("then", "MatMul"),
                else_branch=branch("else", "MatMul"),
            ),
            helper.make_node("MatMul", ["chosen", "w2"], ["m2"]),
            helper.make_node("Relu", ["m2"], ["r2"]),
            helper.make_node("MatMul", ["r2", "w3"], ["m3"]),
            helper.make_node("Add", ["m3", "r0"], ["r3"]),
        ]
    )
    proto.graph.initializer.extend(
        [weight("w_branch", 16, 16), numpy_helper.from_array(np.array(0, np.float32), "zero")]
    )
    return proto


def loop(trips: int = 3) -> ModelProto:
    """A Loop that multiplies by a weight of the graph around it."""
    body = helper.make_graph(
        [
            helper.make_node("MatMul", ["state", "w_loop"], ["product"]),
            helper.make_node("Tanh", ["product"], ["state_out"]),
            helper.make_node("Identity", ["again"], ["again_out"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("number", TensorProto.INT64, []),
            helper.make_tensor_value_info("again", TensorProto.BOOL, []),
            helper.make_tensor_value_info("state", TensorProto.FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("again_out", TensorProto.BOOL, []),
            helper.make_tensor_value_info("state_out", TensorProto.FLOAT, None),
        ],
    )
    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["m0"]),
        helper.make_node("Relu", ["m0"], ["r0"]),
        helper.make_node("Loop", ["trips", "go", "r0"], ["looped"], body=body),
        helper.make_node("MatMul", ["looped", "w1"], ["m1"]),
        helper.make_node("Relu", ["m1"], ["y"]),
    ]
    weights = [
        weight("w0", 16, 16),
        weight("w1", 16, 16),
        weight("w_loop", 16, 16),
        numpy_helper.from_array(np.array(trips, np.int64), "trips"),
        numpy_helper.from_array(np.array(True), "go"),
    ]
    return model_of(nodes, weights, [rows()], ["y"])


def scan() -> ModelProto:
    """A Scan over the columns of what a stage hands on."""
    body = helper.make_graph(
        [
            helper.make_node("Add", ["sum_in", "column"], ["sum_out"]),
            helper.make_node("Identity", ["sum_out"], ["scanned"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("sum_in", TensorProto.FLOAT, None),
            helper.make_tensor_value_info("column", TensorProto.FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("sum_out", TensorProto.FLOAT, None),
            helper.make_tensor_value_info("scanned", TensorProto.FLOAT, None),
        ],
    )
    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["m0"]),
        helper.make_node("ReduceSum", ["m0", "axis"], ["start"], keepdims=0),
        helper.make_node(
            "Scan",
            ["start", "m0"],
            ["last", "sums"],
            body=body,
            num_scan_inputs=1,
            scan_input_axes=[1],
            scan_output_axes=[1],
        ),
        helper.make_node("MatMul", ["sums", "w1"], ["y"]),
    ]
    axis = numpy_helper.from_array(np.array([1], np.int64), "axis")
    return model_of(nodes, [weight("w0", 16, 16), weight("w1", 16, 16), axis], [rows()], ["y"])


def own_functions() -> ModelProto:
    """Nodes that call functions of the model itself, one of which calls another."""
    inner = helper.make_function(
        "own",
        "Twice",
        ["a"],
        ["b"],
        [helper.make_node("Add", ["a", "a"], ["b"])],
        [helper.make_opsetid("", OPSET)],
    )
    outer = helper.make_function(
        "own",
        "Layer",
        ["a", "w"],
        ["c"],
        [
            helper.make_node("MatMul", ["a", "w"], ["m"]),
            helper.make_node("Twice", ["m"], ["d"], domain="own"),
            helper.make_node("Tanh", ["d"], ["c"]),
        ],
        [helper.make_opsetid("", OPSET), helper.make_opsetid("own", 1)],
    )
    nodes, weights, last = [], [], "x"
    for layer in range(5):
        weights.append(weight(f"w{layer}", 16, 16))
        nodes.append(helper.make_node("Layer", [last, f"w{layer}"], [f"c{layer}"], domain="own"))
        last = f"c{layer}"
    return model_of(nodes, weights, [rows()], [last], functions=[inner, outer], domains=["own"])


def of_runtime() -> ModelProto:
    """Operators of ONNX Runtime's own domain."""
    nodes, weights, last = [], [], "x"
    for layer in range(4):
        weights += [weight(f"w{layer}", 16, 16), weight(f"b{layer}", 16)]
        nodes += [
            helper.make_node(
                "FusedMatMul", [last, f"w{layer}"], [f"m{layer}"], domain="com.microsoft", alpha=0.5
            ),
            helper.make_node(
                "BiasGelu", [f"m{layer}", f"b{layer}"], [f"g{layer}"], domain="com.microsoft"
            ),
        ]
        last = f"g{layer}"
    return model_of(nodes, weights, [rows()], [last], domains=["com.microsoft"])


def sequence_model() -> ModelProto:
    """Inputs with a batch and a length that are both free; shapes computed from them."""
    tokens = helper.make_tensor_value_info("tokens", TensorProto.INT64, ["batch", "length"])
    mask = helper.make_tensor_value_info("mask", TensorProto.FLOAT, ["batch", "length"])
    nodes = [
        helper.make_node("Gather", ["table", "tokens"], ["e"]),
        helper.make_node("Shape", ["tokens"], ["shape"]),
        helper.make_node("Concat", ["shape", "heads"], ["wide"], axis=0),
        helper.make_node("MatMul", ["e", "w0"], ["m0"]),
        helper.make_node("Reshape", ["m0", "wide"], ["h"]),
        helper.make_node("Transpose", ["h"], ["t"], perm=[0, 2, 1, 3]),
        helper.make_node("Transpose", ["h"], ["k"], perm=[0, 2, 3, 1]),
        helper.make_node("MatMul", ["t", "k"], ["scores"]),
        helper.make_node("Unsqueeze", ["mask", "axes"], ["broad"]),
        helper.make_node("Add", ["scores", "broad"], ["masked"]),
        helper.make_node("Softmax", ["masked"], ["p"]),
        helper.make_node("MatMul", ["p", "t"], ["mixed"]),
        helper.make_node("Transpose", ["mixed"], ["back"], perm=[0, 2, 1, 3]),
        helper.make_node("Shape", ["e"], ["flat"]),
        helper.make_node("Reshape", ["back", "flat"], ["joined"]),
        helper.make_node("MatMul", ["joined", "w1"], ["y"]),
    ]
    weights = [
        weight("table", 32, 16),
        weight("w0", 16, 16),
        weight("w1", 16, 16),
        numpy_helper.from_array(np.array([4, 4], np.int64), "heads"),
        numpy_helper.from_array(np.array([1, 2], np.int64), "axes"),
    ]
    return model_of(nodes, weights, [tokens, mask], ["y"])


def fixed_batch(samples: int = 2) -> ModelProto:
    """A model exported for one batch size."""
    proto = chain(4)
    proto.graph.input[0].type.tensor_type.shape.dim[0].Clear()
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = samples
    return proto


def data_dependent() -> ModelProto:
    """In the middle a NonZero, whose result has as many columns as there are numbers."""
    proto = chain(2)
    proto.graph.node.extend(
        [
            helper.make_node("NonZero", ["r1"], ["places"], name="find"),
            helper.make_node("Cast", ["places"], ["floats"], to=TensorProto.FLOAT),
            helper.make_node("ReduceSum", ["floats"], ["sum"], keepdims=0),
            helper.make_node("Add", ["r1", "sum"], ["y"]),
        ]
    )
    proto.graph.output[0].name = "y"
    return proto


def write(proto: ModelProto, path: Path) -> Path:
    onnx.save(proto, path)
    return path


ALL = {
    "chain": chain,
    "long_skip": long_skip,
    "shared_weight": shared_weight,
    "conditional": conditional,
    "loop": loop,
    "scan": scan,
    "own_functions": own_functions,
    "of_runtime": of_runtime,
    "sequence_model": sequence_model,
    "fixed_batch": fixed_batch,
    "data_dependent": data_dependent,
}
