"""Small ONNX files of every kind that the field has, each with sizes of its inputs to be tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

FLOAT, INT64, BOOL, STRING = (
    TensorProto.FLOAT,
    TensorProto.INT64,
    TensorProto.BOOL,
    TensorProto.STRING,
)
node = helper.make_node
Sizes = Mapping[str, tuple[int, ...]]

WORDS = ("a", "b", "C", "zz")
"""Of which random strings are made."""


@dataclass(frozen=True)
class Kind:
    """A file.

    Attributes:
        sizes: of calls that are tried.
        inputs: `--input`, where the file leaves sizes open.
    """

    model: ModelProto
    sizes: Sequence[Sizes]
    inputs: tuple[str, ...] = ()


def weight(name: str, *shape: int) -> TensorProto:
    numbers = np.random.default_rng(len(name) + sum(shape)).standard_normal(shape) * 0.3
    return numpy_helper.from_array(numbers.astype(np.float32), name)


def constant(name: str, numbers: object, dtype: type = np.int64) -> TensorProto:
    return numpy_helper.from_array(np.array(numbers, dtype), name)


def value(name: str, shape: Sequence[int | str] | None, element: int = FLOAT) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, element, shape)


def _made(
    nodes: Sequence[NodeProto],
    inputs: Sequence[ValueInfoProto],
    outputs: Sequence[ValueInfoProto],
    weights: Sequence[TensorProto],
    opset: int = 18,
    domains: Sequence[str] = (),
) -> ModelProto:
    graph = helper.make_graph(nodes, "model", inputs, outputs, weights)
    versions = {"com.microsoft": 1, "ai.onnx.ml": 3}
    sets = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, versions[d]) for d in domains)]
    made = helper.make_model(graph, opset_imports=sets)
    made.ir_version = 8 if opset < 20 else 11
    return made


def _rows(width: int, *batches: int) -> list[Sizes]:
    return [{"x": (batch, width)} for batch in batches]


def loops() -> Kind:
    """A Scan along the length, and a Loop on what it ends with, whose bodies read weights."""
    scan = helper.make_graph(
        [
            node("MatMul", ["s", "w"], ["m"]),
            node("Tanh", ["m"], ["t"]),
            node("Add", ["t", "each"], ["next"]),
            node("Identity", ["next"], ["kept"]),
        ],
        "scan",
        [value("s", None), value("each", None)],
        [value("next", None), value("kept", None)],
    )
    loop = helper.make_graph(
        [
            node("Identity", ["c"], ["go_on"]),
            node("Relu", ["l"], ["lr"]),
            node("MatMul", ["lr", "w"], ["ln"]),
        ],
        "loop",
        [value("i", [], INT64), value("c", [], BOOL), value("l", None)],
        [value("go_on", [], BOOL), value("ln", None)],
    )
    nodes = [
        node("MatMul", ["x", "w"], ["x1"]),
        node("ReduceMean", ["x1", "axis"], ["h"], keepdims=0),
        node("Scan", ["h", "x1"], ["last", "ys"], body=scan, num_scan_inputs=1,
             scan_input_axes=[1], scan_output_axes=[1]),
        node("Loop", ["trips", "go", "last"], ["looped"], body=loop),
        node("Unsqueeze", ["looped", "axis"], ["beside"]),
        node("Add", ["ys", "beside"], ["sum"]),
        node("MatMul", ["sum", "w"], ["y"]),
    ]  # fmt: skip
    weights = [
        weight("w", 8, 8),
        constant("axis", [1]),
        constant("trips", 3),
        constant("go", True, np.bool_),
    ]
    rows = ["batch", "length", 8]
    model = _made(nodes, [value("x", rows)], [value("y", rows)], weights)
    return Kind(model, [{"x": (b, n, 8)} for b, n in ((1, 3), (4, 9), (11, 2))], ("x=8x5x8",))


def _branches(condition: Sequence[NodeProto], taken: NodeProto, otherwise: NodeProto) -> ModelProto:
    """An If between layers, whose branches say nothing of the shape that they make."""
    first, second = (
        helper.make_graph([branch], f"branch{at}", [], [value(branch.output[0], None)])
        for at, branch in enumerate((taken, otherwise))
    )
    nodes = [
        node("MatMul", ["x", "w"], ["a0"]),
        node("Relu", ["a0"], ["a"]),
        *condition,
        node("If", ["c"], ["f"], then_branch=first, else_branch=second),
        node("MatMul", ["f", "w"], ["y0"]),
        node("Tanh", ["y0"], ["y1"]),
        node("MatMul", ["y1", "w"], ["y"]),
    ]
    weights = [
        weight("w", 8, 8), constant("one", 1), constant("four", 4), constant("axis", [1]),
        constant("zero", 0, np.float32),
    ]  # fmt: skip
    return _made(nodes, [value("x", ["batch", "length", 8])], [value("y", ["b", "n", 8])], weights)


_LENGTH = [node("Shape", ["x"], ["shape"]), node("Gather", ["shape", "one"], ["length"])]


def if_by_size() -> Kind:
    """The branch follows from the length: for all samples alike."""
    condition = [*_LENGTH, node("Greater", ["length", "four"], ["c"])]
    model = _branches(condition, node("MatMul", ["a", "w"], ["t"]), node("Neg", ["a"], ["e"]))
    return Kind(model, [{"x": (b, n, 8)} for b, n in ((1, 3), (4, 9), (11, 4))], ("x=8x5x8",))


def if_by_numbers() -> Kind:
    """The branch follows from a sum over the batch, and the length from the branch."""
    condition = [
        node("ReduceSum", ["a0"], ["sum"], keepdims=0),
        node("Greater", ["sum", "zero"], ["c"]),
    ]
    both = node("Concat", ["a", "a"], ["t"], axis=1)
    model = _branches(condition, both, node("Identity", ["a"], ["e"]))
    return Kind(model, [{"x": (b, n, 8)} for b, n in ((1, 3), (4, 9), (2, 2))], ("x=8x5x8",))


def int4() -> Kind:
    """Weights of 4 bits in blocks, and a value of 4 bits between two nodes."""
    generator = np.random.default_rng(0)
    nodes = [
        node("DequantizeLinear", ["w4", "scales"], ["wide"], axis=0, block_size=8),
        node("MatMul", ["x", "wide"], ["a"]),
        node("Relu", ["a"], ["r"]),
        node("QuantizeLinear", ["r", "scale", "zero"], ["q"]),
        node("DequantizeLinear", ["q", "scale", "zero"], ["d"]),
        node("MatMul", ["d", "w"], ["b"]),
        node("Tanh", ["b"], ["t"]),
        node("MatMul", ["t", "w"], ["y"]),
    ]
    weights = [
        helper.make_tensor("w4", TensorProto.INT4, [16, 16], generator.integers(-8, 8, 256)),
        weight("scales", 2, 16),
        constant("scale", 0.1, np.float32),
        helper.make_tensor("zero", TensorProto.UINT4, [], [0]),
        weight("w", 16, 16),
    ]
    model = _made(nodes, [value("x", ["N", 16])], [value("y", ["N", 16])], weights, 21)
    return Kind(model, _rows(16, 1, 3, 13))


def of_microsoft() -> Kind:
    """Operators of ONNX Runtime's own, as its tools for transformers write them."""
    bits = np.random.default_rng(0).integers(0, 255, (32, 1, 16))
    own = {"domain": "com.microsoft"}
    bits4 = {"K": 32, "N": 32, "bits": 4, "block_size": 32}
    nodes = [
        node("MatMulNBits", ["x", "bits", "scales"], ["a"], **bits4, **own),
        node("BiasGelu", ["a", "bias"], ["g"], **own),
        node("SkipLayerNormalization", ["g", "x", "gamma", "beta"], ["s"], **own),
        node("FusedMatMul", ["s", "w"], ["f"], alpha=0.5, transB=1, **own),
        node("Attention", ["f", "qkv", "qkv_bias"], ["t"], num_heads=4, **own),
        node("Add", ["t", "s"], ["y"]),
    ]  # fmt: skip
    weights = [
        constant("bits", bits, np.uint8), weight("scales", 32), weight("bias", 32),
        weight("gamma", 32), weight("beta", 32), weight("w", 32, 32), weight("qkv", 32, 96),
        weight("qkv_bias", 96),
    ]  # fmt: skip
    rows = ["batch", "length", 32]
    model = _made(nodes, [value("x", rows)], [value("y", rows)], weights, 17, ["com.microsoft"])
    return Kind(model, [{"x": (b, n, 32)} for b, n in ((1, 3), (4, 9), (11, 2))], ("x=8x6x32",))


