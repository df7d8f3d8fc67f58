"""Rematerialisation: a stage's forward that runs a second time when its backward is due.

The second forward has to be the first one again: the same random masks (`SeededRandom` with the
same key), the same autocast state, the same arguments, and the state that the first one found,
while the state as it is now must not change. Torch's own tool, torch.utils.checkpoint, knows
nothing of the last: it lets BatchNorm update its running statistics twice.

The first forward runs with gradients on, and its graph is dropped when it ends. Without gradients
some modules compute in another way (fused attention does not take masks that need a gradient, for
one), and the second forward would not give the same bits. At the peak that costs nothing: the
second forward holds the same activations, beside the same boundary values.

Segments of a stage (`Remat.SEGMENTS`) are calls of `torch.utils.checkpoint.checkpoint`, so a stage
by itself trains as torch has it. In a pipeline, while a stage's forward runs, each segment packs
what autograd saves by hooks of its own, inside those of torch: a backward in two parts
(`split_backward.py`) asks twice for what was saved, which torch would make twice.
"""

from __future__ import annotations

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from .precision import AutocastState
from .random import OverDraws, SeededRandom
from .written import Copies, WrittenBuffers, stand_in


@dataclass(frozen=True, slots=True)
class Received:
    """What is kept of a micro-batch in place of all that autograd saves.

    Attributes:
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


class _EnoughError(Exception):
    """Ends a second run that has made all that was saved."""


class SegmentTensor(ABC):
    """What autograd holds in place of a tensor that a segment saves."""

    @abstractmethod
    def release(self) -> None:
        """Nobody will ask for the tensor again."""


@dataclass(slots=True)
class _Held(SegmentTensor):
    """The tensor itself."""

    tensor: torch.Tensor | None

    def release(self) -> None:
        self.tensor = None


def _hold(tensor: torch.Tensor) -> _Held:
    return _Held(tensor.detach())


def _held(saved: _Held) -> torch.Tensor:
    if saved.tensor is None:
        raise RuntimeError("this part of the backward has run, and what it had saved is gone")
    return saved.tensor


@dataclass(frozen=True, slots=True)
class _Slot(SegmentTensor):
    """A tensor that a second run makes again."""

    run: SecondRun
    number: int

    def release(self) -> None:
        self.run.made.pop(self.number, None)


@dataclass(eq=False)
class SecondRun:
    """What autograd saves in one run of a segment: how to make it again, and what was made.

    Attributes:
        keeps: whether a tensor that was asked for may be asked for again.
        drawn: how many random ops have run.
    """

    again: Callable[[], object]
    name: str
    keeps: bool = False
    drawn: Callable[[], int] = lambda: 0
    made: dict[int, torch.Tensor] = field(default_factory=dict, init=False)
    _count: int = field(default=0, init=False)
    _drawn_at_last: int = field(default=0, init=False)
    _stops: bool = field(default=True, init=False)

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        with saved_tensors_hooks(self._pack, self._unpack):
            yield
        # A random op may fill, when it runs, what was saved before (the noise of rrelu).
        self._stops = self.drawn() == self._drawn_at_last

    def _pack(self, tensor: torch.Tensor) -> _Slot:
        self._count += 1
        self._drawn_at_last = self.drawn()
        return _Slot(self, self._count - 1)

    def _unpack(self, slot: _Slot) -> torch.Tensor:
        if slot.number not in self.made:
            self._make()
        return self.made[slot.number] if self.keeps else self.made.pop(slot.number)

    def _make(self) -> None:
        found: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            found.append(tensor.detach())
            if len(found) == self._count and self._stops:
                raise _EnoughError
            return found[-1]

        with (
            contextlib.suppress(_EnoughError),
            torch.enable_grad(),
            saved_tensors_hooks(pack, _as_it_is),
        ):
            self.again()
        if len(found) < self._count:
            raise RuntimeError(
                f"the second run of {self.name} saved {len(found)} tensors and the first one "
                f"{self._count}: what it computes depends on more than it is given; run without "
                "rematerialisation"
            )
        self.made = dict(enumerate(found))


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@dataclass(frozen=True, slots=True)
class SegmentContext:
    """What is to be as in the first run, given by the stage's run.

    Attributes:
        device: that of the stage.
        around: enters what a second run is to run in, inside the buffers' copies.
        random: the numbers that the forward draws from; None where it draws none.
    """

    device: torch.device
    around: Callable[[], contextlib.AbstractContextManager[object]]
    random: SeededRandom | None

    def drawn(self) -> int:
        """How many random ops have run."""
        return 0 if self.random is None else self.random.position


class Segments:
    """The segments of one stage.

    Args:
        written: for every segment, by the name of its method or the path of its module, the buffers
            it reads or writes that the stage's forward writes to; by the stage's own names.
        keeps: whether the stage's backward is split.
    """

    def __init__(
        self, module: nn.Module, written: Mapping[str, Sequence[str]], *, keeps: bool
    ) -> None:
        self._module = module
        self._keeps = keeps
        self._written = {name: WrittenBuffers(module, own) for name, own in written.items()}

    @functools.cached_property
    def _modules(self) -> frozenset[str]:
        named = self._module.named_modules(remove_duplicate=False)
        return frozenset(name for name, _ in named)

    @contextlib.contextmanager
    def forward(self, context: SegmentContext | None) -> Iterator[None]:
        """Around a forward whose segments run a second time in its backward.

        Args:
            context: of the second time; None where all is kept that autograd saves.
        """
        run = self._whole if context is None else functools.partial(self._first, context)
        with contextlib.ExitStack() as around:
            for name in self._written:
                owner, attribute = self._called(name)
                segment = _Segment(name, getattr(owner, attribute))
                stand_in(around, owner, attribute, functools.partial(run, segment))
            yield

    def _called(self, name: str) -> tuple[nn.Module, str]:
        """The module of a segment, and the name of its method."""
        if name not in self._modules:
            return self._module, name
        owner = self._module.get_submodule(name)
        # What `nn.Module.__call__` runs, hooks included: `forward` alone would leave these to
        # torch's checkpoint, and `Module.compile` would trace what stands in for it.
        compiled = owner._compiled_call_impl is not None
        return owner, "_compiled_call_impl" if compiled else "_call_impl"

    def _whole(self, segment: _Segment, *arguments: object) -> Any:
        with saved_tensors_hooks(_hold, _held):
            return segment.called(*arguments)

    def _first(self, context: SegmentContext, segment: _Segment, *arguments: object) -> Any:
        start = _Start(
            arguments,
            tuple(version(item) for item in arguments if isinstance(item, torch.Tensor)),
            self._written[segment.name].copies(),
            context.drawn(),
            AutocastState.now(context.device.type),
        )
        again = functools.partial(self._second, context, segment, start)
        with SecondRun(again, segment.name, keeps=self._keeps, drawn=context.drawn).first():
            return segment.called(*arguments)

    def _second(self, context: SegmentContext, segment: _Segment, start: _Start) -> None:
        tensors = (item for item in start.arguments if isinstance(item, torch.Tensor))
        if start.versions != tuple(map(version, tensors)):
            raise RuntimeError(
                f"a value that {segment.name} was given has been written to since, and a second "
                "run would start from that; write to a copy, or run without rematerialisation"
            )
        copies = {id(buffer): buffer.clone() for buffer in start.state}
        with contextlib.ExitStack() as around:
            state = tuple(copies[id(buffer)] for buffer in start.state)
            around.enter_context(self._written[segment.name].replaced(state))
            around.enter_context(context.around())
            around.enter_context(start.autocast.again())
            if context.random is not None:
                around.enter_context(OverDraws(context.random.again(start.random)))
            segment.called(*start.arguments)


@dataclass(frozen=True, slots=True)
class _Segment:
    name: str
    called: Callable[..., Any]


@dataclass(frozen=True, slots=True)
class _Start:
    """Where the first run of a segment began.

    Attributes:
        versions: how often each tensor of the arguments had been written to.
        state: the values of the buffers it reads or writes, of those that the stage writes to.
        autocast: as it was there, where the model may have turned it on or off around the segment.
    """

    arguments: tuple[object, ...]
    versions: tuple[int, ...]
    state: Copies
    random: int
    autocast: AutocastState
