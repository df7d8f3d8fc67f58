"""Tensors that are made of others by moving elements, as files store weights in pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..spec import Steps

_SELF = "self"
_COPIES = ("stack", "cat")


@dataclass(frozen=True, slots=True)
class Assembly:
    """How one tensor is made of others.

    Attributes:
        of: the names of the others.
        steps: `(op, *arguments)` of torch.ops.aten, which only move elements. "%0" is the first of
            the others; results follow on these, "%9.1" being the second of several. The last step
            gives the tensor; without any it is the last of the others.
    """

    of: tuple[str, ...]
    steps: Steps

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> Assembly:
        """What `written` gave.

        Raises:
            TypeError, ValueError, LookupError: when it did not.
        """
        steps = _tuples(content["steps"])
        return cls(tuple(map(str, content["of"])), tuple((str(op), *rest) for op, *rest in steps))

    def written(self) -> dict[str, Any]:
        """It as JSON has it."""
        return {"of": self.of, "steps": self.steps}

    @property
    def plain(self) -> str | None:
        """What it is one and the same as; None where it is made of it, or of several."""
        return self.of[0] if len(self.of) == 1 and not self.steps else None

    @property
    def copies(self) -> bool:
        """Whether the tensor has memory of its own."""
        return any(op in _COPIES for op, *_ in self.steps)

    def of_tensors(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The tensor, made of these."""
        last = {place: number for number, step in enumerate(self.steps) for place in _used(step)}
        results: list[Any] = list(tensors)
        del tensors
        for number, (op, *arguments) in enumerate(self.steps):
            given = [named(argument, results) for argument in arguments]
            results.append(getattr(torch.ops.aten, op)(*given))
            del given
            for place in (place for place, step in last.items() if step == number):
                results[place] = None  # what is large is held no longer than it is needed
        made: torch.Tensor = results[-1]
        return made


def named(argument: Any, results: Sequence[Any], own: torch.Tensor | None = None) -> Any:
    """An argument with the results that it names in their places; itself where it names none.

    Args:
        own: what "self" names.
    """
    if argument == _SELF and own is not None:
        return own
    place = _place(argument)
    if place is not None:
        result = results[place[0]]
        return result if place[1] is None else result[place[1]]
    if isinstance(argument, tuple):
        values = tuple(named(item, results, own) for item in argument)
        changed = any(new is not old for new, old in zip(values, argument, strict=True))
        return list(values) if changed else argument
    return argument


def _place(argument: object) -> tuple[int, int | None] | None:
    """Which result an argument names, and which of several; None where it names none."""
    if not isinstance(argument, str) or not argument.startswith("%"):
        return None
    number, _, item = argument[1:].partition(".")
    return int(number), int(item) if item else None


def _used(argument: object) -> list[int]:
    """The results that a step names."""
    if isinstance(argument, tuple):
        return [place for item in argument for place in _used(item)]
    place = _place(argument)
    return [] if place is None else [place[0]]


def _tuples(value: object) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, (list, tuple)) else value
