"""Loops over what a mask has found, as over the experts that have tokens, with all their rounds.

`for number in mask.any(1).nonzero()` has a round for every row of the mask that has anything true.
It is recorded with a round for every row: that is the same where a round for any other row adds
nothing, as it takes rows by `torch.where(mask[number])`, and all that it leaves behind it writes to
their places.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import fx

from gpipe_compiler.errors import SourceLocation
from gpipe_compiler.frontend.growing_graph import TensorNodes
from gpipe_compiler.frontend.locate import calling_line
from gpipe_compiler.frontend.recorded_nodes import made_by, name_of, written_by
from gpipe_compiler.frontend.trace_errors import by_found
from gpipe_compiler.ir.arguments import tensors_in
from gpipe_compiler.ir.symbolic import expression_of, is_symbolic, same_shape

_CALLS = frozenset({"nonzero", "argwhere", "where", "squeeze", "flatten", "gt", "any", "sum"})
"""What the line of a loop may call: `enumerate` would count the rounds that are there."""

_FINDS = frozenset({"nonzero", "argwhere", "where"})
_TURNS = frozenset({"squeeze", "flatten", "view", "reshape", "permute", "transpose", "to", "bool"})
_COUNTS = frozenset({"any", "count_nonzero", "sum", "amax"})
_PUTS = frozenset(
    {"index_add", "index_copy", "index_put", "setitem", "scatter", "scatter_add", "scatter_reduce"}
)


@dataclass
class _Loop:
    """A loop that is being recorded.

    Attributes:
        masks: what is asked which of its rows have anything, with their dimension.
        ends: the last nodes before it, and of every round.
    """

    masks: Mapping[fx.Node, int]
    line: SourceLocation
    ends: list[fx.Node] = field(default_factory=list)

    def finds_in_row(self, node: fx.Node) -> bool:
        """Whether a node finds what is true in the row of the round that is being recorded."""
        if _verb(node) not in _FINDS or len(node.all_input_nodes) != 1:
            return False
        row: Any = _turned(node.all_input_nodes[0])
        if _verb(row) != "getitem" or row.args[0] not in self.masks:
            return False
        places = row.args[1] if isinstance(row.args[1], tuple) else row.args[1:]
        own = (*(slice(None),) * self.masks[row.args[0]], len(self.ends) - 1)
        return (*places[: len(own)],) == own


class FoundLoops:
    """The loops of a model that is being recorded."""

    def __init__(self, graph: fx.Graph, tensors: TensorNodes) -> None:
        self._graph = graph
        self._tensors = tensors
        self._loops: list[_Loop] = []
        self._open: list[_Loop] = []
        self._found: set[Any] = set()

    def rounds(self, found: torch.Tensor) -> Iterator[torch.Tensor] | None:
        """The numbers of all rows of a mask, in place of those that have anything; None where it
        is something else that a loop goes over."""
        node, where = self._tensors.known(found), calling_line()
        masks = {} if node is None or where is None else _asked(node, found)
        if not masks or where is None or not _is_plain_loop(where.code):
            return None
        rows = min(_most_rows(mask, dim) for mask, dim in masks.items())
        return self._each(_Loop(masks, where), rows, found.dim() > 1)

    def _each(self, loop: _Loop, rows: int, listed: bool) -> Iterator[torch.Tensor]:
        frame = sys._getframe(1)
        before = _counters(frame)
        self._open.append(loop)
        loop.ends.append(self._last())
        for row in range(rows):
            yield torch.tensor([row] if listed else row)
            loop.ends.append(self._last())
        self._open.remove(loop)
        after = _counters(frame)
        if any(after.get(name) != held for name, held in before.items()):
            raise by_found(loop.line)
        self._loops.append(loop)

    def _last(self) -> fx.Node:
        last: fx.Node = next(iter(reversed(self._graph.nodes)))  # of torch 2.11 a list
        return last

    def note(self, made: object) -> None:
        """Notes what a call has made, in a round: rows that were found are one or more there."""
        tensors = tensors_in(made) if self._open else []
        node = self._tensors.known(tensors[0]) if tensors else None
        finds: Any = node.args[0] if node is not None and _verb(node) == "getitem" else node
        if isinstance(finds, fx.Node) and any(loop.finds_in_row(finds) for loop in self._open):
            number: Any = tensors[0].shape[0]
            torch._check(number >= 1)  # type: ignore[no-untyped-call]  # of torch
            self._found.update(expression_of(number).free_symbols)

    def check(self) -> None:
        """Refuses loops in which a round adds something for a row that has nothing.

        Raises:
            TraceError: where one does.
        """
        if self._open:  # which ended before its last round
            raise by_found(self._open[0].line)
        for loop in self._loops:
            if not self._is_plain(loop):
                raise by_found(loop.line)

    def _is_plain(self, loop: _Loop) -> bool:
        """Whether rounds for rows without anything leave nothing behind, and whether all weights
        have gradients without them."""
        before, rounds = self._parts(loop)
        memory = set().union(*map(made_by, before))
        readers: dict[object, set[int]] = defaultdict(set)
        for number, nodes in enumerate(rounds):
            inside = {*nodes}
            for node in nodes:
                outside = not memory.isdisjoint(written_by(node))
                if (outside or not inside.issuperset(node.users)) and not self._puts(node):
                    return False
                for source in _weights(node):
                    readers[source].add(number)
        return len(rounds) == 1 or all(len(found) > 1 for found in readers.values())

    def _parts(self, loop: _Loop) -> tuple[list[fx.Node], list[list[fx.Node]]]:
        """The nodes before a loop, and those of each round but what only reads a weight."""
        parts: list[list[fx.Node]] = [[]]
        ends = iter(loop.ends)
        end: fx.Node | None = next(ends)
        for node in self._graph.nodes:
            if end is not None and node.op not in ("get_attr", "placeholder"):
                parts[-1].append(node)
            while node is end:
                parts.append([])
                end = next(ends, None)
        return parts[0], parts[1:-1]

    def _puts(self, node: fx.Node) -> bool:
        """Whether a node changes only the places that were found."""
        sources = [own for own in node.all_input_nodes if own is not node.args[0]]
        return _verb(node) in _PUTS and any(map(self._is_of_found, sources))

    def _is_of_found(self, node: fx.Node) -> bool:
        """Whether a node has made places, none of them where nothing was found."""
        value = node.meta["val"]
        places = isinstance(value, torch.Tensor) and not value.is_floating_point()
        sizes = (expression_of(size) for size in value.shape if is_symbolic(size)) if places else ()
        return any(size.subs(dict.fromkeys(self._found, 0)) == 0 for size in sizes)


def _is_plain_loop(code: str) -> bool:
    return bool(re.match(r"for\s+\w+\s+in\b", code)) and _CALLS.issuperset(
        re.findall(r"(\w+)\(", code)
    )


def _verb(node: fx.Node) -> str:
    name = name_of(node)
    return name if name.startswith("_") else name.rstrip("_")


def _turned(node: fx.Node) -> fx.Node:
    """What a node has the elements of, in another shape or type."""
    while _verb(node) in _TURNS and len(node.all_input_nodes) == 1:
        (node,) = node.all_input_nodes
    return node


def _asked(node: fx.Node, found: torch.Tensor) -> dict[fx.Node, int]:
    """The masks of which the rows that have anything were found, and their dimension in each."""
    finds = _turned(node)
    while _verb(finds) == "getitem" and len(finds.all_input_nodes) == 1:
        finds = _turned(finds.all_input_nodes[0])
    if _verb(finds) not in _FINDS or len(finds.all_input_nodes) != 1:
        return {}
    whole = tensors_in(finds.meta["val"])[0]
    if not same_shape(whole.shape[:1], found.shape[:1]) or found.shape[1:].numel() != 1:
        return {}
    asked = finds.all_input_nodes[0]
    if _verb(asked) in ("gt", "ne") and asked.args[1] == 0:
        asked = asked.all_input_nodes[0]
    rows = asked.meta["val"].shape
    return {} if len(rows) != 1 or is_symbolic(rows[0]) else dict(_counted(asked, 0))


def _counted(node: fx.Node, dim: int) -> Iterator[tuple[fx.Node, int]]:
    """What a node says of each place of a dimension whether there is anything, and where there."""
    while len(node.all_input_nodes) == 1:
        (source,) = node.all_input_nodes
        dims = range(source.meta["val"].dim())
        over: Any = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
        if _verb(node) == "flatten" and isinstance(over, int) and over > dim:
            node = source
        elif _verb(node) in _COUNTS and over is not None and _is_count(node):
            taken = {place % len(dims) for place in (over if isinstance(over, list) else [over])}
            keeps = node.kwargs.get("keepdim", len(node.args) > 2)
            node, dim = source, dim if keeps else [d for d in dims if d not in taken][dim]
        else:
            return
        yield node, dim


def _most_rows(mask: fx.Node, dim: int) -> int:
    """How many rows of a mask may have anything: of `one_hot` of what `topk` has chosen, as many as
    there were to choose from."""
    rows: int = mask.meta["val"].shape[dim]
    while _verb(mask) in ("permute", "bool", "to") and len(mask.all_input_nodes) == 1:
        if _verb(mask) == "permute":
            order: Any = mask.args[1] if isinstance(mask.args[1], list) else mask.args[1:]
            dim = order[dim] % len(order)
        (mask,) = mask.all_input_nodes
    chosen: Any = mask.args[0]
    if _verb(mask) != "one_hot" or dim != mask.meta["val"].dim() - 1 or _verb(chosen) != "getitem":
        return rows
    picks, place = chosen.args
    if _verb(picks) != "topk" or place != 1:
        return rows
    among = picks.kwargs.get("dim", picks.args[2] if len(picks.args) > 2 else -1)
    choices = picks.all_input_nodes[0].meta["val"].shape[among]
    return min(rows, choices) if isinstance(choices, int) else rows


def _is_count(node: fx.Node) -> bool:
    """Whether a node is zero where all that it is of is zero, and only there."""
    if node.meta["val"].dtype is torch.bool or _verb(node) in ("any", "count_nonzero", "one_hot"):
        return True
    sums = _verb(node) in (*_COUNTS, *_TURNS) and len(node.all_input_nodes) == 1
    return sums and _is_count(node.all_input_nodes[0])


def _weights(node: fx.Node) -> Iterator[object]:
    """What a node reads that is trained: tensors, and modules that are called whole."""
    if node.op == "call_module":
        yield node.target
    for source in node.all_input_nodes:
        if source.op == "get_attr" and source.meta["val"].requires_grad:
            yield source


def _counters(frame: FrameType) -> Mapping[str, object]:
    """What the user's variables hold beside tensors."""
    return {
        name: held if isinstance(held, int | float | str) else (id(held), len(held))
        for name, held in frame.f_locals.items()
        if isinstance(held, int | float | str | list | dict | set | tuple)
    }
