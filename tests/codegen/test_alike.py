"""Layers that are alike in the model are calls of one class, in one loop, as people write them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from stage_text import module_of, text_of, trains_as
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe_compiler.plan import Plan

DIM = 6


class Causal(nn.Conv1d):
    """As WaveNet has it: a layer of torch's with a forward of its own."""

    def __init__(self, inner: int, width: int, dilation: int = 1) -> None:
        super().__init__(inner, width, 2, dilation=dilation)
        self.left_pad = dilation

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (self.left_pad, 0)))


class Dilated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.Sequential(Causal(3, DIM), Causal(DIM, DIM, 2), Causal(DIM, DIM, 4))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.convs(x)
        return made


class Gate(nn.Module):
    """Holds nothing."""

    def forward(self, x: Tensor) -> Tensor:
        x, gate = x.chunk(2, dim=-1)
        return x * F.gelu(gate)


class Square(nn.Module):
    """Is a single op."""

    def forward(self, x: Tensor) -> Tensor:
        return x.square()


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(DIM, 2 * DIM), Gate(), nn.Linear(DIM, DIM), Square(), nn.Dropout(0.0)
        )

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.net(x)
        return made


class Crossed(nn.Module):
    """A loop over a list of parameters beside one of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.ModuleList(nn.Linear(DIM, 1) for _ in range(4))
        self.b = nn.ParameterList(nn.Parameter(torch.rand(DIM)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        start = x
        for index in range(4):
            x = start * self.w[index](x) + self.b[index] + x
        return x


def scan(decay: Tensor, x: Tensor) -> Tensor:
    decay = decay.sigmoid()
    h = torch.zeros_like(x[:, 0])
    found = []
    for step in range(DIM):
        h = h * decay + x[:, step]
        found.append(h)
    return torch.stack(found, dim=1) * decay


class Scans(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.rand(DIM))
        self.down = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down(scan(self.decay, x))
        return made


class Pair(nn.Module):
    """Gives back what it names nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, side: Tensor) -> tuple[Tensor, Tensor]:
        message = self.up(x * side)
        return x + message, side - message


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Pair() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        side = x
        for layer in self.layers:
            x, side = layer(x, side)
        return x + side


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[str, ...]]] = {
    "dilated": (
        Dilated,
        (4, 3, 8),
        (
            "        pad = F.pad(x, (self.left_pad, 0))\n",
            "    Causal(in_channels=3, left_pad=1),\n",
            "    Causal(in_channels=6, left_pad=2),\n",
        ),
    ),
    "gated": (
        Gated,
        (4, DIM),
        ("nn.Linear(6, 12), Gate(), nn.Linear(6, 6), Square(), nn.Dropout",),
    ),
    "crossed": (
        Crossed,
        (4, DIM),
        (
            "self.b = nn.ParameterDict({str(i): nn.Parameter(torch.empty(6)) for i in range(4)})",
            "for w, b in zip(self.w.values(), self.b.values(), strict=True):\n",
        ),
    ),
    "scans": (
        Scans,
        (4, DIM, DIM),
        ("    for step in range(6):\n", "self.down(scan(x, self.decay))"),
    ),
    "pairs": (Pairs, (4, DIM), ("        return x + message, side - message\n",)),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_alike_is_written_once(case: str, planned: Callable[..., Plan]) -> None:
    make, shape, lines = CASES[case]
    torch.manual_seed(0)
    model, x = make(), torch.rand(shape)
    text = text_of(planned(copy.deepcopy(model), x, count=1))
    for line in lines:
        assert line in text, text

    trains_as(module_of(text), model, x)


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean, self.spread = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.mean(x), self.spread(x)]


class Codes(nn.Module):
    """What a module makes has its names where it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.coder, self.out = Coder(), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        mu, log_var = self.coder(x)
        made: Tensor = self.out(mu.cos() * log_var.exp())
        return made


def test_what_a_module_makes_is_called_as_its_caller_does(planned: Callable[..., Plan]) -> None:
    text = text_of(planned(Codes(), torch.rand(4, DIM), count=1))

    assert "mu, log_var = self.coder(x)" in text, text
