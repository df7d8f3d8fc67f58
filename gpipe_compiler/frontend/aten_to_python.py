"""Aten operators of an exported graph become the torch that a person writes.

Three steps, in place: what only checks the trace is dropped, runs of slice, select and unsqueeze
become one index expression, and every remaining operator is written as `aten.write` says. None of
them changes what is computed.

Where tensors are made. `torch.arange(24, device=...)` names the device of the trace, which is that
of the graph's own tensors: a graph runs where it was traced. A program that runs elsewhere
writes the device of one of its tensors in the place of every `torch.device`.
"""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensor

from gpipe_compiler.frontend.aten import brackets, write
from gpipe_compiler.frontend.aten_functions import WrittenCall, bind, has_effect
from gpipe_compiler.frontend.casts import is_asked_for, speaking_cast
from gpipe_compiler.frontend.traced_python import is_data
from gpipe_compiler.ir.symbolic import same_shape

_CHECKS = frozenset(
    {
        "aten::_assert_tensor_metadata",
        "aten::_assert_scalar",
        "aten::_assert_async",
        "aten::sym_constrain_range",
        "aten::sym_constrain_range_for_size",
    }
)
"""Operators that check what the trace assumed, and compute nothing."""

_SAME = frozenset({"aten::lift_fresh", "aten::alias"})
"""Operators that return their argument."""

_PLAIN: Mapping[object, Callable[..., Any]] = {
    torch.sym_max: builtins.max,
    torch.sym_min: builtins.min,
    torch.sym_float: builtins.float,
    torch.sym_int: builtins.int,
    torch.sym_not: operator.not_,
    torch.sym_sqrt: math.sqrt,
}
"""Functions on symbolic sizes, and what they are on numbers."""

_LITERAL_ELEMENTS = 16
"""A constant of at most this many elements is written where it is used."""

_END = 2**63 - 1
"""The end of a slice that runs to the end."""


def aten_to_python(graphs: Sequence[fx.Graph]) -> None:
    """Rewrites an exported graph and those of its regions."""
    for graph in graphs:
        drop_checks(graph)
        merge_indexing(graph)
        _write_stores(graph)
        for node in list(graph.nodes):
            _rewrite(graph, node)


def write_constants(graphs: Sequence[fx.Graph], constants: Mapping[str, torch.Tensor]) -> None:
    """Writes `torch.tensor([1.0, 2.0])` where forward does, for tensors of a few numbers.

    Args:
        constants: the tensors that forward made from numbers while it was traced, by the target of
            the `get_attr` node that reads them.
    """
    for graph in graphs:
        for node in list(graph.nodes):
            source = node.args[0] if node.args else None
            if _name(node) != "aten::lift_fresh_copy" or not isinstance(source, fx.Node):
                continue
            for user in list(node.users):
                # A new tensor of numbers is detached already.
                if _name(user) == "aten::detach_":
                    user.replace_all_uses_with(node)
                    graph.erase_node(user)
            constant = constants.get(str(source.target)) if source.op == "get_attr" else None
            if constant is not None and _is_literal(constant):
                node.target = torch.tensor
                node.args = (constant.tolist(),)
                node.kwargs = {"dtype": constant.dtype, "device": constant.device}
        for node in list(graph.nodes):
            if node.op == "get_attr" and str(node.target) in constants and not node.users:
                graph.erase_node(node)


def _is_literal(tensor: torch.Tensor) -> bool:
    """Whether a tensor can be written out, exactly."""
    return (
        not tensor.is_meta
        and not isinstance(tensor, FakeTensor)
        and tensor.numel() <= _LITERAL_ELEMENTS
        and not tensor.is_complex()
        and bool(torch.isfinite(tensor).all())
    )


def drop_checks(graph: fx.Graph) -> None:
    """Removes assertions, and what nothing reads and has no effect."""
    for node in list(graph.nodes):
        name = _name(node)
        if name in _SAME:
            node.replace_all_uses_with(_source(node))
            graph.erase_node(node)
        elif name == "aten::broadcast_tensors":
            _drop_broadcast(graph, node)
        elif name == "aten::to" and _converts_nothing(node):
            node.replace_all_uses_with(_source(node))
            graph.erase_node(node)
        elif name in _CHECKS or node.target in (torch._check, torch._assert):
            graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        if node.op not in ("placeholder", "output") and not node.users and not has_effect(node):
            graph.erase_node(node)


