"""Python that no function of torch tells of, compared with eager models."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpipe_compiler.errors import TraceError
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.frontend.tracing import trace
from gpipe_compiler.options import LossChoice


class Rows(nn.Module):
    """Takes the number of rows by len() alone, of what is computed and of parts of it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(torch.cat([x, -x]))
        first = y[: len(y) // 2]
        return first[torch.arange(len(first), device=x.device)].view(len(x), -1) / len(x[0])


class Averaging(nn.Module):
    """Writes its averages by way of `.data`, and stops gradients by it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.register_buffer("kept", torch.zeros(6))
        self.register_buffer("decayed", torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x)
        z = y * self.decayed
        if self.training:
            self.kept.data.add_(0.5)
            self.decayed.data = self.decayed * 0.9
        return z * y.data.abs().amax(-1, keepdim=True)


class Swapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(4, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        z = y.view(6, 4)
        self.kept.data = z.view(4, 6)
        return y + self.kept


class Rotating(nn.Module):
    """Two buffers change places."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("now", torch.zeros(6))
        self.register_buffer("old", torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.now, self.old = self.old, self.now
        return x * 2


class Joined(Rotating):
    """Two buffers become one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.now = self.old = x.detach().mean(0)
        return x * 2


def subject(model: nn.Module) -> Subject:
    return Subject("m", model, (torch.randn(4, 6),), loss=LossChoice.SUM_OF_SQUARES)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("model", [Rows, Averaging])
def test_graph_computes_what_the_model_computes(model, training, same_as_eager):
    followed = subject(model())

    same_as_eager(trace(followed), followed, training)


def test_a_loss_may_ask_for_the_number_of_samples():
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target, reduction="sum") / len(output)

    graph = trace(
        Subject("m", nn.Linear(6, 4), (torch.randn(8, 6),), {}, torch.randint(0, 4, (8,)), loss)
    )

    assert graph.loss is not None


def test_the_memory_of_another_tensor_is_refused_with_its_line():
    with pytest.raises(TraceError, match="becomes that of another one") as caught:
        trace(subject(Swapped()))

    assert caught.value.location.file == __file__
    assert "self.kept.data = " in caught.value.location.code


@pytest.mark.parametrize("model", [Rotating, Joined])
def test_a_buffer_that_becomes_another_one_is_refused_with_its_forward(model):
    with pytest.raises(TraceError, match=r"another tensor to the buffer (old|now)") as caught:
        trace(subject(model()))

    location = caught.value.location
    assert location.file == __file__
    assert location.line - model.forward.__code__.co_firstlineno in (0, 1)
    assert "copy_" in caught.value.hint
