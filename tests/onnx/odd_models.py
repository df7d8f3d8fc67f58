"""Small ONNX models that are legal and unusual: what people's files hold beside layers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx_models
from onnx import ModelProto, TensorProto, helper, numpy_helper

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def value(
    name: str, element: int = FLOAT, shape: list[int | str] | None = None
) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, element, shape)


def array(name: str, numbers: object, dtype: type) -> TensorProto:
    return numpy_helper.from_array(np.array(numbers, dtype), name)


def _returns(proto: ModelProto, *names: str) -> ModelProto:
    del proto.graph.output[:]
    proto.graph.output.extend(value(name) for name in names)
    return proto


def passed_on() -> ModelProto:
    """An output that is an input, and one that follows from weights alone."""
    proto = onnx_models.chain(4)
    proto.graph.node.append(helper.make_node("Mul", ["b0", "b1"], ["constant"]))
    return _returns(proto, "r3", "x", "constant")


def used_inside() -> ModelProto:
    """Outputs that later nodes read, in the first stage, and nodes that nobody needs."""
    proto = onnx_models.chain(4)
    proto.graph.node.append(helper.make_node("MatMul", ["r0", "w0"], ["dead"]))
    proto.graph.node.append(helper.make_node("Relu", ["dead"], ["dead_too"]))
    return _returns(proto, "r3", "r0", "m1")


def early() -> ModelProto:
    """Everything after the output is needed by nobody."""
    return _returns(onnx_models.chain(6), "r2")


def weights_as_inputs() -> ModelProto:
    """As IR version 3 asks for."""
    proto = onnx_models.chain(4)
    proto.ir_version = 3
    declared = [value(t.name, t.data_type, list(t.dims)) for t in proto.graph.initializer]
    inputs = [*declared, *proto.graph.input]
    del proto.graph.input[:]
    proto.graph.input.extend(inputs)
    return proto


def numbers() -> ModelProto:
    """No input has a batch: all are numbers."""
    nodes = [
        helper.make_node("Mul", ["x", "x"], ["a"]),
        helper.make_node("Sin", ["a"], ["b"]),
        helper.make_node("Exp", ["b"], ["y"]),
    ]
    return onnx_models.model_of(nodes, [], [value("x", FLOAT, [])], ["y"])


def nothing() -> ModelProto:
    """Tensors without elements, as an input, a weight and an output."""
    proto = onnx_models.chain(4)
    proto.graph.input.append(value("none", FLOAT, ["batch", 0]))
    proto.graph.initializer.append(array("w_none", np.zeros((16, 0)), np.float32))
    proto.graph.node.extend(
        [
            helper.make_node("MatMul", ["r0", "w_none"], ["empty"]),
            helper.make_node("Concat", ["r3", "empty", "none"], ["y"], axis=1),
        ]
    )
    return _returns(proto, "y", "empty")


def sparse() -> ModelProto:
    proto = onnx_models.chain(4)
    proto.graph.sparse_initializer.append(
        helper.make_sparse_tensor(
            array("w_sparse", [1, 2], np.float32), array("places", [1, 5], np.int64), [16]
        )
    )
    proto.graph.node.append(helper.make_node("Add", ["r3", "w_sparse"], ["y"]))
    return _returns(proto, "y")


def without_shape() -> ModelProto:
    proto = onnx_models.chain(4)
    proto.graph.input[0].type.tensor_type.ClearField("shape")
    return proto


def renamed(new: Callable[[str], str]) -> ModelProto:
    """With other names for everything."""
    proto = onnx_models.chain(4)
    for node in proto.graph.node:
        node.name = new(node.name) if node.name else ""
        node.input[:] = [new(name) for name in node.input]
        node.output[:] = [new(name) for name in node.output]
    for item in (*proto.graph.initializer, *proto.graph.input, *proto.graph.output):
        item.name = new(item.name)
    return proto


def half() -> ModelProto:
    """Floats of 16 bits inside, of 32 outside."""
    proto = onnx_models.chain(4)
    for tensor in proto.graph.initializer:
        floats = numpy_helper.to_array(tensor).astype(np.float16)
        tensor.CopyFrom(numpy_helper.from_array(floats, tensor.name))
    proto.graph.node.insert(0, helper.make_node("Cast", ["x"], ["x16"], to=TensorProto.FLOAT16))
    proto.graph.node[1].input[0] = "x16"
    proto.graph.node.append(helper.make_node("Cast", ["r3"], ["y"], to=FLOAT))
    return _returns(proto, "y")


def brain() -> ModelProto:
    """An input and an output of bfloat16."""
    proto = onnx_models.chain(4)
    proto.graph.input[0].type.tensor_type.elem_type = TensorProto.BFLOAT16
    proto.graph.node.insert(0, helper.make_node("Cast", ["x"], ["x32"], to=FLOAT))
    proto.graph.node[1].input[0] = "x32"
    proto.graph.node.append(helper.make_node("Cast", ["r3"], ["y"], to=TensorProto.BFLOAT16))
    _returns(proto, "y")
    proto.graph.output[0].type.tensor_type.elem_type = TensorProto.BFLOAT16
    return proto


def collected() -> ModelProto:
    """A Loop that stacks what it makes: only the model itself says how much that is."""
    body = helper.make_graph(
        [
            helper.make_node("Tanh", ["state"], ["state_out"]),
            helper.make_node("Identity", ["again"], ["again_out"]),
            helper.make_node("Identity", ["state_out"], ["kept"]),
        ],
        "body",
        [value("number", INT64, []), value("again", TensorProto.BOOL, []), value("state")],
        [value("again_out", TensorProto.BOOL, []), value("state_out"), value("kept")],
    )
    proto = onnx_models.chain(4)
    proto.graph.initializer.append(array("trips", 3, np.int64))
    proto.graph.initializer.append(array("go", True, np.bool_))
    proto.graph.node.extend(
        [
            helper.make_node("Loop", ["trips", "go", "r2"], ["last", "all"], body=body),
            helper.make_node("Transpose", ["all"], ["turned"], perm=[1, 0, 2]),
            helper.make_node("Flatten", ["turned"], ["flat"]),
            helper.make_node("Concat", ["flat", "r3"], ["y"], axis=1),
        ]
    )
    del proto.graph.output[:]
    proto.graph.output.append(value("y", FLOAT, ["batch", 64]))
    return proto


def nested() -> ModelProto:
    """An If late in the model and a Loop in one of its branches, which read values made early."""
    body = helper.make_graph(
        [
            helper.make_node("Add", ["state", "r0"], ["state_out"]),
            helper.make_node("Identity", ["again"], ["again_out"]),
        ],
        "body",
        [value("number", INT64, []), value("again", TensorProto.BOOL, []), value("state")],
        [value("again_out", TensorProto.BOOL, []), value("state_out")],
    )
    loop = helper.make_node("Loop", ["trips", "go", "r3"], ["looped"], body=body)
    taken = helper.make_graph([loop], "taken", [], [value("looped")])
    other = helper.make_graph(
        [helper.make_node("MatMul", ["r1", "w1"], ["product"])], "other", [], [value("product")]
    )
    proto = onnx_models.chain(4)
    proto.graph.initializer.append(array("trips", 3, np.int64))
    proto.graph.initializer.append(array("go", True, np.bool_))
    proto.graph.input.append(value("flag", TensorProto.BOOL, []))
    proto.graph.node.extend(
        [
            helper.make_node("If", ["flag"], ["either"], then_branch=taken, else_branch=other),
            helper.make_node("MatMul", ["either", "w0"], ["y"]),
        ]
    )
    return _returns(proto, "y")


def with_output(element: str) -> ModelProto:
    """A chain with one more output, of another kind."""
    proto = onnx_models.chain(3)
    if element == "sequence":
        proto.graph.node.append(helper.make_node("SequenceConstruct", ["r1", "r2"], ["odd"]))
        proto.graph.output.append(helper.make_tensor_sequence_value_info("odd", FLOAT, None))
    elif element == "weight":
        proto.graph.output.append(value("w0"))
    elif element == "mean":
        proto.graph.node.append(helper.make_node("ReduceMean", ["r2"], ["odd"], keepdims=0))
        proto.graph.output.append(value("odd"))
    else:
        proto.graph.node.append(helper.make_node("RandomNormalLike", ["r2"], ["odd"]))
        proto.graph.output.append(value("odd"))
    return proto


def with_input(kind: str) -> ModelProto:
    """A chain with one more input, of another kind."""
    proto = onnx_models.chain(3)
    if kind == "sequence":
        proto.graph.input.append(helper.make_tensor_sequence_value_info("odd", FLOAT, None))
    else:
        inner = helper.make_tensor_type_proto(FLOAT, None)
        proto.graph.input.append(
            helper.make_value_info("odd", helper.make_optional_type_proto(inner))
        )
        proto.opset_import[0].version = 18
    return proto