def _source(node: fx.Node) -> fx.Node:
    """The tensor that an operator takes first."""
    (source, *_) = node.all_input_nodes
    return source


def _converts_nothing(node: fx.Node) -> bool:
    """Whether a move to where a tensor is already says nothing of types either.

    It is x itself, and the trace takes it for x from there on.
    """
    if is_asked_for(node):
        return False
    source = node.args[0]
    assert isinstance(node.target, torch._ops.OpOverload)
    given = bind(node.target, node.args, node.kwargs)
    if not isinstance(source, fx.Node) or not given.defaults.issuperset({"copy", "memory_format"}):
        return False
    before, after = source.meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    return before.dtype == after.dtype and before.device == after.device


def _drop_broadcast(graph: fx.Graph, node: fx.Node) -> None:
    """Removes a broadcast of tensors that have one shape already, as losses ask for."""
    tensors: Any = node.args[0]
    first, *others = [tensor.meta["val"].shape for tensor in tensors]
    if not all(same_shape(first, other) for other in others):
        return
    for item in list(node.users):
        if item.target is not operator.getitem:
            return
        place: Any = item.args[1]
        item.replace_all_uses_with(tensors[place])
        graph.erase_node(item)
    graph.erase_node(node)


def _name(node: fx.Node) -> str:
    if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
        return str(node.target._schema.name)
    return ""


def _rewrite(graph: fx.Graph, node: fx.Node) -> None:
    """Replaces one operator call by the way a person writes it."""
    if node.op != "call_function":
        return
    if node.target in _PLAIN:
        node.target = _PLAIN[node.target]
        return
    if not isinstance(node.target, torch._ops.OpOverload):
        return
    written = write(node.target, node.args, node.kwargs)
    if written is None:
        return
    if is_data(node):
        written = WrittenCall(getattr, (*node.args, "data"))
    if speaking_cast(node) and not written.kwargs:
        written = WrittenCall(speaking_cast(node), written.args[:1])
    name = _name(node)
    before = next((source.meta.get("val") for source in node.all_input_nodes), None)
    node.op = "call_method" if isinstance(written.target, str) else "call_function"
    node.target = written.target
    node.args = written.args
    node.kwargs = dict(written.kwargs) | _move(name, before, node.meta.get("val"))


def _move(name: str, before: Any, after: Any) -> dict[str, torch.device]:
    """The device that `x.to(...)` moves a tensor to, where it is another one."""
    if name not in ("aten::to", "aten::_to_copy"):
        return {}
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return {}
    return {} if before.device == after.device else {"device": after.device}


# --- index expressions ----------------------------------------------------------------------------


@dataclass
class _Index:
    """An index expression under construction.

    Attributes:
        entries: what stands in the brackets.
        shown: for every dimension of the result, the number of its entry; entries that are
            integers have none.
    """

    base: fx.Node
    rank: int
    entries: list[Any] = field(default_factory=list)
    shown: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.entries = [slice(None)] * self.rank
        self.shown = list(range(self.rank))

    def add(self, node: fx.Node) -> bool:
        """Takes one more slice, select or unsqueeze in; False where it has no place."""
        values: dict[str, Any] = dict(zip(_PARAMETERS[_name(node)], node.args[1:], strict=False))
        values |= node.kwargs
        dim = values.get("dim", 0)
        rank = len(self.shown) + (_name(node) == "aten::unsqueeze")
        dim = dim + rank if dim < 0 else dim
        if _name(node) == "aten::unsqueeze":
            place = self.shown[dim] if dim < len(self.shown) else len(self.entries)
            self.entries.insert(place, None)
            self.shown = [entry + (entry >= place) for entry in self.shown]
            self.shown.insert(dim, place)
            return True
        entry = self.shown[dim]
        if not _is_whole(self.entries[entry]):
            return False
        if _name(node) == "aten::select":
            self.entries[entry] = values["index"]
            del self.shown[dim]
        else:
            self.entries[entry] = _slice(
                values.get("start"), values.get("end"), values.get("step", 1)
            )
        return True

    @property
    def is_whole(self) -> bool:
        """Whether the result is the whole tensor."""
        return all(map(_is_whole, self.entries))

    def written(self) -> Any:
        """What stands in the brackets, without whole dimensions at the end."""
        entries = list(self.entries)
        leading = next(i for i, entry in enumerate(entries) if not _is_whole(entry))
        if leading >= 2 and not any(map(_is_whole, entries[leading:])):
            entries[:leading] = [...]
        while _is_whole(entries[-1]):
            entries.pop()
        return entries[0] if len(entries) == 1 else tuple(entries)


