"""Graphs with ops in place, held bit for bit against the graphs as they were, run for real."""

from __future__ import annotations

import operator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from gpipe_compiler.ir import FunctionCall, Graph, MethodCall, ModuleCall, Ref
from gpipe_compiler.passes.effects import effects
from gpipe_compiler.passes.inplace import write_in_place
from gpipe_compiler.passes.shapes import annotate
from gpipe_compiler.runtime.spec import Precision

WIDTH = 4
UNARY = {
    "relu": F.relu,
    "relu6": F.relu6,
    "leaky": lambda b, u: b.call(F.leaky_relu, u, 0.1),
    "elu": F.elu,
    "silu": F.silu,
    "gelu": F.gelu,
    "sigmoid": torch.sigmoid,
    "exp": torch.exp,
    "tanh": torch.tanh,
}
STEPS = (
    *UNARY,
    *("linear", "norm", "shared", "add", "sub", "mul", "scale", "fill", "clamp"),
    *("dropout", "identity", "view", "relu_", "size", "cat"),
)


def build(builder, steps: list[tuple[str, int, int]], training: bool) -> Graph:
    """A graph of (batch, 4) tensors: each step takes two earlier values by number, the newest 0."""
    torch.manual_seed(1)
    b = builder(x=torch.randn(3, WIDTH), y=torch.randn(3, WIDTH))
    b.add_module("relu", nn.ReLU)
    values = [Ref("y"), Ref("x")]
    for number, (kind, first, second) in enumerate(steps):
        u, v = values[-1 - first % len(values)], values[-1 - second % len(values)]
        name = f"{kind}{number}"
        match kind:
            case "linear":
                b.add_module(name, nn.Linear, WIDTH, WIDTH)
                values.append(b.module(name, u))
            case "norm":
                b.add_module(name, nn.BatchNorm1d, WIDTH)
                values.append(b.module(name, u))
            case "shared":
                values.append(b.module("relu", u))
            case "add" | "sub" | "mul":
                values.append(b.call(getattr(operator, kind), u, v))
            case "scale":
                values.append(b.call(operator.mul, 0.5, u))
            case "fill":
                mask = b.call(operator.gt, v, 0.0)
                values.append(b.method("masked_fill", u, mask, 0.25))
            case "clamp":
                values.append(b.method("clamp", u, -1.0, 1.0))
            case "dropout" | "identity":
                values.append(b.call(F.dropout, u, 0.5, training=kind == "dropout"))
            case "view":
                values.append(b.method("view", u, -1, WIDTH))
            case "relu_":
                values.append(b.call(F.relu, u, inplace=True))
            case "size":
                half = b.call(operator.floordiv, b.method("size", v, 1), 2)
                values.append(b.call(operator.mul, u, half))
            case "cat":
                halves = b.method("chunk", u, 2, 1, results=2)
                values.append(b.call(torch.cat, list(halves[::-1]), 1))
            case _:
                make = UNARY[kind]
                values.append(make(b, u) if kind == "leaky" else b.call(make, u))
    loss = b.method("sum", values[-1]) if training else None
    return b.graph((values[-1], values[-2]), loss)


def accepted(eager, graph: Graph) -> bool:
    """Whether torch itself can run it, its own writes in place included."""
    try:
        run_of(eager, graph, graph.loss is not None)
    except RuntimeError:
        return False
    return True


def run_of(eager, graph: Graph, training: bool) -> dict[str, torch.Tensor]:
    run = eager(graph, graph.batch_size, training)
    with torch.set_grad_enabled(graph.loss is not None):
        values = run.run()
    found = {name: values[name].detach() for name in graph.output_values}
    if graph.loss is not None and values[graph.loss.value].requires_grad:
        values[graph.loss.value].backward()
        found.update((n, s.grad) for n, s in run.states.items() if s.grad is not None)
    return found


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def changed(before: Graph, after: Graph) -> dict[str, str]:
    """The ops that are in place now, and what is called."""
    found = {}
    for old, new in zip(before.ops, after.ops, strict=True):
        call = new.call
        if isinstance(call, ModuleCall):
            same = before.modules[call.module].kwargs == after.modules[call.module].kwargs
            if not same:
                found[new.name] = call.module
        elif isinstance(call, FunctionCall) and call != old.call:
            found[new.name] = call.function.__name__
        elif isinstance(call, MethodCall) and call != old.call:
            found[new.name] = call.method
    return found


@settings(max_examples=120, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(STEPS), st.integers(0, 3), st.integers(0, 3)),
        min_size=2,
        max_size=9,
    ),
    training=st.booleans(),
)
def test_no_bit_changes_in_either_mode_forward_or_backward(builder, eager, steps, training):
    graph = build(builder, steps, training)
    if not accepted(eager, graph):
        return
    graph = annotate(graph, graph.batch_size)

    found = write_in_place(graph)

    for mode in (True, False):
        assert same_bits(run_of(eager, graph, mode), run_of(eager, found, mode))
    # Every storage of the new graph is one that the old one had.
    storages = {value.storage for value in graph.values.values()}
    assert len({value.storage for value in found.values.values()}) <= len(storages)
    written = effects(found)
    assert all(name in written.writes for name in changed(graph, found))


