"""What the user's functions call what they compute with, as ops have it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import gpipe_compiler as gpc
from gpipe_compiler.ir.ops import Bound


class Pair(NamedTuple):
    near: Tensor
    far: Tensor


@dataclass
class Given:
    scale: Tensor
    known: dict[str, Any]


class Inner(nn.Module):
    def forward(self, pair: Pair, given: Given, *, shift: Tensor, words: list[str]) -> Tensor:
        far = pair.far
        first = pair.near * given.scale
        given.known["again"] = given.known
        pair = Pair(first, far)
        return pair.near.cos() + far.sin() + shift.tan() * len(words)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift, self.inner = nn.Linear(4, 4), Inner()

    def forward(self, x: Tensor) -> Tensor:
        y = self.lift(x)
        words = ["word"] * 1000
        given = Given(y.exp(), {})
        return self.inner(Pair(x, y), given, shift=y + 1, words=words)


def test_names_are_those_of_the_functions_around() -> None:
    """Of what stands in tuples and objects, of parameters and of names that statements give."""
    x = torch.randn(4, 4)
    loss = nn.functional.mse_loss
    graph = gpc.trace(Outer(), (x,), target=torch.randn(4, 4), loss_fn=loss)
    found = {
        op.name: {(name.name, name.path, name.bound) for name in op.seen if name.scope == 1}
        for op in graph.ops
        if op.module == "inner"
    }
    assert ("pair", ("near",), Bound.PARAMETER) in found["mul"]
    assert ("given", ("scale",), Bound.PARAMETER) in found["mul"]
    assert ("far", (), Bound.STATEMENT) in found["sin"]
    assert ("pair", ("far",), Bound.PERHAPS) in found["sin"]
    assert ("shift", (), Bound.PARAMETER) in found["tan"]