_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "aten::slice": ("dim", "start", "end", "step"),
    "aten::select": ("dim", "index"),
    "aten::unsqueeze": ("dim",),
}


def _slice(start: Any, end: Any, step: Any) -> slice:
    return slice(
        None if _is(start, 0) else start,
        None if _is(end, _END) else end,
        None if step == 1 else step,
    )


def _is_whole(entry: Any) -> bool:
    return isinstance(entry, slice) and entry == slice(None)


def _is(value: Any, number: int) -> bool:
    return isinstance(value, int) and value == number


def merge_indexing(graph: fx.Graph) -> None:
    """Writes slices and selects as `x[:, 0]`.

    Several of them become one expression when they follow each other directly and nothing else
    reads what lies between. A lone unsqueeze stays a method call; an index of the whole tensor
    goes.
    """
    for run in list(_runs(graph)):
        done = 0
        while done < len(run):
            done += _merge_front(graph, run[done:])


def _runs(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """Maximal rows of neighbouring index operators, each reading only the one before."""
    run: list[fx.Node] = []
    for node in graph.nodes:
        if run and _name(node) in _PARAMETERS and node.args[0] is run[-1] and _only_user(run[-1]):
            run.append(node)
            continue
        if run:
            yield run
        run = [node] if _name(node) in _PARAMETERS else []
    if run:
        yield run


def _only_user(node: fx.Node) -> bool:
    return len(node.users) == 1


def _merge_front(graph: fx.Graph, run: Sequence[fx.Node]) -> int:
    """Makes one index expression of as many of the first nodes as possible; returns how many."""
    base = run[0].args[0]
    value = base.meta.get("val") if isinstance(base, fx.Node) else None
    if not isinstance(base, fx.Node) or not isinstance(value, torch.Tensor):
        return 1
    index = _Index(base, value.ndim)
    taken = 0
    while taken < len(run) and index.add(run[taken]):
        taken += 1
    if taken == 0 or (taken == 1 and _name(run[0]) == "aten::unsqueeze"):
        return 1
    last = run[taken - 1]
    if index.is_whole:
        last.replace_all_uses_with(base)
        dead = run[:taken]
    else:
        last.target = operator.getitem
        last.args = (base, index.written())
        last.kwargs = {}
        dead = run[: taken - 1]
    for node in reversed(dead):
        graph.erase_node(node)
    return taken


def _write_stores(graph: fx.Graph) -> None:
    """Writes `x[:, 0] = y` where a part of x is there only to be written to."""
    for node in list(graph.nodes):
        if _name(node) == "aten::index_put_" and len(node.args) == 3 and not node.kwargs:
            base, indices, value = node.args
            assert isinstance(base, fx.Node)
            assert isinstance(indices, list | tuple)
            node.replace_all_uses_with(base)
            node.target, node.args = operator.setitem, (base, brackets(indices), value)
            continue
        stores = _name(node) in ("aten::copy_", "aten::fill_")
        if not stores or node.users or len(node.args) != 2 or node.kwargs:
            continue
        part, value = node.args
        if isinstance(part, fx.Node) and part.target is operator.getitem and _only_user(part):
            base, index = part.args
            if isinstance(base, fx.Node) and isinstance(base.meta.get("val"), torch.Tensor):
                node.target, node.args = operator.setitem, (base, index, value)
                graph.erase_node(part)
