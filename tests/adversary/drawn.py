"""Cases made from a recipe: steps of a model, a layout, a loss, and a way to compute.

A recipe is what JSON can hold, so that the judge makes the same case of it in its own process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from adversary.case import Case
from torch import Tensor, nn

TIME, WIDTH, CLASSES, IGNORED = 5, 4, 3, -100


@dataclass(frozen=True)
class Recipe:
    """What is drawn.

    Attributes:
        steps: keys of `STEPS`, from the input on.
        layout: which dimension of inputs, targets and outputs is the batch: 0 or 1.
        loss: a key of `LOSSES`, or "" for a package that infers.
        output: "tensor", "dict" or "sum", a number of the whole batch besides.
        options: of the compile.
        manners: arguments of pipelines.
        sizes: samples of the judge's batches.
    """

    steps: tuple[str, ...]
    layout: int
    loss: str
    output: str
    options: str
    manners: tuple[Mapping[str, Any], ...]
    sizes: tuple[int, ...]


class Normed(nn.Module):
    """RMSNorm in fp32, as language models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class Attends(nn.Module):
    """Causal attention of two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(found.transpose(1, 2).flatten(2))


class Convolves(nn.Module):
    """Over time, without looking ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)


class Careful(nn.Module):
    """A part that is never autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.layer(x.float()).tanh()


class Fills(nn.Module):
    """A scan into a tensor made before."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found, state = torch.zeros_like(x), torch.zeros_like(x[:, 0])
        for step in range(x.shape[1]):
            state = (self.cell(state) + x[:, step]).tanh()
            found[:, step] = state
        return found


STEPS: Mapping[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
    "attention": Attends,
    "rms": Normed,
    "layer_norm": lambda: nn.LayerNorm(WIDTH),
    "conv": Convolves,
    "careful": Careful,
    "fills": Fills,
    "inplace": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)),
    "no_dropout": lambda: nn.Dropout(0.0),
}


class Drawn(nn.Module):
    """The steps of a recipe, each on a residual, and a head."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.layout, self.output = recipe.layout, recipe.output
        self.steps = nn.ModuleList(STEPS[step]() for step in recipe.steps)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> object:
        x = x.transpose(0, self.layout)
        for step in self.steps:
            x = x + step(x)
        logits = self.head(x).transpose(0, self.layout)
        if self.output == "tensor":
            return logits
        more = {"last": logits.argmax(-1)} if self.output == "dict" else {"total": logits.sum()}
        return {"logits": logits, **more}


def logits_of(output: Any) -> Tensor:
    return output["logits"] if isinstance(output, dict) else output


def of_tokens(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(logits_of(output).flatten(0, 1), target.flatten(), ignore_index=IGNORED)


def of_tokens_and_z(output: Any, target: Tensor) -> Tensor:
    return of_tokens(output, target) + 0.01 * logits_of(output).logsumexp(-1).square().mean()


def squared(output: Any, target: Tensor) -> Tensor:
    return F.mse_loss(logits_of(output).softmax(-1)[..., 0], target.clamp(min=0).float())


def summed(output: Any, target: Tensor) -> Tensor:
    return (logits_of(output).softmax(-1)[..., 0] - target.clamp(min=0)).square().sum()


def masked(output: Any, target: Tensor) -> Tensor:
    kept = (target != IGNORED).float()
    wrong = (logits_of(output).softmax(-1)[..., 0] - target.clamp(min=0)).square()
    return (wrong * kept).sum() / kept.sum()


LOSSES: Mapping[str, Callable[[Any, Tensor], Tensor]] = {
    "tokens": of_tokens,
    "tokens_and_z": of_tokens_and_z,
    "squared": squared,
    "summed": summed,
    "masked": masked,
}


def drawn_case(recipe: Mapping[str, Any] | Recipe) -> Case:
    """The case of a recipe, which may come from JSON."""
    made = recipe if isinstance(recipe, Recipe) else Recipe(**recipe)

    def shape(samples: int) -> tuple[int, int]:
        return (samples, TIME) if made.layout == 0 else (TIME, samples)

    def padded(samples: int) -> Tensor:
        found = torch.randint(CLASSES, (samples, TIME))
        lengths = torch.randint(0, TIME + 1, (samples, 1))
        lengths[0] = TIME
        found = found.masked_fill(torch.arange(TIME) >= lengths, IGNORED)
        return found.transpose(0, made.layout).contiguous()

    return Case(
        "drawn",
        lambda: Drawn(made),
        lambda samples: torch.randn(*shape(samples), WIDTH),
        LOSSES.get(made.loss),
        (lambda samples: torch.randint(CLASSES, shape(samples))) if made.loss else None,
        later_target=padded if made.loss else None,
        options=made.options,
        sizes=tuple(made.sizes),
        manners=tuple(made.manners),
    )


SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    "gpipe": {},
    "1f1b": {"schedule": "1f1b"},
    "zb-h1": {"schedule": "zb-h1"},
    "interleaved": {"schedule": "interleaved", "devices": ["cpu"]},
    "zbv": {"schedule": "zbv", "devices": ["cpu"]},
}
"""How a package of two stages or more, compiled for gpipe, is run under each schedule."""
