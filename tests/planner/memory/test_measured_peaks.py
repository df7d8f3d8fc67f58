"""Predicted peaks against those of the emitted package, as torch's own allocator tells them.

The package runs in this process; the profiler records every block (`helpers/live_bytes.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from uuid import uuid4

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gpipe_compiler.compile import CompileOptions, compile  # noqa: A004  # its name
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.options import RematChoice
from gpipe_compiler.runtime.spec import OptimizerKind

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
from live_memory import Case, count

SLACK = 512
"""Bytes that may be missed: single numbers (losses, their weights) are not measured."""


class Skips(nn.Module):
    """A chain with skips, of layers that keep their input, their output, or nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(6))
        self.wide = nn.Linear(48, 160)
        self.narrow = nn.Linear(160, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x
        for index, layer in enumerate(self.layers):
            y = layer(x)
            x = x + (torch.tanh(y) if index % 2 else F.gelu(y))
            if index == 3:
                x = x * torch.sigmoid(first)
        return self.narrow(torch.relu(self.wide(x))) + first


class Normed(nn.Module):
    """Layer norms and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.qkv = nn.Linear(32, 96)
        self.out = nn.Linear(32, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.reshape(-1, 8, 32)
        q, k, v = self.qkv(self.norm(h)).chunk(3, -1)
        scores = torch.softmax(q @ k.transpose(-1, -2) / 5.0, -1)
        return self.out((scores @ v + h).mean(1))


class Checkpointed(nn.Module):
    """Recomputes its layers by itself, all but the last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(48, 160), nn.GELU(), nn.Dropout(0.1), nn.Linear(160, 48))
            for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:3]:
            x = x + checkpoint(layer, x, use_reentrant=False)
        return self.layers[3](x)


class Follows(nn.Module):
    """A teacher that follows a layer, so that micro-batches begin with what it was."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.last = nn.Linear(48, 48), nn.Linear(48, 48)
        self.target = nn.Linear(48, 48).requires_grad_(False)
        self.register_buffer("average", torch.zeros(48, 48))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.target.weight.lerp_(self.online.weight, 0.1)
                self.average.lerp_(self.last.weight, 0.1)
        return self.last(torch.tanh(self.online(x)) * self.target(x)) + x @ self.average


CASES = [
    (Follows, 48, RematChoice.NONE, OptimizerKind.SGD),
    (Follows, 48, RematChoice.FULL, OptimizerKind.SGD),
    (Checkpointed, 48, RematChoice.NONE, OptimizerKind.SGD),
    (Checkpointed, 48, RematChoice.FULL, OptimizerKind.SGD),
    (Skips, 48, RematChoice.NONE, OptimizerKind.SGD),
    (Skips, 48, RematChoice.NONE, OptimizerKind.ADAM),
    (Skips, 48, RematChoice.FULL, OptimizerKind.MOMENTUM),
    (Normed, 256, RematChoice.NONE, OptimizerKind.ADAMW),
    (Normed, 256, RematChoice.FULL, OptimizerKind.SGD),
]


@pytest.mark.parametrize(("model", "width", "remat", "optimizer"), CASES)
def test_the_peak_is_that_of_the_package(
    model: type[nn.Module],
    width: int,
    remat: RematChoice,
    optimizer: OptimizerKind,
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    batch = torch.randn(24, width), torch.randn(24, 48)
    subject = Subject("peaks", model(), (batch[0],), target=batch[1], loss_fn=F.mse_loss)
    options = CompileOptions(1, 4, remat=remat, optimizer=optimizer, validate=False)
    package = tmp_path / f"peaks_{model.__name__}_{remat.value}_{optimizer.value}".lower()
    made = compile(subject, options, package)

    live, _ = count(Case(str(package), batch, optimizer.value))

    assert made.plan.prediction.memory[0].peak == pytest.approx(live, abs=SLACK)


class Wide(nn.Module):
    """What it is given is read at once, and held while something larger is made."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(48, 160)
        self.down = nn.Linear(160, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.tanh(torch.sin(self.up(x)) * 2))
        return y.relu()


class Layer(nn.Module):
    """A call within a call."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(48)
        self.wide = Wide()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.wide(self.norm(x) + 1)
        return y


class Nested(nn.Module):
    """Layers in a loop, after something large that the first of them is given."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.first = nn.Linear(48, 48)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).sin()
        for layer in self.layers:
            x = layer(x)
        return x.cos()


class Words(nn.Linear):
    """An output that is larger than all that is made on the way to it."""

    def __init__(self) -> None:
        super().__init__(48, 640)


@pytest.mark.parametrize("model", [partial(Nested, 2), partial(Nested, 9), Words])
def test_the_peak_of_inference_is_that_of_the_package(
    model: Callable[[], nn.Module], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    batch = torch.randn(24, 48)
    subject = Subject("infers", model(), (batch,), training=False)
    options = CompileOptions(1, 2, validate=False, training=False)
    package = tmp_path / f"infers_{uuid4().hex}"
    made = compile(subject, options, package)

    live, _ = count(Case(str(package), (batch, None), None))

    assert made.plan.prediction.memory[0].peak == pytest.approx(live, abs=SLACK)
