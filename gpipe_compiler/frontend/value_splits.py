"""Finds in a recorded graph where `x.split(sizes.tolist())` takes its sizes from a tensor.

It is recorded as one call for each number that is read, and a split by these numbers. One call
of the tensor of sizes stands for all of that: no number is then a value of the graph.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from gpipe_compiler.frontend.recorded_nodes import nodes_from, stays_in
from gpipe_compiler.ir.value_splits import split_by_values


def write_value_splits(graph: fx.Graph) -> None:
    """Writes splits by the values of tensors as such, and the sizes of parts as theirs."""
    found: list[tuple[fx.Node, Sequence[fx.Node]]] = []
    for node in graph.nodes:
        if node.op != "call_method" or node.target not in ("split", "split_with_sizes"):
            continue
        whole = _unbound(node.args[1]) if len(node.args) > 1 else None
        if whole is None:
            continue
        source = _as_read(graph, whole, node)
        found.append((node, node.args[1]))
        dim: Any = node.kwargs.get("dim", node.args[2] if len(node.args) > 2 else 0)
        node.op, node.target = "call_function", split_by_values
        node.args, node.kwargs = (node.args[0], source), {"dim": dim} if dim else {}
    for node, numbers in found:
        dim = node.kwargs.get("dim", 0)
        parts = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        for place, number in enumerate(numbers):
            if place in parts:
                _ask_part(graph, number, parts[place], dim)


def _unbound(sizes: Any) -> fx.Node | None:
    """What takes apart the tensor of one dimension whose numbers, all and in order, these are."""
    if not isinstance(sizes, Sequence) or not sizes:
        return None
    read = [_element(size) for size in sizes]
    taken = {whole for whole, _ in read}
    if len(taken) != 1 or [place for _, place in read] != list(range(len(sizes))):
        return None
    (whole,) = taken
    value = _taken_apart(whole).meta["val"] if whole is not None else None
    if not isinstance(value, torch.Tensor) or tuple(value.shape) != (len(sizes),):
        return None
    return whole


def _taken_apart(whole: fx.Node) -> fx.Node:
    (source, *_) = whole.args
    assert isinstance(source, fx.Node)
    return source


def _as_read(graph: fx.Graph, whole: fx.Node, split: fx.Node) -> fx.Node:
    """The tensor that was taken apart; a copy where it is written to before the split."""
    source = _taken_apart(whole)
    between = itertools.takewhile(lambda node: node is not split, nodes_from(whole))
    if stays_in(source.meta["val"], between):
        return source
    with graph.inserting_before(whole):
        copy = graph.create_node("call_method", "clone", (source,))
    with torch._C.DisableTorchFunction():
        copy.meta = {**whole.meta, "val": source.meta["val"].clone()}
    return copy


def _element(number: Any) -> tuple[fx.Node | None, int]:
    """What takes apart the tensor that a number is of, and its place; None for any other number."""
    if not isinstance(number, fx.Node) or number.target not in ("item", torch.Tensor.item):
        return None, 0
    part = number.args[0]
    if not isinstance(part, fx.Node) or part.target is not operator.getitem:
        return None, 0
    whole, place = part.args
    if not isinstance(whole, fx.Node) or whole.target not in ("unbind", torch.Tensor.unbind):
        return None, 0
    return (whole, place) if isinstance(place, int) else (None, 0)


def _ask_part(graph: fx.Graph, number: fx.Node, part: fx.Node, dim: int) -> None:
    """Lets whoever reads a number after the split ask the part how long it is."""
    after = set(itertools.islice(nodes_from(part), 1, None))
    readers = [user for user in number.users if user in after]
    if readers:
        with graph.inserting_after(part):
            size = graph.create_node("call_method", "size", (part, dim))
        size.meta = {**part.meta, "val": number.meta["val"]}
        for reader in readers:
            reader.replace_input_with(number, size)
