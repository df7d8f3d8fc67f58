"""From a trace of the ops that were seen on meta tensors to the steps that fill one tensor."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from gpipe_compiler.frontend.init_trace import EMPTY, FILLS, InitOp, Operand, operands_in
from gpipe_compiler.runtime.spec import Steps

MOST_STEPS = 200
"""A tensor that takes more is taken as unknown: nobody would want to read them."""

_VALUE_OF: Mapping[str, int] = MappingProxyType({"full": 1, "full_like": 1, "new_full": 2})
"""The place of the value among the arguments of an op that fills with one; others fill with 1."""

_DEFAULTS: Mapping[str, tuple[float, ...]] = MappingProxyType(
    {"normal_": (0.0, 1.0), "uniform_": (0.0, 1.0)}
)
"""Arguments that are written out where the user's code left them out."""

_COPIES = frozenset(
    {"clone", "copy_", "_to_copy", "alias", "detach", "lift_fresh", "lift_fresh_copy"}
)
_CASTABLE = frozenset({"zero_", "fill_", "normal_", "uniform_", "trunc_normal_"})
"""Steps that do in another type what they do in the one they were done in, up to rounding."""

_BY_SHAPE = frozenset({"orthogonal_", "sparse_", "dirac_", "eye_"})
"""Steps that do something else in a tensor of another shape."""

UNKNOWN: Steps = (("unknown",),)
"""The steps of a tensor that the model's code fills in a way that cannot be written down."""


class _UnknownError(Exception):
    """The steps cannot be told."""


def init_programs(events: Iterable[InitOp], targets: Mapping[str, Operand]) -> dict[str, Steps]:
    """The steps of each tensor, by name; () where it is memory that nobody wrote to."""
    history = _History(events)
    drawn: dict[int, tuple[str, int]] = {}
    found: dict[str, Steps] = {}
    for name, target in targets.items():
        try:
            steps, random = history.steps(target, len(history.events))
        except _UnknownError:
            found[name] = UNKNOWN
            continue
        first = {drawn.setdefault(event, (name, place)) for place, event in enumerate(random)}
        owners = {owner for owner, _ in first}
        if len(owners) == 1 and owners != {name}:
            # A copy of another tensor holds the same draws.
            steps = (("seed", owners.pop()), *_after_one(steps))
        found[name] = steps
    return found


def _tidied(events: Iterable[InitOp]) -> Iterator[InitOp]:
    """The events with plain fills where a single number is copied in; copies to itself left out."""
    numbers: dict[int, Any] = {}
    for event in events:
        if event.op == "scalar_tensor":
            numbers[event.created[0].storage] = event.args[0]
        if event.op == "copy_" and len(event.args) > 1:
            target, source = event.args[:2]
            if target == source:
                continue
            if isinstance(source, Operand) and source.storage in numbers:
                args = (target, numbers[source.storage])
                yield dataclasses.replace(event, op="fill_", args=args, options=())
                continue
        yield event


