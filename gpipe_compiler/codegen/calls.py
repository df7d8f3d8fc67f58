"""Calls of blocks: of modules as ops of the methods that make them, and of the user's functions."""

from __future__ import annotations

import dataclasses
import inspect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import torch
from torch import nn

from gpipe_compiler.codegen.construction import SourceFile, WrittenBlock
from gpipe_compiler.codegen.constructors import NO_NAMES
from gpipe_compiler.codegen.expressions import OwnModule, RawText, again, runs_again
from gpipe_compiler.codegen.facts import CodeFacts
from gpipe_compiler.codegen.module_tree import ModuleNode
from gpipe_compiler.codegen.sources import calls_at, first_line, is_closure
from gpipe_compiler.codegen.value_names import kind_of
from gpipe_compiler.codegen.variables import makes_only
from gpipe_compiler.errors import SourceLocation
from gpipe_compiler.ir import Call, FunctionCall, Graph, ModuleCall, Op, Ref, StateRef
from gpipe_compiler.ir.blocks import BlockCall, BlockClass, Part, outer_states, regions_around
from gpipe_compiler.ir.classes import MethodBlocks
from gpipe_compiler.ir.contents import Contents, class_of_torch, prefixes
from gpipe_compiler.ir.forms import ConstantSlot
from gpipe_compiler.ir.ops import Result, without_unread

_CALL = "()"


def module_path(path: str) -> str:
    """The path of the module that makes a call, or the path itself where it is that of a module."""
    return path.partition(_CALL)[0].rpartition(".")[0] if _CALL in path else path


@dataclass(frozen=True, slots=True)
class HelperCall:
    """A call of a function: its name, and the line that calls it."""

    name: str
    site: SourceLocation


def line_of_call(graph: Graph, block: BlockCall) -> tuple[SourceLocation | None, str]:
    """The user's line that calls a module, where that is known, and the path of the caller."""
    words = block.path.split(".")
    sources = [op.source for op in block.ops if op.source is not None]
    # What a module of torch runs is told to be of the line that calls it.
    of_torch = class_of_torch(graph, block.path) is not None
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
        regions = regions_around(block)
        return Op(own, made, result, line, around, block.mode, layer=layer, regions=regions)

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
        regions, site = regions_around(call), helper.site
        return Op(call.path, made, result, site, around, call.mode, layer=layer, regions=regions)

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
    module = op.module.removeprefix(root).removeprefix(".")
    return dataclasses.replace(op, module=module)


# --- the user's functions, as blocks: which ops a call of one runs -----------------------------


def enter_calls(ops: Sequence[Op], found: dict[str, HelperCall]) -> tuple[Op, ...]:
    """The ops of a method, with the paths of the calls that they are in as those of modules.

    An op knows the lines that led to it from a module's `forward`. Ops in a row of one call of a
    function get a path below that of their module, such as `attn.rotate_half()mul_1`, and blocks
    are found by paths.

    Args:
        found: takes the calls, by their paths.
    """
    within = Counter(path for op in ops for path in {"", *prefixes(op.module)})
    entered: dict[str, Op] = {}
    for module in dict.fromkeys(op.module for op in ops):
        own = [op for op in ops if op.module == module]
        entered.update(_group(own, 0, module, within[module], found))
    return tuple(entered[op.name] for op in ops)


def _group(
    ops: Sequence[Op], depth: int, path: str, around: int, found: dict[str, HelperCall]
) -> Iterator[tuple[str, Op]]:
    """The ops of a module or call, by name, in the calls that it makes.

    Args:
        around: ops that it runs, those of modules that it calls included.
    """
    for _, group in groupby(_numbered(ops, depth), key=lambda pair: pair[0]):
        members = [op for _, op in group]
        chain = _chain(members[0])
        if len(chain) <= depth:
            yield from ((op.name, dataclasses.replace(op, module=path)) for op in members)
            continue
        for part in _apart(members, depth, chain[depth]):
            own = path
            if len(part) < around:
                own = f"{path}.{chain[depth].name}{_CALL}{part[0].name}".removeprefix(".")
                found[own] = chain[depth]
            yield from _group(part, depth + 1, own, len(part), found)


def _chain(op: Op) -> tuple[HelperCall, ...]:
    """The calls of functions that an op is made in, outermost first; of closures, those around.

    A segment is called by `forward` alone, as it is a method of the stage.
    """
    if op.source is None or runs_again(op.call):
        return ()
    pairs = pairwise((*op.source.callers, op.source))
    calls = (
        HelperCall(_function_name(inner.function), outer)
        for outer, inner in pairs
        if not is_closure(inner)
    )
    return tuple(call for call in calls if call.name.isidentifier())


def _apart(ops: list[Op], depth: int, called: HelperCall) -> list[list[Op]]:
    """The ops of several calls that stand in one statement, each by itself: `f(x) + f(y)`.

    A function of several statements begins again where its lines do, which separates its calls.
    """
    count = calls_at(called.site, called.name)
    size, rest = divmod(len(ops), max(count, 1))
    chains = [(*op.source.callers, op.source)[depth + 1 :] for op in ops if op.source is not None]
    alike = [kind_of(op) for op in ops] == [kind_of(op) for op in ops[:size]] * count
    if count < 2 or rest or not alike or len({chain[0].line for chain in chains}) > 1:
        return [ops]
    return [ops[start : start + size] for start in range(0, len(ops), size)]


def _function_name(text: str) -> str:
    """The user's name; Python changes `__x` inside classes."""
    return text.strip("_") if text.startswith("__") else text


def _numbered(ops: Sequence[Op], depth: int) -> Iterator[tuple[int, Op]]:
    """The ops with the numbers of the calls that make them at some depth."""
    number, before = 0, None
    for op in ops:
        chain = _chain(op)
        called = chain[depth] if len(chain) > depth else None
        line = 0
        if called is not None:
            assert op.source is not None
            frames = (*op.source.callers, op.source)
            inside = frames[frames.index(called.site) + 1] if called.site in frames else op.source
            line = first_line(inside)
        if before is not None and (called != before[0] or line < before[1]):
            number += 1
        before = called, line
        yield number, op
