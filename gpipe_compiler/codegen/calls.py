"""Calls of blocks as ops of the methods that make them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from gpipe_compiler.codegen.construction import SourceFile, WrittenBlock
from gpipe_compiler.codegen.constructors import NO_NAMES
from gpipe_compiler.codegen.expressions import OwnModule, RawText, again
from gpipe_compiler.codegen.facts import CodeFacts
from gpipe_compiler.codegen.helpers import HelperCall, module_path
from gpipe_compiler.codegen.nested import ModuleNode
from gpipe_compiler.codegen.uses import makes_only, without_unread
from gpipe_compiler.errors import SourceLocation
from gpipe_compiler.ir import Call, FunctionCall, Graph, ModuleCall, Op, Ref, RegionCall, StateRef
from gpipe_compiler.ir.blocks import BlockCall, BlockClass, Part, outer_states
from gpipe_compiler.ir.classes import MethodBlocks
from gpipe_compiler.ir.contents import Contents, prefixes
from gpipe_compiler.ir.forms import ConstantSlot
from gpipe_compiler.ir.ops import Result


def line_of_call(graph: Graph, block: BlockCall) -> tuple[SourceLocation | None, str]:
    """The user's line that calls a module, where that is known, and the path of the caller."""
    words = block.path.split(".")
    sources = [op.source for op in block.ops if op.source is not None]
    # What a module of torch runs is told to be of the line that calls it.
    of_torch = hasattr(nn, graph.module_classes.get(block.path) or "")
    for source in sources:
        line = next((line for count, line in source.calls if count >= len(words)), None)
        if line or (of_torch and source.calls):
            around = max((count for count, _ in source.calls if count < len(words)), default=0)
            return line or source, ".".join(words[:around])
    *outer, _ = prefixes(block.path)
    lists = (None, nn.Sequential.__name__)
    callers = (path for path in reversed(outer) if graph.module_classes.get(path) not in lists)
    return sources[0] if sources and of_torch else None, next(callers, "")


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
        file: SourceFile,
        names: Mapping[ConstantSlot, str] = NO_NAMES,
    ) -> tuple[Op, ...]:
        """Parts of a method as ops: calls of blocks are calls of modules.

        Args:
            file: that the method is written in.
            names: what stands for numbers.
        """
        ops: list[Op] = []
        for number, part in enumerate(parts):
            match part:
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
                    own, path = self._without_defaults(part.call), module_path(part.module)
                    ops.append(dataclasses.replace(part, call=own, module=path))
        # Blocks read sizes for themselves: what only they ask for is left out.
        return without_unread(ops, returns, lambda op: makes_only(op, self.facts.templates))

    def draws(self, parts: Sequence[Part]) -> dict[str, int]:
        """How many random ops those parts run that are of layers that may be left out.

        By the ops that `ops` makes of them.
        """
        facts = self.facts

        def count(ops: Iterable[Op]) -> int:
            drawn = [
                (facts.randoms.get(op.name, ()), facts.randoms_in_eval.get(op.name, ()))
                for op in ops
                if op.layer
            ]
            return sum(max(map(len, pair)) for pair in drawn)

        found = {}
        for number, part in enumerate(parts):
            if isinstance(part, Op):
                found[part.name] = count((part,))
            else:
                own = part.path if part.path in self.helpers else f"{part.path}({number})"
                found[own] = count(part.ops)
        return {own: number for own, number in found.items() if number}

    def _without_defaults(self, made: Call) -> Call:
        """A call of a module of torch without the keywords that its `forward` has by default."""
        if not isinstance(made, ModuleCall) or not made.kwargs:
            return made
        known = inspect.signature(self.facts.graph.modules[made.module].cls.forward).parameters
        given = {
            key: item
            for key, item in made.kwargs.items()
            if key not in known or known[key].default is not item
        }
        return dataclasses.replace(made, kwargs=given)

    def _op(
        self,
        block: BlockCall,
        made: ModuleCall | FunctionCall,
        outputs: tuple[str, ...],
        number: int,
    ) -> Op:
        result: Result = (outputs[0] if len(outputs) == 1 else outputs) if outputs else None
        line, around = line_of_call(self.facts.graph, block)
        own, layer = f"{block.path}({number})", layer_of(block)
        return Op(own, made, result, line, around, block.mode, layer=layer)

    def _arguments(self, block: BlockCall) -> tuple[Ref | StateRef, ...]:
        passed = self.written[id(self.block_of(block))].passed
        states = outer_states(self.contents, block)
        return (*(Ref(block.inputs[index]) for index in passed), *map(StateRef, states))

    def _function(self, call: BlockCall, file: SourceFile, names: Mapping[ConstantSlot, str]) -> Op:
        block, helper = self.block_of(call), self.helpers[call.path]
        written = self.written[id(block)]
        if written.shared and not file.shared:
            file.imports.name(".layers", written.name)
        arguments: tuple[object, ...] = self._arguments(call)
        if written.on_device:
            arguments = (*arguments, torch.device("cpu"))  # becomes that of the method
        numbers: dict[str, object] = {}
        for own, parameter in written.parameters.items():
            known = names.get(ConstantSlot(call.path, block.parameters.index(parameter)))
            number = parameter.values[call.stage, call.path]
            numbers[own] = number if known is None else RawText(known)
        result: Result = call.outputs[0] if len(call.outputs) == 1 else call.outputs
        made = ModuleCall(call.path, arguments, numbers)
        around, layer = module_path(call.path), layer_of(call)
        return Op(call.path, made, result, helper.site, around, call.mode, layer=layer)

    def block_of(self, call: BlockCall) -> BlockClass:
        return self.blocks.of_path[call.path]

    def place(self, place: str, root: str) -> str:
        """An expression of the stage in a method of the module at `root`."""
        return "self" + place.removeprefix(self.holders[root].place)


def layer_of(call: BlockCall) -> str:
    """The layer, of those left out at random, that all of a call is part of."""
    layers = {op.layer for op in call.ops}
    return layers.pop() if len(layers) == 1 else ""


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