class _History:
    """Who wrote to which storage."""

    def __init__(self, events: Iterable[InitOp]) -> None:
        self.events = list(_tidied(events))
        self.writers: dict[int, list[int]] = {}
        self.birth: dict[int, Operand] = {}
        for number, event in enumerate(self.events):
            storages = {made.storage for made in event.created.values()} | set(event.written)
            for storage in storages:
                self.writers.setdefault(storage, []).append(number)
            for made in event.created.values():
                self.birth.setdefault(made.storage, made)

    def steps(self, target: Operand, before: int) -> tuple[Steps, tuple[int, ...]]:
        """The steps of a tensor as it was before an event, and the events that draw numbers; none
        where nobody has written to it.

        Raises:
            _UnknownError: when they cannot be told.
        """
        needed = self._needed(target.storage, before)
        events = [self.events[number] for number in needed]
        if not events or not all(event.understood for event in events):
            raise _UnknownError
        if all(event.op in EMPTY for event in events):
            return (), ()
        random = tuple(number for number in needed if self.events[number].random)
        copied = self._copied(target, needed)
        if copied is not None:
            return copied
        steps = _simple(target, events) or _Writer(target, self.birth).write(events)
        if len(steps) > MOST_STEPS:
            raise _UnknownError
        return steps, random

    def _last(self, storage: int, before: int) -> int | None:
        writers = self.writers.get(storage, [])
        place = bisect.bisect_left(writers, before)
        return writers[place - 1] if place else None

    def _needed(self, storage: int, before: int) -> list[int]:
        """The events that the content of a storage depends on, in order."""
        pending: set[int] = set()
        wanted: dict[int, set[int]] = {}

        def want(storage: int, before: int) -> None:
            last = self._last(storage, before)
            if last is None:
                raise _UnknownError
            pending.add(last)
            wanted.setdefault(last, set()).add(storage)

        want(storage, before)
        found: set[int] = set()
        while pending:
            number = max(pending)
            pending.discard(number)
            found.add(number)
            if len(found) > 4 * MOST_STEPS:
                raise _UnknownError
            event = self.events[number]
            made = {item.storage for item in event.created.values()}
            for storage in event.read - made:
                want(storage, number)
            for storage in wanted[number]:
                if storage not in made and storage != event.overwrites:
                    want(storage, number)
        return sorted(found)

    def _copied(
        self, target: Operand, needed: Sequence[int]
    ) -> tuple[Steps, tuple[int, ...]] | None:
        """The steps of the tensor that this one is a plain copy of."""
        number = needed[-1]
        event = self.events[number]
        if event.op not in _COPIES:
            return None
        operands = list(operands_in(event.args))
        in_place = event.op == "copy_"
        if len(operands) != 1 + in_place or not all(item.whole for item in operands):
            return None
        source = operands[-1]
        made = operands[0] if in_place else next(iter(event.created.values()))
        if (made.size, made.size) != (target.size, source.size) or not target.whole:
            return None
        steps, random = self.steps(source, number)
        if steps and source.dtype != target.dtype:
            castable = len(steps) == 1 and steps[0][0] in _CASTABLE
            if not (castable and source.dtype.is_floating_point and target.dtype.is_floating_point):
                return None
        return steps, random


def _simple(target: Operand, events: Iterable[InitOp]) -> Steps | None:
    """The steps where all of them are methods of the tensor itself; None where they are not."""
    steps: list[tuple[Any, ...]] = []
    for event in events:
        if event.op in EMPTY:
            continue
        if event.op in FILLS:
            if not all(made.whole for made in (*event.created.values(), target)):
                return None
            method = FILLS[event.op]
            value: tuple[Any, ...] = ()
            if method == "fill_":
                value = (event.args[_VALUE_OF[event.op]] if event.op in _VALUE_OF else 1,)
            steps.append(_completed(method, value, target.dtype))
            continue
        receiver, *arguments = event.args or (None,)
        if not isinstance(receiver, Operand) or not event.op.endswith("_") or event.options:
            return None
        if (
            receiver.storage != target.storage
            or any(operands_in(arguments))
            or _literals(arguments)
        ):
            return None
        step = _completed(event.op, arguments, target.dtype)
        whole = receiver.whole and target.whole and receiver.dtype == target.dtype
        if receiver.shown == target.shown or (whole and event.op not in _BY_SHAPE):
            steps.append(step)
            continue
        index = _index(receiver, target)
        if index is None or receiver.dtype != target.dtype:
            return None
        steps.append(("at", index, *step))
    return tuple(steps)


def _completed(op: str, arguments: Sequence[Any], dtype: torch.dtype) -> tuple[Any, ...]:
    """A step with the defaults that a reader wants to see, and its fill value as a `dtype`."""
    if op == "fill_" and isinstance(arguments[0], (bool, int, float)):
        if arguments[0] == 0:
            return ("zero_",)
        if dtype.is_floating_point:
            return (op, float(arguments[0]))
        return (op, bool(arguments[0]) if dtype == torch.bool else arguments[0])
    defaults = _DEFAULTS.get(op, ())
    return (op, *arguments, *defaults[len(arguments) :])


