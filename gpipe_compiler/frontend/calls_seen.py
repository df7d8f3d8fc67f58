"""Lets a recorder see what no function of torch tells it.

Constructors of torch's early days; modules and regions of autocast; `len(x)`, which would be a
constant; `max` and `min` of sizes, which would ask which is larger; what forward assigns to a
buffer, which would be lost; and functions under torch.vmap, by the kernels that they come to on the
whole batch.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import operator
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.amp.autocast_mode import autocast

from gpipe_compiler.dispatching import PlainDispatchMode, by_identity
from gpipe_compiler.frontend.asked_autocast import asked, autocast_as_asked
from gpipe_compiler.frontend.calls import Written, written
from gpipe_compiler.frontend.locate import is_own, line_around
from gpipe_compiler.frontend.nests import has_tensors
from gpipe_compiler.frontend.packing import packing_followed
from gpipe_compiler.frontend.recorder import Recorder, recording
from gpipe_compiler.frontend.trace_errors import TRANSFORMED
from gpipe_compiler.frontend.trace_fakes import TraceFakes
from gpipe_compiler.ir.arguments import tensors_in
from gpipe_compiler.ir.symbolic import same_shape


@contextlib.contextmanager
def calls_seen() -> Iterator[None]:
    """Lets a recorder see what no function of torch tells it: modules and regions of autocast."""
    enter, leave = autocast.__enter__, autocast.__exit__
    own_call = nn.Module.__call__

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        recorder = recording()
        if recorder is None:
            return own_call(module, *args, **kwargs)
        return recorder.module(own_call, module, args, kwargs)

    def entered(context: Any) -> Any:
        recorder = recording()
        if recorder is not None:
            recorder.position.enter(asked(context))
        return enter(context)  # type: ignore[no-untyped-call]  # of torch

    def left(context: Any, *raised: Any) -> Any:
        recorder = recording()
        if recorder is not None:
            recorder.position.leave_autocast()
        return leave(context, *raised)

    with (
        mock.patch.object(torch, "from_numpy", _from_numpy),
        mock.patch.object(torch, "is_grad_enabled", _is_grad_enabled),
        mock.patch.object(torch.inference_mode, "__enter__", _enter_inference),
        mock.patch.object(torch.inference_mode, "__exit__", _leave_inference),
        mock.patch.object(builtins, "len", _length),
        mock.patch.object(builtins, "max", _bound(builtins.max, torch.sym_max, "min")),
        mock.patch.object(builtins, "min", _bound(builtins.min, torch.sym_min, "max")),
        mock.patch.object(nn.Module, "__setattr__", _assign),
        mock.patch.object(nn.Module, "__call__", call),
        mock.patch.object(autocast, "__enter__", entered),
        mock.patch.object(autocast, "__exit__", left),
        autocast_as_asked(),
        packing_followed(),
    ):
        yield


_aten = torch.ops.aten
_DETACH, _EMPTY, _NUMBERS = (
    _aten.detach.default,
    _aten.empty.memory_format,
    _aten.lift_fresh.default,
)
_CONSTRUCTORS = by_identity({_DETACH, _EMPTY, _NUMBERS})


class RecordingFakes(TraceFakes):
    """Those of a trace, which records what constructors make."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = self.dispatch(func, types, args, kwargs or {})
        recorder = recording() if id(func) in _CONSTRUCTORS else None
        if recorder is not None:
            _record_constructor(recorder, func, args, made)
        return made


def _record_constructor(recorder: Recorder, kernel: Any, args: Sequence[Any], made: Any) -> None:
    """Records what `torch.FloatTensor(2, 3)`, `torch.Tensor([0.5])` or `Variable(x)` has made.

    No function of torch is called, so that of all that the model does its kernel alone is seen.
    """
    with torch._C.DisableTorchFunction():  # what is made is recorded, and not how
        if kernel is _NUMBERS:
            recorder.from_numbers(args[0], made)
        elif kernel is _EMPTY:
            options = {"dtype": made.dtype, "device": made.device}
            recorder.record(Written(torch.empty, (tuple(args[0]),), options), made, ())
        else:
            recorder.record(Written("detach", (args[0],)), made, ())


_own_length = len


def _length(of: Any) -> Any:
    """`len` of anything; of a tensor it may vary, which Python's own makes a constant."""
    asks = type(of) in (list, tuple) and not is_own(sys._getframe(1).f_code.co_filename)
    if asks and (recorder := recording()) is not None and recorder.lists:
        recorder.take_from_lists(of)
    return of.shape[0] if isinstance(of, torch.Tensor) and of.ndim else _own_length(of)