def recurrent() -> Kind:
    """LSTMs, whose batch is the second dimension, with the state of one of them."""
    nodes = [
        node("LSTM", ["x", "w", "r", "", "", "h", "c"], ["s", "hn", "cn"], hidden_size=8),
        node("Squeeze", ["s", "axis"], ["s1"]),
        node("Tanh", ["s1"], ["t"]),
        node("LSTM", ["t", "w", "r"], ["s2", ""], hidden_size=8),
        node("Squeeze", ["s2", "axis"], ["y"]),
    ]
    state = [1, "batch", 8]
    inputs = [value("x", ["time", "batch", 8]), value("h", state), value("c", state)]
    outputs = [value("y", ["time", "batch", 8]), value("hn", state), value("cn", state)]
    weights = [weight("w", 1, 32, 8), weight("r", 1, 32, 8), constant("axis", [1])]
    sizes = [
        {"x": (time, batch, 8), "h": (1, batch, 8), "c": (1, batch, 8)}
        for time, batch in ((2, 1), (5, 4), (9, 11))
    ]
    return Kind(_made(nodes, inputs, outputs, weights), sizes, ("x=6x8x8",))


def one_sample() -> Kind:
    """Exported for a single sample."""
    nodes = [
        node("Reshape", ["x", "two"], ["r"]),
        node("MatMul", ["r", "w"], ["a"]),
        node("Softmax", ["a"], ["s"]),
        node("Reshape", ["s", "one"], ["y"]),
    ]
    weights = [weight("w", 8, 8), constant("two", [2, 8]), constant("one", [1, 16])]
    model = _made(nodes, [value("x", [1, 2, 8])], [value("y", [1, 16])], weights)
    return Kind(model, [{"x": (1, 2, 8)}])


