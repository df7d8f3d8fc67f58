"""Random models: nn.Modules that read a recipe. What a step does stands in random_steps.py.

A recipe is a list of steps. Each step takes values from pools (the newest first: features,
sequences, indices, masks), does something that a pipeline could get wrong, and puts its results
back. A pick of 0 is always possible, so that hypothesis shrinks towards short chains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn

WIDTH = 4
TIME = 3
CLASSES = 5


@dataclass(frozen=True)
class Step:
    """One line of a recipe: what is done, and to which of the values there are."""

    kind: str
    first: int = 0
    second: int = 0
    third: int = 0


@dataclass(frozen=True)
class Recipe:
    """A model, its call and its loss.

    Attributes:
        seed: of the weights and the inputs.
        output: how the results are returned.
        loss: "none", "own", or a key of `LOSS_FUNCTIONS`, which take a target.
        call: which optional inputs there are.
    """

    steps: tuple[Step, ...]
    output: str = "tuple"
    loss: str = "none"
    call: str = "plain"
    seed: int = 0


@dataclass
class Pools:
    """The values a step can choose from: features (B, WIDTH), sequences (B, TIME, WIDTH), class
    indices (B), masks (B, WIDTH)."""

    features: list[torch.Tensor] = field(default_factory=list)
    sequences: list[torch.Tensor] = field(default_factory=list)
    indices: list[torch.Tensor] = field(default_factory=list)
    masks: list[torch.Tensor] = field(default_factory=list)
    early: list[torch.Tensor] = field(default_factory=list)

    def feature(self, pick: int) -> torch.Tensor:
        return self.features[-1 - pick % len(self.features)]

    def sequence(self, pick: int) -> torch.Tensor:
        return self.sequences[-1 - pick % len(self.sequences)]

    def index(self, pick: int) -> torch.Tensor:
        return self.indices[-1 - pick % len(self.indices)]

    def mask(self, pick: int) -> torch.Tensor:
        return self.masks[-1 - pick % len(self.masks)]


class RandomModel(nn.Module):
    """Runs its recipe."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.parts = nn.ModuleDict()
        self.steps = [(number, step) for number, step in enumerate(recipe.steps)]
        for number, step in self.steps:
            if step.kind in PREPARE:
                PREPARE[step.kind](self, number, step)

    def forward(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        extra: dict[str, torch.Tensor] | None = None,
        *,
        bias: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
    ) -> object:
        pools = Pools([x], [x.unsqueeze(1).expand(-1, TIME, -1)], [ids], [x > 0])
        if extra is not None:
            pools.features.append(extra["more"])
            pools.sequences.append(extra["seq"])
        if bias is not None:
            pools.features.append(bias + x)
        if mask is not None:
            pools.masks.append(mask)
        for number, step in self.steps:
            RUN[step.kind](self, number, step, pools)
        return self._returned(x, pools)

    def _returned(self, x: torch.Tensor, pools: Pools) -> object:
        last = pools.feature(0)
        seq = pools.sequence(0)
        match self.recipe.output:
            case "tensor":
                found: object = last
            case "tuple":
                found = (last, *pools.early)
            case "dict":
                found = {
                    "last": last,
                    "nested": {"early": tuple(pools.early), "none": None},
                    "seq": seq,
                    "index": pools.index(0),
                }
            case "input":
                found = (last, x)
            case "twice":
                found = [last, {"again": last}, pools.mask(0), None]
            case kind:
                raise ValueError(kind)
        if self.recipe.loss != "own":
            return found
        loss = last.square().mean() + seq.tanh().mean()
        return {"loss": loss, "found": found}


Prepare = Callable[[RandomModel, int, Step], None]
Run = Callable[[RandomModel, int, Step, Pools], None]
PREPARE: dict[str, Prepare] = {}
RUN: dict[str, Run] = {}
REGIONS = frozenset({"no_grad", "autocast"})
"""Steps that compute in another mode than the rest."""
TYPED = frozenset({"autocast", "cast", "zeros"})
"""Steps that ask for the type of a value. torch.export writes the answer down, that without
autocast, so its packages compute in 16 bits what the model does not; validation tells."""


def prepares(kind: str) -> Callable[[Prepare], Prepare]:
    def keep(function: Prepare) -> Prepare:
        PREPARE[kind] = function
        return function

    return keep


