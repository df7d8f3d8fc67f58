"""The values that a model takes in its integer inputs: rows of a table, classes of a loss."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from gpipe_compiler.frontend.entry import Entry
from gpipe_compiler.passes.watch import DispatchWatch

_SAME_VALUES = frozenset(
    {
        *("view", "_unsafe_view", "reshape", "expand", "permute", "transpose", "t", "unsqueeze"),
        *("squeeze", "slice", "select", "alias", "detach", "clone", "_to_copy", "copy_", "split"),
        *("split_with_sizes", "unbind", "cat", "stack", "as_strided", "flip", "roll", "repeat"),
        *("masked_fill", "masked_fill_", "where", "constant_pad_nd", "lift_fresh", "contiguous"),
        *("_reshape_alias", "narrow", "fill_", "masked_select"),
    }
)
"""Aten ops whose results hold values of what they are given (and perhaps some constants)."""


@dataclass(frozen=True, slots=True)
class Use:
    """What the values of an integer input have to be.

    Attributes:
        count: values run from 0 to one below this.
        ignored: a value besides, which a loss leaves out.
    """

    count: int
    ignored: int | None = None

    def and_of(self, other: Use) -> Use:
        """What both allow."""
        ignored = self.ignored if self.ignored == other.ignored else None
        return Use(min(self.count, other.count), ignored)


def integer_uses(entry: Entry, inputs: Sequence[torch.Tensor]) -> Mapping[str, Use]:
    """The use of each integer input that is looked up or is a class of a loss, by its name.

    Found by watching one run of the model, in the mode that the entry is in. An input on which
    arithmetic is done first is not in the table, nor is one that is used in no such way.

    Raises:
        Exception: whatever the model raises on these inputs.
    """
    copies = [tensor.clone() for tensor in inputs]
    watch = _UseWatch()
    for source, tensor in zip(entry.signature.inputs, copies, strict=True):
        if not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool):
            watch.holds[tensor] = frozenset({source.name})
    if watch.holds:
        buffers = [(buffer, buffer.clone()) for buffer in entry.model.buffers()]
        with torch.random.fork_rng(), torch.no_grad(), watch:
            entry(*copies)
        for buffer, before in buffers:
            buffer.copy_(before)
    return watch.uses


class _UseWatch(DispatchWatch):
    """Follows integers from the inputs to where they are used.

    Attributes:
        holds: the inputs whose values a tensor has.
    """

    def __init__(self) -> None:
        super().__init__()
        self.holds: Any = WeakIdKeyDictionary()
        self.uses: dict[str, Use] = {}

    def saw(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], returned: object
    ) -> None:
        """Notes what one op does with values of the inputs."""
        name = func.overloadpacket.__name__
        for tensor, use in _uses(name, args):
            for source in self._held(tensor):
                known = self.uses.get(source)
                self.uses[source] = use if known is None else known.and_of(use)
        if name in _SAME_VALUES:
            sources = frozenset[str]().union(*map(self._held, tree_leaves((args, kwargs))))
            for tensor in tree_leaves(returned) if sources else ():
                if isinstance(tensor, torch.Tensor) and not tensor.is_floating_point():
                    self.holds[tensor] = sources | self._held(tensor)

    def _held(self, leaf: object) -> frozenset[str]:
        held = self.holds.get(leaf) if isinstance(leaf, torch.Tensor) else None
        return held or frozenset()


def _uses(name: str, args: tuple[Any, ...]) -> Iterable[tuple[Any, Use]]:
    """The tensors of integers among the arguments of an op, with what they have to be."""
    match name, args:
        case "embedding" | "embedding_bag" | "_embedding_bag", (table, indices, *_):
            yield indices, Use(table.shape[0])
        case "nll_loss_forward" | "nll_loss2d_forward", (scores, target, _, _, ignored, *_):
            yield target, Use(scores.shape[1 if scores.ndim > 1 else 0], ignored)
        case "gather" | "index_select" | "scatter" | "scatter_" | "scatter_add" | "index_add", (
            whole,
            int() as dim,
            index,
            *_,
        ):
            yield index, Use(whole.shape[dim] if whole.ndim else 1)
        case "index" | "index_put" | "index_put_", (whole, indices, *_):
            for dim, index in enumerate(indices):
                if index is not None:
                    yield index, Use(whole.shape[dim])
