"""What torch does otherwise where no dispatch mode looks on and tensors are no fakes.

Some composite ops and formulas of gradients write in place, but not to what a mode might look at
(`isTensorSubclassLike` in torch/csrc/autograd/FunctionsManual.cpp and ATen/native): what is watched
takes more memory than what is not. And some kernels make results that look into larger storages
than those of fake tensors do.

Where several gradients of one value meet, the engine of a backward adds each to the sum so far as
soon as it is made. It adds in place where nobody else holds that sum (`can_accumulate_inplace` in
torch/csrc/autograd/input_buffer.cpp), but never while a dispatch mode looks on. So the watch does
what the engine would have done.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import GradientEdge, Node
from torch.nn import functional as F

from gpipe_compiler.dispatching import DispatchWatch
from gpipe_compiler.ir import FunctionCall, Graph, ModuleCall, Op

_aten = torch.ops.aten

_ADDS: frozenset[object] = frozenset(
    {
        F.linear,
        F.scaled_dot_product_attention,
        F.multi_head_attention_forward,
        _aten.linear.default,
        _aten.scaled_dot_product_attention.default,
        nn.Linear,
        nn.MultiheadAttention,
    }
)
"""Ops that add a bias or mask in place to a product that they have just made."""

_UNDER_MODE: frozenset[object] = frozenset({F.multi_head_attention_forward, nn.MultiheadAttention})
"""Those of them around which a stage that draws has a dispatch mode (`runtime.core.random`)."""

_INTO_ZEROS: Mapping[object, Any] = {
    _aten.scatter.src: _aten.scatter_.src,
    _aten.scatter_add.default: _aten.scatter_add_.default,
    _aten.index_put.default: _aten.index_put_.default,
}

_TERMS: Mapping[object, Any] = {
    _aten.sub.Tensor: _aten.sub_.Tensor,
    _aten.mul.Tensor: _aten.mul_.Tensor,
}

_FORMULAS: Mapping[str, Mapping[object, Any]] = {
    **dict.fromkeys(
        (
            *("MaxBackward0", "MinBackward0", "SortBackward0", "SortBackward1", "TopkBackward0"),
            *("KthvalueBackward0", "MedianBackward1", "NanmedianBackward1", "ModeBackward0"),
            *("CummaxBackward0", "CumminBackward0", "GatherBackward0", "IndexBackward0"),
        ),
        _INTO_ZEROS,
    ),
    "BinaryCrossEntropyWithLogitsBackward0": _TERMS,
}
"""By the node of a backward: the ops that its formula runs in place on what it has made itself."""

_REDUCED: Mapping[object, int] = {_aten.mse_loss.default: 2, _aten.smooth_l1_loss.default: 2}
"""Losses whose single result lies in the storage of all terms, and where their reduction stands."""

REPLAYED = frozenset(
    {
        *("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "AliasBackward0"),
        *("TBackward0", "TransposeBackward0", "PermuteBackward0", "UnsqueezeBackward0"),
        *("SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2", "DetachBackward0"),
    }
)
"""Nodes of views that pass a gradient on as it is. Where a view has been written to, autograd makes
its node anew: a real tensor's is AsStridedBackward0, which copies the gradient."""


def adds_in_place(graph: Graph, op: Op, *, draws: bool) -> bool:
    """Whether the sums that an op makes of its own products are made in place.

    Args:
        draws: whether its stage draws random numbers.
    """
    known = _ADDS - _UNDER_MODE if draws else _ADDS
    match op.call:
        case FunctionCall(function=function):
            return function in known
        case ModuleCall(module=module):
            return graph.modules[module].cls in known
        case _:
            return False


def formula_in_place(node: str, func: object) -> Callable[..., Any] | None:
    """What the formula of a node calls instead of `func`, where the first argument is its own."""
    return _FORMULAS.get(node, {}).get(func)


def storage_bytes(func: object, args: Sequence[Any]) -> int | None:
    """Bytes of the storage of an op's result; None where they are those of the fake result."""
    place = _REDUCED.get(func)
    if place is None or (len(args) > place and args[place] == 0):
        return None
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]  # torch's own
    size: int = shape.numel() * args[0].element_size()
    return size


# --- sparse gradients -----------------------------------------------------------------------------


def of_sparse(func: object, args: Sequence[Any]) -> torch.Tensor | None:
    """What torch makes of sparse gradients unwatched and on real tensors; None for other calls.

    A sum has the rows of both. What is added to a parameter's gradient in place leaves that as it
    is: how it grows from micro-batch to micro-batch is `StageTraces.growth`. And padding, which
    would leave out rows by the values of tensors, is taken to leave out none.
    """
    first = args[0] if args else None
    if not (isinstance(first, torch.Tensor) and first.is_sparse):
        return None
    second = args[1] if len(args) > 1 else None
    if not (isinstance(second, torch.Tensor) and second.is_sparse):
        return None
    if func is _aten.add_.Tensor:
        return first
    if func is _aten.add.Tensor:
        indices = torch.cat((first._indices(), second._indices()), 1)
        return sparse(indices, torch.cat((first._values(), second._values())), first)
    return None


