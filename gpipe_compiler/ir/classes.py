"""Finds the blocks of a model: the modules that can be written as one, and equal ones joined."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

import torch
from torch import nn

from gpipe_compiler.ir.arguments import Argument
from gpipe_compiler.ir.blocks import (
    BlockCall,
    BlockClass,
    Body,
    Parameter,
    Part,
    ShapeReads,
    Turn,
    calls_in,
    is_chain,
    nest,
    outer_states,
    regions_around,
)
from gpipe_compiler.ir.call_forms import CallForm, CallFormer, known_of_inputs, repeated_inputs
from gpipe_compiler.ir.contents import Contents, class_of_torch
from gpipe_compiler.ir.forms import Constant, ConstantSlot, states_read
from gpipe_compiler.ir.ops import Mode, ModuleCall, Op
from gpipe_compiler.ir.values import ValueKind

MOST_PARAMETERS = 8
"""Calls whose numbers differ in more ways are taken to be those of different blocks."""


SMALL = 2
"""A module without state that runs so few ops is no block: they are as short as a call of it."""


@dataclass(frozen=True, eq=False)
class Methods:
    """The methods of one stage.

    Attributes:
        modules: the paths of those that may be blocks, calls of functions included.
        parted: the calls of modules that have ops which are not among these.
    """

    contents: Contents
    bodies: Sequence[Body]
    modules: Collection[str]
    parted: Collection[Turn] = frozenset()
    stage: int = 0
    again: Collection[str] = ()

    def nest(
        self, apart: Collection[Turn], given: Mapping[Turn, tuple[str, ...]], shapes: ShapeReads
    ) -> tuple[tuple[Part, ...], ...]:
        """The ops and calls of each, where modules are blocks but for some calls."""
        is_block = self.modules.__contains__
        return tuple(
            nest(body, is_block, self.stage, self.again, apart, given, shapes=shapes)
            for body in self.bodies
        )


@dataclass(frozen=True, eq=False)
class MethodBlocks:
    """The blocks of the methods of a stage.

    Attributes:
        bodies: of each method, its ops and calls at the outermost level.
        classes: inner blocks first; of all stages for which they were looked for together.
        of_path: the block that each module is an instance of.
    """

    bodies: tuple[tuple[Part, ...], ...]
    classes: tuple[BlockClass, ...]
    of_path: Mapping[str, BlockClass]


def find_blocks(stages: Sequence[Methods], shapes: ShapeReads) -> tuple[MethodBlocks, ...]:
    """The blocks of some stages, which equal calls in different ones have in common."""
    apart: list[set[Turn]] = [set() for _ in stages]
    given: dict[int, dict[Turn, tuple[str, ...]]] = {}
    while True:
        pairs = zip(stages, apart, strict=True)
        nested = [m.nest(turns, given.get(m.stage, {}), shapes) for m, turns in pairs]
        calls = [[call for parts in bodies for call in calls_in(parts)] for bodies in nested]
        bad = []
        for methods, found in zip(stages, calls, strict=True):
            check = _Check(methods, shapes)
            bad.append({(c.path, c.turn) for c in found if not check.can_be(c)})
        if not any(bad):
            contents = {methods.stage: methods.contents for methods in stages}
            parted = {methods.stage: methods.parted for methods in stages}
            grouping = _Grouping(contents, shapes.templates, list(chain(*calls)), parted)
            if grouping.run():
                given = grouping.given
                continue
            bad = [grouping.unequal.get(methods.stage, set()) for methods in stages]
        if not any(bad):
            classes = tuple(grouping.classes)
            of_paths = [
                {call.path: grouping.of_call[call.stage, call.path] for call in found}
                for found in calls
            ]
            return tuple(
                MethodBlocks(bodies, classes, of_path)
                for bodies, of_path in zip(nested, of_paths, strict=True)
            )
        for turns, worse in zip(apart, bad, strict=True):
            turns.update(worse)


class _Check:
    """Whether calls can be those of a block."""

    def __init__(self, methods: Methods, shapes: ShapeReads) -> None:
        ops = [op for body in methods.bodies for op in body.ops]
        self._contents = methods.contents
        self._shapes = shapes
        self._graph = methods.contents.graph
        self._mode = {value: op.mode for op in ops for value in op.outputs}
        self._modules = frozenset(methods.contents.modules)
        self._parted = methods.parted

    def can_be(self, call: BlockCall) -> bool:
        """Whether a call can be one of a block, and is worth it."""
        own = [part for part in call.parts if not isinstance(part, BlockCall)]
        if call.path in self._contents.functions:
            return self._is_function(call)
        if not (self._is_closed(call, own) and self._fits_modes(call)):
            return False
        if call.path in self._modules:
            return False  # torch's own: it is constructed as such, and has no other class
        if is_chain(self._contents, call, self._shapes):
            return True
        if class_of_torch(self._graph, call.path) is nn.Sequential:
            return False
        stateful = any(self._is_local(name, call.path) for op in own for name in states_read(op))
        inner = len(own) < len(call.parts)
        around, _, last = call.path.rpartition(".")
        layer = last.isdecimal()
        parted = (call.path, call.turn) in self._parted
        if inner and parted and not layer:
            return False  # its parts are read better without it; those of a layer go together
        if layer and not parted and class_of_torch(self._graph, around) is nn.Sequential:
            return True  # the nn.Sequential calls it like any other
        calls = inner or any(isinstance(op.call, ModuleCall) for op in own)
        if len(call.parts) == 1 and not stateful:
            return calls and (layer or not parted)
        return len(call.parts) > SMALL or stateful or calls

    def _is_function(self, call: BlockCall) -> bool:
        """Whether it makes tensors of what it is given, in several ops, alike in both modes or in
        one alone."""
        paths = {part.path for part in call.parts if isinstance(part, BlockCall)}
        values = self._graph.values
        return (
            len(call.parts) > SMALL
            and bool(call.outputs)
            and paths <= self._contents.functions.keys()
            and not any(isinstance(op.call, ModuleCall) for op in call.ops)
            and all(op.mode is call.mode and not op.has_choices for op in call.ops)
            and self._fits_modes(call)
            and all(v in values and values[v].kind is ValueKind.TENSOR for v in call.outputs)
        )

    def _is_local(self, state: str, root: str) -> bool:
        return self._contents.places[state].startswith(f"{root}.")

    def _is_closed(self, call: BlockCall, own: Iterable[Op]) -> bool:
        """Whether it is given a tensor, or needs none, and calls no modules but its own."""
        called = [op.call.module for op in own if isinstance(op.call, ModuleCall)]
        values = self._graph.values
        tensors = (v for v in call.inputs if v in values and values[v].kind is ValueKind.TENSOR)
        if not any(True for _ in tensors) and (call.inputs or any(map(_needs_device, call.ops))):
            return False
        return all(module.startswith(f"{call.path}.") for module in called)

    def _fits_modes(self, call: BlockCall) -> bool:
        """Whether what goes in and comes out is there whenever the call runs."""
        mode = call.mode
        around = (self._mode.get(value, Mode.ALWAYS) for value in call.inputs)
        made = (self._mode[value] for value in call.outputs)
        return {*around} <= {Mode.ALWAYS, mode} and {*made} <= {mode}


def _needs_device(op: Op) -> bool:
    """Whether an op makes a tensor of numbers alone, or names a device."""
    reads = any(True for _ in (*op.inputs, *states_read(op)))
    return not reads or any(isinstance(leaf, torch.device) for leaf in op.leaves)


@dataclass
class _Grouping:
    """Joins equal calls, inner ones first.

    Attributes:
        of_call: the blocks of the calls, by their stages and paths.
        unequal: by stage, the calls of modules of which one call is not like another: those that
            are parted, where others are not.
        given: by stage, what calls are given that are given one value several times.
    """

    contents: Mapping[int, Contents]
    templates: Mapping[str, Argument]
    calls: Sequence[BlockCall]
    parted: Mapping[int, Collection[Turn]]
    classes: list[BlockClass] = field(default_factory=list)
    of_call: dict[tuple[int, str], BlockClass] = field(default_factory=dict)
    unequal: dict[int, set[Turn]] = field(default_factory=dict)
    given: dict[int, dict[Turn, tuple[str, ...]]] = field(default_factory=dict)

    def _differs(self, call: BlockCall) -> None:
        parted = self.parted[call.stage]
        turns = {c.turn for c in self.calls if (c.stage, c.path) == (call.stage, call.path)}
        every = {(call.path, turn) for turn in turns}
        some = every.intersection(parted)
        self.unequal.setdefault(call.stage, set()).update(some if some and some < every else every)

    def run(self) -> bool:
        """Finds the classes, up to the first modules that are unequal, or calls that are to be
        given other inputs than they are; whether there are such calls."""
        for calls in self._by_height():
            joined = self._join(calls)
            keys: dict[tuple[int, str], Hashable] = {}
            for number, members in enumerate(joined):
                for form in members:
                    own = number, tuple(constant.form for constant in form.constants)
                    if keys.setdefault((form.call.stage, form.call.path), own) != own:
                        self._differs(form.call)
            if self.unequal:
                return False
            own_inputs = (self.given.get(c.stage, {}).get((c.path, c.turn)) for c in calls)
            if any(
                call.inputs != (inputs or tuple(dict.fromkeys(call.inputs)))
                for call, inputs in zip(calls, own_inputs, strict=True)
            ):
                return True
            for members in joined:
                self._add(members)
        return False

    def _join(self, calls: Sequence[BlockCall]) -> list[list[CallForm]]:
        """The calls of each block, the one that reads the most values first."""
        groups: dict[Hashable, list[CallForm]] = {}
        for call in calls:
            form = self._form(call)
            groups.setdefault(form.key, []).append(form)
        found: dict[int, list[CallForm]] = {}
        for number, members in sorted(
            enumerate(groups.values()), key=lambda pair: -len(pair[1][0].given)
        ):
            general = next((own for own in found.values() if self._are_of(members, own)), None)
            if general is None:
                found[number] = members
            else:
                general.extend(members)
        return [found[number] for number in sorted(found)]

    def _are_of(self, members: Sequence[CallForm], general: Sequence[CallForm]) -> bool:
        """Whether calls are those of others' block; what they are given as such is noted."""
        if len(members[0].given) == len(general[0].given):
            return False
        told = {}
        for form in members:
            contents, call = self.contents[form.call.stage], form.call
            around = call.path.rpartition(".")[0]
            if class_of_torch(contents.graph, around) is nn.Sequential:
                return False  # which calls its modules with one value
            inputs = repeated_inputs(contents.graph, self.templates, form, general[0])
            turn = call.stage, call.path, call.turn
            if inputs is None or self._times[turn] > 1:
                return False
            told[turn] = inputs
        if len(_parameters([*general, *members])) > MOST_PARAMETERS:
            return False
        for (stage, path, number), inputs in told.items():
            self.given.setdefault(stage, {})[path, number] = inputs
        return True

    @cached_property
    def _times(self) -> Counter[tuple[int, str, int]]:
        """How often each call is found: twice where other ops come in between."""
        return Counter((call.stage, call.path, call.turn) for call in self.calls)

    def _by_height(self) -> Iterator[list[BlockCall]]:
        """The calls without inner ones, then those that hold only such, and so on."""
        heights: dict[int, int] = {}
        levels: list[list[BlockCall]] = []
        known: dict[tuple[int, str], int] = {}
        for call in self.calls:
            inner = [heights[id(part)] for part in call.parts if isinstance(part, BlockCall)]
            height = heights[id(call)] = max(inner, default=-1) + 1
            if known.setdefault((call.stage, call.path), height) != height:
                self._differs(call)
            if height == len(levels):
                levels.append([])
            levels[height].append(call)
        yield from levels if not self.unequal else ()

    def _add(self, members: Sequence[CallForm]) -> None:
        """Adds the block that calls of one form are calls of, or several where numbers differ
        in too many ways."""
        parameters = _parameters(members)
        if len(parameters) <= MOST_PARAMETERS:
            self._new(members, parameters)
            return
        exact: dict[Hashable, list[CallForm]] = {}
        for member in members:
            exact.setdefault(tuple(item.form for item in member.constants), []).append(member)
        for equal in exact.values():
            self._new(equal, ())

    def _new(self, members: Sequence[CallForm], parameters: tuple[Parameter, ...]) -> None:
        calls = tuple(form.call for form in members)
        made = BlockClass(self._user(calls[0]), calls, parameters)
        self.classes.append(made)
        self.of_call.update(((call.stage, call.path), made) for call in calls)

    def _user(self, call: BlockCall) -> str:
        return self.contents[call.stage].user(call.path)

    def _form(self, call: BlockCall) -> CallForm:
        contents = self.contents[call.stage]
        former = CallFormer(call, contents.places, len(regions_around(call)))
        inner = dict.fromkeys(part.path for part in call.parts if isinstance(part, BlockCall))
        held, constants = contents.form(call.path, inner)
        for path in inner:
            constants.extend(
                Constant(
                    ConstantSlot(path, number), parameter.values[call.stage, path], parameter.name
                )
                for number, parameter in enumerate(self.of_call[call.stage, path].parameters)
            )
        parts: list[Hashable] = []
        for part in call.parts:
            if isinstance(part, BlockCall):
                wires = [tuple(map(former.number, w)) for w in (part.inputs, part.outputs)]
                outer = tuple(map(former.state, outer_states(contents, part)))
                block = id(self.of_call[part.stage, part.path])
                local = None if part.path in contents.functions else former.local(part.path)
                around = former.regions(regions_around(part))
                parts.append(("call", block, local, *wires, outer, part.again, around))
            else:
                parts.append(former.op(part))
        returned = tuple(map(former.number, call.outputs))
        inside = (self._user(call), held, tuple(parts), returned)
        given = known_of_inputs(contents.graph, self.templates, call)
        numbers = (*constants, *former.constants)
        return CallForm(call, inside, tuple(former.read), given, numbers)


def _parameters(members: Sequence[CallForm]) -> tuple[Parameter, ...]:
    """The numbers that differ between calls of one form; equal columns are one parameter."""
    slots: dict[Hashable, list[int]] = {}
    columns = [
        tuple(constant.form for constant in column)
        for column in zip(*(form.constants for form in members), strict=True)
    ]
    for index, column in enumerate(columns):
        if len(set(column)) > 1:
            slots.setdefault(column, []).append(index)
    first = members[0].constants
    return tuple(
        Parameter(
            first[places[0]].name,
            tuple(first[place].slot for place in places),
            {
                (form.call.stage, form.call.path): form.constants[places[0]].value
                for form in members
            },
        )
        for places in slots.values()
    )
