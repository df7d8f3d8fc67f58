"""What a model sets up in its first call, and notes that it has."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.frontend.tracing import trace


class Capturing(nn.Module):
    """Takes what its layers give by hooks, which it installs once, as transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.installed = False

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        if not self.installed:
            for layer in self.layers:
                layer.register_forward_hook(capture)
            self.installed = True
        given.clear()
        for layer in self.layers:
            x = layer(x).relu()
        first, *_, last = given
        if len(given) != len(self.layers):
            raise ValueError("captured twice")
        return {"loss": (first - last).square().mean(), "output": x}


given: list[Tensor] = []


def capture(_module: nn.Module, _args: object, output: Tensor) -> None:
    given.append(output)


@pytest.mark.parametrize("training", [True, False])
def test_hooks_that_are_installed_once_are_there_once(training, same_as_eager):
    subject = Subject("m", Capturing(), (torch.randn(4, 4),))

    same_as_eager(trace(subject), subject, training)
