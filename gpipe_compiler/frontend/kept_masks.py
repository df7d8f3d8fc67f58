"""Selects by masks where a model selects by the places at which these hold.

`pos = torch.nonzero(mask).squeeze(1); x[pos]` is `x[mask]`. Places are numbers of samples in their
batch, which are others in a micro-batch; masks are the same.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from gpipe_compiler.frontend.recorded_nodes import name_of, nodes_from, stays_in

_GIVES_PLACES = ("nonzero", "argwhere")
_FLATTENS = ("squeeze", "view", "reshape", "flatten", "ravel")


def keep_masks(graph: fx.Graph) -> None:
    """Puts masks in the place of where they hold, where all that is done with that is selecting."""
    for node in list(graph.nodes):
        places = _places(node)
        users = [user for given in (node, *places) for user in given.users]
        readers = [user for user in dict.fromkeys(users) if places and user not in places]
        mask = node.args[0] if node.args else None
        if isinstance(mask, fx.Node) and all(_selects(x, places, mask) for x in readers):
            for reader in readers:
                _select(graph, reader, mask)


def _places(node: fx.Node) -> list[fx.Node]:
    """The places at which a mask holds, one node for each of its dimensions, in order; [] where a
    node does not give these."""
    mask = node.args[0] if node.args else None
    known = mask.meta["val"] if isinstance(mask, fx.Node) else None
    if not isinstance(known, torch.Tensor) or known.dtype is not torch.bool:
        return []
    if not stays_in(known, nodes_from(node)):
        return []
    name = name_of(node)
    separate = node.kwargs.get("as_tuple", False) is True
    if (name == "where" and len(node.args) == 1) or (name == "nonzero" and separate):
        parts = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        every = len(parts) == len(node.users) and sorted(map(str, parts)) == [
            *map(str, range(known.ndim))
        ]
        return [parts[dim] for dim in range(known.ndim)] if every else []
    if name not in _GIVES_PLACES or separate or known.ndim != 1:
        return []
    flat = [user for user in node.users if name_of(user) in _FLATTENS]
    return flat if [user.meta["val"].ndim for user in flat] == [1] else []


def _selects(reader: fx.Node, places: Sequence[fx.Node], mask: fx.Node) -> bool:
    """Whether a node selects by places, all of them at once, from what has as many as the mask; or
    asks how many there are."""
    match name_of(reader), reader.args:
        case "getitem", (fx.Node() as source, index):
            own = tuple(index if isinstance(index, tuple | list) else (index,)) == (*places,)
            return own and _fits(source, mask)
        case "index_select", (fx.Node() as source, 0, index):
            return (index,) == (*places,) and _fits(source, mask)
        case "size", (fx.Node(), 0):
            return True
        case _:
            return False


def _fits(source: fx.Node, mask: fx.Node) -> bool:
    """Whether a tensor has no other sizes, of those that are known, than a mask of some of its
    dimensions."""
    sizes = mask.meta["val"].shape
    pairs = zip(source.meta["val"].shape[: len(sizes)], sizes, strict=True)
    return all(
        isinstance(own, torch.SymInt) is isinstance(size, torch.SymInt)
        and (isinstance(own, torch.SymInt) or own == size)
        for own, size in pairs
    )


def _select(graph: fx.Graph, reader: fx.Node, mask: fx.Node) -> None:
    """Lets a node select by a mask, or ask how many elements that selects."""
    if name_of(reader) != "size":
        reader.op, reader.target = "call_function", operator.getitem
        reader.args = (reader.args[0], mask)
        return
    with graph.inserting_before(reader):
        selected = graph.create_node("call_function", operator.getitem, (mask, mask))
    places: Any = reader.args[0]
    selected.meta = dict(places.meta)
    reader.args = (selected, 0)
