"""Fake results of ops whose number of elements depends on values: as many as there can be, or so.

Such a value has three elements more than the most. So it neither doubles with the batch nor stays
as it is, and counts for a value that cannot be split into micro-batches: `passes.atoms` keeps all
that reads it in one stage.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gpipe_compiler.dispatching import QuickFakes, by_identity
from gpipe_compiler.ir import FunctionCall, Graph, Op
from gpipe_compiler.ir.arguments import value_names
from gpipe_compiler.ir.ops import called

_aten = torch.ops.aten
_MORE = 3

_INDEXING = frozenset({_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default})

_UNKNOWN = by_identity(
    _INDEXING
    | {
        *(_aten.nonzero.default, _aten.masked_select.default, _aten._unique2.default),
        *(_aten.unique_consecutive.default, _aten.repeat_interleave.Tensor),
    }
)
"""The ops that may be such."""


_SELECTING = frozenset(
    {"nonzero", "where", "masked_select", "unique", "unique_consecutive", "repeat_interleave"}
)


def selection_behind(graph: Graph, value: str) -> Op | None:
    """The op by which the number of elements of a value depends on values; None where none does."""
    pending, seen = [value], set()
    while pending:
        op = graph.producer.get(pending.pop())
        if op is None or op.name in seen:
            continue
        seen.add(op.name)
        before = [name for name in op.inputs if not graph.values[name].splittable]
        if not before and (called(op.call) in _SELECTING or _by_mask(graph, op)):
            return op
        pending.extend(before)
    return None


def _by_mask(graph: Graph, op: Op) -> bool:
    """Whether an op indexes by a tensor of booleans."""
    if not isinstance(op.call, FunctionCall) or op.call.function is not operator.getitem:
        return False
    return any(graph.values[name].dtype is torch.bool for name in value_names(op.call.args[1]))


def of_unknown_size(
    mode: QuickFakes, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> object:
    """What an op gives on fakes of a mode; None where its sizes follow from what it is given."""
    if id(func) not in _UNKNOWN:
        return None

    def selected(tensor: torch.Tensor) -> int:
        return tensor.numel() + _MORE if mode.selects is None else mode.selects

    with mode:
        return _made(func, args, kwargs, selected)


_CTC = by_identity({_aten._ctc_loss.default, _aten._ctc_loss.Tensor})


def of_ctc_loss(
    mode: FakeTensorMode, func: Any, args: Sequence[Any]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """What the kernels of `ctc_loss` give: the loss of each sample, and what is kept of targets
    that are all as long as they can be, which no graph sees. None for any other op."""
    if id(func) not in _CTC:
        return None
    scores, targets, *_ = args
    steps, samples, _ = scores.shape
    with mode:
        kept = scores.new_empty(samples, steps, 2 * targets.shape[-1] + 1)
        return scores.new_empty(samples), kept


_Selected: TypeAlias = Callable[[torch.Tensor], int]
"""How many elements are taken of a tensor when it is not known how many."""


def _made(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], selected: _Selected) -> object:
    match func:
        case _aten.nonzero.default:
            return args[0].new_empty((selected(args[0]), args[0].dim()), dtype=torch.long)
        case _aten.masked_select.default:
            return args[0].new_empty((selected(args[0].mul(args[1])),))
        case _aten._unique2.default:
            return _unique(args[0], selected)
        case _aten.unique_consecutive.default if (args[3:] or [kwargs.get("dim")])[0] is None:
            return _unique(args[0], selected)
        case _aten.repeat_interleave.Tensor if kwargs.get("output_size") is None:
            return args[0].new_empty((selected(args[0]),), dtype=torch.long)
        case _ if func in _INDEXING and any(_is_mask(index) for index in args[1]):
            return func(args[0], _by_places(args[1], selected), *args[2:], **kwargs)
    return None


def _unique(
    tensor: torch.Tensor, selected: _Selected
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The elements, which of them each one is, and how often each is there."""
    places = torch.empty_like(tensor, dtype=torch.long)
    found = tensor.new_empty((selected(tensor),))
    return found, places, torch.empty_like(found, dtype=torch.long)


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def _by_places(indices: Sequence[Any], selected: _Selected) -> list[Any]:
    """Indices with the places where masks are true in their stead."""
    found: list[Any] = []
    for index in indices:
        if _is_mask(index):
            places = index.new_empty((selected(index), index.dim()), dtype=torch.long)
            found.extend(places.unbind(1))
        else:
            found.append(index)
    return found
