"""The ops of a graph: what each calls, on what, and what it makes."""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import TypeAlias

import torch
from torch import nn

from gpipe_compiler.errors import SourceLocation
from gpipe_compiler.ir.arguments import (
    Argument,
    Leaf,
    Ref,
    StateRef,
    choices,
    in_mode,
    leaves,
    renamed,
)


class Mode(Enum):
    """When an op runs: always, or only in train or only in eval mode."""

    ALWAYS = "always"
    TRAIN = "train"
    EVAL = "eval"


@dataclass(frozen=True, slots=True)
class ModuleSpec:
    """A torch.nn module that an op calls, and how to construct it anew.

    Attributes:
        path: where the model keeps it, such as `layer1.0.conv1`.
        args, kwargs: constructor arguments as a person would write them, defaults left out.
        state: the module's own names (`weight`) to canonical state names (`layer1.0.conv1.weight`).
    """

    path: str
    cls: type[nn.Module]
    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object] = field(default_factory=dict)
    state: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """`function(*args, **kwargs)`: of torch, torch.nn.functional, operator, builtins, torch.ops."""

    function: Callable[..., object]
    args: tuple[Argument, ...] = ()
    kwargs: Mapping[str, Argument] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MethodCall:
    """`args[0].method(*args[1:], **kwargs)`."""

    method: str
    args: tuple[Argument, ...]
    kwargs: Mapping[str, Argument] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """`self.<module>(*args, **kwargs)`; `module` is the path of a `ModuleSpec`."""

    module: str
    args: tuple[Argument, ...] = ()
    kwargs: Mapping[str, Argument] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NoGrad:
    """`with torch.no_grad():`, or `torch.enable_grad()` when `enabled`."""

    enabled: bool = False


@dataclass(frozen=True, slots=True)
class Autocast:
    """`with torch.autocast(device_type, dtype, enabled):`."""

    device_type: str
    dtype: torch.dtype | None
    enabled: bool


Context: TypeAlias = NoGrad | Autocast


@dataclass(frozen=True, slots=True)
class Region:
    """A block of the user's in a context, in which ops run.

    Attributes:
        module: path of the module in whose forward it is entered.
        number: which one it is, of those of a graph; those of another graph need not be the same.
    """

    context: Context
    module: str = ""
    number: str = ""


Call: TypeAlias = FunctionCall | MethodCall | ModuleCall

Result: TypeAlias = "str | tuple[Result, ...] | None"
"""What a call's return value is bound to: a value's name, None where nothing reads it, or a
(nested) tuple to unpack into: `("out", ("h", "c"))` for an LSTM."""


def called(call: Call) -> str:
    """The name of the method or function of torch, operator or builtins that is called."""
    if isinstance(call, MethodCall):
        return call.method
    return getattr(call.function, "__name__", "") if isinstance(call, FunctionCall) else ""


def with_arguments(call: Call, change: Callable[[Argument], Argument]) -> Call:
    """The call with its arguments changed."""
    args = tuple(change(item) for item in call.args)
    kwargs = {key: change(item) for key, item in call.kwargs.items()}
    return dataclasses.replace(call, args=args, kwargs=kwargs)


def map_result(function: Callable[[str], str], result: Result) -> Result:
    """The same result with other names."""
    if isinstance(result, tuple):
        return tuple(map_result(function, item) for item in result)
    return None if result is None else function(result)


def result_names(result: Result) -> Iterator[str]:
    """The value names in a result, in order."""
    if isinstance(result, str):
        yield result
    elif isinstance(result, tuple):
        for item in result:
            yield from result_names(item)


class Bound(enum.Enum):
    """How a name came to stand for a value in a function: as its parameter; as one that the
    function also gives other values; by a statement."""

    PARAMETER = enum.auto()
    PERHAPS = enum.auto()
    STATEMENT = enum.auto()


@dataclass(frozen=True, slots=True)
class SeenName:
    """What a function of the user's calls an input of an op.

    Attributes:
        place: of the input among those of the op.
        scope: the function's name; of a module's `forward`, the number of words in its path.
        path: within what the name stands for, where that is a list, a dictionary or the like.
    """

    place: int
    scope: int | str
    name: str
    path: tuple[int | str, ...]
    bound: Bound


