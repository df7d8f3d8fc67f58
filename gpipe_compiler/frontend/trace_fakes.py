"""The fake tensors of a trace, whose sizes may be symbols."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch._subclasses.fake_tensor import in_kernel_invocation_manager
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from gpipe_compiler.dispatching import QuickFakes, by_identity, counts_of, is_within

_aten = torch.ops.aten
_ELEMENTWISE = by_identity(
    {
        *(_aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor),
        *(_aten.relu.default, _aten.gelu.default, _aten.silu.default, _aten.sigmoid.default),
        *(_aten.tanh.default, _aten.exp.default, _aten.neg.default, _aten.rsqrt.default),
        *(_aten.sqrt.default, _aten.sin.default, _aten.cos.default, _aten.pow.Tensor_Scalar),
    }
)
_PRODUCTS = by_identity({_aten.mm.default, _aten.addmm.default})
_VIEWS = by_identity(
    {_aten.t.default, _aten.transpose.int, _aten.permute.default, _aten.detach.default}
)
_COUNTING = _aten.bincount.default
_RULED = _ELEMENTWISE | _PRODUCTS | _VIEWS

Saw: TypeAlias = Callable[[Any, Sequence[Any], Any], None]
"""Is told of an op, of what it was called with and of what it made."""


class TraceFakes(QuickFakes):
    """A mode of fake tensors that knows what the commonest kernels make without asking.

    Torch decomposes them, and asks in each part how the sizes compare, which takes milliseconds
    where one of them is a symbol. Here shapes that are written alike are the same; whatever would
    need a question is left to torch.
    """

    def __init__(self, environment: ShapeEnv | None = None, saw: Saw | None = None) -> None:
        """A mode of fakes.

        Args:
            environment: of the sizes that are symbols; None where all are numbers.
            saw: is told of every op, what it was called with and what it made.
        """
        super().__init__(shape_env=environment, export=environment is not None)
        self._saw = saw

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        made = self._made(func, types, args, kwargs)
        if self._saw is not None:
            self._saw(func, args, made)
        return made

    def _made(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
    ) -> Any:
        if id(func) in _RULED and not kwargs and self.are_plain(args):
            made = self._by_rule(func, args)
            if made is not None:
                return self.fake(made, next(t.fake_device for t in args if _is_tensor(t)))
        if func is _COUNTING:
            with self:
                counts = counts_of(func, args, kwargs or {})
            if counts is not None:
                return counts
        return self.dispatch(func, types, args, kwargs or {})

    def _by_rule(self, func: Any, args: Sequence[Any]) -> torch.Tensor | None:
        """What an op makes, on meta; None where torch is to say."""
        if id(func) in _ELEMENTWISE:
            return _like_first(args)
        if id(func) in _PRODUCTS:
            return _product(args)
        try:
            with in_kernel_invocation_manager(self):
                view: torch.Tensor = func(*args)
        except (RuntimeError, IndexError):
            return None  # in torch's words
        return view


def _like_first(args: Sequence[Any]) -> torch.Tensor | None:
    """A meta tensor like the first operand, where it is dense and no other is of another type or
    wider; None where that is not plain to see."""
    first, *others = args
    tensors = [item for item in others if _is_tensor(item)]
    if not _is_tensor(first) or any(isinstance(item, complex) for item in others):
        return None
    if not _are_floating(first, *tensors) or not _is_dense(first):
        return None
    shape = _sizes(first)
    if not all(is_within(_sizes(item), shape) for item in tensors):
        return None
    return _made(first.shape, first.dtype)


def _product(args: Sequence[Any]) -> torch.Tensor | None:
    """What a product of matrices makes, perhaps added to another matrix or a vector."""
    *added, one, other = args[:3]
    if not all(map(_is_tensor, args)) or not _are_floating(one, other, *added):
        return None
    if one.dim() != 2 or other.dim() != 2 or _sizes(one)[1] != _sizes(other)[0]:
        return None
    shape = [_sizes(one)[0], _sizes(other)[1]]
    if not all(is_within(_sizes(item), shape) for item in added):
        return None
    return _made((one.shape[0], other.shape[1]), one.dtype)


def _is_tensor(item: object) -> bool:
    return isinstance(item, torch.Tensor)


def _are_floating(first: torch.Tensor, *others: torch.Tensor) -> bool:
    same = all(other.dtype is first.dtype for other in others)
    return same and first.dtype.is_floating_point


def _sizes(tensor: torch.Tensor) -> list[Any]:
    """The shape, as numbers and expressions that no question is asked to compare."""
    return [size if isinstance(size, int) else size.node.expr for size in tensor.shape]


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the strides are plain to be those of a tensor of this shape that is contiguous."""
    reached: Any = 1
    for size, stride in zip(reversed(_sizes(tensor)), reversed(tensor.stride()), strict=True):
        if (stride if isinstance(stride, int) else stride.node.expr) != reached:
            return False
        reached = reached * size
    return True


def _made(shape: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
    with torch._C._DisableTorchDispatch():
        return torch.empty(tuple(shape), dtype=dtype, device="meta")
