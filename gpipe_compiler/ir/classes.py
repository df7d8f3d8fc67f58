"""Finds the blocks of a model: the modules that can be written as one, and equal ones joined."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from torch import nn

from gpipe_compiler.ir.arguments import Argument, Ref
from gpipe_compiler.ir.blocks import BlockCall, BlockClass, Body, Parameter, Part, calls_in, nest
from gpipe_compiler.ir.contents import Contents
from gpipe_compiler.ir.forms import Constant, Former, Slot, states_read
from gpipe_compiler.ir.graph import ValueKind
from gpipe_compiler.ir.ops import Mode, ModuleCall, Op, ops_within

MOST_PARAMETERS = 8
"""Calls whose numbers differ in more ways are taken to be those of different blocks."""

SMALL = 2
"""A module without state that runs so few ops is no block: they are as short as a call of it."""


@dataclass(frozen=True, eq=False)
class Blocks:
    """The blocks of some methods.

    Attributes:
        bodies: of each method, its ops and calls at the outermost level.
        classes: inner blocks first.
        of_path: the block that each module is an instance of.
    """

    bodies: tuple[tuple[Part, ...], ...]
    classes: tuple[BlockClass, ...]
    of_path: Mapping[str, BlockClass]


def find_blocks(
    contents: Contents,
    bodies: Sequence[Body],
    templates: Mapping[str, Argument],
    modules: Iterable[str],
    split: Callable[[str], bool],
) -> Blocks:
    """The blocks of some methods of one stage.

    Args:
        contents: what the stage holds.
        templates: what the values are that the stage reads off shapes.
        modules: the paths of those that may be blocks.
        split: whether a module has ops that are not among these.
    """
    blocks = set(modules)
    while True:
        nested = tuple(nest(body, blocks.__contains__) for body in bodies)
        calls = [call for parts in nested for call in calls_in(parts)]
        ops = [op for body in bodies for op in body.ops]
        check = _Check(contents, ops, templates, split)
        bad = {call.path for call in calls if not check.can_be(call)}
        if not bad:
            grouping = _Grouping(contents, templates, calls)
            grouping.run()
            bad = grouping.unequal
            if not bad:
                return Blocks(nested, tuple(grouping.classes), grouping.of_path)
        blocks -= bad


class _Check:
    """Whether calls can be those of a block."""

    def __init__(
        self,
        contents: Contents,
        ops: Sequence[Op],
        templates: Collection[str],
        split: Callable[[str], bool],
    ) -> None:
        self._contents = contents
        self._templates = templates
        self._graph = contents.graph
        self._mode = {value: op.mode for op in ops for value in op.outputs}
        self._modules = {module for op in ops for module in _modules_called(op)}
        self._split = split

    def can_be(self, call: BlockCall) -> bool:
        """Whether a call can be one of a block, and is worth it."""
        own = [part for part in call.parts if not isinstance(part, BlockCall)]
        if not (self._is_closed(call, own) and self._fits_modes(call)):
            return False
        if call.path in self._modules:
            return False  # torch's own, called as such in the other mode
        if is_chain(self._contents, call, self._templates):
            return True
        if self._graph.module_classes[call.path] == nn.Sequential.__name__:
            return False
        stateful = any(self._is_local(name, call.path) for op in own for name in states_read(op))
        inner = len(own) < len(call.parts)
        layer = call.path.rpartition(".")[2].isdecimal()
        if inner and self._split(call.path) and not layer:
            return False  # its parts are read better without it; those of a layer go together
        if len(call.parts) == 1 and not stateful:
            return inner and layer and self._split(call.path)
        calls = inner or any(True for op in own for _ in _modules_called(op))
        return len(call.parts) > SMALL or stateful or calls

    def _is_local(self, state: str, root: str) -> bool:
        return self._contents.places[state].startswith(f"{root}.")

    def _is_closed(self, call: BlockCall, own: Iterable[Op]) -> bool:
        """Whether it is given a tensor, and calls no modules but its own."""
        called = (module for op in own for module in _modules_called(op))
        values = self._graph.values
        tensors = (v for v in call.inputs if v in values and values[v].kind is ValueKind.TENSOR)
        return any(True for _ in tensors) and all(m.startswith(f"{call.path}.") for m in called)

    def _fits_modes(self, call: BlockCall) -> bool:
        """Whether what goes in and comes out is there whenever the call runs."""
        mode = call.mode
        around = (self._mode.get(value, Mode.ALWAYS) for value in call.inputs)
        made = (self._mode[value] for value in call.outputs)
        return {*around} <= {Mode.ALWAYS, mode} and {*made} <= {mode}


def _modules_called(op: Op) -> Iterator[str]:
    """The modules of torch that an op calls."""
    calls = (inner.call for inner in ops_within(op))
    return (call.module for call in calls if isinstance(call, ModuleCall))


@dataclass
class _Grouping:
    """Joins equal calls, inner ones first.

    Attributes:
        unequal: the modules of which one call is not like another.
    """

    contents: Contents
    templates: Mapping[str, Argument]
    calls: Sequence[BlockCall]
    classes: list[BlockClass] = field(default_factory=list)
    of_path: dict[str, BlockClass] = field(default_factory=dict)
    unequal: set[str] = field(default_factory=set)

    def run(self) -> None:
        """Finds the classes, up to the first modules that are unequal."""
        for calls in self._by_height():
            formed = [(call, *self._form(call)) for call in calls]
            groups: dict[Hashable, list[tuple[BlockCall, list[Constant]]]] = {}
            keys: dict[str, Hashable] = {}
            for call, form, constants in formed:
                numbers = tuple(constant.form for constant in constants)
                if keys.setdefault(call.path, (form, numbers)) != (form, numbers):
                    self.unequal.add(call.path)
                groups.setdefault(form, []).append((call, constants))
            if self.unequal:
                return
            for members in groups.values():
                self._add(members)

    def _by_height(self) -> Iterator[list[BlockCall]]:
        """The calls without inner ones, then those that hold only such, and so on."""
        heights: dict[int, int] = {}
        levels: list[list[BlockCall]] = []
        of_path: dict[str, int] = {}
        for call in self.calls:
            inner = [heights[id(part)] for part in call.parts if isinstance(part, BlockCall)]
            height = heights[id(call)] = max(inner, default=-1) + 1
            if of_path.setdefault(call.path, height) != height:
                self.unequal.add(call.path)
            if height == len(levels):
                levels.append([])
            levels[height].append(call)
        yield from levels if not self.unequal else ()

    def _add(self, members: list[tuple[BlockCall, list[Constant]]]) -> None:
        """Adds the block that calls of one form are calls of, or several where numbers differ
        in too many ways."""
        parameters = _parameters(members)
        if len(parameters) <= MOST_PARAMETERS:
            self._new(members, parameters)
            return
        exact: dict[Hashable, list[tuple[BlockCall, list[Constant]]]] = {}
        for member in members:
            exact.setdefault(tuple(item.form for item in member[1]), []).append(member)
        for equal in exact.values():
            self._new(equal, ())

    def _new(
        self,
        members: Sequence[tuple[BlockCall, list[Constant]]],
        parameters: tuple[Parameter, ...],
    ) -> None:
        calls = tuple(call for call, _ in members)
        made = BlockClass(self.contents.graph.module_classes[calls[0].path], calls, parameters)
        self.classes.append(made)
        self.of_path.update(dict.fromkeys(made.paths, made))

    def _form(self, call: BlockCall) -> tuple[Hashable, list[Constant]]:
        """What a call is but for names and numbers, and the numbers."""
        former = Former(call.path, self.contents.places)
        inner = dict.fromkeys(part.path for part in call.parts if isinstance(part, BlockCall))
        held, constants = self.contents.form(call.path, inner)
        for path in inner:
            constants.extend(
                Constant(Slot(path, number), parameter.values[path], parameter.name)
                for number, parameter in enumerate(self.of_path[path].parameters)
            )
        given = tuple((former.number(value), self._given(value)) for value in call.inputs)
        parts: list[Hashable] = []
        for part in call.parts:
            if isinstance(part, BlockCall):
                wires = [tuple(map(former.number, w)) for w in (part.inputs, part.outputs)]
                outer = tuple(map(former.state, outer_states(self.contents, part)))
                block = id(self.of_path[part.path])
                parts.append(("call", block, former.local(part.path), *wires, outer))
            else:
                parts.append(former.op(part))
        returned = tuple(map(former.number, call.outputs))
        user = self.contents.graph.module_classes[call.path]
        form = (user, held, given, tuple(parts), returned)
        return form, [*constants, *former.constants]

    def _given(self, name: str) -> Hashable:
        """What is known of a value that a call is given."""
        value = self.contents.graph.values.get(name)
        if value is None:
            return None
        template = repr(self.templates[name]) if name in self.templates else ""
        size = self.contents.graph.batch_size
        dim = value.batch_dim
        batch = None if dim is None else (dim, value.splittable, value.shape[dim] / size)
        return (value.kind, template, batch)


def outer_states(contents: Contents, call: BlockCall) -> list[str]:
    """The states that a call reads by itself and its module does not hold, in order of use."""
    prefix = f"{call.path}."
    read = dict.fromkeys(name for op in call.ops for name in states_read(op))
    return [name for name in read if not contents.places[name].startswith(prefix)]


def is_chain(contents: Contents, call: BlockCall, templates: Collection[str]) -> bool:
    """Whether a call is that of an nn.Sequential.

    It calls modules 0, 1, ..., each of what the one before it made, and holds nothing else.

    Args:
        templates: the values that are read off shapes, and so not passed.
    """
    held = {
        name[len(call.path) + 1 :].split(".")[0] for name in chain(*contents.own(call.path, ()))
    }
    if held != set(map(str, range(len(call.parts)))):
        return False
    carried: str | None = None
    for number, part in enumerate(call.parts):
        if part.mode is not call.mode or len(part.outputs) != 1:
            return False
        match part:
            case Op(call=ModuleCall(path, (Ref(name=given),), kwargs)) if not kwargs:
                pass
            case BlockCall(path=path) if not outer_states(contents, part):
                passed = [value for value in part.inputs if value not in templates]
                if len(passed) != 1:
                    return False
                given = passed[0]
            case _:
                return False
        if path != f"{call.path}.{number}" or carried not in (None, given):
            return False
        carried = part.outputs[0]
    return call.outputs == (carried,)


def _parameters(
    members: Sequence[tuple[BlockCall, list[Constant]]],
) -> tuple[Parameter, ...]:
    """The numbers that differ between calls of one form; equal columns are one parameter."""
    slots: dict[Hashable, list[int]] = {}
    columns = [
        tuple(constant.form for constant in column)
        for column in zip(*(c for _, c in members), strict=True)
    ]
    for index, column in enumerate(columns):
        if len(set(column)) > 1:
            slots.setdefault(column, []).append(index)
    first = members[0][1]
    return tuple(
        Parameter(
            first[places[0]].name,
            tuple(first[place].slot for place in places),
            {call.path: constants[places[0]].value for call, constants in members},
        )
        for places in slots.values()
    )
