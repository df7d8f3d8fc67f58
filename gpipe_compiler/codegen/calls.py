"""Calls of blocks as ops of the methods that make them, and loops over equal layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from gpipe_compiler.codegen.block_text import WrittenBlock
from gpipe_compiler.codegen.expressions import Layers, OwnModule, again, repeat
from gpipe_compiler.codegen.facts import Facts
from gpipe_compiler.codegen.layout import consecutive
from gpipe_compiler.codegen.loops import Loop, find_loops
from gpipe_compiler.codegen.nested import Holder
from gpipe_compiler.ir import FunctionCall, ModuleCall, Op, Ref, StateRef
from gpipe_compiler.ir.blocks import BlockCall, BlockClass, Part
from gpipe_compiler.ir.classes import Blocks, outer_states
from gpipe_compiler.ir.contents import Contents, prefixes
from gpipe_compiler.ir.ops import Result


@dataclass(frozen=True)
class Calls:
    """How the methods of a stage and of its blocks call blocks.

    Attributes:
        holders: the modules of the stage by their paths.
        written: the blocks that may be called, by their ids.
    """

    facts: Facts
    contents: Contents
    blocks: Blocks
    holders: Mapping[str, Holder]
    written: Mapping[int, WrittenBlock]

    def ops(self, parts: Sequence[Part], returns: Sequence[str], root: str) -> tuple[Op, ...]:
        """Parts of a method as ops: calls of blocks are calls of modules."""
        ops: list[Op] = []
        for number, part in enumerate(find_loops(parts, returns, self.block_of)):
            match part:
                case Loop():
                    ops.append(self._loop(part, number, root))
                case BlockCall():
                    arguments = self._arguments(part)
                    made = (
                        again(OwnModule(part.path), arguments)
                        if part.again
                        else ModuleCall(part.path, arguments)
                    )
                    ops.append(self._op(part, made, part.outputs, number))
                case Op():
                    ops.append(part)
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
