"""Random numbers that depend on what is computed, not on how the pipeline is cut.

Dropout and its kin draw from a global generator, in the order in which ops happen to run. Here
every random op draws from a generator seeded afresh from (seed, step, micro-batch, number of the
op in the whole model), so masks are the same for any number of stages, any schedule, and any
transport, and for a forward that is run a second time.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_GLOBAL_GENERATOR = threading.Lock()
"""Held while a process-wide generator is reseeded for one op; stages run on several threads."""


class _Kind(Enum):
    PLAIN = 0
    TAKES_GENERATOR = 1
    GLOBAL = 2


class SeededRandom(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own base
    """Reseeds before every random aten op that runs while the mode is active.

    The state of the process-wide generators is the same afterwards as before. Random ops that are
    given a generator of the caller's are counted, and otherwise left alone.

    Args:
        seed, step, microbatch: what the numbers depend on.
        numbers: the number of each random op in the whole model, in the order they run. Ops beyond
            the end are numbered on from the last.

    Attributes:
        position: how many random ops have run.
    """

    def __init__(self, seed: int, step: int, microbatch: int, numbers: Sequence[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own base
        self.key = (seed, step, microbatch)
        self.numbers = numbers
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
        kind = _kind(func)
        if kind is _Kind.PLAIN:
            return func(*args, **keywords)
        number = self._next()
        if keywords.get("generator") is not None:
            return func(*args, **keywords)
        device = _device(args, keywords)
        seed = mix(*self.key, number)
        if kind is _Kind.TAKES_GENERATOR:
            generator = torch.Generator(device).manual_seed(seed)
            return func(*args, **{**keywords, "generator": generator})
        return _with_global_seed(device, seed, lambda: func(*args, **keywords))

    def again(self, position: int) -> SeededRandom:
        """The same numbers once more, from the random op at `position` on."""
        same = SeededRandom(*self.key, self.numbers)
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


def mix(*parts: int) -> int:
    """A seed that depends on every part: 63 bits."""
    digest = hashlib.blake2b(struct.pack(f"<{len(parts)}q", *parts), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@cache
def _kind(func: Any) -> _Kind:
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return _Kind.PLAIN
    if any(argument.name == "generator" for argument in func._schema.arguments):
        return _Kind.TAKES_GENERATOR
    return _Kind.GLOBAL


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
