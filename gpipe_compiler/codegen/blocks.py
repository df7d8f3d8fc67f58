"""The blocks of stages as classes, those that several stages call in `layers.py`."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from gpipe_compiler.codegen.body import write_body
from gpipe_compiler.codegen.calls import Calls
from gpipe_compiler.codegen.construction import (
    Arguments,
    Construction,
    SourceFile,
    WrittenBlock,
    buffer_types,
    by_position,
    class_lines,
    init_lines,
    relative,
)
from gpipe_compiler.codegen.constructors import StageState, frozen_in_part
from gpipe_compiler.codegen.expressions import ExpressionWriter, OwnAttribute, outer_argument
from gpipe_compiler.codegen.facts import CodeFacts
from gpipe_compiler.codegen.imports import Imports
from gpipe_compiler.codegen.layout import call, lay_out
from gpipe_compiler.codegen.method_text import is_tensor, method_text, returned_type, types_of
from gpipe_compiler.codegen.methods import Method, ReadSize, contains_batch, tells_batch
from gpipe_compiler.codegen.names import RESERVED, Identifiers, class_name
from gpipe_compiler.codegen.nested import ModuleNode
from gpipe_compiler.codegen.peaks import Peaks
from gpipe_compiler.codegen.sources import parameter_names
from gpipe_compiler.ir import Graph, Op, RegionCall
from gpipe_compiler.ir.arguments import map_argument
from gpipe_compiler.ir.blocks import BlockCall, BlockClass, Body, Parameter, calls_in
from gpipe_compiler.ir.classes import MethodBlocks, Methods, find_blocks, is_chain, outer_states
from gpipe_compiler.ir.contents import Contents, is_under, prefixes
from gpipe_compiler.ir.forms import ConstantSlot
from gpipe_compiler.passes.duplicate import BatchMultiple
from gpipe_compiler.plan import Stage


@dataclass(frozen=True)
class StageMethods:
    """What a stage runs and holds.

    Attributes:
        class_name: of its module.
        state: the modules and tensors that it owns.
        methods: those that are written with calls of blocks, by name, in the order in which they
            run: `forward`, and the segments that it calls.
        again: the paths of modules whose calls run again in the backward.
    """

    stage: Stage
    class_name: str
    state: StageState
    methods: Mapping[str, Method]
    again: frozenset[str] = frozenset()


@dataclass
class StageBlocks:
    """The blocks of a stage.

    Attributes:
        written: the blocks that may be constructed, by their ids.
        file: that of the stage.
    """

    facts: CodeFacts
    own: StageMethods
    searched: Methods
    blocks: MethodBlocks
    peaks: Peaks
    written: dict[int, WrittenBlock]
    file: SourceFile

    @property
    def contents(self) -> Contents:
        """What the stage holds."""
        return self.searched.contents

    @cached_property
    def holders(self) -> Mapping[str, ModuleNode]:
        """The modules of the stage by their paths."""
        return {holder.prefix[:-1]: holder for holder in self.own.state.root.all()}

    @cached_property
    def calls(self) -> Calls:
        """How methods call the blocks."""
        return Calls(self.facts, self.contents, self.blocks, self.holders, self.written)

    def construction(self, file: SourceFile) -> Construction:
        """What constructs the modules of the stage."""
        return Construction(
            self.facts.graph,
            self.own.stage.index,
            self.own.state,
            file,
            self.holders,
            self.blocks.of_path,
            self.searched.split,
            self.written,
        )

    def with_calls(self, index: int, method: Method) -> Method:
        """A method of the stage with calls of blocks in place of their ops."""
        ops = self.calls.ops(self.blocks.bodies[index], method.returns, "")
        read = {value for op in ops for value in op.inputs}.union(method.returns)
        given = tuple(item for item in method.given if item.value in read)
        return dataclasses.replace(method, ops=ops, given=given)

    @property
    def places(self) -> Mapping[str, str]:
        """The expressions of the stage for its blocks."""
        return {path: self.holders[path].place for path in self.blocks.of_path}

    def write(self, block: BlockClass, wanted: str, file: SourceFile) -> WrittenBlock:
        """Adds the class of a block, whose first call is one of the stage, to a file.

        Args:
            wanted: what it is to be called.
        """
        first, holder = block.first, self.holders[block.first.path]
        ops = self.calls.ops(first.parts, first.outputs, first.path)
        parameters = self._parameters(block)
        given = Arguments.of(parameters)
        own_ops = {op.name for op in ops}
        attributes = {slot: own for slot, own in given.names.items() if slot.owner in own_ops}
        method, passed = self._method(block, ops, attributes)
        chained = self._is_chain(block)
        file.imports.from_torch("nn")
        if chained and block.user == nn.Sequential.__name__:
            return WrittenBlock("nn.Sequential", passed, parameters, inline=True)
        own_name, construction = file.names.take_numbered(wanted), self.construction(file)
        if chained:
            made = call("super().__init__", construction.chain(holder, given))
            head = init_lines(given.types, lay_out(made, indent=2))
            constructor = [line for line in head if line != "        super().__init__()"]
            text = class_lines(f"{own_name}(nn.Sequential)", [], constructor, [])
        else:
            lines = [f"        self.{own} = {own}" for own in dict.fromkeys(attributes.values())]
            constructor = [*lines, *construction.lines(holder, given)]
            base = "ModuleDict" if holder.cls is nn.ModuleDict else "Module"
            text = class_lines(
                f"{own_name}(nn.{base})",
                buffer_types(holder, file.imports),
                init_lines(given.types, constructor),
                self._forward(block, method, file.imports),
            )
        file.classes.append(text)
        return WrittenBlock(own_name, passed, parameters, shared=file.shared)

    def _is_chain(self, block: BlockClass) -> bool:
        """Whether a block is an nn.Sequential, all of whose modules its constructor tells whole."""
        holder = self.holders[block.first.path]
        return is_chain(self.contents, block.first, self.facts.templates) and not any(
            frozen_in_part(self.facts.graph, item) for _, item in holder.modules()
        )

    def _parameters(self, block: BlockClass) -> dict[str, Parameter]:
        """The parameters of a constructor by name, in order: sizes first."""
        members = self.holders[block.first.path].members
        names = Identifiers((*RESERVED, *dir(nn.Module()), *members))
        found = {names.take(parameter.name): parameter for parameter in block.parameters}
        return dict(sorted(found.items(), key=lambda item: not by_position(item[0])))

    def _method(
        self, block: BlockClass, ops: Sequence[Op], attributes: Mapping[ConstantSlot, str]
    ) -> tuple[Method, tuple[int, ...]]:
        """What a call computes, and the inputs that it is passed."""
        first, graph, templates = block.first, self.facts.graph, self.facts.templates
        read = {value for op in ops for value in op.inputs}
        telling = any(
            value in graph.values and tells_batch(graph.values[value]) for value in first.inputs
        )
        given = [
            value
            for value in first.inputs
            if value in templates and (telling or not contains_batch(templates[value]))
        ]
        passed = tuple(
            index
            for index, value in enumerate(first.inputs)
            if value in read and value not in given
        )
        states = (outer_argument(name) for name in outer_states(self.contents, first))
        local = [self._local(op, first.path, attributes) for op in ops]
        method = Method(
            tuple(local),
            (*(first.inputs[index] for index in passed), *states),
            first.outputs,
            frozenset(value for value, item in templates.items() if item == BatchMultiple(1)),
            tuple(
                ReadSize(value, templates[value], relative(graph.producer[value], first.path))
                for value in given
                if value in read
            ),
            parameter_names(graph, first),
        )
        return method, passed

    @staticmethod
    def _local(op: Op, root: str, attributes: Mapping[ConstantSlot, str]) -> Op:
        """An op as the block has it: paths in comments from its module on, numbers by name."""
        made = op.call
        if not isinstance(made, RegionCall) and any(s.owner == op.name for s in attributes):
            numbers = itertools.count()

            def leaf(item: object) -> object:
                own = attributes.get(ConstantSlot(op.name, next(numbers)))
                return item if own is None else OwnAttribute(own)

            args, kwargs = map_argument(leaf, (made.args, dict(made.kwargs)))
            made = dataclasses.replace(made, args=args, kwargs=kwargs)
        return relative(dataclasses.replace(op, call=made), root)

    def _unlike(self, block: BlockClass) -> frozenset[str]:
        """The values of a block whose sizes are not the same in all calls."""
        values = self.facts.graph.values
        first = [value for op in block.first.ops for value in op.outputs]
        found: set[str] = set()
        for other in block.calls[1:]:
            made = (value for op in other.ops for value in op.outputs)
            for one, same in zip(first, made, strict=True):
                known = [values.get(value) for value in (one, same)]
                shapes = [(v.shape, v.batch_dim) if v else None for v in known]
                if shapes[0] != shapes[1]:
                    found.add(one)
        return frozenset(found)

    def _forward(self, block: BlockClass, method: Method, imports: Imports) -> list[str]:
        graph, root = self.facts.graph, block.first.path
        states = {
            name: self.calls.place(place, root)
            for name, place in self.own.state.places.items()
            if is_under(self.contents.places[name], root)
        }
        modules = {
            path: self.calls.place(holder.place, root)
            for path, holder in self.holders.items()
            if is_under(path, root)
        }
        imports.from_torch("Tensor")
        writer = ExpressionWriter(imports, states, modules)
        unlike = self._unlike(block)
        body = write_body(graph, method, writer, self.peaks.worth, unlike, direct=True)
        returned = returned_type([is_tensor(graph, value) for value in method.returns])
        types = types_of(graph, method.arguments, body.arguments)
        return method_text("forward", body, returned, [], types)


@dataclass(frozen=True)
class FoundBlocks:
    """The blocks of some stages; for each, what was looked through and what was found."""

    stages: tuple[StageMethods, ...]
    methods: tuple[Methods, ...]
    blocks: tuple[MethodBlocks, ...]

    @classmethod
    def of(cls, facts: CodeFacts, stages: Iterable[StageMethods]) -> FoundBlocks:
        """Looks for them."""
        known = tuple(stages)
        methods = tuple(_methods(facts.graph, own) for own in known)
        return cls(known, methods, find_blocks(methods, facts.templates))

    def again(self, place: int) -> frozenset[str]:
        """Of the modules of a stage that are to run again, those that are called once, as blocks.

        Args:
            place: of the stage among these.
        """
        calls = (c for parts in self.blocks[place].bodies for c in calls_in(parts) if c.again)
        counts = Counter(call.path for call in calls if call.outputs)
        return frozenset(path for path, count in counts.items() if count == 1)


def write_blocks(
    facts: CodeFacts, found: FoundBlocks
) -> tuple[tuple[StageBlocks, ...], SourceFile]:
    """The blocks of some stages, written, and the file of those that several of them call."""
    classes = found.blocks[0].classes
    reserved = (*RESERVED, *(own.class_name for own in found.stages))
    layers = SourceFile(Identifiers(reserved), shared=True)
    written: dict[int, WrittenBlock] = {}
    worth: set[int] = set()
    made: dict[int, StageBlocks] = {}
    for own, methods, blocks in zip(found.stages, found.methods, found.blocks, strict=True):
        made[own.stage.index] = StageBlocks(
            facts,
            own,
            methods,
            blocks,
            _peaks(facts, own, blocks, worth),
            written,
            SourceFile(layers.names),
        )
    wanted = _names(classes, made)
    for block in (block for block in classes if len(block.stages) > 1):
        written[id(block)] = made[block.first.stage].write(block, wanted[id(block)], layers)
    for stage in made.values():
        stage.file.names = Identifiers(layers.names.taken)
    for block in (block for block in classes if len(block.stages) == 1):
        stage = made[block.first.stage]
        written[id(block)] = stage.write(block, wanted[id(block)], stage.file)
    return tuple(made.values()), layers


def _methods(graph: Graph, own: StageMethods) -> Methods:
    """A stage as blocks are looked for in it."""
    here = frozenset(own.stage.ops)
    split = {prefix for op in graph.ops if op.name not in here for prefix in prefixes(op.module)}
    displaced = {prefix for path in own.state.displaced for prefix in prefixes(path)}
    kept = {holder.prefix[:-1] for holder in own.state.root.all()} - displaced
    return Methods(
        Contents(graph, tuple(own.state.modules), tuple(own.state.places)),
        [Body(method.ops, method.returns) for method in own.methods.values()],
        [path for path in graph.module_classes if path in kept],
        split.__contains__,
        own.stage.index,
        own.again,
    )


def _peaks(facts: CodeFacts, own: StageMethods, blocks: MethodBlocks, worth: set[int]) -> Peaks:
    """What the methods of a stage have to let go of, added to what is worth it."""
    first, *others = (
        BlockCall("", parts, method.arguments, method.returns)
        for method, parts in zip(own.methods.values(), blocks.bodies, strict=True)
    )
    segments = dict(zip(list(own.methods)[1:], others, strict=True))
    peaks = Peaks(facts.graph, facts.runs, blocks, segments, worth)
    peaks.method(first)
    return peaks


def _names(classes: Sequence[BlockClass], stages: Mapping[int, StageBlocks]) -> dict[int, str]:
    """The user's names; of several classes that have one, with what tells one from the others."""

    def is_part(block: BlockClass) -> bool:
        return stages[block.first.stage].searched.split(block.first.path)

    held = {id(b): stages[b.first.stage].holders[b.first.path].members for b in classes}
    names: dict[int, str] = {}
    for block in classes:
        own = names[id(block)] = class_name(block.user)
        whole = [held[id(b)] for b in classes if b.user == block.user and not is_part(b)]
        words = (word for word in held[id(block)] if word.isidentifier())
        holding = {word: sum(word in members for members in whole) for word in words}
        rarest = min(holding, key=holding.__getitem__, default="")
        if is_part(block):
            names[id(block)] = f"{own}Part"
        elif rarest and holding[rarest] < len(whole):
            names[id(block)] = f"{own}With{class_name(rarest)}"
    return names
