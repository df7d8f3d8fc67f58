"""Ops that change nothing go; all others stay, and no number changes."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe_compiler.compile import trace
from gpipe_compiler.ir import Ref
from gpipe_compiler.ir.interpret import Interpreter
from gpipe_compiler.options import LossChoice
from gpipe_compiler.passes.pass_setting import PassSetting
from gpipe_compiler.passes.pipeline import transform
from gpipe_compiler.passes.shapes import annotate
from gpipe_compiler.passes.simplify import simplify

WHOLE = slice(None)
FLOATS = torch.tensor([[-0.0, 1.5, float("nan")], [float("inf"), -2.0, 0.0]])
IDS = torch.arange(6).reshape(2, 3)


def after(builder, given: Tensor, add: Callable) -> tuple[int, Tensor, Tensor]:
    """How many of the ops stay, and what the last gives before and after; x is doubled first."""
    b = builder(x=given)
    first = b.call(operator.add, Ref("x"), Ref("x"), name="first")
    last = b.call(operator.neg, add(b, first), name="last")
    graph = annotate(b.graph(last), 2)
    simple = simplify(graph)
    for name, value in annotate(simple.replace(values={}), 2).values.items():
        found = simple.values[name]
        assert (found.shape, found.dtype, found.batch_dim) == (
            (value.shape, value.dtype, value.batch_dim)
        )
    runs = [Interpreter(g, {}).run({"x": given})["last"] for g in (graph, simple)]
    return len(simple.ops) - 2, *runs


@pytest.mark.parametrize(
    ("given", "add"),
    [
        (IDS, lambda b, x: b.call(operator.add, x, 0)),
        (IDS, lambda b, x: b.call(operator.mul, x, 1)),
        (FLOATS, lambda b, x: b.call(operator.mul, x, 1.0)),
        (FLOATS.half(), lambda b, x: b.call(operator.mul, x, 1.0)),
        (FLOATS, lambda b, x: b.call(operator.sub, x, 0.0)),
        (FLOATS, lambda b, x: b.call(operator.truediv, x, 1)),
        (FLOATS, lambda b, x: b.method("expand", x, -1, 3)),
        (FLOATS, lambda b, x: b.method("reshape", x, -1, 3)),
        (FLOATS, lambda b, x: b.call(operator.getitem, x, (WHOLE, WHOLE))),
        (FLOATS, lambda b, x: b.call(F.dropout, x, 0.0, True)),
        (FLOATS, lambda b, x: b.call(F.pad, x, (0, 0))),
    ],
)
def test_what_changes_nothing_goes(builder, given, add):
    kept, before, now = after(builder, given, add)

    assert kept == 0
    assert before.dtype is now.dtype
    assert before.numpy().tobytes() == now.numpy().tobytes()


@pytest.mark.parametrize(
    ("given", "add"),
    [
        (FLOATS, lambda b, x: b.call(operator.add, x, 0)),  # -0.0
        (FLOATS, lambda b, x: b.call(operator.sub, x, -0.0)),
        (IDS, lambda b, x: b.call(operator.mul, x, 1.0)),  # integers become floats
        (IDS, lambda b, x: b.call(operator.add, x, 0.0)),
        (IDS, lambda b, x: b.call(operator.truediv, x, 1)),
        (FLOATS > 0, lambda b, x: b.call(operator.add, x, 0)),  # bools become integers
        (FLOATS, lambda b, x: b.method("to", x, torch.float32)),  # it may come in 16 bits
        (FLOATS, lambda b, x: b.call(operator.getitem, x, (WHOLE, slice(0, 2)))),
        (FLOATS, lambda b, x: b.call(F.dropout, x, 0.5, False)),
        (FLOATS, lambda b, x: b.call(F.pad, x, (0, 0), "reflect")),  # other strides
    ],
)
def test_what_may_change_something_stays(builder, given, add):
    kept, before, now = after(builder, given, add)

    assert kept == 1
    assert before.numpy().tobytes() == now.numpy().tobytes()


EVERYWHERE, NOWHERE = (operator.ge, 0), (operator.lt, 0)


@pytest.mark.parametrize(
    ("dtype", "condition", "args", "goes"),
    [
        (torch.float32, EVERYWHERE, lambda x: (x, -1.0), True),
        (torch.float32, NOWHERE, lambda x: (-1.0, x), True),
        (torch.float32, EVERYWHERE, lambda x: (-1.0, x), False),
        (torch.float32, (operator.lt, 3), lambda x: (x, -1.0), False),  # only at this size
        (torch.int64, EVERYWHERE, lambda x: (x, -1.0), False),  # integers become floats
        (torch.float32, EVERYWHERE, lambda x: (x, Ref("other")), False),  # x may come in 16 bits
    ],
)
def test_a_choice_goes_that_is_the_same_everywhere(builder, dtype, condition, args, goes):
    given = FLOATS.nan_to_num(posinf=3.0).to(dtype)
    b = builder(x=given, other=torch.ones(2, 3))
    row = b.call(torch.arange, 3)
    first = b.call(operator.add, Ref("x"), Ref("x"))
    found = b.call(torch.where, b.call(condition[0], row, condition[1]), *args(first), name="found")
    last = b.call(operator.neg, b.method("contiguous", found))
    graph = annotate(b.graph(last), 2)
    simple = simplify(graph)
    inputs = {"x": given, "other": torch.ones(2, 3)}
    before, now = (Interpreter(g, {}).run(inputs)[last.name] for g in (graph, simple))

    assert ("found" not in simple.op_of) is goes
    assert before.dtype is now.dtype
    assert before.numpy().tobytes() == now.numpy().tobytes()


def test_a_condition_goes_that_holds_everywhere(builder):
    b = builder(x=FLOATS)
    row = b.call(torch.arange, 3)
    ones = b.method("new_ones", row, [], dtype=torch.bool)
    low, high = (b.call(compare, row, 1) for compare in (operator.le, operator.ge))
    found = b.call(operator.and_, ones, low, name="everywhere")
    here = b.call(operator.and_, b.call(operator.lt, row, 3), found, name="only at this size")
    view = b.call(operator.and_, b.method("unsqueeze", high, 0), ones, name="of a view")
    last = b.call(torch.where, b.call(operator.or_, here, view), Ref("x"), 2.0)
    graph = annotate(b.graph(last), 2)
    simple = simplify(graph)
    before, now = (Interpreter(g, {}).run({"x": FLOATS})[last.name] for g in (graph, simple))

    assert "everywhere" not in simple.op_of
    assert {"only at this size", "of a view"} <= simple.op_of.keys()
    assert before.numpy().tobytes() == now.numpy().tobytes()


def test_a_size_of_the_batch_is_known_for_what_it_is(builder):
    b = builder(x=torch.randn(3, 4))
    batch = b.method("size", Ref("x"), 0, name="batch")
    h = b.call(operator.neg, Ref("x"), name="h")
    same = b.method("view", h, batch, 4, name="same")
    wide = b.method("expand", b.method("unsqueeze", same, 0), batch, -1, -1, name="wide")
    graph = simplify(annotate(b.graph(b.method("sum", wide)), 1))

    assert "same" not in graph.op_of
    assert "wide" in graph.op_of, "with one sample it is of one shape with what it widens"


def test_what_is_written_in_place_stays_apart(builder):
    b = builder(x=torch.randn(3, 4))
    h = b.call(operator.neg, Ref("x"), name="h")
    copy = b.call(operator.mul, h, 1.0, name="copy")
    b.method("add_", copy, 1.0, name="written")
    graph = simplify(annotate(b.graph((h, b.call(operator.neg, copy))), 3))

    assert "copy" in graph.op_of


def test_a_sum_of_integers_is_made_in_the_memory_of_the_first(builder):
    b = builder(x=torch.arange(6).reshape(3, 2))
    own = b.call(operator.mul, Ref("x"), 16, name="own")
    first = b.call(operator.add, own, 0, name="first")
    b.call(operator.iadd, first, Ref("x"), name="last")
    again = b.call(operator.add, Ref("x"), 0, name="again")
    more = b.call(operator.add, again, 0, name="more")
    b.call(operator.iadd, more, 1, name="written")
    graph = annotate(b.graph((Ref("last"), Ref("written"), Ref("x"))), 3)
    simple = simplify(graph)
    given = torch.arange(6).reshape(3, 2)
    values = Interpreter(simple, {}).run({"x": given})

    assert "first" not in simple.op_of
    assert {"again", "more"} & simple.op_of.keys(), "the caller's x is not to be written to"
    assert torch.equal(values["last"], given * 17)
    assert torch.equal(values["written"], torch.arange(6).reshape(3, 2) + 1)
    assert torch.equal(given, torch.arange(6).reshape(3, 2))


@pytest.mark.parametrize("width", [3, 8, 13, 64, 100])
@pytest.mark.parametrize("times", [1.0, 1 + 2**-40])
def test_attention_loses_the_scale_that_it_takes_by_itself(builder, width, times):
    given = torch.randn(2, 2, 5, width)
    b = builder(x=given)
    scale = times / width**0.5
    found = b.call(F.scaled_dot_product_attention, *[Ref("x")] * 3, scale=scale, name="found")
    simple = simplify(annotate(b.graph(found), 2))

    assert ("scale" in simple.op_of["found"].call.kwargs) is (times != 1)
    expected = F.scaled_dot_product_attention(given, given, given, scale=scale)
    assert torch.equal(Interpreter(simple, {}).run({"x": given})["found"], expected)


class Scaled(nn.Module):
    """Tables made without gradients, scaled by one as rotary embeddings are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            table = torch.arange(4, device=x.device).float().cos() * 1.0
        shared = self.linear(x)
        same = shared.reshape(x.shape[0], -1, 4)
        return (same * table + same.relu()).sum(1) + shared.sum(1)


