"""Branches on values are recorded as they go for the example, and stages check that they do."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipe_compiler as gpc
from gpipe_compiler.cluster import DEFAULT_HOST, IN_PROCESS, Cluster
from gpipe_compiler.errors import TraceError
from gpipe_compiler.ir.branches import required_lines


class ByBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)
        self.register_buffer("rounds", torch.tensor(2))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(int(self.rounds)):
            x = x.sin()
        return self.last(self.first(x).tanh())


def test_another_number_in_a_buffer_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x, target = ByBuffer(), torch.randn(6, 4), torch.randint(3, (6,))
    graph = gpc.trace(model, x, target=target, loss_fn=F.cross_entropy)
    cluster = Cluster.of(DEFAULT_HOST, IN_PROCESS)
    gpc.emit(gpc.plan(graph, stages=2, microbatches=3, cluster=cluster), tmp_path / "by_buffer")
    sys.path.insert(0, str(tmp_path))
    try:
        package = importlib.import_module("by_buffer")
    finally:
        sys.path.remove(str(tmp_path))
    with package.Pipeline() as pipe:
        assert torch.allclose(pipe.step((x,), target), F.cross_entropy(model(x), target))
        pipe.load_state_dict({**model.state_dict(), "rounds": torch.tensor(3)})
        with pytest.raises(Exception, match=r"range\(int\(self.rounds\)\)") as caught:
            pipe.step((x,), target)
    assert type(caught.value).__name__ == "BranchError"


class Nested(nn.Module):
    """Asks in a helper, in a loop, and of numbers that no model knows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def guarded(self, x: Tensor) -> Tensor:
        return x.clamp(max=9) if bool((x > 1e3).any()) else x

    def forward(self, x: Tensor) -> Tensor:
        for bound in (torch.tensor(1.0), torch.tensor(2.0)):
            if bound > 1:
                x = self.guarded(x)
        return self.layer(x)


def test_every_question_gets_its_own_answer() -> None:
    graph = gpc.trace(Nested(), torch.randn(6, 4), training=False)
    lines = [line for line in required_lines(graph.ops) if "1e3" in line]
    assert len(lines) == 1


class Item(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (2 if x.abs().max().item() > 1e3 else 1)


def test_a_number_of_the_batch_is_no_answer() -> None:
    """It is another one for every batch."""
    with pytest.raises(TraceError, match="values of a tensor"):
        gpc.trace(Item(), torch.randn(6, 4), training=False)