def words() -> Kind:
    """Strings that come in, are made, cross between stages and go out."""
    ml = {"domain": "ai.onnx.ml"}
    letters = list("abcd")
    nodes = [
        node("StringNormalizer", ["t"], ["lower"], case_change_action="LOWER", locale="C"),
        node("LabelEncoder", ["lower"], ["ids"], keys_strings=letters, values_int64s=[0, 1, 2, 3],
             default_int64=3, **ml),
        node("Gather", ["table", "ids"], ["e"]),
        node("MatMul", ["e", "w"], ["a"]),
        node("Relu", ["a"], ["r"]),
        node("ArgMax", ["r"], ["best"], axis=1, keepdims=0),
        node("LabelEncoder", ["best"], ["label"], keys_int64s=[0, 1, 2, 3],
             values_strings=letters, default_string="?", **ml),
        node("StringConcat", ["lower", "label"], ["said"]),
        node("MatMul", ["r", "w"], ["b"]),
        node("Tanh", ["b"], ["y"]),
        node("StringConcat", ["said", "end"], ["out"]),
    ]  # fmt: skip
    weights = [
        weight("table", 4, 4),
        weight("w", 4, 4),
        helper.make_tensor("end", STRING, [1], [b"!"]),
    ]
    outputs = [value("y", ["N", 4]), value("out", ["N"], STRING)]
    model = _made(nodes, [value("t", ["N"], STRING)], outputs, weights, 20, ["ai.onnx.ml"])
    return Kind(model, [{"t": (batch,)} for batch in (1, 3, 13)])


def sequences() -> Kind:
    """A sequence that later layers take tensors from, and add to."""
    nodes = [
        node("MatMul", ["x", "w"], ["a"]),
        node("SplitToSequence", ["a", "half"], ["halves"], axis=1),
        node("Relu", ["a"], ["r"]),
        node("MatMul", ["r", "w"], ["b"]),
        node("SequenceAt", ["halves", "first"], ["h"]),
        node("Neg", ["h"], ["n"]),
        node("SequenceInsert", ["halves", "n"], ["three"]),
        node("ConcatFromSequence", ["three"], ["c"], axis=1),
        node("Concat", ["c", "b"], ["y"], axis=1),
    ]
    weights = [weight("w", 8, 8), constant("half", 4), constant("first", 0)]
    model = _made(nodes, [value("x", ["N", 8])], [value("y", ["N", 20])], weights)
    return Kind(model, _rows(8, 1, 3, 13))


def optionals() -> Kind:
    """One optional that holds a tensor and one that holds nothing, for layers later."""
    kind = helper.make_tensor_type_proto(FLOAT, None)
    nodes = [
        node("MatMul", ["x", "w"], ["a"]),
        node("Optional", ["a"], ["some"]),
        node("Optional", [], ["none"], type=kind),
        node("Relu", ["a"], ["r"]),
        node("MatMul", ["r", "w"], ["b"]),
        node("OptionalHasElement", ["some"], ["yes"]),
        node("OptionalHasElement", ["none"], ["no"]),
        node("OptionalGetElement", ["some"], ["got"]),
        node("Cast", ["yes"], ["one"], to=FLOAT),
        node("Cast", ["no"], ["zero"], to=FLOAT),
        node("Mul", ["got", "one"], ["m"]),
        node("Add", ["b", "zero"], ["z"]),
        node("Add", ["m", "z"], ["y"]),
    ]
    model = _made(nodes, [value("x", ["N", 8])], [value("y", ["N", 8])], [weight("w", 8, 8)])
    return Kind(model, _rows(8, 1, 3, 13))


def newest() -> Kind:
    """Operators of opset 24."""
    heads = {"q_num_heads": 4, "kv_num_heads": 4}
    nodes = [
        node("RMSNormalization", ["x", "g"], ["a"]),
        node("MatMul", ["a", "w"], ["q"]),
        node("MatMul", ["q", "w"], ["k"]),
        node("Attention", ["q", "k", "x"], ["t"], **heads),
        node("Swish", ["t"], ["s"]),
        node("Add", ["s", "x"], ["y"]),
    ]
    rows = ["batch", "length", 32]
    weights = [weight("g", 32), weight("w", 32, 32)]
    model = _made(nodes, [value("x", rows)], [value("y", rows)], weights, 24)
    return Kind(model, [{"x": (b, n, 32)} for b, n in ((1, 3), (4, 9), (11, 2))], ("x=8x6x32",))


KINDS: Mapping[str, Callable[[], Kind]] = {
    make.__name__: make
    for make in (
        *(loops, if_by_size, if_by_numbers, int4, of_microsoft, recurrent, one_sample),
        *(words, sequences, optionals, newest),
    )
}
