"""The buffers that a forward writes to: what they were, and how others stand in for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..spec import covers
from .building import submodule

Copies = tuple[torch.Tensor, ...]
"""Copies of a stage's written buffers, one for each place that holds one."""


def stand_in(around: contextlib.ExitStack, owner: object, name: str, item: object) -> None:
    """Until the end of a block, an attribute of an object is another one."""
    own = vars(owner)  # not by setattr, which modules of torch have ideas of their own about
    around.callback(_put_back, own, name, own.get(name))
    own[name] = item


def _put_back(own: dict[str, Any], name: str, before: object) -> None:
    del own[name]
    if before is not None:
        own[name] = before


class WrittenBuffers:
    """The buffers and frozen parameters that a stage's forward writes to, and how others stand in
    for them.

    What stands in takes the buffer's place in the module; the buffer itself is not touched.

    Args:
        names: the buffers, by the stage's own names, or modules of it for all their buffers; what
            it does not hold is left out.
        apart_from: those of them that are left out.
    """

    def __init__(
        self, module: nn.Module, names: Sequence[str], apart_from: Sequence[str] = ()
    ) -> None:
        held: dict[str, torch.Tensor] = {}
        if names:  # most stages write nothing, and this is once a step
            held |= module.named_buffers(remove_duplicate=False)
            parameters = module.named_parameters(remove_duplicate=False)
            held |= {name: item for name, item in parameters if not item.requires_grad}
        split = [
            name.rpartition(".")
            for name in held
            if covers(names, name) and not covers(apart_from, name)
        ]
        owners = [(submodule(module, path), key) for path, _, key in split]
        self._places: tuple[tuple[dict[str, Any], str], ...] = tuple(
            (own._buffers if key in own._buffers else own._parameters, key) for own, key in owners
        )
        self._before: Copies | None = None

    def copies(self) -> Copies:
        """The values of now. Names of one tensor get one copy."""
        held = self._held()
        buffers = {id(buffer): buffer for buffer in held}
        made = {key: torch.empty_like(buffer) for key, buffer in buffers.items()}
        _copy(list(made.values()), list(buffers.values()))
        return tuple(made[id(buffer)] for buffer in held)

    def take_over(self, copies: Copies) -> None:
        _copy(self._held(), copies)

    def begin(self) -> None:
        """Before each micro-batch, of buffers that a mini-batch changes once: they are as they were
        before the first one, so that all come to the same."""
        if self._before is None:
            self._before = self.copies()
        else:
            self.take_over(self._before)

    @contextlib.contextmanager
    def replaced(self, copies: Copies) -> Iterator[None]:
        """The copies stand in, and are written to; afterwards all is as it was."""
        before = self._held()
        self._place(copies)
        try:
            yield
        finally:
            self._place(before)

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Copies stand in; afterwards the buffers take over the values that were written.

        What autograd keeps of the buffers is then of this forward alone. Were it the buffers
        themselves, the forward of the next micro-batch would write to it before the backward.
        """
        before = self._held()
        self._place(self.copies())
        try:
            yield
            _copy(before, self._held())
        finally:
            self._place(before)

    def _held(self) -> Copies:
        return tuple(table[key] for table, key in self._places)

    def _place(self, tensors: Copies) -> None:
        for (table, key), tensor in zip(self._places, tensors, strict=True):
            table[key] = tensor


@contextlib.contextmanager
def undone_in_error(written: Sequence[WrittenBuffers]) -> Iterator[None]:
    """Undoes what was written inside where that ends in an error."""
    before = [buffers.copies() for buffers in written]
    try:
        yield
    except BaseException:
        for buffers, copies in zip(written, before, strict=True):
            buffers.take_over(copies)
        raise


@torch.no_grad()
def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copies tensors in few kernels: a stage may have hundreds of tiny buffers."""
    kinds: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        into, out_of = kinds.setdefault(target.dtype, ([], []))
        into.append(target)
        out_of.append(source)
    for into, out_of in kinds.values():
        torch._foreach_copy_(into, out_of)
