"""The modules of a model as blocks: which ops a call of a module runs, and which modules are equal.

A user's model is a tree of modules, and the ops of a graph know whose forward makes them, and in
which call. Ops in a row of one call are a call here, with the calls of its own modules inside.
Calls are equal that are the same but for the names of values and of state, and but for the numbers
in them: they are calls of one block, of which the modules are instances, and the numbers that
differ its parameters.

A module can be a block where all its calls are equal, those aside that are cut and others not.
Calls that are none of a block are open: their ops count as those of the module around it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, takewhile
from types import MappingProxyType

from gpipe_compiler.ir.arguments import Argument, Ref
from gpipe_compiler.ir.contents import Contents, is_under, prefixes
from gpipe_compiler.ir.forms import ConstantSlot, states_read
from gpipe_compiler.ir.graph import Graph
from gpipe_compiler.ir.ops import MethodCall, Mode, ModuleCall, Op, Region, common_regions
from gpipe_compiler.ir.sizes import is_told
from gpipe_compiler.runtime.sizes import Dim


@dataclass(frozen=True, eq=False, slots=True)
class BlockCall:
    """A call of a module: consecutive ops of its forward, those of its own modules as calls.

    Attributes:
        inputs: the values it is given, in the order in which it reads them; one several times
            where other calls of its block are given several.
        outputs: the values it makes that are read after it, in the order in which it makes them.
        stage: the stage whose method makes the call.
        again: whether it runs a second time in the backward.
        turn: how many calls of the module come before it in the model.
    """

    path: str
    parts: tuple[Part, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    stage: int = 0
    again: bool = False
    turn: int = 0

    @property
    def ops(self) -> Iterator[Op]:
        """All ops, those of inner calls included."""
        return ops_of(self.parts)

    @property
    def mode(self) -> Mode:
        """The one mode that it runs in."""
        modes = {op.mode for op in self.ops}
        return modes.pop() if len(modes) == 1 else Mode.ALWAYS


Part = Op | BlockCall

Turn = tuple[str, int]
"""A call of a module: its path, and how many calls of it came before."""


NONE_GIVEN: Mapping[Turn, tuple[str, ...]] = MappingProxyType({})


def regions_around(part: Part) -> tuple[Region, ...]:
    """The regions that all of a part runs in and that are entered outside of it."""
    if isinstance(part, Op):
        return part.regions
    around = common_regions(part.ops)
    return tuple(takewhile(lambda region: not is_under(f"{region.module}.", part.path), around))


def ops_of(parts: Iterable[Part]) -> Iterator[Op]:
    """The ops of parts of a call, those of inner calls included."""
    for part in parts:
        if isinstance(part, BlockCall):
            yield from part.ops
        else:
            yield part


def turns_around(ops: Iterable[Op]) -> Iterator[Turn]:
    """The calls of modules around each op, outer ones first."""
    return ((path, op.turn(path)) for op in ops for path in prefixes(op.module))


def calls_in(parts: Iterable[Part]) -> Iterator[BlockCall]:
    """All calls in parts of a call, inner ones first."""
    for part in parts:
        if isinstance(part, BlockCall):
            yield from calls_in(part.parts)
            yield part


@dataclass(frozen=True, slots=True)
class Parameter:
    """A number of a block that is not the same in all its instances.

    Attributes:
        slots: where it stands in the first call.
        values: by the stages and paths of the instances.
    """

    name: str
    slots: tuple[ConstantSlot, ...]
    values: Mapping[tuple[int, str], object]


@dataclass(frozen=True, eq=False)
class BlockClass:
    """A block: what equal calls have in common.

    Attributes:
        user: the user's name for the class of the modules.
        calls: in order; the first one stands for all.
    """

    user: str
    calls: tuple[BlockCall, ...]
    parameters: tuple[Parameter, ...]

    @property
    def first(self) -> BlockCall:
        """The call that stands for all."""
        return self.calls[0]

    @property
    def paths(self) -> tuple[str, ...]:
        """Those of the instances."""
        return tuple(dict.fromkeys(call.path for call in self.calls))

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages that call it."""
        return tuple(dict.fromkeys(call.stage for call in self.calls))


@dataclass(frozen=True, slots=True)
class Body:
    """Ops that run one after another in a method, and the values of theirs that it returns."""

    ops: tuple[Op, ...]
    returns: tuple[str, ...]


@dataclass(frozen=True)
class ShapeReads:
    """What calls read off the shapes of what they are given, and so are not given.

    Attributes:
        templates: what values are that follow from shapes.
    """

    graph: Graph
    templates: Mapping[str, Argument]

    def is_size(self, op: Op) -> bool:
        """Whether an op asks a tensor for a size."""
        match op:
            case Op(call=MethodCall("size", (Ref(name), int())), result=str(size)):
                return bool(self.read_off([size], self.graph.told([name])))
            case _:
                return False

    def passed(self, call: BlockCall) -> list[str]:
        """The inputs of a call that it cannot read off the shapes of the others."""
        read = {value for op in call.ops for value in op.inputs}
        told = self.graph.told(read.intersection(call.inputs))
        off = {*self.read_off(call.inputs, told)}
        return [value for value in call.inputs if value not in off]

    def read_off(self, values: Iterable[str], told: Collection[Dim]) -> list[str]:
        """Those of some values that follow from sizes which shapes tell."""
        known = self.templates
        return [value for value in values if value in known and is_told(known[value], told)]


