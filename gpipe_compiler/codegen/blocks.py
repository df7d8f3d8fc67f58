"""The blocks of a stage as classes of their own."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from gpipe_compiler.codegen.block_text import (
    Arguments,
    WrittenBlock,
    buffer_types,
    by_position,
    class_lines,
    init_lines,
    relative,
)
from gpipe_compiler.codegen.body import write_body
from gpipe_compiler.codegen.calls import Calls
from gpipe_compiler.codegen.construction import Construction
from gpipe_compiler.codegen.constructors import StageState, frozen_in_part
from gpipe_compiler.codegen.expressions import OwnAttribute, Writer, outer_argument
from gpipe_compiler.codegen.facts import Facts
from gpipe_compiler.codegen.imports import Imports
from gpipe_compiler.codegen.layout import call, lay_out
from gpipe_compiler.codegen.method_text import is_tensor, method_text, returned_type, types_of
from gpipe_compiler.codegen.methods import Given, Method
from gpipe_compiler.codegen.names import RESERVED, Names, class_name
from gpipe_compiler.codegen.parameters import parameter_names
from gpipe_compiler.codegen.peaks import Content, Peaks
from gpipe_compiler.codegen.templates import contains_batch, tells_batch
from gpipe_compiler.ir import Op, RegionCall
from gpipe_compiler.ir.arguments import map_argument
from gpipe_compiler.ir.blocks import BlockClass, Body, Parameter
from gpipe_compiler.ir.classes import Blocks, find_blocks, is_chain, outer_states
from gpipe_compiler.ir.contents import Contents, is_under, prefixes
from gpipe_compiler.ir.forms import Slot
from gpipe_compiler.passes.duplicate import BatchMultiple
from gpipe_compiler.plan import Stage


@dataclass
class StageBlocks:
    """The blocks of a stage.

    Attributes:
        split: the paths of modules of which other stages run ops.
    """

    facts: Facts
    state: StageState
    imports: Imports
    contents: Contents
    blocks: Blocks
    split: Collection[str]
    names: Names
    peaks: Peaks

    @classmethod
    def of(
        cls,
        facts: Facts,
        stage: Stage,
        state: StageState,
        methods: Mapping[str, Method],
        imports: Imports,
        own_name: str,
    ) -> StageBlocks:
        """Finds and writes the blocks that some methods of a stage call.

        Args:
            methods: those to be written with calls of blocks, by name, in the order in which they
                run: `forward`, and the segments that it calls.
            own_name: of the class of the stage.
        """
        graph = facts.graph
        here = frozenset(stage.ops)
        absent = {
            prefix for op in graph.ops if op.name not in here for prefix in prefixes(op.module)
        }
        displaced = {prefix for path in state.displaced for prefix in prefixes(path)}
        kept = {holder.prefix[:-1] for holder in state.root.all()} - displaced
        bodies = [Body(method.ops, method.returns) for method in methods.values()]
        contents = Contents(graph, tuple(state.modules), tuple(state.places))
        blocks = find_blocks(
            contents,
            bodies,
            facts.templates,
            [path for path in graph.module_classes if path in kept],
            absent.__contains__,
        )
        names = Names((*RESERVED, own_name))
        first, *others = (
            Content(method.arguments, parts, method.returns)
            for method, parts in zip(methods.values(), blocks.bodies, strict=True)
        )
        segments = dict(zip(list(methods)[1:], others, strict=True))
        peaks = Peaks(graph, facts.runs, blocks, segments)
        peaks.method(first)
        made = cls(facts, state, imports, contents, blocks, absent, names, peaks)
        for block in blocks.classes:
            made.construction.written[id(block)] = made._write(block)
        return made

    @cached_property
    def construction(self) -> Construction:
        """What constructs the blocks, and their classes."""
        of_path = self.blocks.of_path
        return Construction(
            self.facts.graph, self.state, self.imports, of_path, self.split, self.names
        )

    @cached_property
    def calls(self) -> Calls:
        """How methods call the blocks."""
        holders = {holder.prefix[:-1]: holder for holder in self.state.root.all()}
        return Calls(self.facts, self.contents, self.blocks, holders)

    def with_calls(self, index: int, method: Method) -> Method:
        """A method of the stage with calls of blocks in place of their ops."""
        ops = self.calls.ops(self.blocks.bodies[index], method.returns, "")
        read = {value for op in ops for value in op.inputs}.union(method.returns)
        given = tuple(item for item in method.given if item.value in read)
        return dataclasses.replace(method, ops=ops, given=given)

    @property
    def places(self) -> Mapping[str, str]:
        """The expressions of the stage for its blocks."""
        return {path: self.calls.holders[path].place for path in self.blocks.of_path}

    def _write(self, block: BlockClass) -> WrittenBlock:
        first, holder = block.first, self.calls.holders[block.first.path]
        ops = self.calls.ops(first.parts, first.outputs, first.path)
        parameters = self._parameters(block)
        given = Arguments.of(parameters)
        own_ops = {op.name for op in ops}
        attributes = {slot: own for slot, own in given.names.items() if slot.owner in own_ops}
        method, passed = self._method(block, ops, attributes)
        self.calls.passed[id(block)] = passed
        chained = self._is_chain(block)
        if chained and block.user == nn.Sequential.__name__:
            self.imports.from_torch("nn")
            return WrittenBlock("nn.Sequential", passed, parameters, inline=True)
        own_name = self._name(block)
        if chained:
            made = call("super().__init__", self.construction.chain(holder, given))
            head = init_lines(given.types, lay_out(made, indent=2))
            constructor = [line for line in head if line != "        super().__init__()"]
            text = class_lines(f"{own_name}(nn.Sequential)", [], constructor, [])
        else:
            lines = [f"        self.{own} = {own}" for own in dict.fromkeys(attributes.values())]
            constructor = [*lines, *self.construction.lines(holder, given)]
            base = "ModuleDict" if holder.cls is nn.ModuleDict else "Module"
            text = class_lines(
                f"{own_name}(nn.{base})",
                buffer_types(holder, self.imports),
                init_lines(given.types, constructor),
                self._forward(block, method),
            )
        self.construction.classes.append(text)
        return WrittenBlock(own_name, passed, parameters)

    def _is_chain(self, block: BlockClass) -> bool:
        """Whether a block is an nn.Sequential, all of whose modules its constructor tells whole."""
        holder = self.calls.holders[block.first.path]
        return is_chain(self.contents, block.first, self.facts.templates) and not any(
            frozen_in_part(self.facts.graph, self.calls.holders[f"{call.path}.{own}"])
            for call in block.calls
            for own in holder.members
        )

    def _parameters(self, block: BlockClass) -> dict[str, Parameter]:
        """The parameters of a constructor by name, in order: sizes first."""
        members = self.calls.holders[block.first.path].members
        names = Names((*RESERVED, *dir(nn.Module()), *members))
        found = {names.take(parameter.name): parameter for parameter in block.parameters}
        return dict(sorted(found.items(), key=lambda item: not by_position(item[0])))

    def _name(self, block: BlockClass) -> str:
        """The user's name; of several classes that have one, with what tells it from the others."""
        own = class_name(block.user)
        alike = (other.first.path for other in self.blocks.classes if other.user == block.user)
        if block.first.path in self.split:
            own = f"{own}Part"
        else:
            whole = [self.calls.holders[path].members for path in alike if path not in self.split]
            holding = {
                word: sum(word in members for members in whole)
                for word in self.calls.holders[block.first.path].members
                if word.isidentifier()
            }
            rarest = min(holding, key=holding.__getitem__, default="")
            if rarest and holding[rarest] < len(whole):
                own = f"{own}With{class_name(rarest)}"
        return self.names.take_numbered(own)

    def _method(
        self, block: BlockClass, ops: Sequence[Op], attributes: Mapping[Slot, str]
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
                Given(value, templates[value], graph.producer[value])
                for value in given
                if value in read
            ),
            parameter_names(graph, first),
        )
        return method, passed

    @staticmethod
    def _local(op: Op, root: str, attributes: Mapping[Slot, str]) -> Op:
        """An op as the block has it: paths in comments from its module on, numbers by name."""
        made = op.call
        if not isinstance(made, RegionCall) and any(s.owner == op.name for s in attributes):
            numbers = itertools.count()

            def leaf(item: object) -> object:
                own = attributes.get(Slot(op.name, next(numbers)))
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

    def _forward(self, block: BlockClass, method: Method) -> list[str]:
        graph, root = self.facts.graph, block.first.path
        states = {
            name: self.calls.place(place, root)
            for name, place in self.state.places.items()
            if is_under(self.contents.places[name], root)
        }
        modules = {
            path: self.calls.place(holder.place, root)
            for path, holder in self.calls.holders.items()
            if is_under(path, root)
        }
        writer = Writer(self.imports, states, modules)
        unlike = self._unlike(block)
        body = write_body(graph, method, writer, self.peaks.worth, unlike, direct=True)
        returned = returned_type([is_tensor(graph, value) for value in method.returns])
        types = types_of(graph, method.arguments, body.arguments)
        return method_text("forward", body, returned, [], types)
