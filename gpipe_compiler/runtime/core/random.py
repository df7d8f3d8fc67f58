"""Random numbers that depend on what is computed, not on how the pipeline is cut.

Dropout and its kin draw from a global generator, in the order in which ops happen to run. Here
every random op draws from a generator seeded afresh from (seed, step, micro-batch, number of the
op in the whole model), so masks are the same for any number of stages, any schedule, and any
transport, and for a forward that is run a second time. A draw without a batch dimension is the same
for all micro-batches: its seed is made without their number.

An op is random only when it draws with the arguments it is called with (`draws`). A dispatch mode
costs every op that it sees some 50 microseconds, so a stage has one around the functions alone that
may draw (`OverDraws`), and none around those that draw once and from a process-wide generator.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import struct
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MethodDescriptorType,
    MethodWrapperType,
    WrapperDescriptorType,
)
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function
from torch.utils._python_dispatch import TorchDispatchMode

_GLOBAL_GENERATOR = threading.Lock()
"""Held while a process-wide generator is reseeded for one op; stages run on several threads."""


_DRAW_ONCE = frozenset({functional.dropout, torch.dropout, functional.scaled_dot_product_attention})
"""Functions that draw once at most, and that consist of many ops."""

_DROPPED = frozenset({"p", "dropout_p", "dropout"})
"""Arguments that are the chance of a one, or of being dropped: with 0 nothing is drawn."""

_SWITCHES = frozenset({"train", "training"})
"""Arguments without which nothing is drawn."""

_DROPOUT_STATE = 15
"""The place of the generator among the arguments of cuDNN's recurrent networks, the last."""

_GIVEN = frozenset({"seed", "dropout_seed", "philox_seed", "rng_state"})
"""Arguments in place of a generator: what is drawn was decided when they were."""


_IN_C = BuiltinFunctionType | MethodDescriptorType | MethodWrapperType | WrapperDescriptorType


@dataclass(frozen=True, slots=True)
class _Argument:
    """One of an op's arguments."""

    position: int
    name: str
    default: object

    def of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self.position < len(args):
            return args[self.position]
        return kwargs.get(self.name, self.default)


_OF_DROPOUT = (_Argument(0, "input", None), _Argument(1, "p", 0.5), _Argument(2, "training", True))
"""Those of `torch.nn.functional.dropout` that say whether it draws."""


