"""A graph from elsewhere: a JSON file of ops with their times and sizes, and edges between them.

    {"ops": [{"name": "conv1", "forward_s": 0.001, "backward_s": 0.002, "output_bytes": 1000,
              "parameter_bytes": 10, "saved_bytes": 0}, ...],
     "edges": [["conv1", "relu1"], ...]}

`docs/graph_file.md` says what the fields mean.
"""

from __future__ import annotations

import dataclasses
import difflib
import heapq
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from gpipe_compiler.errors import ModelError, UsageError
from gpipe_compiler.passes.cut.problem import CutProblem, Node, Resident, Traffic

MOST_FAULTS = 20
"""Faults that one error lists; further ones are counted."""


@dataclass(frozen=True, slots=True)
class BareOp:
    """One op of a bare graph; times and sizes are those of one micro-batch.

    Attributes:
        output_bytes: of its output, which goes to every op that it has an edge to.
        parameter_bytes: of its weights, held whatever the micro-batch.
        saved_bytes: kept from its forward to its backward.
        weight_s: the part of `backward_s` that makes the gradients of its weights.
    """

    name: str
    forward_s: float
    backward_s: float
    output_bytes: float
    parameter_bytes: float
    saved_bytes: float = 0
    weight_s: float = 0


@dataclass(frozen=True)
class BareGraph:
    """A weighted directed acyclic graph of named ops.

    Attributes:
        edges: (producer, consumer) names.
    """

    ops: tuple[BareOp, ...]
    edges: tuple[tuple[str, str], ...] = ()
    name: str = "graph"

    @property
    def has_backward(self) -> bool:
        """Whether any op takes time backward: then gradients come back over every edge."""
        return any(op.backward_s > 0 for op in self.ops)

    @cached_property
    def place(self) -> Mapping[str, int]:
        """The number of every op in the file."""
        return {op.name: index for index, op in enumerate(self.ops)}

    @cached_property
    def users(self) -> Mapping[str, tuple[str, ...]]:
        """For every op, those that read its output, in the order of the ops."""
        found: dict[str, set[str]] = {op.name: set() for op in self.ops}
        for before, after in self.edges:
            found[before].add(after)
        return {
            name: tuple(sorted(after, key=self.place.__getitem__)) for name, after in found.items()
        }

    @cached_property
    def order(self) -> tuple[str, ...]:
        """The names such that every op comes after those it reads from; else as in the file."""
        sorter = TopologicalSorter[str](dict.fromkeys(self.place, ()))
        for before, after in self.edges:
            sorter.add(after, before)
        sorter.prepare()
        ready: list[int] = []
        found = []
        while sorter.is_active():
            for name in sorter.get_ready():
                heapq.heappush(ready, self.place[name])
            found.append(self.ops[heapq.heappop(ready)].name)
            sorter.done(found[-1])
        return tuple(found)

    def problem(self, *, training: bool) -> CutProblem:
        """The same as a problem for the cut; nodes are the ops, in order."""
        back = training and self.has_backward
        return CutProblem(
            tuple(
                Node(op.name, op.forward_s, op.backward_s, op.weight_s)
                if training
                else Node(op.name, op.forward_s)
                for op in self.ops
            ),
            tuple(
                Traffic(
                    op.name,
                    self.place[op.name],
                    tuple(self.place[user] for user in self.users[op.name]),
                    op.output_bytes,
                    op.output_bytes if back else 0,
                )
                for op in self.ops
                if self.users[op.name]
            ),
            kept=tuple(
                Resident(
                    (index,),
                    math.ceil(op.parameter_bytes) * (2 if training else 1),
                    math.ceil(op.saved_bytes) if training else 0,
                )
                for index, op in enumerate(self.ops)
                if op.parameter_bytes or op.saved_bytes
            ),
        )


_FIELDS = tuple(field.name for field in fields(BareOp))
_REQUIRED = tuple(field.name for field in fields(BareOp) if field.default is MISSING)
_, *_NUMBERS = _FIELDS


def read_graph(path: Path) -> BareGraph:
    """The graph of a JSON file, named as the file.

    Raises:
        UsageError: when there is no such file.
        ModelError: with everything that is wrong in it.
    """
    if not path.is_file():
        raise UsageError(f"there is no file {path}", hint="check the path, it is relative to here")
    try:
        document = json.loads(path.read_bytes(), object_pairs_hook=_Pairs)
    except UnicodeDecodeError:
        raise ModelError(f"{path} is no JSON: it is not even text") from None
    except json.JSONDecodeError as error:
        raise ModelError(
            f"{path}:{error.lineno}: this is no JSON: {error.msg}, at column {error.colno}"
        ) from None
    except RecursionError:
        raise ModelError(f"{path} is no graph: lists within lists without end") from None
    except ValueError as error:  # such as a whole number of more digits than Python converts
        raise ModelError(f"{path} cannot be read: {error}") from None
    return parse_graph(document, path.stem, str(path))


def check_graph(graph: BareGraph) -> BareGraph:
    """The same graph, if it is one."""
    ops = list(map(dataclasses.asdict, graph.ops))
    parse_graph({"ops": ops, "edges": list(map(list, graph.edges))}, graph.name)
    return graph


class _Pairs(dict[str, object]):
    """An object of JSON that remembers which of its keys stood there twice."""

    def __init__(self, pairs: Iterable[tuple[str, object]]) -> None:
        pairs = list(pairs)
        super().__init__(pairs)
        keys = [key for key, _ in pairs]
        self.twice = sorted({key for key in keys if keys.count(key) > 1})


