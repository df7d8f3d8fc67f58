"""Branches on values: which way they go is checked at every step."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from adversary.case import FP32_ONLY, Case, Refused, RefusedAtStep
from adversary.inputs import classes, rows
from torch import Tensor, nn


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def head(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


class Clamps(Two):
    """As detection transformers guard their layers."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if not torch.isfinite(h).all():
            h = h.clamp(-1e4, 1e4)
        return self.last(h)


class ClampsHalves(Two):
    """The same as others write it, by the type too."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if h.dtype == torch.float16 or torch.isinf(h).any() or torch.isnan(h).any():
            limit = torch.finfo(h.dtype).max - 1000
            h = torch.clamp(h, min=-limit, max=limit)
        return self.last(h)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(6, 6)
        self.register_buffer("on", torch.tensor(1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(x).tanh()
        if self.on and x.isnan().any():
            x = x.nan_to_num()
        return x


class Layered(Two):
    """One in each of many equal layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class ByBuffers(Two):
    """Numbers that stand in buffers which nothing changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rounds", torch.tensor(3))
        self.register_buffer("sizes", torch.tensor([2, 4]))
        self.register_buffer("on", torch.tensor(True))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(int(self.rounds)):
            x = x.sin()
        x = torch.cat(x.split(self.sizes.tolist(), 1)[::-1], 1)
        if self.on:
            x = x * self.rounds.item()
        with torch.no_grad():
            scale = 2 if self.rounds > 2 else 1
        return self.head(F.pad(x[:, : self.rounds], (0, 3)) / scale)


class Compares(Two):
    """By functions of torch that compare all values of two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ones", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        if torch.equal(self.ones, torch.ones(6)) and not self.ones.equal(x):
            x = x * self.ones
        if not torch.allclose(x, x.nan_to_num(), atol=1e-3):
            x = x.nan_to_num()
        assert not torch.equal(x, x + 1)
        return self.head(x)


class Counts(nn.Module):
    """Numbers below a bound have as many counts, whatever they are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.register_buffer("load", torch.zeros(5, dtype=torch.long))
        self.register_buffer("mass", torch.zeros(8))

    def forward(self, x: Tensor, kinds: Tensor) -> Tensor:
        h = self.first(x)
        if self.training:
            self.load += torch.bincount(kinds, minlength=5)[:5]
            self.mass += h.argmax(-1).bincount(x.detach()[:, 0], minlength=8)
        return self.last(h)


class Normed(Two):
    """Statistics of micro-batches before the one that is refused are those before the step."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x))
        if not torch.isfinite(h).all():
            h = h.nan_to_num()
        return self.last(h)


class WithGradients(Two):
    """In eval mode a step has them, and an evaluation has none."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if h.requires_grad and h.grad_fn is not None:  # refused: with_gradients
            h = h * 2
        return self.last(h)


class WithGradientsInTraining(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.training and h.requires_grad and torch.is_grad_enabled():
            h = h * 2
        if not h.is_leaf:
            h = h + 0
        return self.last(h)


class Leaves(Two):
    """Returns another thing early."""

    def forward(self, x: Tensor) -> Tensor:
        if (x > 100).any():
            return x[:, :3]
        return self.head(x)


class InTraining(Two):
    def forward(self, x: Tensor) -> Tensor:
        if self.training and x.abs().max() > 1e6:
            x = x / 2
        return self.head(x)


class ByFlag(Two):
    """A number of Python's that says whether, as long transformers ask for global attention."""

    def forward(self, x: Tensor) -> Tensor:
        large = x.flatten() > 1e6
        is_large = large.any().item()
        for _ in range(2):
            if is_large:
                x = x / 2
        return self.head(x)


class Several(Two):
    """Comparisons with what is taken over the batch, that hold of it as of its parts."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if h.max() > 1e4 or (h.min() < -1e4 and h.abs().mean() > 1):
            h = h / 2
        if (h > 1e5).sum() > 0:
            h = h / 2
        return self.last(h)


class BySum(Two):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:  # refused: by_sum
            x = x / 2
        return self.head(x)


class InRegion(Two):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.std(1, keepdim=True)
            if scale.isnan().any():  # refused: in_region
                scale = scale.nan_to_num()
        return self.head(x / scale)


class Routed(Two):
    """Of few samples some expert gets none."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        chosen, mixed = x[:, :3].argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mask = chosen == number
            if mask.any():  # refused: routed
                mixed[mask] = expert(x[mask])
        return self.head(mixed)


