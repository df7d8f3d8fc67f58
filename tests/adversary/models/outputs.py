"""What a model returns: structures, classes of the user's own, and numbers of a whole batch."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from adversary.case import ONE_PIECE_BF16, Case, Refused
from adversary.inputs import classes, rows
from torch import Tensor, nn


class Two(nn.Module):
    """Two layers; what is returned is for subclasses to say."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def hidden(self, x: Tensor) -> Tensor:
        return self.first(x).tanh()


class Pair(NamedTuple):
    logits: Tensor
    hidden: Tensor


@dataclass
class Answer:
    logits: Tensor
    hidden: Tensor
    loss: Tensor | None = None


class AsTuple(Two):
    def forward(self, x: Tensor) -> object:
        hidden = self.hidden(x)
        return self.last(hidden), hidden


class AsList(Two):
    def forward(self, x: Tensor) -> object:
        hidden = self.hidden(x)
        return [self.last(hidden), [hidden, None], 3]


class AsDict(Two):
    def forward(self, x: Tensor) -> object:
        hidden = self.hidden(x)
        return {
            "logits": self.last(hidden),
            "more": {"hidden": hidden, "width": 8, 0: hidden[:, 0]},
        }


class WithParameters(Two):
    """Returns weights of its tasks beside what they weigh."""

    def __init__(self) -> None:
        super().__init__()
        self.log_vars = nn.Parameter(torch.linspace(-1, 1, 2))

    def forward(self, x: Tensor) -> object:
        return self.last(self.hidden(x)), self.log_vars, self.first.weight


def weighed(output: tuple[Tensor, Tensor, Tensor], target: Tensor) -> Tensor:
    logits, log_vars, _ = output
    terms = F.cross_entropy(logits, target), logits.square().mean()
    return sum(
        (term * (-own).exp() + own for term, own in zip(terms, log_vars, strict=True)),
        torch.zeros(()),
    )


class AsOrderedDict(Two):
    def forward(self, x: Tensor) -> object:
        hidden = self.hidden(x)
        return OrderedDict(out=self.last(hidden), aux=hidden)


class AsNamedTuple(Two):
    def forward(self, x: Tensor) -> object:
        hidden = self.hidden(x)
        return Pair(self.last(hidden), hidden)


class AsDataclass(Two):
    def forward(self, x: Tensor) -> object:
        hidden = self.hidden(x)
        return Answer(self.last(hidden), hidden)


class OwnLoss(Two):
    def forward(self, x: Tensor, labels: Tensor) -> object:
        hidden = self.hidden(x)
        logits = self.last(hidden)
        return Answer(logits, hidden, F.cross_entropy(logits, labels))


class OwnLossDict(Two):
    def forward(self, x: Tensor, labels: Tensor) -> object:
        logits = self.last(self.hidden(x))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class LossesBeside(Two):
    """Two losses over other things than samples, their sum, and a scaled one with a number."""

    def forward(self, x: Tensor, labels: Tensor) -> object:
        logits = self.last(self.hidden(x))
        entropy = F.cross_entropy(logits, labels)
        kept = (labels >= 0).float()
        z = (logits.logsumexp(1).square() * kept).sum() / kept.sum().clamp(min=1)
        return logits, entropy + 0.1 * z, {"entropy": entropy.detach(), "z": 2 * z - 1}


class Same(Two):
    """The same tensor twice, and an input as it is."""

    def forward(self, x: Tensor) -> object:
        out = self.last(self.hidden(x))
        return out, {"again": out}, x


class Decided(Two):
    """Integers and booleans besides."""

    def forward(self, x: Tensor) -> object:
        out = self.last(self.hidden(x))
        return out, out.argmax(1), out > 0, out.topk(2).indices


class Row(list[Tensor]):
    """A list of the user's."""


class OwnSequences(Two):
    def forward(self, x: Tensor) -> tuple[Row, torch.Size]:
        output = self.last(self.first(x).tanh())
        return Row([output, output * 2]), self.first.weight.shape


