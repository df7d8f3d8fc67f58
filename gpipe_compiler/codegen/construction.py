"""How a stage and its classes construct the modules that they hold, and these as text."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from torch import nn

from gpipe_compiler.codegen.constants import write_literal
from gpipe_compiler.codegen.constructors import StageState, construct, construct_member
from gpipe_compiler.codegen.imports import Imports
from gpipe_compiler.codegen.layout import Expression, call, comprehension, lay_out, name
from gpipe_compiler.codegen.names import Identifiers, class_name
from gpipe_compiler.codegen.nested import ModuleNode
from gpipe_compiler.ir import Graph, Op, RegionCall, StateKind
from gpipe_compiler.ir.blocks import BlockClass, Parameter
from gpipe_compiler.ir.contents import is_under
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
    """

    name: str
    passed: tuple[int, ...]
    parameters: Mapping[str, Parameter]
    inline: bool = False
    shared: bool = False


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
        """Those of a block."""
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


def buffer_types(holder: ModuleNode, imports: Imports) -> list[str]:
    """`mask: Tensor` for each buffer that a module registers, as type checkers ask for it."""
    found = [
        f"    {own}: Tensor"
        for own, state in holder.tensors()
        if state.kind is not StateKind.PARAMETER and holder.place_of(own) == f"{holder.place}.{own}"
    ]
    if found:
        imports.from_torch("Tensor")
    return found


def init_lines(types: Mapping[str, str], lines: Sequence[str]) -> list[str]:
    """The constructor of a class; none where it makes nothing."""
    if not lines:
        return []
    parameters = [name(f"{own}: {kind}") for own, kind in types.items()]
    head = lay_out(call("def __init__", [name("self"), *parameters]), suffix=" -> None:", indent=1)
    return [*head, "        super().__init__()", *lines]


def relative(op: Op, root: str) -> Op:
    """An op whose module is called as the module at `root` calls it."""
    made = op.call
    if isinstance(made, RegionCall):
        body = dataclasses.replace(
            made.body, ops=tuple(relative(inner, root) for inner in made.body.ops)
        )
        made = dataclasses.replace(made, body=body)
    module = op.module.removeprefix(root).removeprefix(".")
    return dataclasses.replace(op, call=made, module=module)


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
        stage: its number.
        file: that they are written in.
        holders: the modules of the stage by their paths.
        of_path: the blocks, by the paths of their modules.
        split: whether other stages run ops of a module too.
        written: the blocks that may be constructed, by their ids.
    """

    graph: Graph
    stage: int
    state: StageState
    file: SourceFile
    holders: Mapping[str, ModuleNode]
    of_path: Mapping[str, BlockClass]
    split: Callable[[str], bool]
    written: Mapping[int, WrittenBlock]

    def lines(self, holder: ModuleNode, given: Arguments = NO_ARGUMENTS) -> list[str]:
        """The body of the `__init__` of a module, without `super().__init__()`."""
        made = self._inside(holder, given)
        own = None if holder is self.state.root else holder
        return construct(self.graph, self.state, self.file.imports, own, made, given.names)

    def chain(self, holder: ModuleNode, given: Arguments = NO_ARGUMENTS) -> list[Expression]:
        """The modules of an nn.Sequential in order; equal ones in a row by a generator."""
        made = (
            self._block(path, given)
            if (path := item.prefix[:-1]) in self.of_path
            else construct_member(self.graph, item, self.file.imports, given.names)
            for _, item in sorted(holder.modules(), key=lambda member: int(member[0]))
        )
        runs = [list(run) for _, run in groupby(made, key=lambda item: item.flat)]
        return [
            comprehension("*(", run[0], f"for _ in range({len(run)})", ")")
            if len(run) > 1
            else run[0]
            for run in runs
        ]

    def _inside(self, holder: ModuleNode, given: Arguments) -> dict[str, Expression]:
        """What constructs the blocks and containers in a module, by their paths."""
        made: dict[str, Expression] = {}
        for _, item in holder.modules():
            path = item.prefix[:-1]
            if path in self.of_path:
                made[path] = self._block(path, given)
            elif item.spec is None and _has_attributes(item):
                made[path] = self._container(item, given)
            elif item.spec is None:
                made.update(self._inside(item, given))
        return made

    def _block(self, path: str, given: Arguments) -> Expression:
        """The call that constructs a block."""
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
            arguments.append(value if by_position(own) else value.prefixed(f"{own}="))
        if written.shared and not self.file.shared:
            self.file.imports.layer(written.name)
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
            named = user and not hasattr(nn, user)
            wanted = class_name(user if named else path.rpartition(".")[2])
            known = self.file.names.take_numbered(f"{wanted}Part" if self.split(path) else wanted)
            self.file.containers[key] = known
            self.file.classes.append(class_lines(f"{known}(nn.{base})", buffers, init, []))
        passed = [name(own) if by_position(own) else name(f"{own}={own}") for own in types]
        return call(known, passed)


def _has_attributes(holder: ModuleNode) -> bool:
    """Whether a module holds what is no item of an nn.ModuleDict."""
    kinds = (nn.Module, nn.ModuleDict)
    return holder.cls in kinds and any(own not in holder.keyed for own in holder.members)


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
