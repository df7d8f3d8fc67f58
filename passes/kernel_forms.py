"""Remembers what kernels return of fake tensors, by what they are given.

torch has such a cache too. It minds symbolic sizes and tensors that are not plain, which here are
left to it; asking it takes several times as long.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import torch
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)

_PLAIN = (int, bool, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
_BY_NUMBERS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})


class _UnknownError(Exception):
    """An argument is not of a kind that is minded here."""


@dataclass(frozen=True, slots=True)
class _Form:
    """A plain tensor without its numbers: what has to be known to make it anew.

    Attributes:
        offset: into the storage of the first argument; None for a tensor with its own.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int | None


KernelTable: TypeAlias = dict[Hashable, _Form | tuple[_Form, ...]]
"""Of kernels by what they are given; modes may share one."""


class KernelForms:
    """What the kernels that ran in one mode returned.

    Kept are results that are plain tensors, each with a storage of its own, and single views of a
    first argument.

    Args:
        known: what is known already, and where more is kept.
    """

    def __init__(self, mode: FakeTensorMode, known: KernelTable) -> None:
        self._mode = mode
        self._known = known

    def key(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> Hashable | None:
        """All that decides the form of what a kernel returns; None where that is not minded."""
        if not args or type(args[0]) is not FakeTensor or not _is_minded(func):
            return None
        try:
            given = tuple([self._told(item) for item in args])
            options = tuple([(k, self._told(item)) for k, item in kwargs.items()]) if kwargs else ()
        except _UnknownError:
            return None
        return func, given, options, torch.get_default_dtype()

    def known(self, key: Hashable, args: Sequence[Any]) -> Any:
        """What the kernel returns; None where that is not known."""
        form = self._known.get(key)
        if form is None or isinstance(form, _Form):
            return None if form is None else self._made(form, args[0])
        return tuple([self._made(item, args[0]) for item in form])

    def learn(self, key: Hashable, func: Any, args: Sequence[Any], returned: Any) -> None:
        """Remembers what a kernel has returned."""
        if key in self._known or getattr(returned, "is_sparse", False):
            return
        form = None
        if func.is_view:
            form = self._view(args[0], returned)
        elif isinstance(returned, tuple):
            forms = [self._own(item) for item in returned]
            kept = [item for item in forms if item is not None]
            storages = {_storage(item) for item in returned if _is_fake(item)}
            if len(kept) == len(forms) == len(storages) and not storages & self._storages(args):
                self._known[key] = tuple(kept)
            return
        elif _is_fake(returned) and _storage(returned) not in self._storages(args):
            form = self._own(returned)
        if form is not None:
            self._known[key] = form

    def _told(self, item: Any) -> Hashable:
        kind = type(item)
        if kind is FakeTensor:
            if not self._is_plain(item):
                raise _UnknownError
            return (
                item.shape,
                item.stride(),
                item.storage_offset(),
                item.dtype,
                item.fake_device,
            )
        if item is None or isinstance(item, _PLAIN):
            return kind, item
        if kind is list or kind is tuple:
            return kind, tuple([self._told(part) for part in item])
        raise _UnknownError

    def _is_plain(self, tensor: FakeTensor) -> bool:
        return (
            tensor.fake_mode is self._mode
            and tensor.constant is None
            and tensor.layout is torch.strided
            and not tensor.is_conj()
            and not tensor.is_neg()
        )

    def _own(self, tensor: Any) -> _Form | None:
        """The form of a tensor in a storage of just its size."""
        if not _is_fake(tensor) or not self._is_plain(tensor) or tensor.requires_grad:
            return None
        form = _Form(tensor.shape, tensor.stride(), tensor.dtype, tensor.fake_device, None)
        same = self._made(form, tensor).untyped_storage().nbytes()
        whole = tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == same
        return form if whole else None

    def _view(self, viewed: FakeTensor, tensor: Any) -> _Form | None:
        if tensor is viewed or not _is_fake(tensor) or not self._is_plain(tensor):
            return None
        if tensor.requires_grad or _storage(tensor) != _storage(viewed):
            return None
        offset = tensor.storage_offset()
        return _Form(tensor.shape, tensor.stride(), tensor.dtype, tensor.fake_device, offset)

    def _made(self, form: _Form, viewed: FakeTensor) -> FakeTensor:
        with in_kernel_invocation_manager(self._mode):
            empty = torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device="meta")
            if form.offset is not None:
                empty.set_(viewed.untyped_storage(), form.offset, form.shape, form.stride)
        return FakeTensor(self._mode, empty, form.device)

    def _storages(self, args: Sequence[Any]) -> set[int]:
        parts = [part for item in args for part in (item if isinstance(item, list) else [item])]
        return {_storage(part) for part in parts if _is_fake(part)}


def _is_fake(item: object) -> bool:
    return type(item) is FakeTensor


def _storage(tensor: torch.Tensor) -> int:
    """What tells a storage from others that are alive."""
    address: int = tensor.untyped_storage()._cdata
    return address


@cache
def _is_minded(func: Any) -> bool:
    """Whether a kernel writes to nothing, and no numbers decide the form of what it returns."""
    schema = func._schema
    if func.namespace != "aten" or schema.is_mutable or _BY_NUMBERS.intersection(func.tags):
        return False
    aliased = any(result.alias_info is not None for result in schema.returns)
    return not aliased or (func.is_view and len(schema.returns) == 1)
