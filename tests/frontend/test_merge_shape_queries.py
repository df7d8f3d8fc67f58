"""Questions about shapes, asked once for both modes."""

from __future__ import annotations

import operator

import torch

from gpipe_compiler.frontend.merge_shape_queries import always_contiguous, merge_shape_queries
from gpipe_compiler.ir import ByMode, FunctionCall, MethodCall, Mode, Op, Ref


def ask(name: str, mode: Mode, of: str = "x") -> Op:
    return Op(name, MethodCall("size", (Ref(of), 0)), name, mode=mode)


def test_the_same_size_is_asked_once_and_its_readers_choose_no_more():
    reader = Op("zeros", FunctionCall(torch.zeros, (ByMode(Ref("n"), Ref("m")), 4)), "zeros")
    ops, outputs = merge_shape_queries(
        [ask("n", Mode.TRAIN), ask("m", Mode.EVAL), reader], {"size": Ref("m"), "out": Ref("zeros")}
    )

    assert [(op.name, op.mode) for op in ops] == [("n", Mode.ALWAYS), ("zeros", Mode.ALWAYS)]
    assert ops[1].call.args == (Ref("n"), 4)
    assert outputs == {"size": Ref("n"), "out": Ref("zeros")}


def test_arithmetic_on_answers_is_unified_and_other_arithmetic_is_not():
    def double(name: str, of: str, mode: Mode) -> Op:
        return Op(name, FunctionCall(operator.mul, (Ref(of), 2)), name, mode=mode)

    ops, _ = merge_shape_queries(
        [
            ask("n", Mode.TRAIN),
            double("twice_n", "n", Mode.TRAIN),
            double("tensor", "x", Mode.TRAIN),
            ask("m", Mode.EVAL),
            double("twice_m", "m", Mode.EVAL),
            double("other", "x", Mode.EVAL),
        ],
        (),
    )

    assert [op.name for op in ops] == ["n", "twice_n", "tensor", "other"]
    assert [op.mode for op in ops] == [Mode.ALWAYS, Mode.ALWAYS, Mode.TRAIN, Mode.EVAL]


def test_different_questions_stay_apart():
    whole = Op("whole", MethodCall("size", (Ref("x"),)), ("a", None), mode=Mode.TRAIN)
    other = Op("other", MethodCall("size", (Ref("x"),)), (None, "b"), mode=Mode.EVAL)
    ops, _ = merge_shape_queries([ask("n", Mode.TRAIN), ask("m", Mode.EVAL, "y"), whole, other], ())

    assert [op.mode for op in ops] == [Mode.TRAIN, Mode.EVAL, Mode.TRAIN, Mode.EVAL]


def test_contiguous_stays_in_its_mode_with_what_it_reads():
    """And runs in both where both have that: the layout alone decided that one left it out."""

    def contiguous(name: str, of: str) -> Op:
        return Op(name, MethodCall("contiguous", (Ref(of),)), name, mode=Mode.TRAIN)

    turned = Op("turned", MethodCall("t", (Ref("x"),)), "turned", mode=Mode.TRAIN)
    read = Op("read", FunctionCall(torch.sin, (ByMode(Ref("whole"), Ref("x")),)), "read")

    ops = always_contiguous((turned, contiguous("own", "turned"), contiguous("whole", "x"), read))

    assert [op.mode for op in ops] == [Mode.TRAIN, Mode.TRAIN, Mode.ALWAYS, Mode.ALWAYS]
    assert ops[-1].call.args == (Ref("whole"),)