def test_a_residual_block_is_written_in_place_as_a_person_would(builder):
    b = builder(x=torch.randn(2, 3, 8, 8))
    b.add_module("conv1", nn.Conv2d, 3, 3, 3, padding=1)
    b.add_module("bn1", nn.BatchNorm2d, 3)
    b.add_module("conv2", nn.Conv2d, 3, 3, 3, padding=1)
    b.add_module("bn2", nn.BatchNorm2d, 3)
    b.add_module("relu", nn.ReLU)
    first = b.module("conv1", Ref("x"), name="a")
    h = b.module("relu", b.module("bn1", first, name="b"), name="c")
    h = b.module("bn2", b.module("conv2", h, name="d"), name="e")
    added = b.call(operator.add, first, h, name="f")
    out = b.module("relu", added, name="g")
    graph = annotate(b.graph(out, b.method("sum", out)), 2)

    found = write_in_place(graph)

    assert changed(graph, found) == {"c": "relu", "f": "iadd", "g": "relu"}
    # The shortcut `a` is read twice: the other operand takes the sum.
    assert found.op_of["f"].call.args == (Ref("e"), Ref("a"))
    assert found.modules["relu"].kwargs == {"inplace": True}
    storage = {name: value.storage for name, value in found.values.items()}
    assert storage["e"] == storage["f"] == storage["g"] != storage["a"]


def test_a_module_called_twice_is_in_place_where_it_may_be(builder):
    b = builder(x=torch.randn(2, WIDTH))
    b.add_module("fc", nn.Linear, WIDTH, WIDTH)
    b.add_module("relu", nn.ReLU)
    h = b.module("relu", Ref("x"), name="of_the_input")
    h = b.module("relu", b.module("fc", h), name="of_its_own")
    graph = annotate(b.graph(h, b.method("sum", h)), 2)

    found = write_in_place(graph)

    assert changed(graph, found) == {"of_its_own": "relu"}
    assert found.op_of["of_its_own"].call == FunctionCall(
        F.relu, found.op_of["of_its_own"].call.args, {"inplace": True}
    )
    assert not found.modules["relu"].kwargs


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda b, h: b.call(F.relu, b.call(F.sigmoid, Ref("x"))), "sigmoid may keep its result"),
        (lambda b, h: b.call(F.silu, h), "silu keeps its argument"),
        (lambda b, h: b.method("clamp", h, -1.0, 1.0), "clamp keeps its argument"),
        (lambda b, h: b.call(F.elu, h), "the gradient is computed in another way"),
        (
            lambda b, h: b.call(operator.mul, h, b.module("fc", Ref("x"))),
            "a product keeps its factors",
        ),
        (lambda b, h: b.call(F.relu, b.method("view", h, -1)), "a view of what somebody made"),
        (lambda b, h: b.call(operator.sub, b.call(F.gelu, h), h), "gelu keeps it, sub reads it"),
        (
            lambda b, h: b.call(operator.sub, b.call(F.softmax, h, -1), 1),
            "softmax keeps its result",
        ),
        (lambda b, h: b.call(F.relu, Ref("x")), "an input is the caller's"),
        (lambda b, h: b.call(operator.add, h, h), "both operands are one tensor"),
        (lambda b, h: b.call(operator.mul, b.call(operator.getitem, h, 0), 2), "a view"),
    ],
)
def test_what_somebody_needs_is_let_be(builder, make, why):
    b = builder(x=torch.randn(2, WIDTH))
    b.add_module("fc", nn.Linear, WIDTH, WIDTH)
    h = b.module("fc", Ref("x"))
    out = make(b, h)
    graph = annotate(b.graph((out,), b.method("sum", out)), 2)

    found = write_in_place(graph)

    assert not changed(graph, found), why


def test_what_is_returned_or_returned_by_dropout_is_let_be(builder):
    b = builder(x=torch.randn(2, WIDTH))
    b.add_module("fc", nn.Linear, WIDTH, WIDTH)
    h = b.module("fc", Ref("x"))
    kept = b.call(F.dropout, h, 0.5, training=False)
    out = b.call(F.relu, kept)
    graph = annotate(b.graph((out, h), b.method("sum", out)), 2)

    assert not changed(graph, write_in_place(graph))


def test_without_a_backward_nobody_keeps_anything(builder):
    b = builder(x=torch.randn(2, WIDTH))
    b.add_module("fc", nn.Linear, WIDTH, WIDTH)
    h = b.call(F.silu, b.module("fc", Ref("x")), name="silu")
    h = b.call(operator.mul, b.method("clamp", h, -1.0, 1.0, name="clamp"), 2.0, name="mul")
    graph = annotate(b.graph((h,)), 2)

    found = changed(graph, write_in_place(graph))

    assert found == {"silu": "silu", "clamp": "clamp_", "mul": "imul"}


def test_operands_that_autocast_may_make_of_two_types_are_let_be(builder):
    """Under bf16 the product is of 16 bits and the sum is not, whatever the package is for."""
    b = builder(x=torch.randn(2, 3, WIDTH))
    b.add_module("fc", nn.Linear, WIDTH, WIDTH, bias=False)
    out = b.call(operator.add, Ref("x"), b.module("fc", Ref("x")))
    plain = b.graph((out,))

    for precision in (Precision.FP32, Precision.BF16):
        graph = annotate(plain, 2, precision)
        assert not changed(graph, write_in_place(graph))


def test_the_writes_of_repeated_blocks_are_those_of_one(builder):
    b = builder(x=torch.randn(2, WIDTH))
    h = Ref("x")
    for number in range(12):
        b.add_module(f"fc{number}", nn.Linear, WIDTH, WIDTH)
        b.add_module(f"bn{number}", nn.BatchNorm1d, WIDTH)
        norm = b.module(f"bn{number}", b.module(f"fc{number}", h))
        h = b.call(F.relu, norm, name=f"relu{number}")
    graph = annotate(b.graph((h,), b.method("sum", h)), 2)
    assert graph.repeats

    found = write_in_place(graph)

    assert changed(graph, found) == {f"relu{number}": "relu" for number in range(12)}
    assert found.repeats
