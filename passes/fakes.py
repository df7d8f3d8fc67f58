"""Fake tensors with the memory that real kernels of the host would take."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

from gpipe_compiler.dispatching import QuickFakes, is_within
from gpipe_compiler.passes.unknown_sizes import of_ctc_loss, of_unknown_size

_LSTM = torch.ops.aten.mkldnn_rnn_layer.default
_WORKSPACE = 3
"""The place of the workspace among the results of an LSTM."""
_INDEX = torch.ops.aten.index.Tensor
_EMBEDDING = "EmbeddingBackward0"
_BAG_BACKWARD = torch.ops.aten._embedding_bag_backward.default
_BAGS = 3
"""The place of each index's bag among the arguments of the backward of bags."""

_aten = torch.ops.aten
DEVICE = torch.ops.prim.device.default
_EMPTY = _aten.empty_strided.default
_EQUAL = _aten.equal.default
_HOST = torch.device("cpu")
_META = torch.device("meta")
_FLOAT = 4
_PAGE = 4096
_ROW = 64
_NO_STRIDE = 256


Saw: TypeAlias = Callable[[Any, tuple[Any, ...], dict[str, Any], object], None]
"""Called with a kernel, its arguments and its result."""

Rule: TypeAlias = Callable[..., Sequence[int] | None]
"""The shape of a dense result of its first operand's type, from the arguments of a kernel; None
where torch is to say."""


class HostFakes(QuickFakes):
    """A mode of fake tensors that knows what torch's own meta kernels do not.

    The backward of oneDNN's LSTM reads nearly all that its forward has made from a workspace, which
    the meta kernel takes to be empty. And the sparse gradient of an embedding has no rows for its
    padding: how many that are depends on numbers, and the most are taken, all of them. What CTC
    keeps for its backward goes with the longest target: as many as fit are taken. The backward of
    a sum of bags finds out which bag an index is in where its forward has not, and makes a row
    for each. Whether tensors are equal torch asks by itself to find fault alone, as `istft` with
    its window.
    """

    def __init__(self) -> None:
        super().__init__()
        self._saw: Saw | None = None

    @contextlib.contextmanager
    def watched(self, saw: Saw) -> Iterator[None]:
        """Calls `saw` after every kernel: half as slow as another mode around this one."""
        before, self._saw = self._saw, saw
        try:
            yield
        finally:
            self._saw = before

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        if func is DEVICE:
            # Most calls are such questions; torch's fakes answer them after a long way round.
            (tensor,) = args
            return _META if self.in_kernel_invocation else tensor.fake_device
        saw = self._saw
        if saw is None:
            return self._made(func, types, args, kwargs)
        self._saw = None  # kernels may run others
        try:
            returned = self._made(func, types, args, kwargs)
        finally:
            self._saw = saw
        saw(func, tuple(args), dict(kwargs or {}), returned)
        return returned

    def _made(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
    ) -> object:
        """What an op returns."""
        if id(func) in _RULES and not kwargs:
            made = self._by_rule(func, args, _RULES[id(func)])
            if made is not None:
                return made
        if func is _EMPTY and kwargs and kwargs.get("device") == _HOST:
            return self._empty(args, kwargs.get("dtype"))
        if func is _EQUAL:
            return False
        if func is _INDEX and _node() == _EMBEDDING:
            (mask,) = args[1]
            with self:
                return args[0].new_empty((mask.numel(), *args[0].shape[mask.dim() :]))
        if func is _BAG_BACKWARD and not args[_BAGS].numel():
            with self:
                args = (*args[:_BAGS], torch.empty_like(args[1]), *args[_BAGS + 1 :])
        loss = of_ctc_loss(self, func, args)
        if loss is not None:
            return loss
        unknown = of_unknown_size(self, func, args, kwargs or {})
        if unknown is not None:
            self.guesses += 1
            return unknown
        # Not by the mode's own handler, which torch wraps for dynamo: there is none here.
        returned = self.dispatch(func, types, args, kwargs or {})
        if func is not _LSTM or not isinstance(returned, tuple):
            return returned
        size = lstm_workspace_bytes(returned[0], args[0], args[6])
        with self:
            workspace = torch.empty(size, dtype=torch.uint8)
        return *returned[:_WORKSPACE], workspace, *returned[_WORKSPACE + 1 :]

    def _empty(self, form: Sequence[Any], dtype: torch.dtype | None) -> FakeTensor:
        """A tensor of the host, of this shape and these strides."""
        shape, strides = form
        with torch._C._DisableTorchDispatch():
            made = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        return self.fake(made, _HOST)

    def _by_rule(self, func: Any, args: Sequence[Any], rule: Rule | None) -> object:
        """What a kernel returns that is the same for all devices; None where torch is to say."""
        given = args[0] if isinstance(args[0], list | tuple) else args
        if not self.are_plain(given):
            return None
        first: Any = next(iter(given), None)
        shape = rule(*args) if rule is not None and _of_one_type(args) else None
        made: Any
        if rule is _in_place:
            return None if shape is None else first
        if shape is not None:
            with torch._C._DisableTorchDispatch():
                made = torch.empty(shape, dtype=first.dtype, device=_META)
        else:
            try:
                with in_kernel_invocation_manager(self):
                    made = func(*args)
            except RuntimeError:
                return None  # in torch's words
        if isinstance(made, list | tuple):
            return [self.fake(part, first.fake_device) for part in made]
        return self.fake(made, first.fake_device)


# --- shapes by rule -------------------------------------------------------------------------------


