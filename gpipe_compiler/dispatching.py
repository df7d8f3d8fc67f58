"""The bases of modes that see every aten op and are entered around many."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols, guard_or_false
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary


class PlainDispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own base
    """A dispatch mode whose handler is called as it is.

    torch wraps handlers so that dynamo, where it compiles what runs, leaves them alone. Nothing is
    compiled in these modes, and the wrapper takes as long as what most handlers do.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()  # type: ignore[no-untyped-call]  # torch's own base

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own base

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class DispatchWatch(PlainDispatchMode):
    """While entered, `saw` is called after every aten op that reaches dispatch below autograd: the
    given one, or that of a subclass."""

    def __init__(self, saw: Callable[..., None] | None = None) -> None:
        super().__init__()
        self._given = saw

    def saw(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], returned: object
    ) -> None:
        """`func` (an OpOverload) was called so and returned this."""
        if self._given is not None:
            self._given(func, args, kwargs, returned)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        returned = func(*args, **kwargs)
        self.saw(func, args, kwargs, returned)
        return returned


def by_identity(ops: Iterable[Any]) -> frozenset[int]:
    """Ops to look for by `id`: torch computes their hashes in Python, which are asked for at every
    kernel."""
    return frozenset(map(id, ops))


def is_within(shape: Sequence[Any], whole: Sequence[Any]) -> bool:
    """Whether a tensor of a shape is broadcast to this one."""
    if shape == whole:
        return True
    pairs = zip(reversed(shape), reversed(whole), strict=False)
    return len(shape) <= len(whole) and all(one in (1, other) for one, other in pairs)


_BINCOUNT = torch.ops.aten.bincount.default


def _counts(
    numbers: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0
) -> torch.Tensor | None:
    """What a `bincount` makes of numbers that are all below its `minlength`; None without one."""
    dtype = torch.long if weights is None else torch.double
    if weights is not None and weights.dtype is torch.float:
        dtype = torch.float
    return numbers.new_empty((minlength,), dtype=dtype) if minlength else None


_LIKE_ARGUMENTS: Mapping[int, tuple[int, ...]] = {
    id(getattr(torch.ops.aten, f"{before}_{each}_affine{end}").default): of
    for each, more in (("per_tensor", "_tensor_qparams"), ("per_channel", ""))
    for before, end, of in (
        ("_fake_quantize_learnable", "", (0,)),
        ("_fake_quantize_learnable", "_backward", (1, 2, 3)),
        ("fake_quantize", "_cachemask", (0, 0)),
        (f"{'_' if more else ''}fake_quantize", f"_cachemask{more}", (0, 0)),
    )
}
"""Ops for which torch has no kernel without numbers, or of free sizes, by `id`: the places of the
arguments that their results are like. One that is like the first again is a mask of it."""


_SLICE = torch.ops.aten.slice.Tensor

_MASKED_SELECT = torch.ops.aten.masked_select.default
"""Two by one mask give as many elements. Torch remembers that of a mask by which is indexed."""

_NONZERO = torch.ops.aten.nonzero.default

_LARGER: Callable[[Any, Any], Any] = torch.sym_max
_SMALLER: Callable[[Any, Any], Any] = torch.sym_min

_GROUPED = getattr(torch.ops.aten, "_grouped_mm", None)
"""A product for each group of rows, as experts have it. Without numbers torch takes bfloat16 alone;
its kernels take other types."""


def _slice(
    tensor: torch.Tensor, dim: int, start: Any = None, end: Any = None, step: int = 1
) -> torch.Tensor:
    """A slice whose bounds may follow from sizes.

    Such bounds count from the end that those of the example do, which other sizes are held to.
    Torch 2.11 would not say how many elements there are.
    """
    sizes, strides = list(tensor.shape), list(tensor.stride())
    size = sizes[dim]
    start = _bound(size, 0 if start is None else start)
    whole = end is None or (isinstance(end, int) and end == sys.maxsize)
    end = size if whole else _bound(size, end)
    length = end - start
    if not guard_or_false(length >= 0):
        length = _LARGER(length, 0)
    sizes[dim], strides[dim] = (length + step - 1) // step, strides[dim] * step
    offset: Any = tensor.storage_offset() + start * tensor.stride(dim)
    return tensor.as_strided(sizes, strides, offset)


def _bound(size: Any, bound: Any) -> Any:
    """Where a bound is, from the beginning."""
    if bound >= 0:
        return bound if guard_or_false(bound <= size) else _SMALLER(bound, size)
    return bound + size if guard_or_false(bound >= -size) else _LARGER(bound + size, 0)


def _follow_from_sizes(bounds: Sequence[object]) -> bool:
    symbols = [bound for bound in bounds if isinstance(bound, torch.SymInt)]
    return bool(symbols) and not any(map(free_unbacked_symbols, symbols))