class Embedded(nn.Module):
    """Does something else with padding, of which the example has none."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(20, 6), nn.Linear(6, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.table(tokens)
        if (tokens == 0).any():  # refused: padded
            h = h * (tokens != 0).unsqueeze(-1)
        return self.last(h.mean(1))


class ByWeight(Two):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x * 2 if self.scale > 0.1 else x)  # refused: by_weight


class Initialises(Two):
    """By the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("done", torch.tensor(False))
        self.register_buffer("scale", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        if not self.done:  # refused: initialises
            self.scale.copy_(x.std(0))
            self.done.fill_(True)
        return self.head(x / self.scale)


def padded(output: Tensor, target: Tensor) -> Tensor:
    if (target == -1).all():
        return output.sum() * 0
    return F.cross_entropy(output, target, ignore_index=-1)


def bounded(output: Tensor, target: Tensor) -> Tensor:
    losses = F.cross_entropy(output, target, reduction="none")
    if (losses > 1e4).any():
        losses = losses.clamp(max=10)
    return losses.mean()


def outlier() -> Tensor:
    """Rows, one of the last of which is too large."""
    x = torch.randn(6, 6)
    x[4, 2] = torch.inf
    return x


def missing() -> Tensor:
    """Rows, one of the last of which has no number."""
    x = torch.randn(6, 6)
    x[4, 2] = torch.nan
    return x


def kinds(samples: int) -> tuple[Tensor, Tensor]:
    return rows(samples), torch.randint(5, (samples,))


def beyond() -> tuple[Tensor, Tensor]:
    """A kind among the last samples of which there is none."""
    return rows(6), torch.tensor([0, 1, 2, 3, 4, 5])


def simple(name: str, model: type[nn.Module], **options: object) -> Case:
    return Case(name, model, rows, F.cross_entropy, classes, **options)


def at_step(line: str, inputs: object = outlier, target: object = None) -> RefusedAtStep:
    """Of a batch for which the line decides otherwise."""
    given = target or (lambda: classes(6))
    return RefusedAtStep(inputs, ("branches.py", line, "another way"), given, ("torch.where",))


CASES = (
    simple("clamps", Clamps, quick=True, expect=at_step("if not torch.isfinite(h).all()")),
    simple("clamps_halves", ClampsHalves, expect=at_step("torch.isinf(h).any()")),
    simple("layered", Layered, expect=at_step("x.isnan().any()", missing)),
    simple("by_buffers", ByBuffers),
    simple("leaves", Leaves, expect=at_step("if (x > 100).any()")),
    simple("in_training", InTraining, expect=at_step("if self.training and")),
    simple("by_flag", ByFlag, expect=at_step("is_large = large.any().item()")),
    simple("several", Several, expect=at_step("if ")),
    simple("compares", Compares, expect=at_step("torch.allclose(x", missing)),
    Case(
        "counts",
        Counts,
        kinds,
        F.cross_entropy,
        classes,
        expect=at_step("torch.bincount(kinds, minlength=5)", beyond),
    ),
    simple(
        "normed",
        Normed,
        sizes=(8,),
        reference="micro-batches",
        expect=at_step("torch.isfinite(h)"),
    ),
    simple(
        "with_gradients",
        WithGradients,
        expect=Refused(("something else with gradients than without",), ("self.training",)),
    ),
    simple("with_gradients_in_training", WithGradientsInTraining),
    Case("with_gradients_inference", WithGradients, rows, options="--mode infer"),
    Case(
        "all_padded",
        Two,
        rows,
        padded,
        classes,
        expect=at_step("(target == -1).all()", lambda: rows(6), lambda: torch.full((6,), -1)),
    ),
    Case("bounded_losses", Two, rows, bounded, classes),
    Case("clamps_inference", Clamps, rows, options="--mode infer"),
    simple(
        "by_sum",
        BySum,
        manners=FP32_ONLY,
        expect=Refused(
            ("micro-batches may go one way",),
            ("ask it of every sample", "--microbatches 1"),
            accept="--microbatches 1",
            reference="whole",
        ),
    ),
    simple("in_region", InRegion),
    simple("routed", Routed, expect=Refused(("one way for the example",), ("torch.where",))),
    Case(
        "padded",
        Embedded,
        lambda n: torch.randint(1, 20, (n, 200)),  # other values have zeros for certain
        F.cross_entropy,
        classes,
        expect=Refused(("one way for the example",), ("torch.where",)),
    ),
    simple(
        "by_weight", ByWeight, expect=Refused(("scale, which the model changes",), ("torch.where",))
    ),
    simple(
        "initialises", Initialises, expect=Refused(("done, which the model changes",), ("torch",))
    ),
)