def _of_one_type(args: Sequence[Any]) -> bool:
    """Whether a kernel is given floating tensors of the type of its first argument alone."""
    dtype = args[0].dtype
    return dtype.is_floating_point and all(
        item.dtype is dtype for item in args if isinstance(item, torch.Tensor)
    )


def _in_place(first: torch.Tensor, *others: Any) -> Sequence[int] | None:
    for item in others:
        if isinstance(item, complex):
            return None
        if isinstance(item, torch.Tensor) and not is_within(item.shape, first.shape):
            return None
    return first.shape


def _elementwise(first: torch.Tensor, *others: Any) -> Sequence[int] | None:
    """Its strides are those of the first, whatever those of the others."""
    return _in_place(first, *others) if first.is_contiguous() else None


def _reduced(
    first: torch.Tensor, dims: Sequence[int] | None, keepdim: bool = False
) -> Sequence[int] | None:
    shape, rank = first.shape, first.dim()
    gone = {dim % rank for dim in dims or () if -rank <= dim < rank}
    if not dims or len(gone) < len(dims):
        return None
    if keepdim:
        return [1 if dim in gone else size for dim, size in enumerate(shape)]
    return [size for dim, size in enumerate(shape) if dim not in gone]


def _product(one: torch.Tensor, other: torch.Tensor) -> tuple[int, int] | None:
    fits = one.dim() == other.dim() == 2 and one.shape[1] == other.shape[0]
    return (one.shape[0], other.shape[1]) if fits else None


def _added_product(
    added: torch.Tensor, one: torch.Tensor, other: torch.Tensor, *_: Any
) -> tuple[int, int] | None:
    shape = _product(one, other)
    return shape if shape is not None and added.shape in (shape[1:], shape) else None


def _by_identity(rule: Rule | None, *kernels: Any) -> Mapping[int, Rule | None]:
    """By `id`: torch computes the hashes of kernels in Python."""
    return dict.fromkeys(map(id, kernels), rule)


_UNARY = ["sigmoid", "tanh", "gelu", "silu", "relu", "exp", "neg", "rsqrt", "sqrt", "sin", "cos"]
_BINARY = ["add", "sub", "mul", "div"]

_RULES: Mapping[int, Rule | None] = {
    **_by_identity(
        _elementwise,
        *(getattr(_aten, name).default for name in _UNARY),
        *(getattr(_aten, name).Tensor for name in _BINARY),
        *(_aten.sigmoid_backward.default, _aten.tanh_backward.default, _aten.clone.default),
        *(_aten.gelu_backward.default, _aten.silu_backward.default),
        *(_aten.threshold_backward.default, _aten.pow.Tensor_Scalar),
    ),
    **_by_identity(
        _in_place,
        *(getattr(_aten, f"{name}_").default for name in _UNARY),
        *(getattr(_aten, f"{name}_").Tensor for name in _BINARY),
    ),
    **_by_identity(_reduced, _aten.sum.dim_IntList, _aten.mean.dim),
    **_by_identity(_product, _aten.mm.default),
    **_by_identity(_added_product, _aten.addmm.default),
    **_by_identity(
        None,
        *(_aten.bmm.default, _aten.baddbmm.default, _aten.t.default, _aten.transpose.int),
        *(_aten.permute.default, _aten.unsqueeze.default, _aten.view.default),
        *(_aten.expand.default, _aten.detach.default, _aten._unsafe_view.default),
        *(_aten.slice.Tensor, _aten.select.int, _aten.unbind.int, _aten.squeeze.dim),
        *(_aten.squeeze.dims, _aten.cat.default, _aten.stack.default, _aten.split.Tensor),
        *(_aten.unsafe_split.Tensor, _aten.split_with_sizes.default),
    ),
}
"""Kernels whose results have the same shapes, strides and types on all devices: torch's fakes look
for a device first, which takes ten times as long. With the rule for their shape, where there is
one: torch's own kernels for the meta device are mostly decompositions in Python, which take up to a
hundred times as long."""


# --- what torch does not know ---------------------------------------------------------------------


def _node() -> str:
    """The node of a backward that is at work; empty where none is."""
    node = torch._C._current_autograd_node()
    return "" if node is None else node.name()


def lstm_workspace_bytes(output: torch.Tensor, taken: torch.Tensor, cells: torch.Tensor) -> int:
    """Bytes of the workspace of one layer of an LSTM, in one direction.

    What oneDNN 3 keeps for training (`set_workspace_sizes` and `set_offsets` in its
    src/cpu/rnn/rnn_utils): the gates, what a projection would make, and the states and cells of two
    layers with their gradients; each in rows of whole cache lines and from a new page on.

    Args:
        output, taken: what the layer gives and takes, steps x samples x features.
        cells: the cells at the beginning.
    """
    steps, samples, hidden = output.shape
    item = output.element_size()
    states = 2 * (steps + 1) * samples
    widest = max(hidden, taken.shape[-1])
    sizes = (
        steps * samples * _row(4 * hidden, item),
        steps * samples * _row(hidden, item),
        states * _row(widest, item),
        states * hidden * cells.element_size(),
        states * _row(widest, _FLOAT),
        states * _row(widest, _FLOAT),
        states * hidden * _FLOAT,
    )
    return sum(-(-size // _PAGE) * _PAGE for size in sizes)


def _row(numbers: int, item: int) -> int:
    """Bytes of a row: whole cache lines, one more where all rows would fall into the same ones."""
    line = _ROW // item
    padded = -(-numbers // line) * line
    return (padded + line * (padded % _NO_STRIDE == 0)) * item
