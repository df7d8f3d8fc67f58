"""Calls of blocks as ops of the methods that make them, and loops over equal layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from gpipe_compiler.codegen.construction import SourceFile, WrittenBlock
from gpipe_compiler.codegen.constructors import NO_NAMES
from gpipe_compiler.codegen.expressions import Layers, OwnModule, Written, again, repeat
from gpipe_compiler.codegen.facts import CodeFacts
from gpipe_compiler.codegen.helpers import HelperCall, module_path
from gpipe_compiler.codegen.layout import consecutive
from gpipe_compiler.codegen.nested import ModuleNode
from gpipe_compiler.ir import FunctionCall, ModuleCall, Op, Ref, StateRef
from gpipe_compiler.ir.blocks import BlockCall, BlockClass, Part
from gpipe_compiler.ir.classes import MethodBlocks, outer_states
from gpipe_compiler.ir.contents import Contents, prefixes
from gpipe_compiler.ir.forms import ConstantSlot
from gpipe_compiler.ir.ops import Result


@dataclass(frozen=True, eq=False, slots=True)
class Loop:
    """Calls of one block in a row, each of which is given what the one before it made.

    Attributes:
        carried: for each output, the place among the inputs of the next call at which it goes in.
    """

    calls: tuple[BlockCall, ...]
    carried: tuple[int, ...]


def find_loops(
    parts: Sequence[Part],
    returns: Sequence[str],
    class_of: Callable[[BlockCall], BlockClass],
) -> list[Part | Loop]:
    """Parts of a method, with loops in place of the calls that they make."""
    last: dict[str, int] = {v: i for i, part in enumerate(parts) for v in part.inputs}
    last.update(dict.fromkeys(returns, len(parts)))
    found: list[Part | Loop] = []
    place = 0
    while place < len(parts):
        loop = _loop_at(parts, place, last, class_of)
        found.append(loop or parts[place])
        place += len(loop.calls) if loop else 1
    return found


def _loop_at(
    parts: Sequence[Part],
    place: int,
    last: dict[str, int],
    class_of: Callable[[BlockCall], BlockClass],
) -> Loop | None:
    first = parts[place]
    if not isinstance(first, BlockCall):
        return None
    calls = [first]
    carried: tuple[int, ...] | None = None
    for index in range(place + 1, len(parts)):
        call = parts[index]
        if not isinstance(call, BlockCall) or not _alike(calls[-1], call, class_of):
            break
        wires = _wires(calls[-1], call)
        if wires is None or carried not in (None, wires):
            break
        if any(last.get(value, -1) != index for value in calls[-1].outputs):
            break
        carried = wires
        calls.append(call)
    return None if carried is None else Loop(tuple(calls), carried)


def _alike(one: BlockCall, other: BlockCall, class_of: Callable[[BlockCall], BlockClass]) -> bool:
    """Whether two calls are of one block, by modules of one list."""
    (around, _, word), (other_around, _, other_word) = (
        call.path.rpartition(".") for call in (one, other)
    )
    listed = around == other_around and word.isdecimal() and other_word.isdecimal()
    equal = class_of(one) is class_of(other) and one.again is other.again
    return equal and listed and word != other_word


def _wires(one: BlockCall, other: BlockCall) -> tuple[int, ...] | None:
    """Where the outputs of a call go into the next one, which shares all else with it."""
    wires: dict[str, int] = {}
    for place, (before, after) in enumerate(zip(one.inputs, other.inputs, strict=True)):
        if after in one.outputs:
            wires[after] = place
        elif after != before:
            return None
    complete = one.outputs and len(wires) == len(one.outputs)
    return tuple(wires[value] for value in one.outputs) if complete else None


@dataclass(frozen=True)
class Calls:
    """How the methods of a stage and of its blocks call blocks.

    Attributes:
        holders: the modules of the stage by their paths.
        written: the blocks that may be called, by their ids.
        helpers: those that are functions, by the paths of their calls.
    """

    facts: CodeFacts
    contents: Contents
    blocks: MethodBlocks
    holders: Mapping[str, ModuleNode]
    written: Mapping[int, WrittenBlock]
    helpers: Mapping[str, HelperCall]

    @property
    def functions(self) -> dict[str, str]:
        """The names of the functions that may be called, by the paths of their calls."""
        made = {path: self.blocks.of_path.get(path) for path in self.helpers}
        known = {path: self.written.get(id(block)) for path, block in made.items()}
        return {path: function.name for path, function in known.items() if function is not None}

    def ops(
        self,
        parts: Sequence[Part],
        returns: Sequence[str],
        root: str,
        file: SourceFile,
        names: Mapping[ConstantSlot, str] = NO_NAMES,
    ) -> tuple[Op, ...]:
        """Parts of a method as ops: calls of blocks are calls of modules.

        Args:
            file: that the method is written in.
            names: what stands for numbers.
        """
        ops: list[Op] = []
        for number, part in enumerate(find_loops(parts, returns, self.block_of)):
            match part:
                case Loop():
                    ops.append(self._loop(part, number, root))
                case BlockCall() if part.path in self.helpers:
                    ops.append(self._function(part, file, names))
                case BlockCall():
                    arguments = self._arguments(part)
                    made = (
                        again(OwnModule(part.path), arguments)
                        if part.again
                        else ModuleCall(part.path, arguments)
                    )
                    ops.append(self._op(part, made, part.outputs, number))
                case Op():
                    ops.append(dataclasses.replace(part, module=module_path(part.module)))
        return self._without_unread(ops, returns)

    def _without_unread(self, ops: Sequence[Op], returns: Sequence[str]) -> tuple[Op, ...]:
        """The ops without those that ask for sizes which only blocks read, for themselves."""
        needed = set(returns)
        kept: list[Op] = []
        for op in reversed(ops):
            outputs = set(op.outputs)
            if outputs and needed.isdisjoint(outputs) and outputs <= self.facts.templates.keys():
                continue
            kept.append(op)
            needed.update(op.inputs)
        return tuple(reversed(kept))

    def _op(
        self,
        block: BlockCall,
        made: ModuleCall | FunctionCall,
        outputs: tuple[str, ...],
        number: int,
    ) -> Op:
        result: Result = (outputs[0] if len(outputs) == 1 else outputs) if outputs else None
        *outer, _ = prefixes(block.path)
        lists = (None, nn.Sequential.__name__)
        known = self.facts.graph.module_classes.get
        around = next((path for path in reversed(outer) if known(path) not in lists), "")
        return Op(f"{block.path}({number})", made, result, None, around, block.mode)

    def _arguments(self, block: BlockCall) -> tuple[Ref | StateRef, ...]:
        passed = self.written[id(self.block_of(block))].passed
        states = outer_states(self.contents, block)
        return (*(Ref(block.inputs[index]) for index in passed), *map(StateRef, states))

    def _function(self, call: BlockCall, file: SourceFile, names: Mapping[ConstantSlot, str]) -> Op:
        block, helper = self.block_of(call), self.helpers[call.path]
        written = self.written[id(block)]
        if written.shared and not file.shared:
            file.imports.layer(written.name)
        arguments: tuple[object, ...] = self._arguments(call)
        if written.on_device:
            arguments = (*arguments, torch.device("cpu"))  # becomes that of the method
        numbers: dict[str, object] = {}
        for own, parameter in written.parameters.items():
            known = names.get(ConstantSlot(call.path, block.parameters.index(parameter)))
            number = parameter.values[call.stage, call.path]
            numbers[own] = number if known is None else Written(known)
        result: Result = call.outputs[0] if len(call.outputs) == 1 else call.outputs
        made = ModuleCall(call.path, arguments, numbers)
        return Op(call.path, made, result, helper.site, module_path(call.path), call.mode)

    def _loop(self, loop: Loop, number: int, root: str) -> Op:
        first, last = loop.calls[0], loop.calls[-1]
        passed = self.written[id(self.block_of(first))].passed
        carried = tuple(passed.index(index) for index in loop.carried)
        each = self._each([call.path for call in loop.calls], root, carried)
        each = dataclasses.replace(each, again=first.again)
        made = FunctionCall(repeat, (each, *self._arguments(first)))
        return self._op(first, made, last.outputs, number)

    def _each(self, paths: Sequence[str], root: str, carried: tuple[int, ...]) -> Layers:
        """How a loop runs over modules of one list."""
        around = paths[0].rpartition(".")[0]
        holder = self.holders[around]
        held = self.place(holder.place, root)
        words = [path.rpartition(".")[2] for path in paths]
        singular = around.rpartition(".")[2].removesuffix("s")
        one = singular if singular.isidentifier() and len(singular) > 1 else "layer"
        if list(holder.keyed) == list(holder.members) == words:
            return Layers(f"{held}.values()", one, "", carried)
        span = consecutive(words)
        if span and holder.keyed.keys() >= set(words):
            return Layers(span, "index", f"{held}[str({{}})]", carried)
        places = ", ".join(self.place(self.holders[path].place, root) for path in paths)
        return Layers(f"({places})", one, "", carried)

    def block_of(self, call: BlockCall) -> BlockClass:
        """The block that a call is one of."""
        return self.blocks.of_path[call.path]

    def place(self, place: str, root: str) -> str:
        """An expression of the stage in a method of the module at `root`."""
        return "self" + place.removeprefix(self.holders[root].place)
