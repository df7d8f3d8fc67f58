"""The values and the state of a graph: what is known of each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from gpipe_compiler.ir.sizes import BATCH, is_free
from gpipe_compiler.runtime.sizes import Dim, Shape
from gpipe_compiler.runtime.spec import Steps


class ValueKind(Enum):
    """What a value is at run time."""

    TENSOR = "tensor"
    SCALAR = "scalar"
    """A Python number computed from shapes, such as the batch size."""
    OTHER = "other"
    """Anything else (a `torch.Size`, a cache object): it never crosses a cut."""


class StateKind(Enum):
    """What a tensor of the model is."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    """A tensor the model's code closes over; it is in no state_dict."""


@dataclass(frozen=True, slots=True)
class Value:
    """What is known of a named value, at the graph's batch size.

    Attributes:
        shape: sizes at batch size `Graph.batch_size` and those of the example; () for anything but
            tensors.
        free: the same, where some of them follow from free sizes: those as expressions, in which
            the number of samples is `BATCH`. () where none does.
        dtype: None for anything but tensors.
        batch_dim: the dimension that grows in proportion to the batch, None if no dimension does.
        splittable: False where the batch shows in several dimensions or not in proportion to it
            (a B x B matrix), so that the value cannot be cut into micro-batches.
        requires_grad: whether autograd tracks it when training.
        storage: values of one number share memory (views, in-place results). -1 for non-tensors.
    """

    name: str
    kind: ValueKind
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    batch_dim: int | None = None
    splittable: bool = True
    requires_grad: bool = False
    storage: int = -1
    free: Shape = ()

    @property
    def dims(self) -> Shape:
        """The shape, what follows from free sizes as expressions."""
        return self.free or self.shape

    @property
    def samples_dim(self) -> int | None:
        """The dimension off which the number of samples can be read; None where there is none."""
        dim = self.batch_dim
        if dim is None or not self.splittable or self.shape[dim] == 0 or is_free(self.dims[dim]):
            return None
        return dim

    @property
    def tells(self) -> frozenset[Dim]:
        """The sizes that vary from call to call and can be read off its shape."""
        free = filter(is_free, self.dims)
        return frozenset(free if self.samples_dim is None else (BATCH, *free))

    def __str__(self) -> str:
        """Its type, such as `8x64x56x56 float32`, with the batch dimension starred."""
        if self.kind is not ValueKind.TENSOR:
            return str(self.kind.value)
        sizes = (f"{size}{'*' * (at == self.batch_dim)}" for at, size in enumerate(self.shape))
        return f"{'x'.join(sizes) or 'scalar'} {str(self.dtype).removeprefix('torch.')}"

    @property
    def bytes(self) -> int:
        """Bytes of the elements, views counted as if they were contiguous."""
        if self.dtype is None:
            return 0
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class State:
    """A parameter, buffer or constant of the model, under its original name.

    Attributes:
        name: canonical: the first name that `named_parameters()` or `named_buffers()` gives.
        aliases: further names of the same tensor (tied weights).
        persistent: whether it is in `state_dict()`.
        initial: for a tensor on meta, the steps by which the model's own code filled it; () where
            they are not known.
    """

    name: str
    kind: StateKind
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    persistent: bool = True
    aliases: tuple[str, ...] = ()
    initial: Steps = ()

    @property
    def bytes(self) -> int:
        """Bytes of the elements."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize
