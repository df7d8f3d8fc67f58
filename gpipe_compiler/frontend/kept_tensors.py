"""Keeps numbers that are read from tensors, and only computed with, the tensors that they are.

`total / max(mask.sum().item(), 1)` is recorded as a number that is read and bounded, and a division
by it. No stage has a number before it runs, so it becomes a division by the bounded tensor. So does
one by the length of what a mask selects, which is the sum of the mask.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from gpipe_compiler.frontend.growing_graph import WRITES
from gpipe_compiler.frontend.recorded_nodes import name_of, nodes_from, stays_in

_READS = ("item", torch.Tensor.item)

_ARITHMETIC: Mapping[str, Callable[..., Any]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "truediv": torch.div,
    "neg": torch.neg,
    "pow": torch.pow,
}
"""By their names, functions that take a tensor of one element as they take its number."""

_BOUNDS: Mapping[Any, tuple[str, Callable[..., Any]]] = {
    builtins.max: ("min", torch.maximum),
    builtins.min: ("max", torch.minimum),
}
"""What bounds a number: the bound in `clamp`, and the function of two tensors."""

_PLACES = ("nonzero", "argwhere")

_Kept = dict[fx.Node, torch.Tensor]


def keep_tensors(graph: fx.Graph) -> None:
    """Puts tensors in the place of numbers that are read from them, where what is made of these is
    tensors of the same type."""
    kept: _Kept = {}
    other: set[fx.Node] = set()
    for node in graph.nodes:
        numbers = [source for source in node.all_input_nodes if source in kept]
        if not numbers:
            source, mask = _read_from(node), _mask_counted_by(node)
            if source is not None:
                kept[node] = source.meta["val"].detach().reshape(())
            elif mask is not None:
                kept[node] = mask.meta["val"].sum()
            continue
        made = _made_of(node, kept)
        if made is None:
            other.update(numbers)
        elif not isinstance(node.meta["val"], torch.Tensor):
            kept[node] = made
    pairs = [(node, source) for node in kept for source in node.all_input_nodes if source in kept]
    for _ in pairs:
        other.update(*(pair for pair in pairs if not other.isdisjoint(pair)))
    written = [node for node in kept if node not in other]
    for user in dict.fromkeys(user for node in written for user in node.users if user not in kept):
        _keep_type(graph, user, kept)
    for node in written:
        _write(graph, node, kept[node])


def _read_from(node: fx.Node) -> fx.Node | None:
    """The tensor that a number is read from, where nothing writes to it afterwards."""
    source = node.args[0] if node.target in _READS else None
    known = source.meta["val"] if isinstance(source, fx.Node) else None
    if not isinstance(known, torch.Tensor) or known.dtype is torch.bool or known.is_complex():
        return None
    return source if isinstance(source, fx.Node) and stays_in(known, nodes_from(node)) else None


def _mask_counted_by(node: fx.Node) -> fx.Node | None:
    """The mask that selects as many elements as a number says, where nothing writes to it after
    they were selected."""
    selected = node.args[0] if node.target == "size" and node.args[1] == 0 else None
    if not isinstance(selected, fx.Node):
        return None
    indexes = selected.target is operator.getitem
    mask = selected.args[indexes] if indexes or name_of(selected) in _PLACES else None
    known = mask.meta["val"] if isinstance(mask, fx.Node) else None
    if not isinstance(known, torch.Tensor) or known.dtype is not torch.bool:
        return None
    return mask if isinstance(mask, fx.Node) and stays_in(known, nodes_from(selected)) else None


def _made_of(node: fx.Node, kept: _Kept) -> torch.Tensor | None:
    """What a node makes of tensors in place of numbers; None where that is something else, or is
    not known."""
    function = _on_tensors(node)
    given = [kept.get(x, x.meta["val"]) if isinstance(x, fx.Node) else x for x in node.args]
    plain = all(isinstance(item, torch.Tensor | int | float | torch.SymInt) for item in given)
    if function is None or node.kwargs or not plain:
        return None
    made, known = function(*given), node.meta["val"]
    if isinstance(known, torch.Tensor):
        return made if (made.dtype, made.shape) == (known.dtype, known.shape) else None
    return made if made.is_floating_point() is isinstance(known, torch.SymFloat) else None


def _on_tensors(node: fx.Node) -> Callable[..., torch.Tensor] | None:
    target, name = node.target, name_of(node)
    if target in _BOUNDS:
        return lambda *items: _bounded(target, items)
    if target is builtins.float:
        return torch.Tensor.float
    return _ARITHMETIC.get(name.removesuffix("_")) or _ARITHMETIC.get(name.removeprefix("i"))


def _bounded(target: Any, items: Sequence[Any]) -> torch.Tensor:
    name, function = _BOUNDS[target]
    fixed = [item for item in items if not isinstance(item, torch.Tensor)]
    tensors = [item for item in items if isinstance(item, torch.Tensor)]
    return torch.clamp(*tensors, **{name: fixed[0]}) if fixed else function(*tensors)


def _keep_type(graph: fx.Graph, user: fx.Node, kept: _Kept) -> None:
    """Gives what a node makes of fractions of one element the type that a number leaves as it is:
    in another precision, that of the tensor beside it may be of fewer bits."""
    scalars = [item for item in user.all_input_nodes if _value(item, kept).ndim == 0]
    beside = [item for item in scalars if item not in kept]
    fractions = [item for item in scalars if item in kept and kept[item].is_floating_point()]
    if len(beside) != 1 or not fractions or user.meta.get(WRITES):
        return
    with graph.inserting_after(user):
        cast = graph.create_node("call_method", "type_as", (user, beside[0]))
    cast.meta = dict(user.meta)
    user.replace_all_uses_with(cast, lambda reader: reader is not cast)


def _value(node: fx.Node, kept: _Kept) -> Any:
    return kept.get(node, node.meta["val"])


def _write(graph: fx.Graph, node: fx.Node, value: torch.Tensor) -> None:
    """Lets a node make a tensor in place of a number."""
    source, mask = _read_from(node), _mask_counted_by(node)
    bounded: Any = node.target
    if mask is not None:
        node.target, node.args = "sum", (mask,)
    elif source is not None:
        known = source.meta["val"]
        # Also where the trace asks for no gradients of it, as of an input that may require them.
        steps: list[tuple[str, tuple[Any, ...]]] = [("detach", ())] * known.is_floating_point()
        steps += [("reshape", ((),))] if known.ndim else []
        for target, args in steps:
            with graph.inserting_before(node):
                source = graph.create_node("call_method", target, (source, *args))
            source.meta = {**node.meta, "val": value}
        node.replace_all_uses_with(source)
        graph.erase_node(node)
    elif bounded in _BOUNDS:
        bound, node.target = _BOUNDS[bounded]
        fixed = [item for item in node.args if not isinstance(item, fx.Node)]
        if fixed:
            node.op, node.target = "call_method", "clamp"
            node.args, node.kwargs = tuple(node.all_input_nodes), {bound: fixed[0]}
    elif bounded is builtins.float:
        node.op, node.target = "call_method", "float"
    node.meta["val"] = value
