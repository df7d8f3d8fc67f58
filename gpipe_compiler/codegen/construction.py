"""How a stage and its classes construct the modules that they hold."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby

from torch import nn

from gpipe_compiler.codegen.block_text import (
    Arguments,
    SourceFile,
    WrittenBlock,
    buffer_types,
    by_position,
    class_lines,
    init_lines,
)
from gpipe_compiler.codegen.constants import write_literal
from gpipe_compiler.codegen.constructors import StageState, construct, construct_member
from gpipe_compiler.codegen.layout import Expression, call, name
from gpipe_compiler.codegen.names import class_name
from gpipe_compiler.codegen.nested import Holder
from gpipe_compiler.ir import Graph
from gpipe_compiler.ir.blocks import BlockClass
from gpipe_compiler.ir.contents import is_under
from gpipe_compiler.ir.forms import Slot

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
    holders: Mapping[str, Holder]
    of_path: Mapping[str, BlockClass]
    split: Callable[[str], bool]
    written: Mapping[int, WrittenBlock]

    def lines(self, holder: Holder, given: Arguments = NO_ARGUMENTS) -> list[str]:
        """The body of the `__init__` of a module, without `super().__init__()`."""
        made = self._inside(holder, given)
        own = None if holder is self.state.root else holder
        return construct(self.graph, self.state, self.file.imports, own, made, given.names)

    def chain(self, holder: Holder, given: Arguments = NO_ARGUMENTS) -> list[Expression]:
        """The modules of an nn.Sequential; equal ones in a row by a generator."""
        made = (
            self._block(path, given)
            if (path := item.prefix[:-1]) in self.of_path
            else construct_member(self.graph, item, self.file.imports, given.names)
            for _, item in holder.modules()
        )
        runs = [list(run) for _, run in groupby(made, key=lambda item: item.flat)]
        return [
            Expression(f"*({run[0].flat} for _ in range({len(run)}))") if len(run) > 1 else run[0]
            for run in runs
        ]

    def _inside(self, holder: Holder, given: Arguments) -> dict[str, Expression]:
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
            slot = Slot(path, block.parameters.index(parameter))
            known = given.names.get(slot)
            number = parameter.values[self.stage, path]
            value = name(known) if known else write_literal(number, self.file.imports)
            arguments.append(value if by_position(own) else value.prefixed(f"{own}="))
        if written.shared and not self.file.shared:
            self.file.imports.layer(written.name)
        return call(written.name, arguments)

    def _container(self, holder: Holder, given: Arguments) -> Expression:
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


def _has_attributes(holder: Holder) -> bool:
    """Whether a module holds what is no item of an nn.ModuleDict."""
    kinds = (nn.Module, nn.ModuleDict)
    return holder.cls in kinds and any(own not in holder.keyed for own in holder.members)


def _reads(text: str, own: str) -> bool:
    return re.search(rf"(?<![\w.]){own}\b(?!=)", text) is not None


def _moved(block: BlockClass, path: str, given: Arguments) -> Arguments:
    """What stands for the numbers of an instance of a block that is constructed where it stands."""
    first = block.first.path
    names = {
        Slot(path + slot.owner.removeprefix(first), slot.key): given.names[Slot(path, number)]
        for number, parameter in enumerate(block.parameters)
        if Slot(path, number) in given.names
        for slot in parameter.slots
        if is_under(slot.owner, first)
    }
    return Arguments(names, given.types)