def parts(gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors whose memory a gradient is."""
    if gradient.is_sparse:
        return gradient._indices(), gradient._values()
    return (gradient,)


def sparse(indices: torch.Tensor, values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A sparse tensor of these, otherwise like another."""
    made: torch.Tensor = _aten._sparse_coo_tensor_with_dims_and_tensors.default(
        like.sparse_dim(),
        like.dense_dim(),
        like.shape,
        indices,
        values,
        dtype=values.dtype,
        layout=torch.sparse_coo,
        device=values.device,
    )
    return made


# --- sums of the engine ---------------------------------------------------------------------------

_ENDS = 2**63
"""Nodes that add to the gradient of a leaf have a sequence number from here on; others have one of
their own below it."""

Slot = tuple[Hashable, int]
"""The identity of a node, and the number of one of its gradients."""

Counts = tuple[int, int]
"""How often a tensor is held, and how often its storage."""


class EngineSums:
    """Follows a backward node by node.

    A sum is the engine's when the node that has just run leads to where a gradient waits already,
    and what is added to was made before that node.
    """

    def __init__(self) -> None:
        self._held_once = _held_once()
        self._slots: dict[int, tuple[Slot, ...]] = {}
        self._filled: set[Slot] = set()
        self._task = self._node = -1
        self._expected = 0
        self._doubled = False
        self._made: set[int] = set()

    def walk(self, roots: Iterable[GradientEdge]) -> None:
        """Learn the graph of the backward that is to come; none of it is held."""
        pending = [root.node for root in roots]
        while pending:
            node = pending.pop()
            number = node._sequence_nr()
            if number in self._slots or number >= _ENDS:
                continue
            edges = [(target, place) for target, place in node.next_functions if target]
            self._slots[number] = tuple((_key(target), place) for target, place in edges)
            pending.extend(target for target, _ in edges)

    def forget(self) -> None:
        """The backward is over."""
        self._slots.clear()
        self._filled.clear()

    def enter(self, node: Node) -> bool:
        """Notes the node that runs; returns whether it is another one than before."""
        number = node._sequence_nr()
        if number == self._node:
            return False
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            self._filled.clear()
        self._node = number
        self._made.clear()
        self._expected, self._doubled = 0, False
        fresh: set[Slot] = set()
        for slot in self._slots.get(number, ()):
            self._expected += slot in self._filled or slot in fresh
            self._doubled |= slot in fresh
            fresh.add(slot)
        self._filled |= fresh
        return True

    def made(self, tensor: torch.Tensor) -> None:
        """The node at work has made a tensor."""
        self._made.add(id(tensor))

    def is_in_place(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> bool:
        """Whether this call is a sum that the engine would make in place."""
        if func is not _aten.add.Tensor or not self._expected or len(args) != 2 or kwargs:
            return False
        total, summand = args
        if not (isinstance(total, torch.Tensor) and isinstance(summand, torch.Tensor)):
            return False
        if id(total) in self._made and not self._doubled:
            return False
        self._expected -= 1
        return self.held_once(total)

    def is_own(self, tensor: object) -> bool:
        """Whether the running node or op has made a tensor, and it has the only reference."""
        return (
            isinstance(tensor, torch.Tensor) and id(tensor) in self._made and self.held_once(tensor)
        )

    def held_once(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is dense, and torch's own code has the only reference."""
        strided = tensor.layout is torch.strided  # a sparse one has no storage to ask
        return (
            strided
            and _counts(tensor) == self._held_once
            and is_non_overlapping_and_dense_or_false(tensor)
        )

    def begin(self) -> None:
        self._made.clear()


def _key(node: Node) -> Hashable:
    number = node._sequence_nr()
    return number if number < _ENDS else ("leaf", id(getattr(node, "variable", node)))


def _counts(tensor: torch.Tensor) -> Counts:
    storage = tensor.untyped_storage()
    count: int = tensor._use_count()  # type: ignore[attr-defined]  # of C++, not in the stubs
    return count, torch._C._storage_Use_Count(storage._cdata)


class _Look(DispatchWatch):
    """Takes down the counts of the first argument of a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Counts] = []

    def saw(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], returned: object
    ) -> None:
        if func is _aten.add.Tensor:
            self.found.append(_counts(args[0]))


@cache
def _held_once() -> Counts:
    """The reference counts of a sum that only the engine refers to."""
    look = _Look()
    with FakeTensorMode(), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        value = torch.empty(2, requires_grad=True).exp()
        result = (value.sin() * value.cos()).sum()
        with look:
            torch.autograd.backward(result)
    (counts,) = look.found
    return counts
