"""Loops: ops of a method that repeat, each round of which is given what the one before it made.

A loop stands among the ops of a method as those of its last round, between two ops of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpipe_compiler.ir import FunctionCall, Op


@dataclass(frozen=True, eq=False, slots=True)
class Loop:
    """What repeats.

    Attributes:
        lists: the paths of the lists over whose modules it runs, side by side.
        keys: of these modules, round by round.
        whole: whether these are all modules of the lists.
        numbers: what the rounds are numbered by, where something in them depends on that.
        count: of the rounds.
        carried: what the last round is given by the one before it, and what it makes in its place.
        own: the values that the last round makes, or is given by the one before.
        after: those that are read after the loop.
        unlike: those whose sizes are not the same in all rounds.
    """

    lists: tuple[str, ...]
    keys: tuple[str, ...]
    whole: bool
    numbers: range | None
    count: int
    carried: Mapping[str, str]
    own: frozenset[str]
    after: frozenset[str]
    unlike: frozenset[str]


def begin(loop: Loop, *initial: object) -> object:
    """As the function of an op: stands before a loop, and makes what its rounds are given."""
    raise NotImplementedError


def end(loop: Loop, *read: object) -> object:
    """As the function of an op: stands after a loop, and reads what all its rounds need."""
    raise NotImplementedError


def loop_begun(op: Op) -> Loop | None:
    return _loop_of(op, begin)


def loop_ended(op: Op) -> Loop | None:
    return _loop_of(op, end)


def _loop_of(op: Op, function: object) -> Loop | None:
    made = op.call
    if not isinstance(made, FunctionCall) or made.function is not function:
        return None
    loop = made.args[0]
    assert isinstance(loop, Loop)
    return loop
