"""What the ops in the rounds of a loop are made of, and how that compares between rounds."""

from __future__ import annotations

import operator
import re
from collections.abc import Hashable
from dataclasses import dataclass

from gpipe_compiler.codegen.expressions import OwnModule, runs_again
from gpipe_compiler.codegen.sources import is_repeated, statement_at
from gpipe_compiler.ir import Call, FunctionCall, ModuleCall, Op, Ref, RegionCall, StateRef
from gpipe_compiler.ir.arguments import leaves

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


@dataclass(frozen=True, slots=True)
class PathPart:
    """A module or state, as a part of a call."""

    path: str


def call_arguments(made: Call) -> tuple[object, object]:
    """The arguments of a call; slices from the start on as those from 0."""
    args, kwargs = made.args, {} if isinstance(made, RegionCall) else dict(made.kwargs)
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
    made = op.call
    found = [
        PathPart(leaf.name if isinstance(leaf, StateRef) else leaf.path)
        if isinstance(leaf, StateRef | OwnModule)
        else leaf
        for leaf in leaves(call_arguments(made))
    ]
    return [PathPart(made.module), *found] if isinstance(made, ModuleCall) else found


def calls_module(op: Op) -> bool:
    return isinstance(op.call, ModuleCall) or runs_again(op.call)


def are_apart(one: Op, other: Op) -> bool:
    """Whether two ops are of different statements, of which a loop of the user's has one."""
    sources = [op.source for op in (one, other) if op.source is not None]
    repeated = any(map(is_repeated, sources))
    return repeated and len({statement_at(source) for source in sources}) > 1