def nest(
    body: Body,
    is_block: Callable[[str], bool],
    stage: int = 0,
    again: Collection[str] = (),
    apart: Collection[Turn] = (),
    given: Mapping[Turn, tuple[str, ...]] = NONE_GIVEN,
    *,
    shapes: ShapeReads,
) -> tuple[Part, ...]:
    """The ops of a method and its calls of modules, at the outermost level.

    A size that only one call reads, of a tensor that it is given, is no part of the call but an
    input of it alone: calls are equal that are given such sizes, and that ask for them.

    Args:
        is_block: whether the module at a path is a block; ops of one that is not are taken for
            those of the module around it.
        again: the paths of modules whose calls run a second time in the backward.
        apart: calls of such modules that are none of the block, whose ops count likewise.
        given: what calls are given that are given one value several times.
    """
    around = {path: [*filter(is_block, prefixes(path))] for path in {o.module for o in body.ops}}
    turns = ([(path, op.turn(path)) for path in around[op.module]] for op in body.ops)
    chains = [[call for call in chain if call not in apart] for chain in turns]
    last: dict[str, float] = {v: i for i, op in enumerate(body.ops) for v in op.inputs}
    last.update(dict.fromkeys(body.returns, math.inf))
    asked = _sizes_of_calls(body, chains, last, shapes)

    def parts(places: Sequence[int], depth: int) -> tuple[Part, ...]:
        """The parts of a block at this depth."""
        found: list[Part] = []
        for call, group in groupby(places, lambda place: next(iter(chains[place][depth:]), None)):
            inside = tuple(group)
            if call is not None:
                found.append(called(call, inside, depth + 1))
            else:
                ops = (body.ops[place] for place in inside)
                found.extend(op for op in ops if asked.isdisjoint(op.outputs))
        return tuple(found)

    def called(call: Turn, places: Sequence[int], depth: int) -> BlockCall:
        path, turn = call
        ops = [op for p in places if asked.isdisjoint((op := body.ops[p]).outputs)]
        inner = parts(places, depth)
        made = dict.fromkeys(value for op in ops for value in op.outputs)
        read = dict.fromkeys(
            value
            for part in inner
            for value in (shapes.passed(part) if isinstance(part, BlockCall) else part.inputs)
        )
        own = tuple(value for value in read if value not in made)
        inputs = given.get(call, own)
        inputs = inputs if {*inputs} == {*own} else own
        outputs = tuple(value for value in made if last.get(value, -1) > places[-1])
        return BlockCall(path, inner, inputs, outputs, stage, path in again, turn)

    return parts(range(len(body.ops)), 0)


def _sizes_of_calls(
    body: Body, chains: Sequence[Sequence[Turn]], last: Mapping[str, float], shapes: ShapeReads
) -> set[str]:
    """Sizes of what a call of a module is given that nobody reads outside of it."""
    spans: dict[tuple[Turn, ...], list[Op]] = {}
    ends: dict[tuple[Turn, ...], int] = {}
    for place, (op, around) in enumerate(zip(body.ops, chains, strict=True)):
        for depth in range(1, len(around) + 1):
            spans.setdefault(tuple(around[:depth]), []).append(op)
            ends[tuple(around[:depth])] = place
    found: set[str] = set()
    for op, around in zip(body.ops, chains, strict=True):
        if around and "()" not in around[-1][0] and shapes.is_size(op):
            tensor, size, call = op.inputs[0], op.outputs[0], tuple(around)
            given = not any(tensor in other.outputs for other in spans[call])
            read = any(tensor in o.inputs and not shapes.is_size(o) for o in spans[call])
            if given and read and last.get(size, -1) <= ends[call]:
                found.add(size)
    return found


def outer_states(contents: Contents, call: BlockCall) -> list[str]:
    """The states that a call reads by itself and its module does not hold, in order of use."""
    prefix = f"{call.path}."
    read = dict.fromkeys(name for op in call.ops for name in states_read(op))
    return [name for name in read if not contents.places[name].startswith(prefix)]


def is_chain(contents: Contents, call: BlockCall, shapes: ShapeReads) -> bool:
    """Whether a call is that of an nn.Sequential.

    It calls modules 0, 1, ..., each of what the one before it made, and holds nothing else.
    """
    held = {
        name[len(call.path) + 1 :].split(".")[0] for name in chain(*contents.own(call.path, ()))
    }
    if not held <= set(map(str, range(len(call.parts)))):
        return False
    carried: str | None = None
    around = regions_around(call)
    for number, part in enumerate(call.parts):
        if part.mode is not call.mode or len(part.outputs) != 1:
            return False
        if regions_around(part) != around:
            return False
        if isinstance(part, BlockCall) and part.again:
            return False  # nn.Sequential calls its modules without a checkpoint
        match part:
            case Op(call=ModuleCall(path, (Ref(name=given),), kwargs)) if not kwargs:
                pass
            case BlockCall(path=path) if not outer_states(contents, part):
                passed = shapes.passed(part)
                if len(passed) != 1:
                    return False
                given = passed[0]
            case _:
                return False
        if path != f"{call.path}.{number}" or carried not in (None, given):
            return False
        carried = part.outputs[0]
    return call.outputs == (carried,)
