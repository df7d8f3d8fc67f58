"""Rematerialisation: a stage's forward that runs a second time when its backward is due.

The second forward has to be the first one again: the same random masks (`SeededRandom` with the
same key), the same autocast state, the same arguments, and the state that the first one found,
while the state as it is now must not change. Torch's own tool, torch.utils.checkpoint, knows
nothing of the last: it lets BatchNorm update its running statistics twice.

The first forward runs with gradients on, and its graph is dropped when it ends. Without gradients
some modules compute in another way (fused attention does not take masks that need a gradient, for
one), and the second forward would not give the same bits. At the peak that costs nothing: the
second forward holds the same activations, beside the same boundary values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..spec import covers
from .weights import submodule

Copies = tuple[torch.Tensor, ...]
"""Copies of a stage's written buffers, one for each place that holds one."""


class WrittenBuffers:
    """The buffers that a stage's forward writes to, and how others stand in for them.

    What stands in takes the buffer's place in the module; the buffer itself is not touched.

    Args:
        names: the buffers, by the stage's own names, or modules of it for all their buffers; what
            it does not hold is left out.
    """

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        held = dict(module.named_buffers(remove_duplicate=False))
        split = [name.rpartition(".") for name in held if covers(names, name)]
        self._places = tuple((submodule(module, path), key) for path, _, key in split)

    def copies(self) -> Copies:
        """The values of now. Names of one tensor get one copy."""
        held = self._held()
        buffers = {id(buffer): buffer for buffer in held}
        made = {key: torch.empty_like(buffer) for key, buffer in buffers.items()}
        _copy(list(made.values()), list(buffers.values()))
        return tuple(made[id(buffer)] for buffer in held)

    def take_over(self, copies: Copies) -> None:
        """The buffers get the values of copies."""
        _copy(self._held(), copies)

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
        return tuple(module._buffers[key] for module, key in self._places)  # type: ignore[misc]  # named_buffers has given it, so it is no None

    def _place(self, tensors: Copies) -> None:
        for (module, key), tensor in zip(self._places, tensors, strict=True):
            module._buffers[key] = tensor


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


@dataclass(frozen=True, slots=True)
class Received:
    """What is kept of a micro-batch in place of all that autograd saves.

    Attributes:
        arguments: what the stage received.
        state: the written buffers before the first forward; the second one uses them up.
    """

    arguments: tuple[torch.Tensor, ...]
    state: Copies


@contextlib.contextmanager
def unwritten(arguments: Sequence[torch.Tensor]) -> Iterator[None]:
    """Around a first forward: its arguments have to be what they were for the second one.

    Raises:
        RuntimeError: when one of them was written to.
    """
    versions = [version(argument) for argument in arguments]
    yield
    if versions != [version(argument) for argument in arguments]:
        raise RuntimeError(
            "the stage writes to a value it received, and a second forward would start from that; "
            "write to a copy, or run without rematerialisation"
        )


def version(tensor: torch.Tensor) -> int:
    """How often a tensor was written to; inference tensors do not count, and cannot be trained."""
    return 0 if tensor.is_inference() else tensor._version