def parse_graph(document: object, name: str = "graph", where: str = "") -> BareGraph:
    """The graph of a JSON document that `json.loads` has read.

    Args:
        where: what messages call it; its name unless given.

    Raises:
        ModelError: with everything that is wrong in it.
    """
    where = where or name
    faults: list[str] = []
    if not isinstance(document, Mapping):
        raise ModelError(
            f'{where} is no graph: expected an object with "ops" and "edges", '
            f"found {_kind(document)}"
        )
    _fields(document, "the graph", ("ops", "edges"), ("ops", "edges"), faults)
    ops = _ops(document.get("ops", []), faults)
    edges = _edges(document.get("edges", []), {op.name for op in ops}, faults)
    # Edges of ops that are at fault say nothing yet.
    if not faults:
        order = TopologicalSorter[str]()
        for before, after in edges:
            order.add(after, before)
        try:
            order.prepare()
        except CycleError as error:
            circle: list[str] = error.args[1][1:]
            first = circle.index(next(op.name for op in ops if op.name in circle))
            circle = [*circle[first:], *circle[: first + 1]]
            faults.append(f"the edges go round in a circle: {_path(circle)}")
    if faults:
        listing = "\n".join(f"  - {fault}" for fault in faults[:MOST_FAULTS])
        if len(faults) > MOST_FAULTS:
            listing += f"\n  - and {len(faults) - MOST_FAULTS} more"
        raise ModelError(f"{where} is no graph to be cut:\n{listing}")
    return BareGraph(tuple(ops), tuple(dict.fromkeys(edges)), name)


def _ops(listed: object, faults: list[str]) -> list[BareOp]:
    if not isinstance(listed, list):
        faults.append(f'"ops" is to be a list, not {_kind(listed)}')
        return []
    if not listed:
        faults.append("there are no ops: nothing can be cut")
    found: dict[str, BareOp] = {}
    repeated: dict[str, None] = {}
    for index, item in enumerate(listed):
        if not isinstance(item, Mapping):
            faults.append(f"op number {index} is to be an object, not {_kind(item)}")
            continue
        name = item.get("name")
        named = isinstance(name, str) and name != ""
        what = f"the op {name!r}" if named else f"op number {index}"
        _fields(item, what, _FIELDS, _REQUIRED, faults)
        if "name" in item and not named:
            faults.append(f'{what}: "name" is to be a text that is not empty, not {_shown(name)}')
        numbers: dict[str, Any] = dict.fromkeys(_NUMBERS, 0.0)
        for key in filter(item.__contains__, _NUMBERS):
            if fault := _fault(item[key]):
                faults.append(f"{what}: {key} {fault}")
            else:
                numbers[key] = item[key]
        if numbers["weight_s"] > numbers["backward_s"]:
            faults.append(f"{what}: weight_s is a part of backward_s, and cannot be more")
        if isinstance(name, str) and name:
            if name in found:
                repeated[name] = None
            found[name] = BareOp(name, **numbers)
    faults.extend(f"several ops are named {name!r}: names tell them apart" for name in repeated)
    return list(found.values())


def _fields(
    item: Mapping[str, object],
    what: str,
    known: Sequence[str],
    required: Sequence[str],
    faults: list[str],
) -> None:
    missing = [key for key in required if key not in item]
    if missing:
        faults.append(f"{what} lacks {', '.join(missing)}")
    for key in item:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            meant = f": is {near[0]} meant?" if near else f"; there are {', '.join(known)}"
            faults.append(f"{what} has an unknown field {key!r}{meant}")
    if isinstance(item, _Pairs):
        faults.extend(f"{what} has the field {key!r} more than once" for key in item.twice)


def _fault(value: object) -> str:
    """What is wrong with a value that is to be seconds or bytes; "" where nothing is."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"is to be a number, not {_shown(value)}"
    if isinstance(value, float) and not math.isfinite(value):
        return f"is to be a finite number, not {value}"
    if abs(value) > _LARGEST:
        return "is too large a number"
    return f"is {value}, but cannot be negative" if value < 0 else ""


_LARGEST = 10**18
"""Seconds or bytes; above this, sums lose their small summands."""


def _edges(listed: object, names: set[str], faults: list[str]) -> list[tuple[str, str]]:
    if not isinstance(listed, list):
        faults.append(f'"edges" is to be a list, not {_kind(listed)}')
        return []
    found: list[tuple[str, str]] = []
    unknown: dict[str, str] = {}
    for index, item in enumerate(listed):
        if (
            not isinstance(item, list | tuple)
            or len(item) != 2
            or not all(isinstance(end, str) for end in item)
        ):
            faults.append(
                f"edge number {index} is to be a pair of op names, [from, to], not {_shown(item)}"
            )
            continue
        before, after = item
        for end in (before, after):
            if end not in names:
                unknown.setdefault(end, f"[{before!r}, {after!r}]")
        if before in names and after in names:
            found.append((before, after))
    for end, edge in unknown.items():
        near = difflib.get_close_matches(end, names, n=1)
        meant = f"; is {near[0]!r} meant?" if near else ""
        faults.append(f"the edge {edge} names the op {end!r}, which there is not{meant}")
    return found


def _path(names: Sequence[str]) -> str:
    shown = list(names)
    if len(shown) > 12:
        shown = [*shown[:6], f"... {len(shown) - 10} more ...", *shown[-4:]]
    return " -> ".join(shown)


def _kind(value: object) -> str:
    if isinstance(value, Mapping):
        return "an object"
    kinds = {str: "a text", bool: "true or false", int: "a number", float: "a number"}
    return "null" if value is None else kinds.get(type(value), "a list")


def _shown(value: object) -> str:
    text = repr(value) if not isinstance(value, Mapping | list) else _kind(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