@pytest.mark.parametrize("batch", [2, 5])
def test_numbers_and_gradients_of_a_model_are_the_same_bits(batch):
    torch.manual_seed(0)
    model = Scaled()
    graph = trace(model, (torch.randn(3, 6, 4),), loss=LossChoice.SUM_OF_SQUARES)
    simple = transform(graph, PassSetting(3))
    assert len([op for op in simple.ops if op.regions]) == 3
    x = torch.randn(batch, 6, 4)
    expected = model(x).square().sum()
    expected.backward()
    tensors = {n: t.detach().clone().requires_grad_() for n, t in simple.tensors.items()}
    loss = Interpreter(simple, tensors).run({"x": x})[simple.loss.value]
    loss.backward()

    assert torch.equal(loss, expected)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, tensors[name].grad)


def test_gradients_of_three_readers_are_added_up_in_the_order_of_the_model():
    simple = transform(
        trace(Scaled(), (torch.randn(3, 6, 4),), loss=LossChoice.SUM_OF_SQUARES), PassSetting(3)
    )

    assert "reshape" in simple.op_of


def test_contiguous_goes_where_its_operand_is_so_whatever_kernels_do(builder):
    b = builder(x=FLOATS)
    first = b.call(operator.add, Ref("x"), Ref("x"))
    laid = b.method("contiguous", first, name="as a kernel lays it out")
    flat = b.method("reshape", laid, -1, 3, 1)
    again = b.method("contiguous", flat, name="again")
    turned = b.method("contiguous", b.method("transpose", again, 1, 2), name="turned")
    last = b.call(operator.neg, turned)
    simple = simplify(annotate(b.graph(last), 2))

    assert "again" not in simple.op_of
    assert {"as a kernel lays it out", "turned"} <= simple.op_of.keys()
