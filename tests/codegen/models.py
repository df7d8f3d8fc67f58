"""Small models that between them use all that a stage may have to write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Residual(nn.Module):
    """BatchNorm, an in-place ReLU called three times, an in-place addition."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x
        return self.relu(out)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.blocks = nn.Sequential(Residual(), Residual())
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(4, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        x = self.blocks(x)
        x = self.pool(x).flatten(1)
        return self.head(x)


class Attention(nn.Module):
    """Batch-size integers, unpacking, a mask in a buffer, dropout by mode."""

    def __init__(self, dim: int = 8, heads: int = 2, length: int = 6) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.register_buffer("mask", torch.tril(torch.ones(length, length)).bool())

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q = q.view(batch, length, self.heads, dim // self.heads).transpose(1, 2)
        k = k.view(batch, length, self.heads, dim // self.heads).transpose(1, 2)
        v = v.view(batch, length, self.heads, dim // self.heads).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) / (dim // self.heads) ** 0.5
        scores = scores.masked_fill(~self.mask[:length, :length], float("-inf"))
        mixed = F.dropout(scores.softmax(dim=-1), 0.0, self.training) @ v
        return self.out(mixed.transpose(1, 2).reshape(batch, length, dim))


class Decoder(nn.Module):
    """Tied embeddings, position table, two attention blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(11, 8)
        self.wpe = nn.Parameter(torch.randn(6, 8))
        self.attentions = nn.ModuleList([Attention(), Attention()])
        self.norm = nn.LayerNorm(8)
        self.lm_head = nn.Linear(8, 11, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe[: ids.shape[1]]
        for attention in self.attentions:
            x = x + attention(x)
        return self.lm_head(self.norm(x))


class Operators(nn.Module):
    """Operators, subscripts, writes in place, a buffer that counts, constants."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(8))
        self.frozen = nn.Parameter(torch.rand(8), requires_grad=False)
        self.weight = nn.Parameter(torch.rand(8, 8))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.arange(8.0), persistent=False)

    def forward(self, x: Tensor) -> dict[str, object]:
        self.steps += 1
        y = -(x**2) * self.scale + (x @ self.weight.t()) / (1 + self.frozen)
        y = y + torch.tensor([0.5, -1.0, 0.25, 2.0]).repeat(2)
        z = y[:, 1:-1:2] * x[..., None, 0] ** 2 + x[:, : self.scale.shape[0] : 3]
        keep = (y > 0) & ~(y > self.table)
        w = torch.where(keep, y, y * 0.1)
        w = w.clone()
        w[:, 0] = z.sum(1)
        w.mul_(2).add_(y)
        low, high = w.split([3, 5], dim=1)
        values, _ = high.topk(2, dim=1)
        return {"low": low.exp().clamp(max=9.0), "rest": [values, None, z - 1]}


class Recurrent(nn.Module):
    """A nested result, of which one part is not read; a multi-output in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 6, batch_first=True)
        self.attend = nn.MultiheadAttention(6, 2, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out, (hidden, _) = self.lstm(x)
        mixed, _ = self.attend(out, out, out, need_weights=False)
        return self.head(mixed), hidden.transpose(0, 1)


class Modes(nn.Module):
    """Different code in train and eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.first(x))
        if self.training:
            y = torch.tanh(x)
            y = y * 2
        else:
            y = torch.sigmoid(x)
        return self.second(F.dropout(y, p=0.0, training=self.training))


class Regions(nn.Module):
    """no_grad and autocast around parts of the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with torch.no_grad():
            scale = x.abs().amax(1, keepdim=True)
            centre = scale.mean()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.second(x / scale)
        return y.float() - centre


class Names(nn.Module):
    """Names that mean something else in Python or in torch."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("class", "0", "forward_", "F", "a_b", "training_", "état", "loss"):
            self.add_module(name, nn.Linear(4, 4))
        self.a = nn.Module()
        self.a.b = nn.Linear(4, 4)
        self.register_parameter("lambda", nn.Parameter(torch.rand(4)))

    def forward(self, input: Tensor, self_: Tensor | None = None) -> Tensor:  # noqa: A002
        l = getattr(self, "class")(input)  # noqa: E741
        max = getattr(self, "0")(l) + getattr(self, "lambda")  # noqa: A001
        nn = self.forward_(max)
        F = self.F(nn)  # noqa: N806
        torch_ = self.a_b(F) + self.a.b(l)
        return self.training_(self.état(torch_)) + self.loss(max)


class Inception(nn.Module):
    """Branches of one input, joined again; long calls."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(4, 3) for _ in range(9))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x).relu() for branch in self.branches], dim=1)


@dataclass(frozen=True)
class Case:
    """A model with its example inputs and its loss."""

    build: Callable[[], nn.Module]
    args: Callable[[], tuple[Tensor, ...]]
    target: Callable[[], Tensor] | None = None
    loss_fn: Callable[[object, object], Tensor] | None = None


def cross_entropy(output: Any, target: Any) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


CASES = {
    "conv_net": Case(
        ConvNet,
        lambda: (torch.randn(4, 3, 8, 8),),
        target=lambda: torch.randint(5, (4,)),
        loss_fn=cross_entropy,
    ),
    "decoder": Case(
        Decoder,
        lambda: (torch.randint(11, (4, 6)),),
        target=lambda: torch.randint(11, (4, 6)),
        loss_fn=cross_entropy,
    ),
    "operators": Case(Operators, lambda: (torch.rand(4, 8),)),
    "recurrent": Case(Recurrent, lambda: (torch.rand(4, 7, 5),)),
    "modes": Case(Modes, lambda: (torch.rand(4, 6),)),
    "regions": Case(Regions, lambda: (torch.rand(4, 6),)),
    "names": Case(Names, lambda: (torch.rand(4, 4),)),
    "inception": Case(Inception, lambda: (torch.rand(4, 4),)),
}