def runs(kind: str) -> Callable[[Run], Run]:
    def keep(function: Run) -> Run:
        RUN[kind] = function
        return function

    return keep


def module(kind: str, make: Callable[[], nn.Module]) -> None:
    """A step whose module turns features into features."""

    @prepares(kind)
    def prepare(model: RandomModel, number: int, step: Step) -> None:
        del step
        model.parts[f"{kind}_{number}"] = make()

    @runs(kind)
    def run(model: RandomModel, number: int, step: Step, pools: Pools) -> None:
        pools.features.append(model.parts[f"{kind}_{number}"](pools.feature(step.first)))


def first_of(output: Any) -> torch.Tensor:
    """The first feature of an output."""
    if isinstance(output, dict):
        output = output["last"]
    return output[0] if isinstance(output, tuple | list) else output


def mean_square(output: object, target: torch.Tensor) -> torch.Tensor:
    """The distance of the first feature of an output from a target; most outputs go unused."""
    return (first_of(output) - target).square().mean()


def tokens(output: object, target: torch.Tensor) -> torch.Tensor:
    """A class for each sample, or none."""
    return F.cross_entropy(first_of(output), target)


def words(output: object, target: torch.Tensor) -> torch.Tensor:
    """Several classes for each sample, any of them none."""
    x = first_of(output)
    logits = torch.stack([x, x.sin(), -x], dim=1)
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=IGNORED)


def masked(output: object, target: torch.Tensor) -> torch.Tensor:
    """A mean over the samples with a class, written by hand."""
    counted = target != IGNORED
    each = F.cross_entropy(first_of(output), target.clamp(min=0), reduction="none")
    return (each * counted).sum() / counted.sum().clamp(min=1)


IGNORED = -100
LOSS_FUNCTIONS: Mapping[str, Callable[[object, torch.Tensor], torch.Tensor]] = {
    "function": mean_square,
    "tokens": tokens,
    "words": words,
    "masked": masked,
}


@dataclass(frozen=True)
class Call:
    """Arguments of a model."""

    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    target: torch.Tensor | None


def call_of(
    recipe: Recipe, batch: int, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Call:
    """A call of a recipe's model; that of seed 0 is the example."""
    generator = torch.Generator().manual_seed(recipe.seed + 100 * seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype)

    def classes(*shape: int) -> torch.Tensor:
        found = torch.randint(-2, WIDTH, shape, generator=generator)
        return found.where(found >= 0, IGNORED)

    x = normal(batch, WIDTH)
    ids = torch.randint(0, WIDTH, (batch,), generator=generator)
    target = None
    match recipe.loss:
        case "function":
            target = normal(batch, WIDTH)
        case "tokens" | "masked":
            target = classes(batch)
        case "words":
            target = classes(batch, TIME)
    extra = {"more": normal(batch, WIDTH), "seq": normal(batch, TIME, WIDTH)}
    args: tuple[object, ...] = (x, ids)
    kwargs: dict[str, object] = {}
    match recipe.call:
        case "plain":
            pass
        case "extra":
            args = (x, ids, extra)
        case "keywords":
            args, kwargs = (x,), {"ids": ids, "mask": normal(batch, WIDTH) > 0}
        case "none":
            args, kwargs = (x, ids, None), {"bias": normal(1, WIDTH), "mask": None}
        case kind:
            raise ValueError(kind)
    return Call(args, kwargs, target)


OUTPUTS = ("tensor", "tuple", "dict", "input", "twice")
LOSSES = ("none", "own", *LOSS_FUNCTIONS)
CALLS = ("plain", "extra", "keywords", "none")


def recipes(kinds: Sequence[str], most: int) -> st.SearchStrategy[Recipe]:
    """Recipes of these steps between two linear layers, so that there is something to train."""
    picks = st.integers(0, 5)
    steps = st.lists(st.builds(Step, st.sampled_from(kinds), picks, picks, picks), max_size=most)
    return st.builds(
        Recipe,
        steps.map(lambda found: (Step("linear"), *found, Step("linear"))),
        st.sampled_from(OUTPUTS),
        st.sampled_from(LOSSES),
        st.sampled_from(CALLS),
        st.integers(0, 3),
    )
