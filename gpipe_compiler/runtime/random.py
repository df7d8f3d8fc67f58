"""Random numbers that depend on what is computed, not on how the pipeline is cut.

Dropout and its kin draw from a global generator, in the order in which ops happen to run. Here
every random op draws from a generator seeded afresh from (seed, step, micro-batch, number of the
op in the whole model), so masks are the same for any number of stages, any schedule, and any
transport, and for a forward that is run a second time. A draw without a batch dimension is the same
for all micro-batches: its seed is made without their number.

An op is random only when it draws with the arguments it is called with (`draws`).
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_GLOBAL_GENERATOR = threading.Lock()
"""Held while a process-wide generator is reseeded for one op; stages run on several threads."""


_DROPPED = frozenset({"p", "dropout_p", "dropout"})
"""Arguments that are the chance of a one, or of being dropped: with 0 nothing is drawn."""

_SWITCHES = frozenset({"train", "training"})
"""Arguments without which nothing is drawn."""

_DROPOUT_STATE = 15
"""The place of the generator among the arguments of cuDNN's recurrent networks, the last."""

_GIVEN = frozenset({"seed", "dropout_seed", "philox_seed", "rng_state"})
"""Arguments in place of a generator: what is drawn was decided when they were."""


@dataclass(frozen=True, slots=True)
class _Argument:
    """One of an op's arguments."""

    position: int
    name: str
    default: object

    def of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What a call passes for it."""
        if self.position < len(args):
            return args[self.position]
        return kwargs.get(self.name, self.default)


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
        """Whether it draws in this call."""
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

    Attributes:
        position: how many random ops have run.
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

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one aten op; a random one from its own seed."""
        keywords = dict(kwargs or {})
        sampler = _sampler(func)
        if sampler is None or not sampler.draws(args, keywords):
            return func(*args, **keywords)
        if func._can_decompose():  # in inference mode, where nothing above has
            with self:
                return func.decompose(*args, **keywords)
        return self.draw(self._next(), func, args, keywords)

    def draw(self, number: int, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What the random op of this number comes to."""
        return seeded(self.seed_of(number), func, args, kwargs)

    def seed_of(self, number: int) -> int:
        """The seed of the random op of this number."""
        seed, step, _ = self.key
        return mix(seed, step, number) if number in self.shared else mix(*self.key, number)

    def again(self, position: int) -> SeededRandom:
        """The same numbers once more, from the random op at `position` on."""
        same = SeededRandom(*self.key, self.numbers, self.shared)
        same.position = position
        return same

    def _next(self) -> int:
        position = self.position
        self.position += 1
        if position < len(self.numbers):
            return self.numbers[position]
        last = self.numbers[-1] if self.numbers else -1
        return last + 1 + position - len(self.numbers)


def seed_in_eval(seed: int, call: int) -> int:
    """The seed of a call in eval mode, which are numbered from one training step to the next.

    A model that draws even then (Monte Carlo dropout, noise) gives other results at every call.
    """
    return mix(seed, 1 + call)


def seeded(seed: int, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a random aten op comes to when it draws from this seed.

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
    return _with_global_seed(device, seed, lambda: func(*args, **kwargs))


def mix(*parts: int) -> int:
    """A seed that depends on every part: 63 bits."""
    digest = hashlib.blake2b(struct.pack(f"<{len(parts)}q", *parts), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


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


def _with_global_seed(device: torch.device, seed: int, call: Callable[[], Any]) -> Any:
    """The call's result with the device's own generator seeded, and put back afterwards."""
    with _GLOBAL_GENERATOR:
        generator = torch.default_generator
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            generator = torch.cuda.default_generators[index]
        state = generator.get_state()
        try:
            generator.manual_seed(seed)
            return call()
        finally:
            generator.set_state(state)