def _bound(
    own: Callable[..., Any], of_sizes: Callable[[Any, Any], Any], side: str
) -> Callable[..., Any]:
    """`max` or `min`, which of a size that may vary and another is no question, but a number; nor
    of a number and what is counted in the inputs.

    Args:
        side: the bound of `clamp` that it is.
    """

    def bound(*items: Any, **options: Any) -> Any:
        match items:
            case (torch.Tensor() as counted, (int() | float()) as number) | (
                (int() | float()) as number,
                torch.Tensor() as counted,
            ) if not options and _is_counted(counted):
                whole = not counted.is_floating_point() and float(number).is_integer()
                options[side] = int(number) if whole else number
                return torch.clamp(counted, **options)
        sizes = sum(isinstance(item, _SIZE) for item in items)
        numbers = not options and all(isinstance(item, _SIZE | int | float) for item in items)
        if sizes and numbers and _own_length(items) == 2:
            return of_sizes(*items)
        return own(*items, **options)

    return bound


def _is_counted(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one number of the inputs, which is only computed with."""
    recorder = recording()
    return (
        recorder is not None
        and tensor.ndim == 0
        and not tensor.requires_grad
        and recorder.tensors.is_of_inputs(tensor)
    )


_SIZE = torch.SymInt | torch.SymFloat

_own_from_numpy = torch.from_numpy


def _from_numpy(array: Any) -> Any:
    """A tensor of an array's numbers, as it is no function of torch that a mode sees."""
    recorder = recording()
    if recorder is None:
        return _own_from_numpy(array)
    with torch._C.DisableTorchFunction():  # what is made is recorded, and not how
        made = _own_from_numpy(array)
        with unset_fake_temporarily():
            real = _own_from_numpy(array).clone()
        return recorder.from_numbers(real, made)


_own_is_grad_enabled = torch.is_grad_enabled


def _is_grad_enabled() -> bool:
    answer, recorder = _own_is_grad_enabled(), recording()
    return answer if recorder is None else recorder.asks_for_gradients(answer)


def _enter_inference(context: Any) -> None:
    """Tensors made in it have no versions, by which writes in place are seen: no gradients do."""
    context.instead = torch.set_grad_enabled(torch.is_grad_enabled() and not context.mode)


def _leave_inference(context: Any, *_: object) -> None:
    torch.set_grad_enabled(context.instead.prev)


_own_assign = nn.Module.__setattr__


def _assign(module: nn.Module, name: str, value: Any) -> None:
    """Assigns to a module; what is assigned to a buffer is written into it."""
    buffer = vars(module).get("_buffers", {}).get(name)
    if (
        isinstance(value, torch.Tensor)
        and isinstance(buffer, torch.Tensor)
        and recording() is not None
        and value.dtype == buffer.dtype
        and same_shape(value.shape, buffer.shape)
    ):
        if value is not buffer:
            buffer.copy_(value)
    else:
        _own_assign(module, name, value)


_FUNCTORCH = "torch/_functorch/"
_IN_C = types.MethodDescriptorType | types.BuiltinFunctionType


@contextlib.contextmanager
def vmap_followed() -> Iterator[None]:
    """Lets what is recorded inside apply torch.vmap where there is nothing to differentiate, as to
    make masks."""
    apis: Any = importlib.import_module("torch._functorch.apis")
    own = apis.vmap_impl

    def followed(*args: Any, **kwargs: Any) -> Any:
        recorder = recording()
        if recorder is None:  # within another
            return own(*args, **kwargs)
        with recorder.paused(), _Kernels(recorder):
            return own(*args, **kwargs)

    with mock.patch.object(apis, "vmap_impl", followed):
        yield


class _Kernels(PlainDispatchMode):
    """Records kernels, in place of the functions of torch that call them."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs a kernel, and records it.

        Raises:
            TraceError: for one that draws, writes to a tensor, or has something to differentiate.
        """
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if not has_tensors(made):
            return made
        follows = torch.is_grad_enabled() and any(
            tensor.requires_grad for tensor in tensors_in((args, kwargs))
        )
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if follows or draws or func._schema.is_mutable:
            raise TRANSFORMED.at(line_around(_FUNCTORCH))
        return self._recorder.record(_public(func, args, kwargs, made), made, ())


def _public(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Any) -> Written:
    """The call of a kernel, by torch's method or function of its name where there is one."""
    name = func.overloadpacket.__name__
    if func is torch.ops.aten.index.Tensor:
        places = (slice(None) if place is None else place for place in args[1])
        return Written(operator.getitem, (args[0], tuple(places)))
    on_tensor = bool(args) and isinstance(args[0], torch.Tensor)
    public = getattr(torch.Tensor if on_tensor else torch, name, None)
    if name.startswith("_") or not isinstance(public, _IN_C):
        return written(func, args, kwargs, made)
    return written(public, args, {k: item for k, item in kwargs.items() if item is not None}, made)
