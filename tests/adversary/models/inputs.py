"""What a model is called with."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from adversary.case import FP32_ONLY, SAMPLES, Case, Refused, RefusedAtStep
from torch import Tensor, nn


class Two(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, 8), nn.Linear(8, 3)

    def head(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


class Keywords(Two):
    def forward(self, x: Tensor, *, bias: Tensor | None = None, scale: float = 2.0) -> Tensor:
        x = x * scale
        return self.head(x if bias is None else x + bias)


class Nested(Two):
    def forward(self, batch: dict[str, object]) -> Tensor:
        left, (right, more) = batch["left"], batch["both"]
        return self.head(left + right * more["deep"][0])


class Point(NamedTuple):
    x: Tensor
    y: Tensor


class TakesNamedTuple(Two):
    def forward(self, point: Point) -> Tensor:
        return self.head(point.x + point.y)


class Variadic(Two):
    def forward(self, *parts: Tensor) -> Tensor:
        return self.head(sum(parts))


class Indices(Two):
    """Rows of a table, chosen by one input, mixed by another."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)

    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        return self.head((self.table(ids) * weights.unsqueeze(-1)).sum(1))


class Gathered(Two):
    """Chooses a step of each sample by its index."""

    def forward(self, x: Tensor, where: Tensor) -> Tensor:
        return self.head(x[torch.arange(len(x)), where])


class Asking(Two):
    """Inputs that ask for gradients get them."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


class TurnsOn(Two):
    """A penalty of the gradient needs the input's own."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().clone()
        x.requires_grad = True
        return self.head(x)


class TurnsOnInput(Two):
    """The same on the very tensor that was passed."""

    def forward(self, x: Tensor) -> Tensor:
        x.requires_grad = True
        return self.head(x)


class FloorDivided(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(x // 0.5)


class Unused(Two):
    def forward(self, x: Tensor, unused: Tensor) -> Tensor:
        return self.head(x)


class BooleanMask(Two):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.head(x.masked_fill(mask, 0.0))


class Scalars(Two):
    """Tensors without dimensions beside the batch."""

    def forward(self, x: Tensor, temperature: Tensor) -> Tensor:
        return self.head(x / temperature)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 8, dtype=torch.complex64) * 0.3)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((x @ self.weight).abs())


class Varying(Two):
    """Sequences of any length."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.cumsum(1).mean(1))


class Bytes(Two):
    """Images of unsigned bytes."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.float() / 255)


class Optional(Two):
    """None among positional arguments."""

    def forward(self, x: Tensor, state: Tensor | None, flag: bool = True) -> Tensor:
        return self.head(x if state is None or not flag else x + state)


class Extra:
    """No container that a pipeline takes apart."""

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask


@dataclass(frozen=True)
class Sample:
    """Tensors by name, one in a list, and none where one may be, beside a number."""

    x: Tensor
    masks: list[Tensor]
    scale: float
    bias: Tensor | None = None


class TakesList(Two):
    """Samples of lengths of their own, in a list."""

    def forward(self, samples: list[Tensor]) -> Tensor:
        rows = [self.first(sample).tanh().mean(0) for sample in samples]
        return self.last(torch.stack(rows))


class TakesSample(Two):
    def forward(self, sample: Sample) -> Tensor:
        x = sample.x * sample.masks[0] * sample.scale
        return self.head(x if sample.bias is None else x + sample.bias)


class TakesObject(Two):
    def forward(self, x: Tensor, extra: Extra) -> Tensor:
        return self.head(x * extra.mask)


@dataclass
class Settings:
    """Holds no tensor, and decides what is computed."""

    scale: float


class TakesSettings(Two):
    def forward(self, x: Tensor, settings: Settings) -> Tensor:
        return self.head(x * settings.scale)


class Attributes(collections.UserDict[str, Tensor]):
    """Items that are read as attributes too, as in Hugging Face's batches."""

    def __getattr__(self, name: str) -> Tensor:
        if name not in self.__dict__.get("data", ()):
            raise AttributeError(name)
        return self.data[name]


class ReadsAttributes(Two):
    def forward(self, batch: Attributes) -> Tensor:
        return self.head(batch.x + batch["y"])


def smoothed(output: Tensor, target: dict[str, object]) -> Tensor:
    return F.cross_entropy(output, target["labels"], label_smoothing=target["smoothing"])


class DecidesByValue(Two):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # refused: branch_on_values
            x = x * 2
        return self.head(x)


def rows(samples: int) -> Tensor:
    return torch.randn(samples, 6)


def classes(samples: int) -> Tensor:
    return torch.randint(3, (samples,))


def asking(samples: int) -> Tensor:
    return rows(samples).requires_grad_()


def simple(name: str, model: type[nn.Module], inputs: object, **options: object) -> Case:
    return Case(name, model, inputs, F.cross_entropy, classes, **options)


