"""What models and graphs run in: precisions, exports, and places where nothing has numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from gpipe_compiler.frontend.encoders import unpacked
from gpipe_compiler.frontend.entry import Entry
from gpipe_compiler.frontend.state import isolated, put_tensors
from gpipe_compiler.frontend.trace_fakes import TraceFakes


@contextlib.contextmanager
def ambient(dtype: torch.dtype | None, kind: str) -> Iterator[None]:
    """Autocast to a type, fp32 included, on a kind of device that need not be there."""
    if dtype is None:
        yield
        return
    before = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    torch.set_autocast_enabled(kind, True)
    torch.set_autocast_dtype(kind, dtype)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled(kind, before[0])
        torch.set_autocast_dtype(kind, before[1])


@contextlib.contextmanager
def as_exported() -> Iterator[None]:
    """Tells models that look that they are being exported, and keeps nested tensors away."""
    with contextlib.ExitStack() as around:
        around.enter_context(unpacked())
        for flag in ("_is_compiling_flag", "_is_exporting_flag"):
            around.enter_context(mock.patch.object(torch.compiler, flag, True))
        yield


def kind_of(entry: Entry) -> str:
    """The kind of device that a model computes on; the host for one on meta."""
    device = next((tensor.device.type for tensor in entry.states.tensors.values()), "cpu")
    return "cpu" if device == "meta" else device


@dataclass(frozen=True, slots=True)
class Place:
    """Where tensors have no numbers: fakes of a kind of device, which need not be there, that are
    cast as real ones of it are.

    Attributes:
        mode: that all of them belong to.
    """

    device: torch.device
    mode: TraceFakes

    @classmethod
    def of(cls, kind: str) -> Place:
        return cls(torch.device(kind), TraceFakes())

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is here, without numbers."""
        return (
            type(tensor) is FakeTensor
            and tensor.constant is None
            and tensor.fake_device == self.device
        )

    def empty(self, shape: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        """A new tensor of this form."""
        with torch._C._DisableTorchDispatch():
            bare = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        return self.mode.fake(bare, self.device)

    def view(self, tensor: torch.Tensor, shape: Any, stride: Any, offset: int) -> torch.Tensor:
        """A view of this form of a tensor here."""
        with torch._C._DisableTorchDispatch():
            bare = torch.as_strided(tensor, shape, stride, offset)
        return self.mode.fake(bare, self.device)

    def to(self, tensor: torch.Tensor) -> torch.Tensor:
        """A leaf of the same form here."""
        if tensor.layout is torch.strided and not tensor.is_quantized:
            new = self.empty(tensor.shape, tensor.stride(), tensor.dtype)
        else:
            new = self.mode.from_tensor(tensor.detach(), static_shapes=True)
        return new.requires_grad_(tensor.requires_grad)

    def moved(self, model: nn.Module) -> nn.Module:
        """A copy of a model with its tensors here."""
        copied = isolated(model, share_parameters=True)
        put_tensors(copied, self.to)
        return copied
