"""CTC trains as in one piece: a mean over samples, each divided by the length of its target."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from loading import load_package
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe_compiler.cluster import DEFAULT_HOST, IN_PROCESS, Cluster
from gpipe_compiler.compile import CompileOptions
from gpipe_compiler.compile import compile as compile_subject
from gpipe_compiler.errors import GPipeCompilerError
from gpipe_compiler.frontend.subject import Subject

CLUSTER = Cluster.of(DEFAULT_HOST, IN_PROCESS)
STEPS, CLASSES, LONGEST, IGNORED = 10, 6, 4, -100


class Listener(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ear, self.head = nn.Linear(5, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.ear(x).relu()).log_softmax(-1)


def by_function(output: Tensor, target: Any) -> Tensor:
    return F.ctc_loss(output.transpose(0, 1), target["text"], target["steps"], target["length"])


def by_module(output: Tensor, target: Any) -> Tensor:
    """Beside another mean, over all positions."""
    ctc = nn.CTCLoss(zero_infinity=True)
    loss = ctc(output.transpose(0, 1), target["text"], target["steps"], target["length"])
    return loss + 0.1 * output.square().mean()


def joined(output: Tensor, target: Any) -> Tensor:
    """The targets of all samples in a row."""
    return F.ctc_loss(output.transpose(0, 1), target["row"], target["steps"], target["length"])


def batch(samples: int, seed: int) -> tuple[Tensor, dict[str, Tensor]]:
    random = torch.Generator().manual_seed(seed)
    length = torch.randint(1, LONGEST + 1, (samples,), generator=random)
    length[0] = 0
    return torch.randn(samples, STEPS, 5, generator=random), {
        "text": torch.randint(1, CLASSES, (samples, LONGEST), generator=random),
        "steps": torch.randint(LONGEST + 4, STEPS + 1, (samples,), generator=random),
        "length": length,
    }


def validated(given: Subject, folder: Path) -> ModuleType:
    made = compile_subject(given, CompileOptions(2, 4, cluster=CLUSTER), folder)
    assert made.validation is not None
    assert made.validation.passed, str(made.validation)
    return load_package(folder)


@pytest.mark.parametrize("loss_fn", [by_function, by_module])
@pytest.mark.usefixtures("in_process")
def test_any_batch_trains_as_in_one_piece(loss_fn: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Listener()
    x, target = batch(8, 0)
    given = Subject("listener", model, (x,), target=target, loss_fn=loss_fn)
    package = validated(given, tmp_path / "package")
    for samples in (7, 3):
        x, target = batch(samples, samples)
        model.zero_grad()
        expected = loss_fn(model(x), target)
        expected.backward()
        with package.Pipeline() as pipe:
            torch.testing.assert_close(pipe.step(x, target), expected.detach())
            for name, parameter in pipe.named_parameters():
                torch.testing.assert_close(
                    parameter.grad, model.get_parameter(name).grad, rtol=1e-4, atol=1e-6
                )


class Dictated(Listener):
    """Returns its loss, as models of speech do: targets of one row for each sample, in which some
    places hold no class. What it hears is bounded on one side."""

    def forward(self, x: Tensor, labels: Tensor, steps: Tensor) -> dict[str, Tensor]:
        heard = (labels != IGNORED) & (labels != 0)
        scores = self.head(self.ear(x).clamp(0.0, math.inf)).log_softmax(-1).transpose(0, 1)
        row, lengths = labels.masked_select(heard), heard.sum(-1)
        return {"loss": F.ctc_loss(scores, row, steps, lengths, reduction="sum")}


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.usefixtures("in_process")
def test_targets_are_drawn_among_the_classes(ignored: bool, tmp_path: Path) -> None:
    """The kernel of torch does not check them, but reads what happens to lie there."""
    torch.manual_seed(0)
    model = Dictated()
    x, target = batch(8, 0)
    labels = target["text"]
    if ignored:
        labels[1, 2:] = IGNORED
    given = Subject("dictated", model, (x, labels, target["steps"]))
    package = validated(given, tmp_path / "package")
    x, target = batch(7, 7)
    with package.Pipeline() as pipe:
        expected = model(x, target["text"], target["steps"])["loss"].detach()
        torch.testing.assert_close(pipe.step((x, target["text"], target["steps"])), expected)


def test_targets_in_a_row_are_refused(tmp_path: Path) -> None:
    """No slice of them belongs to a slice of the batch."""
    x, target = batch(8, 0)
    target["length"] = torch.full((8,), 3)
    target["row"] = torch.randint(1, CLASSES, (24,))
    del target["text"]
    given = Subject("listener", Listener(), (x,), target=target, loss_fn=joined)

    with pytest.raises(GPipeCompilerError) as raised:
        compile_subject(given, CompileOptions(2, 4, cluster=CLUSTER), tmp_path / "package")

    assert "ctc_loss" in raised.value.problem
    assert raised.value.location is not None
    assert "one row for each sample" in raised.value.hint
