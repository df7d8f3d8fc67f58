"""The emitted module that counts what the loss is a mean over, compared with counts by hand."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe_compiler.options import LossChoice
from gpipe_compiler.plan import Plan
from gpipe_compiler.targets.torch_stages import emit

CLASSES = 20
OF_CLASS = torch.linspace(0.5, 2.4, CLASSES)
TARGET = torch.tensor([0, 19, -100, 4])

OWN = LossChoice.MODEL


class Guarded(nn.Module):
    """A mean over a mask that may be empty."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 3)

    def forward(self, x: Tensor, mask: Tensor) -> dict[str, Tensor]:
        y = self.second(torch.relu(self.first(x)))
        error = (y.square().sum(-1) * mask).sum()
        return {"loss": error / (mask.sum().clamp(min=2) + 0.5), "y": y}


class Labelled(nn.Module):
    """Class weights that are the model's own buffer, and labels that it edits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.head = nn.Linear(4, CLASSES)
        self.register_buffer("of_class", OF_CLASS.clone())

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        kept = labels.clone()
        kept[labels == 4] = -100
        logits = self.head(torch.relu(self.embed(x)))
        return {"loss": F.cross_entropy(logits, kept, weight=self.of_class), "logits": logits}


def built(package: ModuleType, directory: Path) -> nn.Module:
    """The module with its state, as the runtime builds it."""
    weights = importlib.import_module(f"{package.__name__}.runtime.core.building")
    spec = package.SPEC.loss.weight
    module: nn.Module = weights.build_stage(
        spec, weights.Weights.open(directory / "weights"), torch.device("cpu"), 0
    )
    return module


@pytest.fixture
def emit_of(
    cut_of: Callable[..., Plan], load: Callable[[Path], ModuleType], tmp_path: Path
) -> Callable[..., tuple[ModuleType, Path]]:
    """Emits a model, cut by hand into two stages, and loads the package."""

    def make(model: nn.Module, *args: Tensor, **options: Any) -> tuple[ModuleType, Path]:
        directory = emit(cut_of(model, *args, **options), tmp_path / "out")
        return load(directory), directory

    return make


def test_class_weights_of_a_loss_function(
    emit_of: Callable[..., Any], ruff: Callable[[Path], None]
) -> None:
    """They are in no state_dict, yet stored with the weights, and read from there."""
    loss_fn = nn.CrossEntropyLoss(OF_CLASS, ignore_index=19)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, CLASSES))
    target = TARGET.clamp(min=0)
    package, directory = emit_of(model, torch.randn(4, 4), target=target, loss_fn=loss_fn)

    module = built(package, directory)

    spec = package.SPEC.loss.weight
    assert spec.inputs == ("target",)
    assert list(spec.state.values()) == ["loss_fn.weight"]
    index = json.loads((directory / "weights" / "index.json").read_text())
    assert "loss_fn.weight" in index["weight_map"]
    expected = OF_CLASS[0] + OF_CLASS[0] + OF_CLASS[4]
    torch.testing.assert_close(module(target), expected)
    ruff(directory)


def test_a_buffer_of_the_model_and_labels_that_it_edits(
    emit_of: Callable[..., Any], ruff: Callable[[Path], None]
) -> None:
    """The buffer under the model's name; the labels that came in stay as they are."""
    package, directory = emit_of(Labelled(), torch.randn(4, 4), TARGET, loss=OWN)
    labels = TARGET.clone()

    weight = built(package, directory)(labels)

    torch.testing.assert_close(weight, OF_CLASS[0] + OF_CLASS[19])
    assert torch.equal(labels, TARGET)
    assert list(package.SPEC.loss.weight.state.values()) == ["of_class"]
    ruff(directory)


def test_guards_stand_in_the_schedule(
    emit_of: Callable[..., Any], ruff: Callable[[Path], None]
) -> None:
    """The module gives the plain sum; what it is guarded by is applied to that of the whole."""
    package, directory = emit_of(Guarded(), torch.randn(4, 4), torch.ones(4), loss=OWN)

    module = built(package, directory)

    (loss,) = package.SPEC.loss.terms
    assert (loss.floor, loss.offset) == (2.0, 0.5)
    assert float(module(torch.tensor([0.0, 0.25, 0.0]))) == 0.25
    assert "`loss_weight.py`" in (directory / "README.md").read_text()
    ruff(directory)


def test_a_package_that_only_infers_has_none(emit_of: Callable[..., Any]) -> None:
    package, directory = emit_of(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(4, 4))

    assert not (directory / "loss_weight.py").exists()
    assert package.SPEC.loss is None or package.SPEC.loss.weight is None
    assert "`loss_weight.py`" not in (directory / "README.md").read_text()
