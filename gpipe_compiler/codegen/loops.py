"""Loops: ops of a method that repeat, each round of which is given what the one before it made.

A loop stands among the ops of a method as those of its last round, between two ops of its own.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpipe_compiler.codegen.expressions import OwnModule, runs_again
from gpipe_compiler.codegen.sources import is_repeated, statement_at
from gpipe_compiler.errors import SourceLocation
from gpipe_compiler.ir import Call, FunctionCall, ModuleCall, Op, Ref, StateRef
from gpipe_compiler.ir.arguments import leaves


@dataclass(frozen=True, eq=False, slots=True)
class Loop:
    """What repeats.

    Attributes:
        lists: the paths of the lists over whose modules it runs, side by side.
        keys: of these modules, round by round.
        whole: whether these are all modules of the lists.
        numbers: what the rounds are numbered by, where something in them depends on that.
        carried: what the last round is given by the one before it, and what it makes in its place.
        own: the values that the last round makes, or is given by the one before.
        after: those that are read after the loop.
        unlike: those whose sizes are not the same in all rounds.
        gathered: values of all rounds, one of each in order, that are read together after it.
        source: of an op of a round.
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
    gathered: tuple[tuple[str, ...], ...]
    source: SourceLocation | None

    @property
    def listed(self) -> tuple[str, ...]:
        """Of the values that are gathered, those that stand in the lists alone."""
        return tuple(v for values in self.gathered for v in values if v not in self.own)


def begin(loop: Loop, *initial: object) -> object:
    """As the function of an op: stands before a loop, and makes what its rounds are given."""
    raise NotImplementedError


def end(loop: Loop, *read: object) -> object:
    """As the function of an op: stands after a loop, and reads what all its rounds need."""
    raise NotImplementedError


def gather(loop: str, number: int, item: object) -> None:
    """As the function of an op: adds what a round makes to a list of the loop's of this name."""
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


# --- what the ops in the rounds are made of, and how that compares between rounds ----------------


DIGITS = re.compile(r"\d+")


def form_of(leaf: object) -> Hashable:
    match leaf:
        case Ref():
            return Ref
        case StateRef(name=path) | OwnModule(path=path):
            return DIGITS.sub("", path)
        case int() if type(leaf) is int:
            return int
        case _:
            return type(leaf), repr(leaf)


@dataclass(frozen=True, slots=True)
class SameInAll:
    """An argument that is the same in all rounds."""


@dataclass(frozen=True, slots=True)
class MadeInRound:
    """One that is made in the same round, or in the one before; in which place, of which output."""

    before: bool
    place: int
    output: int


@dataclass(frozen=True, slots=True)
class InList:
    """A module or state below another one of a list in each round."""

    around: str


@dataclass(frozen=True, slots=True)
class Growing:
    """A number that grows from round to round."""

    step: int


PartKind = SameInAll | MadeInRound | InList | Growing


def call_arguments(made: Call) -> tuple[object, object]:
    """The arguments of a call; slices from the start on as those from 0."""
    args, kwargs = made.args, dict(made.kwargs)
    if not isinstance(made, FunctionCall) or made.function is not operator.getitem:
        return args, kwargs
    tensor, index = args

    def whole(item: object) -> object:
        if isinstance(item, slice) and item.start is None and type(item.stop) is int:
            return slice(0, item.stop, item.step)
        return item

    index = tuple(map(whole, index)) if isinstance(index, tuple) else whole(index)
    return (tensor, index), kwargs


def parts_of(op: Op) -> list[object]:
    """What an op calls, where that is a module, and the leaves of the arguments."""
    found = leaves(call_arguments(op.call))
    return [OwnModule(op.call.module), *found] if isinstance(op.call, ModuleCall) else [*found]


def calls_module(op: Op) -> bool:
    return isinstance(op.call, ModuleCall) or runs_again(op.call)


def are_apart(one: Op, other: Op) -> bool:
    """Whether two ops are of different statements, of which a loop of the user's has one."""
    sources = [op.source for op in (one, other) if op.source is not None]
    repeated = any(map(is_repeated, sources))
    return repeated and len({statement_at(source) for source in sources}) > 1


def stand_in_list(
    values: Sequence[str], lists: Iterable[Sequence[object]], reads: Iterable[str]
) -> bool:
    """Whether values stand in one of some lists, in order and nothing in between, and are read
    nowhere else by who reads the list.

    Args:
        reads: what that reads, as often as it does.
    """
    wanted = [*map(Ref, values)]
    counts = Counter(reads)
    return all(counts[value] == 1 for value in values) and any(
        [*items[start : start + len(wanted)]] == wanted
        for items in lists
        for start in range(len(items) - len(wanted) + 1)
    )