class Ranked(Two):
    """What torch returns under names of its own: `values` and `indices`."""

    def forward(self, x: Tensor) -> object:
        out = self.last(self.hidden(x))
        return {"best": out.topk(2, 1), "sorted": [out.sort(1)], "largest": out.max(1)}


class InNamespace(Two):
    def forward(self, x: Tensor) -> object:
        out = self.last(self.hidden(x))
        return SimpleNamespace(logits=out, parts=[out * 2])


class Cache:
    """No container that could be taken apart."""

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys


@dataclass
class Cached:
    logits: Tensor
    cache: Cache | None = None


class Caching(Two):
    """Caches in one mode alone: as a field, as None beside, and under a key that is missing."""

    def forward(self, x: Tensor) -> object:
        hidden = self.hidden(x)
        out, cache = self.last(hidden), Cache(hidden)
        if self.training:
            return Cached(out), {"out": out * 2, "seen": cache, "kept": None}, [None, cache]
        return Cached(out, cache), {"out": out * 2, "kept": cache}, [cache, None]


class OwnWeight(Two):
    def forward(self, x: Tensor) -> object:
        return self.last(self.hidden(x)), self.last.weight, self.last.weight[0]


class Early(Two):
    """An output of the first stage, an auxiliary head's."""

    def __init__(self) -> None:
        super().__init__()
        self.aux = nn.Linear(8, 3)
        self.middle = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> object:
        hidden = self.hidden(x)
        return self.last(self.middle(hidden).tanh()), self.aux(hidden)


class Remembers(Two):
    """Keeps what a later call needs in eval mode alone, as recurrent language models do."""

    def forward(self, x: Tensor) -> object:
        hidden = self.hidden(x)
        returned = {"logits": self.last(hidden)}
        if not self.training:
            past = hidden.unsqueeze(-1).expand(-1, -1, 4)
            returned["state"] = [past.transpose(0, 1), hidden.cos()]
        return returned


class OverBatch(Two):
    """A number of the whole batch, besides an output for each sample."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> object:
        out = self.last(self.hidden(x))
        match self.how:
            case "sum":
                total = out.sum()
            case "sum_of_columns":
                total = out.sum(0)
            case "mean":
                total = out.mean()
            case "mean_of_columns":
                total = out.mean(0)
            case "max":
                total = out.max()
            case "max_of_columns":
                total = out.amax(0)
            case "min":
                total = out.min()
            case "any":
                total = (out > 1).any()
            case "all":
                total = (out > -5).all()
            case "count":
                total = (out > 0).sum()
            case "norm":
                total = out.norm()  # refused: over_batch_norm
            case "std":
                total = out.std()  # refused: over_batch_std
            case "median":
                total = out.median()  # refused: over_batch_median
            case "which":
                total = out.argmax(0)  # refused: over_batch_which
            case "majority":
                total = (out > -9).float().mean() > 0.5  # refused: over_batch_majority
            case "rounded":
                total = out.mean().floor()  # refused: over_batch_rounded
            case "clamped":
                total = out.mean().clamp(-9, 9)  # refused: over_batch_clamped
            case "of_selected":
                total = out[out > 0].mean()  # refused: over_batch_of_selected
            case "waves":
                total = torch.fft.fft(out, dim=0)  # refused: over_batch_waves
            case "gram":
                total = out.t() @ out
            case "similarities":
                total = out @ out.t()  # refused: over_batch_similarities
        return out, total


class OnlySum(Two):
    """Nothing but one number."""

    def forward(self, x: Tensor) -> object:
        return self.last(self.hidden(x)).exp().sum()


class Constants(Two):
    """Tensors that have nothing to do with the batch."""

    def forward(self, x: Tensor) -> object:
        return self.last(self.hidden(x)), self.first.weight.norm(), torch.arange(3), x.shape[1]


class BatchSize(Two):
    """Python's own number of the samples."""

    def forward(self, x: Tensor) -> object:
        return self.last(self.hidden(x)), x.shape[0]


def labelled(samples: int) -> tuple[Tensor, Tensor]:
    return rows(samples), classes(samples)