CASES = (
    simple("keywords", Keywords, lambda n: ((rows(n),), {"bias": torch.randn(n, 6)})),
    simple("keywords_alone", Keywords, lambda n: {"x": rows(n), "scale": 3.0}),
    simple("shared_keyword", Keywords, lambda n: {"x": rows(n), "bias": torch.randn(6)}),
    simple(
        "nested",
        Nested,
        lambda n: ({"left": rows(n), "both": (rows(n), {"deep": [rows(n)]})},),
    ),
    simple("named_tuple", TakesNamedTuple, lambda n: (Point(rows(n), rows(n)),)),
    simple("variadic", Variadic, lambda n: (rows(n), rows(n), rows(n))),
    simple("indices", Indices, lambda n: (torch.randint(11, (n, 4)), torch.rand(n, 4))),
    simple("gathered", Gathered, lambda n: (torch.randn(n, 5, 6), torch.randint(5, (n,)))),
    simple("asking", Asking, asking, manners=FP32_ONLY, quick=True),
    simple(
        "asking_for_some", Keywords, lambda n: {"x": rows(n), "bias": asking(n)}, manners=FP32_ONLY
    ),
    simple("turns_on", TurnsOn, rows),
    simple("turns_on_the_input", TurnsOnInput, rows),
    simple("floor_divided", FloorDivided, rows),
    simple("unused", Unused, lambda n: (rows(n), torch.randn(n, 2))),
    simple("mask", BooleanMask, lambda n: (rows(n), torch.rand(n, 6) > 0.5)),
    simple("scalar", Scalars, lambda n: (rows(n), torch.rand(()) + 1)),
    simple(
        "complex", Complex, lambda n: torch.randn(n, 6, dtype=torch.complex64), manners=FP32_ONLY
    ),
    simple("bytes", Bytes, lambda n: torch.randint(255, (n, 6), dtype=torch.uint8)),
    simple("none_among_them", Optional, lambda n: (rows(n), None, False)),
    simple(
        "another_length",
        Varying,
        lambda n: torch.randn(n, 5, 6),
        options="--fix all",
        expect=RefusedAtStep(lambda: torch.randn(8, 7, 6), ("5x6", "8x7x6"), lambda: classes(8)),
    ),
    simple(
        "another_type",
        Asking,
        rows,
        expect=RefusedAtStep(
            lambda: rows(8).double(), ("float64", "float32"), lambda: classes(8), (".to(",)
        ),
    ),
    simple(
        "another_value",
        Keywords,
        lambda n: {"x": rows(n), "scale": 3.0},
        expect=RefusedAtStep(
            lambda: {"x": rows(8), "scale": 2.0},
            ("'scale' is 2.0", "compiled for 3.0"),
            lambda: classes(8),
            ("compile the model with this value",),
        ),
    ),
    simple(
        "a_value_more",
        Keywords,
        rows,
        expect=RefusedAtStep(
            lambda: ((rows(8),), {"scale": 3.0}),
            ("'scale' is 3.0", "compiled for 2.0"),
            lambda: classes(8),
            ("leave it out",),
        ),
    ),
    simple(
        "the_default_too",
        Keywords,
        lambda n: ((rows(n),), {"scale": 2.0} if n != 8 else {}),
    ),
    simple(
        "another_object",
        TakesSettings,
        lambda n: (rows(n), Settings(2.0)),
        quick=True,
        expect=RefusedAtStep(
            lambda: (rows(8), Settings(3.0)),
            ("argument 1 is Settings(scale=3.0)", "compiled for Settings(scale=2.0)"),
            lambda: classes(8),
            ("compile the model with this value",),
        ),
    ),
    simple("same_object", TakesSettings, lambda n: (rows(n), Settings(2.0))),
    simple("read_as_attributes", ReadsAttributes, lambda n: (Attributes(x=rows(n), y=rows(n)),)),
    Case(
        "another_value_in_the_target",
        Asking,
        rows,
        smoothed,
        lambda n: {"labels": classes(n), "smoothing": 0.1, "file": "a"},
        expect=RefusedAtStep(
            lambda: rows(8),
            ("target['smoothing'] is 0.2", "compiled for 0.1"),
            lambda: {"labels": classes(8), "smoothing": 0.2, "file": "a"},
        ),
    ),
    Case(
        "unused_values_in_the_target",
        Asking,
        rows,
        smoothed,
        lambda n: {"labels": classes(n), "smoothing": 0.1, "files": [f"{n}.png"] * n},
    ),
    simple(
        "unequal_numbers",
        Keywords,
        lambda n: {"x": rows(n), "bias": torch.randn(n, 6)},
        expect=RefusedAtStep(
            lambda: {"x": rows(8), "bias": torch.randn(7, 6)},
            ("8 samples", "7"),
            lambda: classes(8),
        ),
    ),
    simple(
        "nothing_at_all",
        Asking,
        rows,
        expect=RefusedAtStep(lambda: rows(0), ("empty",), lambda: classes(0)),
    ),
    simple(
        "index_too_large",
        Indices,
        lambda n: (torch.randint(11, (n, 4)), torch.rand(n, 4)),
        expect=RefusedAtStep(
            lambda: (torch.full((SAMPLES, 4), 11), torch.rand(SAMPLES, 4)),
            ("index",),
            lambda: classes(8),
        ),
    ),
    simple(
        "in_a_dataclass",
        TakesSample,
        lambda n: (Sample(rows(n), [torch.rand(n, 6)], 0.5),),
    ),
    simple(
        "in_a_list",
        TakesList,
        lambda n: ([torch.randn(3 + i % 3, 6) for i in range(n)],),
        expect=Refused(
            ("the 8 tensors of a list",), ("pad them", "--microbatches 1"), at_line=False
        ),
    ),
    simple(
        "in_an_object",
        TakesObject,
        lambda n: (rows(n), Extra(torch.rand(6))),
        expect=Refused(("inside of an Extra at ",), ("a dataclass",), at_line=False),
    ),
    simple(
        "branch_on_values",
        DecidesByValue,
        rows,
        expect=Refused(("values of a tensor",), ("torch.where",)),
    ),
)
