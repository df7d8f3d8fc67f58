"""Models that stages and segments trip over, compared with plain torch.

The package of each, recomputing in segments, must come to the loss and gradients of the model's own
backward over micro-batches, with the same random numbers, and to its outputs in eval mode. What its
device is predicted to take is compared with torch's own allocator.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch
from loading import load_package
from segmenting import in_segments
from torch import nn
from torch.nn import functional as F

from gpipe_compiler.cluster import local_cluster
from gpipe_compiler.compile import trace
from gpipe_compiler.options import Policy
from gpipe_compiler.planner.memory_fit import remeasured
from gpipe_compiler.planner.planner import Planner
from gpipe_compiler.runtime.core.random import SeededRandom
from gpipe_compiler.runtime.spec import OptimizerKind
from gpipe_compiler.targets.torch_stages import emit

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
from live_memory import Case, count

WIDTH, BATCH, MICROBATCHES = 32, 8, 2


class Layers(nn.Module):
    """Two layers to be joined."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)


class SoftmaxInEval(Layers):
    """Its loss reads what only train mode makes, or only eval mode."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(torch.tanh(self.first(x)))
        return y if self.training else y.softmax(-1)


class DoubledInTraining(Layers):
    """The other way round."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(torch.tanh(self.first(x)))
        if self.training:
            y = y * 2.0
        return y


class OneNorm(Layers):
    """One BatchNorm in three places, the last of them the output."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(self.norm(x)))
        y: torch.Tensor = self.norm(self.second(torch.relu(x)))
        return y


class Noisy(Layers):
    """Segments that end with an op that saves its noise before it is drawn."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.rrelu(self.first(x), training=self.training)
        return F.rrelu(self.second(x), training=self.training)


class MadeWeights(Layers):
    """Weights that are made of others: the first of three stages takes no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(self.first)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(torch.tanh(self.first(x)))
        return y


class Sparse(Layers):
    """A table of words used twice, with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, WIDTH, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (x * 10).long().abs() % 50
        y: torch.Tensor = self.second(torch.tanh(self.first(self.words(tokens).mean(1))))
        return y + self.words(tokens[:, 0])


@pytest.mark.parametrize(
    ("kind", "stages"),
    [
        (SoftmaxInEval, 2),
        (DoubledInTraining, 1),
        (OneNorm, 1),
        (Noisy, 2),
        (MadeWeights, 3),
        (Sparse, 1),
    ],
)
def test_the_package_is_the_model(kind: type[nn.Module], stages: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x, target = kind(), torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)
    graph = trace(model, x, target=target, loss_fn=F.mse_loss)
    planner = Planner(graph, local_cluster())
    policy = Policy()
    plan = planner.plan(planner.choose(stages, MICROBATCHES, policy), policy)
    emit(in_segments(plan, 2), tmp_path / "package")
    with load_package(tmp_path / "package").Pipeline() as pipe:
        loss = pipe.step(x, target)
        gradients = {name: p.grad.to_dense() for name, p in pipe.named_parameters()}
        buffers = dict(pipe.named_buffers())
        outputs = pipe.eval()(x)

    plain = copy.deepcopy(model)
    losses = []
    parts = zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True)
    for number, (part, wanted) in enumerate(parts):
        with SeededRandom(0, 0, number, ()):
            losses.append(F.mse_loss(plain(part), wanted) / MICROBATCHES)
        losses[-1].backward()
    torch.testing.assert_close(loss, sum(losses))
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad.to_dense())
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(buffers[name], buffer)
    torch.testing.assert_close(outputs, plain.eval()(x))


@pytest.mark.parametrize("kind", [OneNorm, Noisy, SoftmaxInEval])
def test_the_peak_is_predicted(kind: type[nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    batch = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)
    graph = trace(kind(), batch[0], target=batch[1], loss_fn=F.mse_loss)
    planner = Planner(graph, local_cluster())
    policy = Policy()
    plan = in_segments(planner.plan(planner.choose(1, MICROBATCHES, policy), policy), 2)
    package = tmp_path / f"peak_of_{kind.__name__}".lower()
    emit(plan, package)

    live, _ = count(Case(str(package), batch, "sgd"))

    told = remeasured(plan, OptimizerKind.SGD).prediction.memory[0].peak
    assert told == pytest.approx(live, abs=256)
