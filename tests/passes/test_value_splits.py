"""Tensors that are split into parts as long as the values of another tensor say."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from gpipe_compiler.compile import trace
from gpipe_compiler.ir import Graph
from gpipe_compiler.ir.value_splits import (
    all_in_one,
    is_value_split,
    split_by_values,
)
from gpipe_compiler.options import LossChoice
from gpipe_compiler.passes.duplicate import shape_values
from gpipe_compiler.passes.fakes import HostFakes
from gpipe_compiler.passes.value_splits import sized_by_values

WAYS = (split_by_values, all_in_one, partial(all_in_one, place=0))


class Cut(nn.Module):
    """Rows in parts, which are put together again; with how many rows are in the last part."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.parts = parts
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        sizes = nn.functional.one_hot(x[:, 0].long() % self.parts, self.parts).sum(0).tolist()
        parts = [part.sin() for part in self.layer(x).split(sizes)]
        last = torch.full((sizes[-1], 1), 0.5)
        return torch.cat([*parts[:-1], parts[-1] * last])


def graph_of(parts: int, samples: int = 2) -> Graph:
    return trace(Cut(parts), torch.randn(samples, 4), loss=LossChoice.SUM_OF_SQUARES)


@pytest.mark.parametrize("parts", [2, 3, 6, 7])
@pytest.mark.parametrize("samples", [2, 4])
def test_parts_are_not_cut_off_and_the_whole_may_be(parts: int, samples: int) -> None:
    """Also of fewer samples than there are parts."""
    graph = graph_of(parts, samples)
    (split,) = filter(is_value_split, graph.ops)
    readers = [reader for name in split.outputs for reader in graph.consumers[name]]
    sines = [graph.values[op.outputs[0]] for op in readers if op.name.startswith("sin")]
    (whole,) = (graph.values[op.outputs[0]] for op in graph.ops if op.name.startswith("cat"))

    assert len(split.outputs) == len(sines) == parts
    assert not any(graph.values[name].splittable for name in split.outputs)
    assert not any(value.splittable for value in sines)
    assert whole.splittable
    assert whole.batch_dim == 0


def test_what_a_part_is_asked_for_follows_from_no_shape() -> None:
    graph = graph_of(3)
    sizes = [op.outputs[0] for op in graph.ops if op.name.startswith("size")]
    unknown = [name for name in sizes if name in sized_by_values(graph)]

    assert unknown
    assert not shape_values(graph).keys() & set(unknown)


@pytest.mark.parametrize("parts", range(1, 9))
@pytest.mark.parametrize("dim", [0, 1])
def test_without_numbers_every_way_splits_all(parts: int, dim: int) -> None:
    for whole in (0, 1, parts, 5 * parts - 1):
        with HostFakes():
            tensor = torch.empty((whole, 3) if dim == 0 else (3, whole))
            counts = torch.zeros(parts, dtype=torch.long)
            ways = [split(tensor, counts, dim) for split in WAYS]
        even, *_ = sizes = [[part.shape[dim] for part in way] for way in ways]

        assert {sum(way) for way in sizes} == {whole}
        assert {len(way) for way in sizes} == {parts}
        assert max(even) - min(even) <= 1


class Computing(nn.Module):
    """Rounds the size of a part, and takes a part up to a number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        counts = nn.functional.one_hot((x[:, 0] > 0).long(), 2).sum(0).tolist()
        one, other = self.layer(x).split(counts)
        whole = torch.cat([one, other])
        few = other[:1].sum(0) + torch.zeros(len(one) // 100 + 4)[:4]
        return whole + few.sum() * 0


def test_what_is_computed_of_sizes_is_no_more_known_than_they_are() -> None:
    graph = trace(Computing(), torch.randn(4, 4), loss=LossChoice.SUM_OF_SQUARES)
    unknown = sized_by_values(graph)
    rounded = [op.outputs[0] for op in graph.ops if op.name.startswith("floor_div")]
    taken = [op.outputs[0] for op in graph.ops if op.name.startswith("item")]
    zeros = [op.outputs[0] for op in graph.ops if op.name.startswith("zeros")]

    assert len(rounded) == len(zeros) == 1
    assert unknown.issuperset(rounded)
    assert unknown.issuperset(zeros)
    assert unknown.intersection(taken)
    assert not shape_values(graph).keys() & unknown


class Picking(nn.Module):
    """Divides by how many elements a mask selects, in the layer after the next."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        count = hidden[hidden > 0].shape[0]
        return self.last(hidden.tanh()) * hidden.new_ones(count + 1).mean()


@pytest.mark.parametrize("shape", [(4, 4), (4, 3, 4)])
def test_how_many_elements_are_selected_follows_from_no_shape(shape: tuple[int, ...]) -> None:
    """Be other sizes free or not."""
    graph = trace(Picking(), torch.randn(shape), loss=LossChoice.SUM_OF_SQUARES)
    counts = {op.outputs[0] for op in graph.ops if op.name.startswith(("size", "add"))}
    unknown = sized_by_values(graph)

    assert len(graph.sizes) == len(shape) - 2
    assert len(counts) == 2
    assert counts <= unknown
    assert not shape_values(graph).keys() & counts


def test_with_numbers_it_is_split_by_them() -> None:
    parts = split_by_values(torch.arange(6), torch.tensor([1, 0, 5]))

    assert [part.tolist() for part in parts] == [[0], [], [1, 2, 3, 4, 5]]


class Capped(nn.Module):
    """Writes to how many rows each part has once they are cut by it: what exceeds a bound."""

    def __init__(self, bound: int) -> None:
        super().__init__()
        self.bound = bound
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        counts = nn.functional.one_hot((x[:, 0] > 0).long(), 2).sum(0)
        sizes = counts.view(2).tolist()
        counts.clamp_(max=self.bound)
        one, other = self.layer(x).split(sizes)
        return torch.cat([one, other * 2])


@pytest.mark.parametrize("bound", [0, 1, 10_000])
def test_sizes_are_those_that_were_read(bound: int) -> None:
    """Not those that are written in their place, for whatever batch that makes a difference."""
    graph = trace(Capped(bound), torch.randn(4, 4), loss=LossChoice.SUM_OF_SQUARES)
    (split,) = filter(is_value_split, graph.ops)
    copies = [op for op in graph.ops if op.name.startswith("clone")]

    assert [copy.outputs[0] for copy in copies] == [split.inputs[1]]