@dataclass(frozen=True, eq=False)
class Op:
    """One step of the model. What follows from it is kept with it: every pass asks.

    Attributes:
        name: unique in the graph; also the name of its value when it has one.
        result: the names its return value is bound to.
        source: the user's line, None where the frontend does not know it.
        module: path of the module whose forward makes the call ("" is the model itself).
        checkpoint: the call of torch.utils.checkpoint that it runs in, which the model makes; ""
            outside.
        turns: of the modules around that are called several times, by path, how many calls came
            before; those that are called once may be absent.
        layer: that it is part of, of those that are left out at random (`ir.left_out`), numbered as
            the model decides; "" outside.
        regions: that it runs in, the outermost first.
        seen: what the user's functions around call what it reads, the innermost first.
    """

    name: str
    call: Call
    result: Result
    source: SourceLocation | None = None
    module: str = ""
    mode: Mode = Mode.ALWAYS
    checkpoint: str = ""
    turns: tuple[tuple[str, int], ...] = ()
    layer: str = ""
    regions: tuple[Region, ...] = ()
    seen: tuple[SeenName, ...] = field(default=(), compare=False, repr=False)

    @property
    def path(self) -> str:
        """That of the module whose forward it is part or all of."""
        return self.call.module if isinstance(self.call, ModuleCall) else self.module

    def turn(self, path: str) -> int:
        """How many calls of a module around it came before the one that it is part of."""
        return next((turn for around, turn in self.turns if around == path), 0)

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        """The values it makes."""
        return tuple(result_names(self.result))

    @property
    def arguments(self) -> tuple[tuple[Argument, ...], dict[str, Argument]]:
        """The arguments of its call, by position and by name."""
        return self.call.args, dict(self.call.kwargs)

    @cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        """The leaves of its arguments, in order."""
        return tuple(leaves(self.arguments))

    @cached_property
    def has_choices(self) -> bool:
        """Whether an argument is another in train than in eval mode."""
        return any(True for _ in choices(self.arguments))

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """The values it reads, each as often as it does."""
        return tuple(leaf.name for leaf in self.leaves if isinstance(leaf, Ref))

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """The values it reads, each once, in order of first use."""
        return tuple(dict.fromkeys(self.reads))

    def states(self, modules: Mapping[str, ModuleSpec]) -> tuple[str, ...]:
        """The canonical names of the parameters, buffers and constants it reads or writes."""
        call = self.call
        names = [leaf.name for leaf in self.leaves if isinstance(leaf, StateRef)]
        if isinstance(call, ModuleCall):
            names.extend(modules[call.module].state.values())
        return tuple(dict.fromkeys(names))


def reading(op: Op, names: Mapping[str, str]) -> Op:
    """The op, reading other values instead of some; itself where it reads none of them.

    Args:
        names: the values that are read, by those that were.
    """
    if names.keys().isdisjoint(op.inputs):
        return op
    call = with_arguments(op.call, lambda argument: renamed(argument, names))
    return dataclasses.replace(op, call=call)


def in_one_mode(op: Op, *, training: bool) -> Op:
    """The op with the arguments that it has in one mode."""
    if not op.has_choices:
        return op
    return dataclasses.replace(
        op, call=with_arguments(op.call, lambda item: in_mode(item, training=training))
    )


def without_unread(
    ops: Sequence[Op], needed: Iterable[str], droppable: Callable[[Op], bool]
) -> tuple[Op, ...]:
    """The ops without those droppable ones of which no result is read, by them or afterwards."""
    read = set(needed)
    kept: list[Op] = []
    for op in reversed(ops):
        if read.isdisjoint(op.outputs) and droppable(op):
            continue
        kept.append(op)
        read.update(op.inputs)
    return tuple(reversed(kept))


def autocasts(op: Op) -> bool:
    """Whether the model itself decides on autocast around an op, whatever it runs in."""
    return any(isinstance(region.context, Autocast) for region in op.regions)


def records_gradients(op: Op) -> bool:
    """Whether the model lets autograd record an op where it records at all."""
    contexts = (region.context for region in reversed(op.regions))
    return next((item.enabled for item in contexts if isinstance(item, NoGrad)), True)


def regions_kept(entered: Iterable[Region], regions: Sequence[Region]) -> int:
    """How many of the regions that are entered, the outermost first, go on where others are due.

    Two without gradients, one after the other, may be one; leaving and entering autocast has it
    cast weights anew.
    """
    pairs = zip(entered, regions, strict=False)
    same = (one == due or one.context == due.context == NoGrad() for one, due in pairs)
    return sum(1 for _ in itertools.takewhile(bool, same))


def common_regions(ops: Iterable[Op]) -> tuple[Region, ...]:
    """The regions that all of some ops run in, the outermost first."""
    first, *others = (op.regions for op in ops)
    together = itertools.takewhile(
        lambda level: len({*level}) == 1, zip(first, *others, strict=False)
    )
    return tuple(level[0] for level in together)