def _index(part: Operand, whole: Operand) -> tuple[Any, ...] | None:
    """The index by which a dense tensor shows a part of itself; None where there is none."""
    if not whole.whole or math.prod(part.size) == 0:
        return None
    offset, starts = part.offset, []
    for size, stride in zip(whole.size, whole.stride, strict=True):
        starts.append(offset // stride % size if stride else 0)
    if sum(start * stride for start, stride in zip(starts, whole.stride, strict=True)) != offset:
        return None
    index: list[Any] = []
    left = list(zip(part.size, part.stride, strict=True))
    for size, stride, start in zip(whole.size, whole.stride, starts, strict=True):
        if left and left[0][1] == stride and start + left[0][0] <= size:
            length = left.pop(0)[0]
            index.append((start, start + length))
        else:
            index.append(start)
    if left:
        return None
    while index and index[-1] == (0, whole.size[len(index) - 1]):
        index.pop()
    return tuple(index)


class _Writer:
    """Writes events as steps that name tensors."""

    def __init__(self, target: Operand, birth: Mapping[int, Operand]) -> None:
        self.target = target
        self.birth = birth
        self.steps: list[tuple[Any, ...]] = []
        self.base: dict[int, tuple[str, Operand]] = {}

    def write(self, events: Sequence[InitOp]) -> Steps:
        """The steps, the last of which copies the result into the tensor."""
        for event in events:
            self._event(event)
        result = self._operand(self.target)
        if result != "self":
            self._step(("copy_", "self", result))
        return tuple(self.steps)

    def _step(self, step: tuple[Any, ...]) -> str:
        self.steps.append(step)
        return f"%{len(self.steps) - 1}"

    def _event(self, event: InitOp) -> None:
        if event.op == "tensor":
            made = event.created[0]
            self.base[made.storage] = self._step((event.op, *event.args)), made
            return
        if event.reads_nothing:
            self._allocate(event)
            return
        arguments = [self._argument(argument) for argument in event.args]
        options = [(f"{key}=", self._argument(value)) for key, value in event.options]
        result = self._step((event.op, *arguments, *options))
        for place, made in event.created.items():
            name = f"{result}.{place}" if event.several else result
            self.base[made.storage] = name, made

    def _allocate(self, event: InitOp) -> None:
        """New memory, by size; what its op took as a pattern is not needed."""
        operand = event.created[0]
        name = self._memory(operand)
        if event.op in FILLS:
            steps = _simple(operand, [event])
            if not steps:
                raise _UnknownError
            method, *arguments = steps[0]
            self._step((method, name, *arguments))

    def _memory(self, operand: Operand) -> str:
        if not operand.whole:
            raise _UnknownError
        if operand.stride == _contiguous(operand.size):
            name = self._step(("empty", operand.size, ("dtype=", operand.dtype)))
        else:
            option = ("dtype=", operand.dtype)
            name = self._step(("empty_strided", operand.size, operand.stride, option))
        self.base[operand.storage] = (name, operand)
        return name

    def _argument(self, argument: Any) -> Any:
        if isinstance(argument, Operand):
            return self._operand(argument)
        if isinstance(argument, tuple):
            if argument and argument[0] == "tensor":
                return self._step(argument)
            return tuple(self._argument(item) for item in argument)
        return argument

    def _operand(self, operand: Operand) -> str:
        if operand.storage not in self.base:
            if operand.storage == self.target.storage and self.target.whole:
                self.base[operand.storage] = ("self", self.target)
            elif operand.storage in self.birth:
                self._memory(self.birth[operand.storage])
            else:
                raise _UnknownError
        name, base = self.base[operand.storage]
        if base.shown == operand.shown:
            return name
        if base.dtype != operand.dtype:
            raise _UnknownError
        return self._step(("as_strided", name, operand.size, operand.stride, operand.offset))


def _contiguous(size: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for length in reversed(size):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


def _literals(tree: Any) -> bool:
    """Whether a real tensor stands among arguments."""
    if isinstance(tree, (tuple, list)):
        return bool(tree and tree[0] == "tensor") or any(_literals(item) for item in tree)
    return False


def _after_one(steps: Steps) -> Steps:
    """The same steps after another one: results have numbers one higher."""

    def shift(value: Any) -> Any:
        if isinstance(value, str) and value.startswith("%"):
            number, dot, item = value[1:].partition(".")
            return f"%{int(number) + 1}{dot}{item}"
        return tuple(shift(item) for item in value) if isinstance(value, tuple) else value

    return tuple(shift(step) for step in steps)
