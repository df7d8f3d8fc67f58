"""A model that labels every position, with losses that are means over many things."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe_compiler.compile import trace_subject
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.ir import Graph
from gpipe_compiler.passes.shapes import annotate

BATCH, LENGTH, CLASSES, WIDTH = 4, 3, 5, 4

LossOf = Callable[["Tagger", Tensor, Tensor, Tensor], Tensor]


class Tagger(nn.Module):
    """Logits for every position, and a loss of one kind."""

    def __init__(self, loss: LossOf) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES)
        self.other = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("of_class", torch.tensor([1.0, 2.0, 0.5, 4.0, 0.25]))
        self.register_buffer("seen", torch.ones(CLASSES))
        self.learned = nn.Parameter(torch.rand(CLASSES))
        self.criterion = nn.CrossEntropyLoss(torch.tensor([3.0, 1.0, 0.5, 0.0, 2.0]))
        self.smooth = nn.CrossEntropyLoss(
            torch.tensor([3.0, 1.0, 0.5, 1.0, 2.0]), ignore_index=2, label_smoothing=0.3
        )
        self.loss = loss

    def forward(self, x: Tensor, labels: Tensor, mask: Tensor) -> dict[str, Tensor]:
        return {"loss": self.loss(self, x, labels, mask), "logits": self.head(x)}


def rows(model: Tagger, x: Tensor) -> Tensor:
    return model.head(x).flatten(0, 1)


def nll(model: Tagger, x: Tensor, labels: Tensor) -> Tensor:
    logits = model.head(x).transpose(1, 2)
    return F.cross_entropy(logits, labels.clamp(min=0), reduction="none")


def tokens(model: Tagger, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return F.cross_entropy(rows(model, x), labels.view(-1))


def shifted(model: Tagger, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """As causal language models of Hugging Face do."""
    labels = F.pad(labels, (0, 1), value=-100)
    following = labels[..., 1:].contiguous().view(-1)
    logits = model.head(x).view(-1, CLASSES)
    return F.cross_entropy(logits, following, ignore_index=-100, reduction="mean")


def by_class(model: Tagger, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    scores = F.log_softmax(model.head(x), dim=-1).transpose(1, 2)
    return F.nll_loss(scores, labels, model.of_class)


def module(model: Tagger, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return model.criterion(rows(model, x), labels.flatten())


def smoothed(model: Tagger, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return model.smooth(rows(model, x), labels.masked_fill(labels == -100, 2).flatten())


def scaled(model: Tagger, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    loss = F.cross_entropy(rows(model, x), labels.flatten()).double()
    return 0.0 + 0.3 * -(-loss / 7) * x.size(1) + 0.0


def summed(model: Tagger, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    count = (labels.flatten() != -100).sum()
    return F.cross_entropy(rows(model, x), labels.flatten(), reduction="sum") / count


def masked(model: Tagger, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return (nll(model, x, labels) * mask).sum() / mask.sum()


def clamped(model: Tagger, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return (nll(model, x, labels) * mask).sum() / mask.sum().clamp(min=1.0)


def guarded(model: Tagger, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """As max(2 * sum, 1) + 0.5, out of order."""
    total = torch.clamp(mask.sum() * 2 + 0.25, min=1.25) + 0.25
    return torch.div((nll(model, x, labels) * mask).sum(), total)


def mean_by_mean(model: Tagger, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return (nll(model, x, labels) * mask).mean() / torch.mean(mask)


def inside(model: Tagger, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return (nll(model, x, labels) * mask / mask.sum()).sum()


def edited(model: Tagger, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    labels = labels.clone()
    labels[labels == 0] = -100
    return F.cross_entropy(rows(model, x), labels.view(-1))


def alike(model: Tagger, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Two heads with the same labels, and a regulariser."""
    deep = F.cross_entropy(model.other(x).flatten(0, 1), labels.flatten())
    return tokens(model, x, labels, mask) + 0.5 * deep + 0.01 * model.head.weight.square().sum()


