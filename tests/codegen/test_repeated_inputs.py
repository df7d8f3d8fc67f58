"""Modules that are given one value several times, and several values elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_compiler.codegen.facts import CodeFacts
from gpipe_compiler.codegen.stage import write_stages
from gpipe_compiler.plan import Plan


def similarity(a: Tensor, b: Tensor) -> Tensor:
    left, right = F.normalize(a, dim=-1), F.normalize(b, dim=-1)
    return (left * right).sum(-1, keepdim=True).tanh()


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.to_query = nn.Linear(width, width)
        self.to_key = nn.Linear(width, width)
        self.to_value = nn.Linear(width, width)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        batch, length, width = query.shape
        keys = key.shape[1]
        query = self.to_query(query).view(batch, length, 2, width // 2).transpose(1, 2)
        key = self.to_key(key).view(batch, keys, 2, width // 2).transpose(1, 2)
        value = self.to_value(value).view(batch, keys, 2, width // 2).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(query, key, value)
        return mixed.transpose(1, 2).reshape(batch, length, width)


class Layer(nn.Module):
    """Attends to itself, to what it is given, and once more by the same module."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.own = Attention(width)
        self.cross = Attention(width)

    def forward(self, x: Tensor, context: Tensor, places: Tensor) -> Tensor:
        x = x + self.own(x, x, x)
        x = x + self.cross(x, context + places, context)
        x = x * similarity(x, x) + similarity(x, x.flip(1))
        return x + self.cross(x, context, context)


class Decoder(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = Attention(width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))

    def forward(self, x: Tensor, context: Tensor, places: Tensor) -> Tensor:
        context = context + self.first(context, context, context)
        for layer in self.layers:
            x = layer(x, context, places)
        return x


def test_one_class_is_written_for_all_ways_to_call_it(planned: Callable[..., Plan]) -> None:
    """As the model calls it; sizes have the names that the user gives those of each argument."""
    torch.manual_seed(0)
    model = Decoder()
    given = torch.rand(4, 5, 8), torch.rand(4, 3, 8), torch.rand(3, 8)
    plan = planned(copy.deepcopy(model), *given, count=1)
    assert plan.graph is not None

    (source,) = write_stages(plan, CodeFacts.of(plan.graph)).stages

    text = source.text
    assert [text.count(f"class {own}(") for own in ("Attention", "Layer")] == [1, 1], text
    assert text.count("class ") == 3, text
    assert text.count("def similarity(") == 1, text
    assert "def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:" in text, text
    assert "self.own(x, x, x)" in text, text
    assert "self.cross(x, context, context)" in text, text
    assert "similarity(x, x)" in text, text
    assert "keys = key.shape[1]" in text, text
    namespace: dict[str, Any] = {}
    exec(text, namespace)
    stage = namespace["Stage0"]()
    stage.load_state_dict(model.state_dict())
    for rows in (4, 6):
        others = {"x": torch.rand(rows, 5, 8), "context": torch.rand(rows, 3, 8)}
        assert torch.equal(stage(**others, places=given[2]), model(**others, places=given[2]))


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, x: Tensor, by: Tensor | None = None) -> Tensor:
        by = x if by is None else by
        return self.mix(x) * by.sigmoid() + by


class Gated(nn.Module):
    """One module of an nn.Sequential, and one that is called with two values."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(Gate(), nn.ReLU(), Gate())
        self.last = Gate()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(x), x)


def test_a_sequential_calls_its_modules_with_one_value(planned: Callable[..., Plan]) -> None:
    torch.manual_seed(0)
    model, x = Gated(), torch.rand(4, 4)
    plan = planned(copy.deepcopy(model), x, count=1)
    assert plan.graph is not None

    (source,) = write_stages(plan, CodeFacts.of(plan.graph)).stages

    assert "nn.Sequential(" in source.text, source.text
    namespace: dict[str, Any] = {}
    exec(source.text, namespace)
    stage = namespace["Stage0"]()
    stage.load_state_dict(model.state_dict())
    assert torch.equal(stage(x[:3]), model(x[:3]))


class Series(nn.Module):
    """With more numbers of its own than a class has parameters for."""

    def __init__(self, first: float) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)
        self.numbers = [first + number * number / 7 for number in range(10)]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for number in self.numbers:
            x = (x * number + y).tanh()
        return self.mix(x)


class OfSeries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.series = nn.ModuleList(Series(first) for first in (0.1, 0.2, 0.4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first, second, third = self.series
        x = first(second(x, x), y)
        return third(x, x)


def test_classes_that_differ_in_many_numbers_stay_apart(planned: Callable[..., Plan]) -> None:
    torch.manual_seed(0)
    model, given = OfSeries(), (torch.rand(4, 4), torch.rand(4, 4))
    plan = planned(copy.deepcopy(model), *given, count=1)
    assert plan.graph is not None

    (source,) = write_stages(plan, CodeFacts.of(plan.graph)).stages

    assert source.text.count("def forward(self, x: Tensor) -> Tensor:") == 2, source.text
    namespace: dict[str, Any] = {}
    exec(source.text, namespace)
    stage = namespace["Stage0"]()
    stage.load_state_dict(model.state_dict())
    assert torch.equal(stage(*given), model(*given))
