"""Packages whose model keeps state, recomputed and deferred.

Recomputing is held to the bit against not recomputing. Deferred running statistics are compared
with torch's BatchNorm on all that each layer of the plain model was given.
"""

from __future__ import annotations

import copy
import importlib
import itertools
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gpipe_compiler as gpc
from gpipe_compiler.cluster import DEFAULT_HOST, IN_PROCESS, Cluster
from gpipe_compiler.runtime.core.random import SeededRandom

MICROBATCHES = 3
SAMPLES = 12
F64 = torch.float64


class Scaled(nn.Module):
    """Scales by a running average, which autograd keeps for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.ones(5, dtype=F64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.average.mul_(0.9).add_(x.detach().mean(0) * 0.1)
            self.steps += 1
        return x * self.average


class Model(nn.Module):
    """BatchNorm by module, with a cumulative average, and by function on buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, dtype=F64)
        self.bn2 = nn.BatchNorm2d(3, dtype=F64)
        self.linear = nn.Linear(3, 5, dtype=F64)
        self.scaled = Scaled()
        self.bn1 = nn.BatchNorm1d(5, momentum=0.3, dtype=F64)
        self.register_buffer("mean", torch.zeros(5, dtype=F64))
        self.register_buffer("variance", torch.ones(5, dtype=F64))
        self.out = nn.Linear(5, 2, dtype=F64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.bn2(self.conv(x))).mean((2, 3))
        x = self.bn1(self.scaled(self.linear(x)))
        x = F.batch_norm(x, self.mean, self.variance, training=self.training)
        return self.out(F.dropout(x, 0.1, self.training))


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.fixture(scope="module")
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(SAMPLES, 2, 5, 5, dtype=F64) * 2 + 1, torch.randn(SAMPLES, 2, dtype=F64)


@pytest.fixture(scope="module")
def package(
    model: Model,
    batch: tuple[torch.Tensor, torch.Tensor],
    tmp_path_factory: pytest.TempPathFactory,
) -> ModuleType:
    """Two stages, three micro-batches."""
    graph = gpc.trace(copy.deepcopy(model), batch[0], target=batch[1], loss_fn=F.mse_loss)
    made = gpc.plan(
        graph, stages=2, microbatches=MICROBATCHES, cluster=Cluster.of(DEFAULT_HOST, IN_PROCESS)
    )
    place: Path = tmp_path_factory.mktemp("made") / "stateful"
    gpc.emit(made, place)
    sys.path.insert(0, str(place.parent))
    try:
        return importlib.import_module(place.name)
    finally:
        sys.path.remove(str(place.parent))


Bits = dict[str, torch.Tensor]


def two_steps(
    package: ModuleType, batch: tuple[torch.Tensor, torch.Tensor], **choices: str
) -> Bits:
    """Losses, gradients and state after two steps without an optimizer."""
    with package.Pipeline(**choices, seed=5) as pipe:
        found = {f"loss {i}": pipe.step((batch[0],), batch[1]).clone() for i in range(2)}
        found |= {f"gradient {n}": p.grad.clone() for n, p in pipe.named_parameters()}
        found |= {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
    return found


@pytest.mark.parametrize(
    ("batchnorm", "schedule"),
    [*itertools.product(("micro", "deferred"), ("gpipe", "1f1b")), ("exact", "gpipe")],
)
def test_recomputing_changes_no_bit(
    package: ModuleType,
    batch: tuple[torch.Tensor, torch.Tensor],
    batchnorm: str,
    schedule: str,
) -> None:
    choices = {"batchnorm": batchnorm, "schedule": schedule}
    kept = two_steps(package, batch, remat="none", **choices)
    again = two_steps(package, batch, remat="full", **choices)
    assert kept.keys() == again.keys()
    assert [name for name in kept if not torch.equal(kept[name], again[name])] == []


def test_deferred_statistics(
    package: ModuleType, model: Model, batch: tuple[torch.Tensor, torch.Tensor]
) -> None:
    found = two_steps(package, batch, batchnorm="deferred", remat="full")

    plain = copy.deepcopy(model)
    by_function = nn.BatchNorm1d(5, affine=False, dtype=F64)
    layers = {"bn2": plain.bn2, "bn1": plain.bn1}
    expected: Bits = {}
    given: dict[str, list[torch.Tensor]] = {"bn2": [], "bn1": [], "function": []}
    plain.bn2.register_forward_pre_hook(lambda _, args: given["bn2"].append(args[0].detach()))
    plain.bn1.register_forward_pre_hook(lambda _, args: given["bn1"].append(args[0].detach()))
    plain.bn1.register_forward_hook(lambda *call: given["function"].append(call[2].detach()))
    for step in range(2):
        before = {name: copy.deepcopy(layer) for name, layer in layers.items()}
        for collected in given.values():
            collected.clear()
        total = torch.zeros((), dtype=F64)
        pieces = zip(batch[0].chunk(MICROBATCHES), batch[1].chunk(MICROBATCHES), strict=True)
        for number, (x, target) in enumerate(pieces):
            plain.scaled.steps.fill_(step)  # a count of calls goes on once a mini-batch
            with SeededRandom(5, step, number, range(9)):
                loss = F.mse_loss(plain(x), target) / MICROBATCHES
            loss.backward()
            total += loss.detach()
        inputs = {name: torch.cat(collected) for name, collected in given.items()}
        for name, layer in layers.items():
            before[name](inputs[name])
            layer.load_state_dict(before[name].state_dict())
        by_function(inputs["function"])
        expected[f"loss {step}"] = total
    expected |= {
        f"gradient {name}": parameter.grad
        for name, parameter in plain.named_parameters()
        if parameter.grad is not None
    }
    expected |= plain.state_dict()
    expected["mean"] = by_function.running_mean  # type: ignore[assignment]  # it tracks
    expected["variance"] = by_function.running_var  # type: ignore[assignment]  # it tracks

    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-11, atol=1e-11, msg=name)
    assert found["bn1.num_batches_tracked"] == 2
    assert found["scaled.steps"] == 2
