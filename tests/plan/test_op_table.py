"""The notes about ops that a plan keeps in its JSON."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from gpipe_compiler.errors import SourceLocation
from gpipe_compiler.ir import (
    FunctionCall,
    Graph,
    Input,
    MethodCall,
    ModuleCall,
    ModuleSpec,
    NoGrad,
    Op,
    Ref,
    Region,
    State,
    StateKind,
    Value,
    ValueKind,
)
from gpipe_compiler.plan.stages import OpNote, list_ops

WEIGHT = State("fc.weight", StateKind.PARAMETER, (2, 3), torch.float32)


def graph() -> Graph:
    """Of batch size 8; `w` has a batch of 4 times 8 in dimension 1."""
    tensor = ValueKind.TENSOR
    return Graph(
        name="g",
        inputs=(Input("x", ("args", 0)),),
        ops=(
            Op("fc", ModuleCall("fc", (Ref("x"),)), "fc", SourceLocation("/u/m.py", 3)),
            Op("a", FunctionCall(F.relu, (Ref("fc"),)), "a", module="act"),
            Op("r", MethodCall("neg", (Ref("a"),)), "r", regions=(Region(NoGrad()),)),
            Op("n", MethodCall("size", (Ref("r"), 0)), "n"),
            Op("w", FunctionCall(torch.stack, ([Ref("a")],)), "w"),
        ),
        outputs=Ref("w"),
        state={"fc.weight": WEIGHT},
        modules={"fc": ModuleSpec("fc", nn.Linear, (3, 2), state={"weight": "fc.weight"})},
        batch_size=8,
        values={
            "fc": Value("fc", tensor, (8, 2), torch.float32, 0),
            "n": Value("n", ValueKind.SCALAR),
            "w": Value("w", tensor, (5, 32), torch.bool, 1),
        },
    )


def test_every_kind_of_call_is_noted_for_one_micro_batch() -> None:
    assert list_ops(graph(), samples=2) == (
        OpNote("fc", "Linear", ("x",), ("fc",), ("2x2 float32",), "fc", ("fc.weight",), "m.py:3"),
        OpNote("a", "F.relu", ("fc",), ("a",), ("",), "act"),
        OpNote("r", ".neg", ("a",), ("r",), ("",)),
        OpNote("n", ".size", ("r",), ("n",), ("scalar",)),
        OpNote("w", "torch.stack", ("a",), ("w",), ("5x8 bool",)),
    )
