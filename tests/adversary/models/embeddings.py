"""Embeddings: sparse gradients, bags, padding, tables shared by both ends."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from adversary.case import FP32_ONLY, Case, Refused
from adversary.inputs import classes
from torch import Tensor, nn

ROWS = 13


class Bag(nn.Module):
    def __init__(self, mode: str = "mean", sparse: bool = False) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(ROWS, 6, mode=mode, sparse=sparse)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.first(self.bag(ids)).tanh())


class Looked(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, 6, **options)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.first(self.table(ids).mean(1)).tanh())  # refused: scaled_by_counts


class Tied(nn.Module):
    """The table is the head, scaled."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, 6, **options)
        self.body = nn.Linear(6, 6)

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.body(self.table(ids) * 6**0.5).tanh(), self.table.weight)


class Crossed(nn.Module):
    """Several tables and pairwise products, as recommenders have them."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ROWS, 6) for _ in range(3))
        self.dense, self.head = nn.Linear(4, 6), nn.Linear(12, 1)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        found = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        rows = torch.stack([self.dense(dense), *found], 1)
        pairs = rows @ rows.transpose(1, 2)
        upper = pairs[:, *torch.triu_indices(4, 4, 1)]
        return self.head(torch.cat([rows[:, 0], upper], 1)).squeeze(1)


class OneHot(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(ROWS, 8), nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.first(F.one_hot(ids, ROWS).float().sum(1)).tanh())


def ids(samples: int) -> Tensor:
    return torch.randint(ROWS, (samples, 4))


def tied_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=0)


def simple(name: str, model: object, **options: object) -> Case:
    return Case(name, model, ids, F.cross_entropy, classes, **options)


CASES = (
    simple("bag", Bag, manners=FP32_ONLY),
    simple("bag_of_sums", lambda: Bag("sum"), manners=FP32_ONLY),
    simple("bag_sparse", lambda: Bag("sum", sparse=True), manners=FP32_ONLY),
    simple("sparse", lambda: Looked(sparse=True), manners=FP32_ONLY),
    simple("padded", lambda: Looked(padding_idx=0)),
    simple("one_hot", OneHot),
    simple(
        "scaled_by_counts",
        lambda: Looked(scale_grad_by_freq=True),
        expect=Refused(
            ("samples of a batch together", "scale_grad_by_freq"),
            ("--microbatches 1",),
            accept="--per-microbatch",
        ),
    ),
    Case(
        "tied",
        Tied,
        ids,
        tied_loss,
        lambda n: torch.randint(1, ROWS, (n, 4)),
        later_target=ids,
        quick=True,
    ),
    Case(
        "tied_sparse",
        lambda: Tied(sparse=True),
        ids,
        tied_loss,
        lambda n: torch.randint(1, ROWS, (n, 4)),
        later_target=ids,
        manners=FP32_ONLY,
    ),
    Case(
        "crossed",
        Crossed,
        lambda n: (torch.randn(n, 4), torch.randint(ROWS, (n, 3))),
        F.binary_cross_entropy_with_logits,
        torch.rand,
    ),
)
