"""Mixtures of experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from adversary.case import FP32_ONLY, Case
from adversary.inputs import steps
from torch import Tensor, nn


class Dense(nn.Module):
    """Every expert computes every token; the gate weighs."""

    def __init__(self, attends: bool = False) -> None:
        super().__init__()
        self.inside = nn.Linear(6, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True) if attends else None
        self.gate = nn.Linear(8, 4)
        self.up = nn.Parameter(torch.randn(4, 8, 10) * 0.3)
        self.down = nn.Parameter(torch.randn(4, 10, 8) * 0.3)
        self.head = nn.Linear(8, 3)

    def mixed(self, x: Tensor) -> Tensor:
        chances, chosen = self.gate(x).softmax(-1).topk(2, -1)
        weights = torch.zeros(*x.shape[:-1], 4, dtype=chances.dtype).scatter(-1, chosen, chances)
        hidden = torch.einsum("bti,eio->bteo", x, self.up).relu()
        return torch.einsum("bteo,eoi,bte->bti", hidden, self.down, weights)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inside(x)
        if self.attention is not None:
            x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(x + self.mixed(x))


class Masked(nn.Module):
    """A loop over experts, each one's share by a mask, as Hugging Face's eager mixtures have it."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.gate = nn.Linear(6, 8), nn.Linear(8, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 10), nn.GELU(), nn.Linear(10, 8)) for _ in range(3)
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inside(x)
        chances = self.gate(x).softmax(-1)
        best = chances.argmax(-1)
        total = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            share = (best == number).unsqueeze(-1) * chances[..., number : number + 1]
            total = total + expert(x) * share
        return self.head(x + total)


class Gathering(Masked):
    """Each expert gets the tokens that chose it: as many as the data say."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inside(x)
        tokens = x.flatten(0, 1)
        chances = self.gate(tokens).softmax(-1)
        best = chances.argmax(-1)
        total = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            (where,) = torch.where(best == number)
            found = expert(tokens[where]) * chances[where, number, None]
            total = total.index_add(0, where, found.to(total.dtype))
        return self.head(x + total.view_as(x))


def classes(samples: int) -> Tensor:
    return torch.randint(3, (samples, 4))


def of_tokens(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


CASES = (
    Case("dense", Dense, steps, of_tokens, classes, manners=FP32_ONLY, quick=True),
    Case("dense_with_attention", lambda: Dense(True), steps, of_tokens, classes, manners=FP32_ONLY),
    Case("masked", Masked, steps, of_tokens, classes),
    Case("gathering", Gathering, steps, of_tokens, classes, manners=FP32_ONLY),
    Case(
        "dense_inference", Dense, steps, options="--mode infer", manners=({}, {"microbatches": 3})
    ),
)