def stacked(model: Tagger, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    deep = F.cross_entropy(model.other(x).flatten(0, 1), labels.flatten())
    return torch.stack([tokens(model, x, labels, mask), deep]).mean()


def chosen(model: Tagger, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """The mean over what a mask selects."""
    return nll(model, x, labels)[mask > 0].mean()


def where_any(model: Tagger, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Zero where nothing counts."""
    number = mask.sum()
    total = (nll(model, x, labels) * mask).sum()
    return torch.where(number > 0, total / number.clamp(min=0.25), 0.0)


def where_none(model: Tagger, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    number = (labels != -100).sum()
    return torch.where(number == 0, torch.zeros((), dtype=x.dtype), tokens(model, x, labels, mask))


def if_any(model: Tagger, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    counts = mask > 0
    total = (nll(model, x, labels) * counts).sum()
    return torch.where(~counts.any(), 0.0, total / counts.sum().clamp(min=1))


def one_at_least(model: Tagger, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    number = (mask > 0).sum()
    total = (nll(model, x, labels) * (mask > 0)).sum()
    return total / torch.where(number > 0, number, 1) + total / torch.where(number > 0, number, 1)


def linear(model: Tagger, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """The loss that torch fuses with the head."""
    weight = model.head.weight
    return F.linear_cross_entropy(x.flatten(0, 1), weight, labels.flatten())


WEIGHTED: dict[str, LossOf] = {
    made.__name__: made
    for made in (
        *(tokens, shifted, by_class, module, smoothed, scaled, summed, masked, clamped, guarded),
        *(mean_by_mean, inside, edited, alike, stacked),
        *(chosen, where_any, where_none, if_any, one_at_least),
    )
}

LABELS = torch.tensor([[0, 1, 2], [-100, -100, 3], [4, 4, -100], [-100, -100, -100]])
MASK = torch.tensor([[1.0, 0.0, 0.5], [0.0, 0.0, 0.0], [0.25, 1.0, 1.0], [0.0, 0.0, 0.125]])

BY_HAND: dict[str, list[float]] = {
    "tokens": [3, 1, 2, 0],
    "shifted": [2, 1, 1, 0],
    "by_class": [1 + 2 + 0.5, 4, 0.25 + 0.25, 0],
    "module": [3 + 1 + 0.5, 0, 2 + 2, 0],
    "smoothed": [3 + 1, 1, 2 + 2, 0],
    "scaled": [3, 1, 2, 0],
    "summed": [3, 1, 2, 0],
    "masked": [1.5, 0, 2.25, 0.125],
    "clamped": [1.5, 0, 2.25, 0.125],
    "guarded": [1.5, 0, 2.25, 0.125],
    "mean_by_mean": [1.5, 0, 2.25, 0.125],
    "inside": [1.5, 0, 2.25, 0.125],
    "edited": [2, 1, 2, 0],
    "alike": [3, 1, 2, 0],
    "stacked": [3, 1, 2, 0],
    "chosen": [2, 0, 3, 1],
    "where_any": [1.5, 0, 2.25, 0.125],
    "where_none": [3, 1, 2, 0],
    "if_any": [2, 0, 3, 1],
    "one_at_least": [2, 0, 3, 1],
}
"""The weight of every single sample of LABELS and MASK."""


def traced(loss: LossOf, size: int = 2) -> tuple[Graph, Tagger]:
    """The model on LABELS and MASK, its graph described for micro-batches of some size."""
    torch.manual_seed(0)
    model = Tagger(loss).double()
    torch.nn.init.normal_(model.head.weight)
    call = {"x": torch.randn(BATCH, LENGTH, WIDTH).double(), "labels": LABELS, "mask": MASK}
    call = {name: tensor.double() if name == "mask" else tensor for name, tensor in call.items()}
    subject = Subject("tagger", model, (), call)
    return annotate(trace_subject(subject), size), model
