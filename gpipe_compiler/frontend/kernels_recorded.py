"""Functions under torch.vmap, recorded by the kernels that they come to on the whole batch."""

from __future__ import annotations

import contextlib
import importlib
import operator
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch

from gpipe_compiler.dispatching import PlainDispatchMode
from gpipe_compiler.frontend.calls import Written, written
from gpipe_compiler.frontend.locate import line_around
from gpipe_compiler.frontend.nests import has_tensors, tensors_in
from gpipe_compiler.frontend.recorder import Recorder, recording
from gpipe_compiler.frontend.untraced import transformed

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

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
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
            raise transformed(line_around(_FUNCTORCH))
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