class _Masks:
    """The masks of a trace, of which those that are computed alike select as many elements. Torch
    remembers how many of each mask alone, and `x[y > 0]` and `y[y > 0]` have two."""

    def __init__(self) -> None:
        self._numbers = WeakIdKeyDictionary()
        self._computed: dict[str, int] = {}
        self._selected: dict[int, Any] = {}
        self._unused = itertools.count()

    def _number(self, tensor: torch.Tensor) -> int:
        """Of a tensor as it is now: equal for masks that were computed alike."""
        if tensor.is_inference():  # torch does not count what is written there
            return next(self._unused)
        known: tuple[int, int] | None
        known = self._numbers.get(tensor)  # type: ignore[no-untyped-call]  # torch's own
        if known is None or known[1] != tensor._version:
            known = self._numbers[tensor] = next(self._unused), tensor._version
        return known[0]

    def add(self, mask: torch.Tensor, func: Any, arguments: Any) -> None:
        """Numbers a mask that an op has made."""
        random = torch.Tag.nondeterministic_seeded in func.tags
        if random or func._schema.is_mutable or mask.is_inference():
            return
        given = tree_map_only(torch.Tensor, lambda item: f"%{self._number(item)}", arguments)
        key = f"{func} {given}"
        number = self._computed.setdefault(key, self._number(mask))
        self._numbers[mask] = number, mask._version

    def recall(self, mask: Any) -> None:
        if mask.nonzero_memo is None and not mask.is_inference():
            mask.nonzero_memo = self._selected.get(self._number(mask))

    def remember(self, mask: Any) -> None:
        if not mask.is_inference():
            self._selected[self._number(mask)] = mask.nonzero_memo


class QuickFakes(FakeTensorMode):  # type: ignore[no-untyped-call]  # torch's own base
    """The base of modes of fake tensors that know some results by a rule.

    Like `PlainDispatchMode`, it is not wrapped for dynamo. Torch's own handler goes a long way, and
    its kernels for tensors without numbers are mostly decompositions in Python.

    Args:
        environment: of the sizes that are symbols; None where all are numbers.

    Attributes:
        guesses: how often the number of elements of a result depended on values.
        selects: what that number is taken to be; None for as many as there can be.
    """

    guesses = 0
    selects: int | None = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()  # type: ignore[no-untyped-call]  # torch's own base

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self, environment: ShapeEnv | None = None, *, export: bool = False) -> None:
        super().__init__(allow_non_fake_inputs=True, shape_env=environment, export=export)
        self._attributes: dict[torch.device, dict[str, Any]] = {}
        self._masks = _Masks()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.dispatch(func, types, args, kwargs or {})

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _SLICE and _follow_from_sizes(args[2:4]):
            with self:
                return _slice(*args)
        if _GROUPED is not None and func is _GROUPED.default:
            return self._grouped(func, types, args, kwargs or {})
        if func is _MASKED_SELECT and self.shape_env and args[0].shape == args[1].shape:
            with self:
                return args[0][args[1]]
        if func is _BINCOUNT:
            with self:
                made = _counts(*args, **(kwargs or {}))
            if made is not None:
                return made
        places = _LIKE_ARGUMENTS.get(id(func))
        if places is None:
            if func is _NONZERO and self.shape_env:
                self._masks.recall(args[0])
            result: Any = super().dispatch(func, types, args, kwargs)
            if self.shape_env and type(result) is FakeTensor and result.dtype is torch.bool:
                self._masks.add(result, func, (args, kwargs))
            elif func is _NONZERO and self.shape_env:
                self._masks.remember(args[0])
            return result
        with self:
            like = [torch.empty_like(args[place]) for place in places]
            if places[1:] == places[:1]:
                like[1] = torch.empty_like(like[0], dtype=torch.bool)
        return tuple(like) if len(like) > 1 else like[0]

    def _grouped(self, func: Any, types: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        dtype = args[0].dtype
        if dtype not in (torch.float32, torch.float16) or args[1].dtype is not dtype:
            return super().dispatch(func, types, args, kwargs)
        with self:
            args = (*(one.to(torch.bfloat16) for one in args[:2]), *args[2:])
            made: Any = super().dispatch(func, types, args, kwargs)
            return made.to(dtype)

    def fake(self, made: torch.Tensor, device: torch.device) -> FakeTensor:
        """A fake of this mode on a device.

        It is given the attributes of the first, which are the same for all: torch works them out
        for each.
        """
        if device not in self._attributes:
            first = FakeTensor(self, made, device)
            self._attributes[device] = dict(first.__dict__)
            return first
        fake = torch.Tensor._make_subclass(
            FakeTensor, made, False, dispatch_device=True, device_for_backend_keys=device
        )
        torch._C._set_throw_on_mutable_data_ptr(fake)
        fake.__dict__.update(self._attributes[device])
        return fake

    def are_plain(self, items: Iterable[object]) -> bool:
        """Whether the kernels of the meta device see all that there is of the tensors among these,
        which are on one device."""
        device: torch.device | None = None
        for item in items:
            if type(item) is not FakeTensor:
                if isinstance(item, torch.Tensor):
                    return False
                continue
            if not (
                item.fake_mode is self
                and item.constant is None
                and item.layout is torch.strided
                and not item.is_conj()
                and not item.is_neg()
            ):
                return False
            if device is not None and item.fake_device != device:
                return False
            device = item.fake_device
        return True
