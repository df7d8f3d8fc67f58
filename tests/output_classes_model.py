"""Models that return objects of their own classes, importable and not."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn


class Pair(NamedTuple):
    first: Tensor
    rest: list[Tensor]


class Cache:
    """No container whose tensors could be found in it."""

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys


@dataclass
class Answer:
    rows: Tensor
    total: Tensor
    pair: Pair
    unused: Tensor | None
    ordered: OrderedDict[str, Tensor | None]
    counted: defaultdict[str, Tensor]
    local: defaultdict[str, Tensor]
    caches: tuple[Tensor, Cache]


class Answering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Answer:
        y = self.last(self.first(x).tanh())
        counted = defaultdict(Tensor, {"rows": y + 2})
        ordered = OrderedDict(b=y - 1, a=None)
        local = defaultdict(lambda: y, {"rows": y + 3})  # a factory that cannot be imported
        caches = (y * 3, Cache(y))
        return Answer(y, y.sum(0), Pair(y * 2, [y + 1]), None, ordered, counted, local, caches)
