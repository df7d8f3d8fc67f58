"""Concatenations lose their empty parts where the result may be the part that is left."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe_compiler.compile import trace
from gpipe_compiler.ir import Graph, called
from gpipe_compiler.ir.interpret import Interpreter
from gpipe_compiler.options import LossChoice
from gpipe_compiler.passes.empty_parts import without_empty_parts


class Cached(nn.Module):
    """Attention over keys and values that are joined to an empty cache."""

    def __init__(self, *, fixed: bool, reads: str) -> None:
        super().__init__()
        self.qkv, self.fixed, self.reads = nn.Linear(8, 24), fixed, reads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p.view(-1, 5, 2, 4).transpose(1, 2) for p in self.qkv(x).split(8, -1))
        kind = torch.float32 if self.fixed else k.dtype
        k = torch.cat([torch.tensor([], dtype=kind), k], dim=-2)
        v = torch.cat([torch.tensor([], dtype=kind), v], dim=-2)
        if self.reads == "view":  # of what is contiguous, as a copy is
            v = v.view(-1, 10, 4).view(-1, 2, 5, 4)
        if self.reads == "write":
            v.mul_(2.0)
        if self.reads == "reshape":  # what has x's strides is viewed in another way
            v = v.reshape(-1, 2, 5, 4).view(-1, 10, 4).view(-1, 2, 5, 4)
        if self.reads == "copy":  # of what has x's strides, that would be none
            q = v.transpose(1, 2).contiguous().mul_(2.0).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v)
        return out + v if self.reads == "twice" else out


def traced(model: nn.Module, x: Tensor) -> Graph:
    return trace(model, (x,), loss=LossChoice.SUM_OF_SQUARES)


def joined(graph: Graph) -> int:
    return sum(called(op.call) == "cat" for op in graph.ops)


@pytest.mark.parametrize(
    ("fixed", "reads", "left"),
    [
        *((False, "", 0), (True, "", 0), (False, "view", 0), (True, "view", 1)),
        *((False, "write", 1), (False, "twice", 0), (False, "reshape", 0), (False, "copy", 1)),
    ],
)
def test_what_is_left_is_the_part_in_the_type_that_it_had(fixed, reads, left):
    torch.manual_seed(0)
    model, x = Cached(fixed=fixed, reads=reads), torch.randn(4, 5, 8)
    graph = traced(model, x)

    found = without_empty_parts(graph)

    assert (joined(graph), joined(found)) == (2, left)
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
            (source,) = found.inputs
            states = {name: tensor.detach() for name, tensor in found.tensors.items()}
            ran = Interpreter(found, states).run({source.name: x})
            expected = model(x)
        (name,) = [value for value in found.ends if value != found.loss.value]
        assert ran[name].dtype is expected.dtype
        assert torch.equal(ran[name], expected)
        assert ran[name].stride() == expected.stride()