def padded(samples: int) -> tuple[Tensor, Tensor]:
    """Labels of which the first half is ignored, and those of some micro-batches are all."""
    x, labels = labelled(samples)
    return x, labels.masked_fill(torch.arange(samples) < samples // 2, -100)


def first(output: object, target: Tensor) -> Tensor:
    item = output[0] if isinstance(output, tuple | list) else output["logits"]
    return F.cross_entropy(item, target)


def over_batch(how: str, **options: object) -> Case:
    return Case(
        f"over_batch_{how}", lambda: OverBatch(how), rows, options="--mode infer", **options
    )


NOT_OF_PARTS = Refused(
    ("output",), ("--microbatches 1",), accept="--microbatches 1", reference="whole"
)

CASES = (
    Case("tuple", AsTuple, rows, first, classes),
    Case("parameters", WithParameters, rows, weighed, classes),
    Case("list", AsList, rows, first, classes),
    Case("dict", AsDict, rows, first, classes),
    Case("ordered_dict", AsOrderedDict, rows, lambda y, t: F.cross_entropy(y["out"], t), classes),
    Case("named_tuple", AsNamedTuple, rows, first, classes),
    Case("named_tuple_inference", AsNamedTuple, rows, options="--mode infer"),
    Case("dataclass", AsDataclass, rows, lambda y, t: F.cross_entropy(y.logits, t), classes),
    Case("dataclass_inference", AsDataclass, rows, options="--mode infer"),
    Case("own_loss_in_a_dataclass", OwnLoss, labelled),
    Case("own_loss_in_a_dict", OwnLossDict, labelled),
    Case(
        "losses_beside_logits",
        LossesBeside,
        labelled,
        lambda y, t: y[1],
        classes,
        later_inputs=padded,
        quick=True,
    ),
    Case(
        "losses_beside_logits_inference",
        LossesBeside,
        labelled,
        options="--mode infer",
        later_inputs=padded,
    ),
    Case(
        "remembers",
        Remembers,
        rows,
        lambda y, t: F.cross_entropy(y["logits"], t),
        classes,
        as_evaluated=True,
    ),
    Case("same_twice", Same, rows, first, classes),
    Case("decisions", Decided, rows, first, classes),
    Case(
        "early",
        Early,
        rows,
        lambda y, t: F.cross_entropy(y[0], t) + 0.4 * F.cross_entropy(y[1], t),
        classes,
    ),
    Case("constants", Constants, rows, first, classes),
    Case("own_sequences", OwnSequences, rows, options="--mode infer"),
    Case("ranked", Ranked, rows, options="--mode infer", manners=({}, {"microbatches": 3})),
    Case("caches", Caching, rows, lambda y, t: F.cross_entropy(y[0].logits, t), classes),
    Case("in_namespace", InNamespace, rows, options="--mode infer"),
    Case("own_weight", OwnWeight, rows, lambda y, t: F.cross_entropy(y[0], t), classes),
    Case("batch_size", BatchSize, rows, options="--mode infer"),
    Case("only_sum", OnlySum, rows, options="--mode infer"),
    *(
        over_batch(how, quick=how == "sum")
        for how in (
            *("sum", "sum_of_columns", "mean", "mean_of_columns", "max", "max_of_columns"),
            *("min", "any", "all", "count", "gram"),
        )
    ),
    *(
        over_batch(how, expect=NOT_OF_PARTS)
        for how in (
            *("norm", "std", "median", "which", "majority", "rounded", "clamped"),
            "of_selected",
        )
    ),
    over_batch(
        "waves",
        manners=({},),
        expect=Refused(
            ("takes the samples of a batch together",),
            ("--microbatches 1",),
            accept="--microbatches 1",
            reference="whole",
        ),
    ),
    over_batch("similarities", expect=NOT_OF_PARTS, manners=({}, ONE_PIECE_BF16)),
    Case("sum_in_training", lambda: OverBatch("sum"), rows, first, classes),
    Case("max_in_training", lambda: OverBatch("max"), rows, first, classes),
)
