"""`contiguous()` that one mode does without."""

from __future__ import annotations

import torch

from gpipe_compiler.frontend.alignment import always_contiguous
from gpipe_compiler.ir import ByMode, FunctionCall, MethodCall, Mode, Op, Ref


def test_contiguous_stays_in_its_mode_with_what_it_reads():
    """And runs in both where both have that: the layout alone decided that one left it out."""

    def contiguous(name: str, of: str) -> Op:
        return Op(name, MethodCall("contiguous", (Ref(of),)), name, mode=Mode.TRAIN)

    turned = Op("turned", MethodCall("t", (Ref("x"),)), "turned", mode=Mode.TRAIN)
    read = Op("read", FunctionCall(torch.sin, (ByMode(Ref("whole"), Ref("x")),)), "read")

    ops = always_contiguous((turned, contiguous("own", "turned"), contiguous("whole", "x"), read))

    assert [op.mode for op in ops] == [Mode.TRAIN, Mode.TRAIN, Mode.ALWAYS, Mode.ALWAYS]
    assert ops[-1].call.args == (Ref("whole"),)
