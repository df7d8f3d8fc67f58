"""Writes the constructors of a stage and of its classes, and the classes as text."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from torch import nn

from gpipe_compiler.codegen.constants import quote, write_literal
from gpipe_compiler.codegen.constructors import (
    StageState,
    construct_module,
    dict_of_modules,
    frozen_parameters,
    memory_for,
    tensor_of_values,
)
from gpipe_compiler.codegen.imports import Imports
from gpipe_compiler.codegen.layout import Expression, call, comprehension, lay_out, name
from gpipe_compiler.codegen.module_tree import ModuleNode
from gpipe_compiler.codegen.names import Identifiers, class_name
from gpipe_compiler.errors import EmitError
from gpipe_compiler.frontend.own_statements import UnwritableError
from gpipe_compiler.ir import Graph, ModuleSpec, State, StateKind
from gpipe_compiler.ir.blocks import BlockClass, Parameter
from gpipe_compiler.ir.contents import LITERAL_ELEMENTS, class_of_torch, is_under
from gpipe_compiler.ir.forms import ConstantSlot

_BY_POSITION = ("in_", "out_", "num_", "normalized_")
"""How parameters begin that people pass by position."""


@dataclass(frozen=True, eq=False)
class WrittenBlock:
    """A block as a class.

    Attributes:
        passed: the inputs of a call that are passed, by their places.
        parameters: what its constructor is given: names, and the parameters of the block.
        inline: whether it is an nn.Sequential, constructed where it stands.
        shared: whether it stands in `layers.py`.
        on_device: whether it is a function that is given the device.
    """

    name: str
    passed: tuple[int, ...]
    parameters: Mapping[str, Parameter]
    inline: bool = False
    shared: bool = False
    on_device: bool = False


@dataclass(eq=False)
class SourceFile:
    """A file with classes of modules: that of a stage, or `layers.py` for what several have.

    Attributes:
        names: of its classes, and those that none of them takes.
        classes: the lines of each, inner ones first.
        containers: by their lines, the names of those that only hold modules.
    """

    names: Identifiers
    shared: bool = False
    imports: Imports = field(default_factory=Imports)
    classes: list[tuple[str, ...]] = field(default_factory=list)
    containers: dict[tuple[str, ...], str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Arguments:
    """What a constructor is given.

    Attributes:
        names: the arguments that stand for numbers.
        types: their annotations, by their names.
    """

    names: Mapping[ConstantSlot, str] = field(default_factory=dict)
    types: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, parameters: Mapping[str, Parameter]) -> Arguments:
        return cls(
            {slot: own for own, item in parameters.items() for slot in item.slots},
            {own: _type(item.values.values()) for own, item in parameters.items()},
        )


def class_lines(
    header: str, buffers: Sequence[str], constructor: Sequence[str], forward: Sequence[str]
) -> tuple[str, ...]:
    """A class; each part may be empty."""
    parts = [part for part in (buffers, constructor, forward) if part]
    spaced = [line for part in parts for line in ("", *part)]
    return (f"class {header}:", *spaced[1:])


def buffer_types(
    holder: ModuleNode, imports: Imports, but: Collection[str] = frozenset()
) -> list[str]:
    """`mask: Tensor` for each buffer that a module registers, as type checkers ask for it.

    Args:
        but: canonical names of others, which it is given from outside.
    """
    found = [
        f"    {own}: Tensor"
        for own, state in holder.tensors()
        if state.kind is not StateKind.PARAMETER
        and state.name not in but
        and holder.place_of(own) == f"{holder.place}.{own}"
    ]
    if found:
        imports.name("torch", "Tensor")
    return found


def init_lines(types: Mapping[str, str], lines: Sequence[str]) -> list[str]:
    """The constructor of a class; none where it makes nothing."""
    if not lines:
        return []
    parameters = [name(f"{own}: {kind}") for own, kind in types.items()]
    head = lay_out(call("def __init__", [name("self"), *parameters]), suffix=" -> None:", indent=1)
    return [*head, "        super().__init__()", *lines]


def by_position(parameter: str) -> bool:
    """Whether people pass a parameter without its name."""
    return parameter.startswith(_BY_POSITION)


def _type(values: Iterable[object]) -> str:
    """The annotation for a parameter that has these values."""
    kinds = dict.fromkeys(_kind(value) for value in values)
    return " | ".join(sorted(kinds, key=lambda kind: (kind == "None", kind)))


def _kind(value: object) -> str:
    if isinstance(value, tuple) and value and all(type(v) is type(value[0]) for v in value):
        return f"tuple[{', '.join(_kind(v) for v in value)}]"
    if value is None:
        return "None"
    known = type(value) in (bool, int, float, str, tuple, list)
    return type(value).__name__ if known else "object"


NO_ARGUMENTS = Arguments()


@dataclass
class Construction:
    """Writes constructors.

    A module that only holds others is of a class of its own where it holds them by attributes, as
    type checkers know nothing of what is set on an nn.Module from outside.

    Attributes:
        of_path: the blocks, by the paths of their modules.
        split: whether other stages run ops of a module too.
    """

    graph: Graph
    state: StageState
    file: SourceFile
    stage: int = 0
    holders: Mapping[str, ModuleNode] = field(default_factory=dict)
    of_path: Mapping[str, BlockClass] = field(default_factory=dict)
    split: Callable[[str], bool] = lambda _: False
    written: Mapping[int, WrittenBlock] = field(default_factory=dict)

    def lines(self, holder: ModuleNode, given: Arguments = NO_ARGUMENTS) -> list[str]:
        """The body of the `__init__` of a module, without `super().__init__()`.

        What several modules of a stage share is shared when all are made.

        Raises:
            EmitError: when a module's class or an argument of it has no spelling.
        """
        try:
            made = [*self._members(holder, holder, given)]
        except UnwritableError as error:
            raise EmitError(f"a module of the stage cannot be written: {error}") from error
        for item in holder.all() if not holder.prefix else ():
            for local, canonical in item.spec.state.items() if item.spec is not None else ():
                own, place = f"{item.place}.{local}", self.state.places[canonical]
                if own != place:
                    made.append(f"        {own} = {place}  # shared")
        return made

    def chain(self, holder: ModuleNode, given: Arguments = NO_ARGUMENTS) -> list[Expression]:
        """The modules of an nn.Sequential in order; equal ones in a row by a generator."""
        members = sorted(holder.modules(), key=lambda member: int(member[0]))
        made = (self._module(item, given) for _, item in members)
        runs = [list(run) for _, run in groupby(made, key=lambda item: item.flat)]
        return [
            comprehension("*(", run[0], f"for _ in range({len(run)})", ")")
            if len(run) > 1
            else run[0]
            for run in runs
        ]

    def _members(self, root: ModuleNode, holder: ModuleNode, given: Arguments) -> Iterator[str]:
        """The statements that make what a module in the one at `root` holds."""
        if holder.spec is not None:
            yield from self._frozen_apart(root, holder, holder.spec)
        for own, item in holder.members.items():
            if isinstance(item, State):
                if self._is_dict(holder):
                    continue  # made with what holds it
                if root.prefix[:-1] not in self.of_path or item.name not in self.state.unread:
                    yield from self._bare_state(root, item, holder, own, given)
                continue
            if not holder.is_keyed(own) or holder is root:
                made = self._module(item, given)
                place = _below(root, item.place)
                if self._is_opened(item):
                    self.file.imports.name("typing", "Any")
                    place += ": Any"
                yield from lay_out(made, prefix=f"{place} = ", indent=2)
            if not self._has_class(item):
                yield from self._members(root, item, given)
            elif item.prefix[:-1] in self.of_path and root.prefix[:-1] not in self.of_path:
                yield from self._unread(root, item, given)

    def _unread(self, root: ModuleNode, block: ModuleNode, given: Arguments) -> Iterator[str]:
        """The statements that add to a block what it holds and does not read.

        A module in it that has a class of its own without being a block registers its own.
        """
        path = block.prefix.removeprefix(root.prefix)[:-1]
        # Items of an nn.Sequential have numbers, those of an nn.ModuleDict keys.
        keyed = "[" in _below(root, block.place)
        place = f"{root.place}.get_submodule({quote(path)})" if keyed else block.place
        for own, state in block.tensors():
            if state.name in self.state.unread:
                found = dataclasses.replace(block, place=place)
                yield from self._bare_state(root, state, found, own, given)
        for _, inner in block.modules():
            if inner.prefix[:-1] in self.of_path or not self._has_class(inner):
                yield from self._unread(root, inner, given)

    def _has_class(self, item: ModuleNode) -> bool:
        """Whether a module is constructed whole, by a class of a file."""
        return item.prefix[:-1] in self.of_path or (
            self.holders.get(item.prefix[:-1]) is item
            and item.spec is None
            and _has_attributes(item)
        )

    def _is_opened(self, item: ModuleNode) -> bool:
        """Whether methods look into what it holds by keys, of which type checkers know nothing."""
        inside = (inner for inner in item.keyed.values() if inner.prefix[:-1] not in self.of_path)
        return any(
            part.spec is not None or any(s.name not in self.state.unread for _, s in part.tensors())
            for inner in inside
            if inner.spec is None
            for part in inner.all()
        )

    def _module(self, item: ModuleNode, given: Arguments) -> Expression:
        if item.prefix[:-1] in self.of_path:
            return self._block(item.prefix[:-1], given)
        if self._has_class(item):
            return self._container(item, given)
        if item.spec is None:
            inside = [(own, self._module(inner, given)) for own, inner in item.keyed.items()]
            if self._is_dict(item):
                inside = [(own, self._parameter(one, given)) for own, one in item.tensors()]
            called = f"nn.{item.cls.__name__}"
            return call(called, [dict_of_modules(inside)] if inside else [])
        return construct_module(self.graph, item.spec, self.file.imports, given.names)

    def _is_dict(self, item: ModuleNode) -> bool:
        """Whether a module is an nn.ParameterDict whose parameters are all read."""
        read = all(state.name not in self.state.unread for _, state in item.tensors())
        return (
            read
            and bool(item.members)
            and all(map(item.is_keyed, item.members))
            and not [*item.modules()]
        )

    def _parameter(self, state: State, given: Arguments) -> Expression:
        self.file.imports.module("torch")
        self.file.imports.name("torch", "nn")
        flag = [] if state.requires_grad else [name("requires_grad=False")]
        return call("nn.Parameter", [memory_for("torch.empty", state, given.names), *flag])

    def _frozen_apart(
        self, root: ModuleNode, holder: ModuleNode, spec: ModuleSpec
    ) -> Iterator[str]:
        """Statements for parameters that are frozen beside others of their module."""
        frozen, whole = frozen_parameters(spec, self.graph.state)
        for local in () if whole else frozen:
            if self.state.places[spec.state[local]] == f"{holder.place}.{local}":
                yield f"        {_below(root, holder.place)}.{local}.requires_grad_(False)"

    def _bare_state(
        self, root: ModuleNode, state: State, holder: ModuleNode, own: str, given: Arguments
    ) -> list[str]:
        """The statements that register a tensor which the model uses without a module of torch."""
        imports = self.file.imports
        imports.module("torch")
        place = _below(root, holder.place_of(own))
        tensor = self.graph.tensors.get(state.name)
        if state.kind is StateKind.PARAMETER:
            return lay_out(self._parameter(state, given), prefix=f"{place} = ", indent=2)
        # Weights that are not loaded are initialised; of a buffer nobody can know its values.
        unknown = tensor is None or tensor.is_meta
        made = memory_for("torch.zeros" if unknown else "torch.empty", state, given.names)
        if state.kind is StateKind.CONSTANT and tensor is not None and not unknown:
            made = tensor_of_values(tensor, imports) if tensor.numel() <= LITERAL_ELEMENTS else made
        persistent = state.persistent and state.kind is StateKind.BUFFER
        around = _below(root, holder.place)
        if holder.means_something_else(own):  # register_buffer refuses it
            transient = f"        {around}._non_persistent_buffers_set.add({quote(own)})"
            return [
                *lay_out(made, prefix=f"{place} = ", indent=2),
                *([] if persistent else [transient]),
            ]
        flag = [] if persistent else [name("persistent=False")]
        return lay_out(call(f"{around}.register_buffer", [name(quote(own)), made, *flag]), indent=2)

    def _block(self, path: str, given: Arguments) -> Expression:
        block = self.of_path[path]
        written = self.written[id(block)]
        if written.inline:
            return call(written.name, self.chain(self.holders[path], _moved(block, path, given)))
        arguments = []
        for own, parameter in written.parameters.items():
            slot = ConstantSlot(path, block.parameters.index(parameter))
            known = given.names.get(slot)
            number = parameter.values[self.stage, path]
            value = name(known) if known else write_literal(number, self.file.imports)
            positional = by_position(parameter.name)
            arguments.append(value if positional else value.prefixed(f"{own}="))
        if written.shared and not self.file.shared:
            self.file.imports.name(".layers", written.name)
        return call(written.name, arguments)

    def _container(self, holder: ModuleNode, given: Arguments) -> Expression:
        """The call that constructs a module which only holds others."""
        lines = self.lines(holder, given)
        text = "\n".join(lines)
        types = {own: kind for own, kind in given.types.items() if _reads(text, own)}
        buffers, init = buffer_types(holder, self.file.imports), init_lines(types, lines)
        base = "ModuleDict" if holder.cls is nn.ModuleDict else "Module"
        key = (base, *buffers, *init)
        known = self.file.containers.get(key)
        if known is None:
            path = holder.prefix[:-1]
            user = self.graph.module_classes.get(path, "")
            named = user and class_of_torch(self.graph, path) is None
            wanted = class_name(user if named else _singular(path))
            known = self.file.names.take_numbered(f"{wanted}Part" if self.split(path) else wanted)
            self.file.containers[key] = known
            self.file.classes.append(class_lines(f"{known}(nn.{base})", buffers, init, []))
        return call(known, [name(f"{own}={own}") for own in types])


def _has_attributes(holder: ModuleNode) -> bool:
    """Whether a module holds what is no item of an nn.ModuleDict."""
    kinds = (nn.Module, nn.ModuleDict)
    return holder.cls in kinds and not all(map(holder.is_keyed, holder.members))


def _singular(path: str) -> str:
    """`layer` for the module at `model.layers.3`, its own name for any other."""
    around, _, last = path.rpartition(".")
    return around.rpartition(".")[2].removesuffix("s") if last.isdecimal() else last


def _reads(text: str, own: str) -> bool:
    return re.search(rf"(?<![\w.]){own}\b(?!=)", text) is not None


def _moved(block: BlockClass, path: str, given: Arguments) -> Arguments:
    """What stands for the numbers of an instance of a block that is constructed where it stands."""
    first = block.first.path
    names = {
        ConstantSlot(path + slot.owner.removeprefix(first), slot.key): given.names[
            ConstantSlot(path, number)
        ]
        for number, parameter in enumerate(block.parameters)
        if ConstantSlot(path, number) in given.names
        for slot in parameter.slots
        if is_under(slot.owner, first)
    }
    return Arguments(names, given.types)


def _below(root: ModuleNode, place: str) -> str:
    return "self" + place.removeprefix(root.place)