@dataclass(frozen=True, slots=True)
class _Sampler:
    """An op that draws, unless its arguments say otherwise.

    Attributes:
        generator: where it takes one.
        zeros: numbers of which one that is 0 lets nothing be drawn.
        switches: flags of which one that is off lets nothing be drawn.
        layers: of a network whose dropout lies between them.
    """

    generator: _Argument | None
    zeros: tuple[_Argument, ...]
    switches: tuple[_Argument, ...]
    layers: tuple[_Argument, ...]

    def draws(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        return not (
            any(_is(item.of(args, kwargs), 0) for item in self.zeros)
            or any(item.of(args, kwargs) is False for item in self.switches)
            or any(_is(item.of(args, kwargs), 1) for item in self.layers)
        )


def draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an aten op draws random numbers when it is called so.

    Torch tags every op that can (`nondeterministic_seeded`), whatever its arguments: attention with
    `dropout_p=0`, and ops that are given the seed of a draw that another has made.
    """
    sampler = _sampler(func)
    return sampler is not None and sampler.draws(args, kwargs)


class SeededRandom(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own base
    """Reseeds before every random aten op that runs while the mode is active.

    The state of the process-wide generators is the same afterwards as before. Random ops that are
    given a generator of the caller's are counted, and otherwise left alone.

    Args:
        seed, step, microbatch: what the numbers depend on.
        numbers: the number of each random op in the whole model, in the order they run. Ops beyond
            the end are numbered on from the last.
        shared: the numbers of those whose draw has no batch dimension.
    """

    def __init__(
        self,
        seed: int,
        step: int,
        microbatch: int,
        numbers: Sequence[int],
        shared: Collection[int] = (),
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own base
        self.key = (seed, step, microbatch)
        self.numbers = numbers
        self.shared = shared
        self.position = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = dict(kwargs or {})
        sampler = _sampler(func)
        if sampler is None or not sampler.draws(args, keywords):
            return func(*args, **keywords)
        if func._can_decompose():  # in inference mode, where nothing above has
            with self:
                return func.decompose(*args, **keywords)
        number = self.number
        self.position += 1
        return self.draw(number, func, args, keywords)

    def draw(self, number: int, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return seeded(self.seed_of(number), func, args, kwargs)

    def seed_of(self, number: int) -> int:
        seed, step, _ = self.key
        return mix(seed, step, number) if number in self.shared else mix(*self.key, number)

    def pass_over(self, count: int) -> None:
        """Leaves out this many random ops that come next."""
        self.position += count

    def again(self, position: int) -> SeededRandom:
        """The same numbers once more, from the random op at `position` on."""
        same = SeededRandom(*self.key, self.numbers, self.shared)
        same.position = position
        return same

    @property
    def number(self) -> int:
        if self.position < len(self.numbers):
            return self.numbers[self.position]
        last = self.numbers[-1] if self.numbers else -1
        return last + 1 + self.position - len(self.numbers)


class OverDraws(TorchFunctionMode):
    """Has the functions that may draw do so from a `SeededRandom`, and leaves the others alone."""

    def __init__(self, random: SeededRandom) -> None:
        super().__init__()
        self.random = random

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        if func is passed_on:
            self.random.pass_over(*args[1:])
            return func(args[0], **keywords)
        if not may_draw(func):
            return func(*args, **keywords)
        if func in _DRAW_ONCE and _GLOBAL_GENERATOR.acquire(blocking=False):
            try:
                return self._draw_once(func, args, keywords)
            finally:
                _GLOBAL_GENERATOR.release()
        with self.random:
            return func(*args, **keywords)

    def _draw_once(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The result of a function that draws from a process-wide generator, once at most."""
        known = func is functional.dropout
        if known and not _drops(args, kwargs):
            return func(*args, **kwargs)
        with _seeded(_device(args, kwargs), self.random.seed_of(self.random.number)) as generator:
            before = None if known else generator.get_state()
            self.random.position += 1  # what autograd saves meanwhile is drawn
            result = func(*args, **kwargs)
            if before is not None:
                self.random.position -= torch.equal(before, generator.get_state())
        return result


def passed_on(given: torch.Tensor, draws: int = 0, *, gradient: bool = False) -> torch.Tensor:
    """What a layer was given, in memory of its own as what it makes would be.

    Args:
        draws: how many random ops the layer would have run: those that follow are numbered as if it
            had (`OverDraws`).
        gradient: whether what the layer makes needs a gradient, be it for its weights alone.
    """
    if has_torch_function((given,)):
        made: torch.Tensor = handle_torch_function(
            passed_on, (given,), given, draws, gradient=gradient
        )
        return made
    if gradient and torch.is_grad_enabled() and not given.requires_grad:
        given = given.detach().requires_grad_()
    return given.clone()


def _drops(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether `torch.nn.functional.dropout` draws when it is called so."""
    tensor, p, training = (item.of(args, kwargs) for item in _OF_DROPOUT)
    return bool(training and 0 < p < 1 and tensor.numel())


def seed_in_eval(seed: int, call: int) -> int:
    """The seed of a call in eval mode, which are numbered from one training step to the next.

    A model that draws even then (Monte Carlo dropout, noise) gives other results at every call.
    """
    return mix(seed, 1 + call)


def seeded(seed: int, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of a random aten op that draws from this seed.

    One that is given a generator of the caller's is left alone.
    """
    sampler, device = _sampler(func), _device(args, kwargs)
    assert sampler is not None
    if sampler.generator is not None:
        if sampler.generator.of(args, kwargs) is not None:
            return func(*args, **kwargs)
        generator = torch.Generator(device).manual_seed(seed)
        return func(*args[: sampler.generator.position], **{**kwargs, "generator": generator})
    if func is torch.ops.aten._cudnn_rnn.default:  # keeps a generator of its own on the device
        (dropout,), (train,) = sampler.zeros, sampler.switches
        state = torch._cudnn_init_dropout_state(
            dropout.of(args, kwargs), train.of(args, kwargs), seed, dtype=torch.uint8, device=device
        )
        return func(*args[:_DROPOUT_STATE], state)
    with _GLOBAL_GENERATOR, _seeded(device, seed):
        return func(*args, **kwargs)


def mix(*parts: int) -> int:
    """A seed that depends on every part: 63 bits."""
    digest = hashlib.blake2b(struct.pack(f"<{len(parts)}q", *parts), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@cache
def may_draw(func: Any) -> bool:
    """Whether a torch function draws random numbers with some arguments; True if that is unknown.

    One written in C is known by the aten op of its name, one in Python by the names it mentions.
    """
    if isinstance(func, torch._ops.OpOverload):
        return func.namespace != "aten" or _sampler(func) is not None
    written = inspect.unwrap(func)
    if isinstance(written, FunctionType):
        return any(map(_tagged, _mentioned(written)))
    return not isinstance(written, _IN_C) or _tagged(written.__name__)


def _tagged(name: str) -> bool:
    """Whether there is an aten op of this name that draws with some arguments."""
    packet = getattr(torch.ops.aten, name, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return False
    overloads = (getattr(packet, overload) for overload in packet.overloads())  # type: ignore[no-untyped-call]  # torch's own
    return any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads)


def _mentioned(func: FunctionType) -> set[str]:
    """The names in a function's code, and in that of the Python functions that they stand for."""
    names: set[str] = set()
    left: list[tuple[CodeType, Mapping[str, Any]]] = []

    def look_at(found: object) -> None:
        if isinstance(found, FunctionType):
            cells = inspect.getclosurevars(found).nonlocals
            left.append((found.__code__, {**found.__globals__, **cells}))

    look_at(func)
    while left:
        code, known = left.pop()
        left.extend((inner, known) for inner in code.co_consts if isinstance(inner, CodeType))
        for name in {*code.co_names, *code.co_freevars} - names:
            names.add(name)
            for scope in (known, vars(functional), vars(torch)):
                look_at(scope.get(name))
    return names


@cache
def _sampler(func: Any) -> _Sampler | None:
    """How an op draws; None for one that never does."""
    schema = func._schema
    known = {
        argument.name: _Argument(position, argument.name, argument.default_value)
        for position, argument in enumerate(schema.arguments)
    }
    if (
        torch.Tag.nondeterministic_seeded not in func.tags
        or not _GIVEN.isdisjoint(known)
        or not any("Tensor" in str(returned.type) for returned in schema.returns)
    ):
        return None

    def named(names: Collection[str]) -> tuple[_Argument, ...]:
        return tuple(argument for name, argument in known.items() if name in names)

    return _Sampler(
        known.get("generator"), named(_DROPPED), named(_SWITCHES), named({"num_layers"})
    )


def _is(value: object, number: int) -> bool:
    """Whether an argument is this number, and no tensor of it."""
    return isinstance(value, int | float) and value == number


def _device(args: Sequence[Any], keywords: Mapping[str, Any]) -> torch.device:
    """Where an op draws: on the device it is told, else where its tensors are."""
    told = keywords.get("device")
    if told is not None:
        return torch.device(told)
    for argument in (*args, *keywords.values()):
        if isinstance(argument, torch.Tensor):
            return argument.device
    return torch.device("cpu")


@contextlib.contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[torch.Generator]:
    """The device's own generator, seeded, and put back afterwards; the caller holds the lock."""
    generator = torch.default_generator
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generator = torch.cuda.default_generators[index]
    state = generator.get_state()
    try:
        yield generator.manual_seed(seed)
    finally:
        generator.set_state(state)
