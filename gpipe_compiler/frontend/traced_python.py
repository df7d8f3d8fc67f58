"""Python on tensors that torch.export does not follow by itself, made so that it is in the trace.

`len(x)` would be a constant, `x.data` a tensor from nowhere, and what forward assigns to a buffer
or to the `.data` of a tensor would be lost.
"""

from __future__ import annotations

import builtins
import contextlib
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.overrides import TorchFunctionMode

from gpipe_compiler.errors import SourceLocation, TraceError
from gpipe_compiler.frontend.locate import calling_line
from gpipe_compiler.ir.symbolic import same_shape

_DATA = "gpipe_compiler_data"
"""Key of node.meta: the node is a tensor's `.data`."""

_READ = torch.Tensor.data.__get__  # type: ignore[attr-defined]  # a descriptor of C
_ASSIGN = torch.Tensor.data.__set__  # type: ignore[attr-defined]  # a descriptor of C


def is_data(node: fx.Node) -> bool:
    """Whether a node is a tensor's `.data`."""
    return _DATA in node.meta


_own_length = len


def _length(of: Any) -> Any:
    """`len` of anything; of a tensor it may vary, which Python's own makes a constant."""
    return of.shape[0] if isinstance(of, torch.Tensor) and of.ndim else _own_length(of)


_own_assign = nn.Module.__setattr__


def _assign(module: nn.Module, name: str, value: Any) -> None:
    """Assigns to a module; what is assigned to a buffer is written into it."""
    buffer = vars(module).get("_buffers", {}).get(name)
    if (
        isinstance(value, torch.Tensor)
        and isinstance(buffer, torch.Tensor)
        and get_proxy_mode() is not None
        and value.dtype == buffer.dtype
        and same_shape(value.shape, buffer.shape)
    ):
        if value is not buffer:
            buffer.copy_(value)
    else:
        _own_assign(module, name, value)


class PythonFollowed(TorchFunctionMode):
    """Has a trace follow such Python.

    Attributes:
        transform: the user's line that first ran inside of a transform of torch.func: what fails
            then often fails after the trace, where no line is known.
    """

    transform: SourceLocation | None = None

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Around the trace."""
        with (
            mock.patch.object(builtins, "len", _length),
            mock.patch.object(nn.Module, "__setattr__", _assign),
            self,
        ):
            yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        mode = get_proxy_mode()
        if mode is not None and func is torch._VF._pack_padded_sequence:
            where = calling_line()
            code = f" at `{where.code}`" if where and where.code else ""
            raise TraceError(f"torch.export follows no packed sequences{code}", location=where)
        if self.transform is None and torch._C._functorch.peek_interpreter_stack() is not None:
            self.transform = calling_line()
        if (
            mode is None
            or func not in (_READ, _ASSIGN)
            or get_proxy_slot(args[0], mode.tracer, None) is None
        ):
            return func(*args, **(kwargs or {}))
        if func == _ASSIGN:
            _refuse_other_memory(mode.tracer, *args)
        data = args[0].detach()
        get_proxy_slot(data, mode.tracer).proxy.node.meta[_DATA] = True
        return data if func == _READ else data.copy_(args[1])


def _refuse_other_memory(tracer: Any, tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Checks that writing a value into a tensor is what assigning it to its `.data` would be.

    Raises:
        TraceError: where the tensor would be another one than before, or the memory of another one.
    """
    slot = get_proxy_slot(value, tracer, None)
    made = None if slot is None else slot.proxy.node
    earlier = itertools.takewhile(lambda node: node is not made, tracer.graph.nodes)
    values = [node.meta.get("val") for node in earlier]
    held = {item.untyped_storage()._cdata for item in values if isinstance(item, torch.Tensor)}
    same = same_shape(value.shape, tensor.shape) and value.dtype == tensor.dtype
    if not same or value.untyped_storage()._cdata in held:
        raise TraceError(
            "the `.data` of a tensor becomes that of another one, or of another shape or type",
            location=calling_line(),
            hint="write into the tensor, under torch.no_grad(): `tensor.copy_(value)`",
        )
