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
from gpipe_compiler.codegen.calls import Calls, HelperCall, module_path, relative
from gpipe_compiler.codegen.construction import (
    Arguments,
    Construction,
    SourceFile,
    WrittenBlock,
    buffer_types,
    by_position,
    class_lines,
    init_lines,
)
from gpipe_compiler.codegen.constructor_names import InnerBlocks, constructor_names, inputs_first
from gpipe_compiler.codegen.constructors import StageState, frozen_in_part
from gpipe_compiler.codegen.expressions import ExpressionWriter, RawText, outer_argument
from gpipe_compiler.codegen.facts import CodeFacts
from gpipe_compiler.codegen.find_loops import LoopFinder
from gpipe_compiler.codegen.imports import Imports
from gpipe_compiler.codegen.layout import call, lay_out
from gpipe_compiler.codegen.method_text import MethodBody, function_text, method_text
from gpipe_compiler.codegen.methods import Method, is_tensor
from gpipe_compiler.codegen.module_tree import ModuleNode
from gpipe_compiler.codegen.names import RESERVED, Identifiers
from gpipe_compiler.codegen.parameter_names import parameter_names
from gpipe_compiler.codegen.releases import Peaks
from gpipe_compiler.codegen.rounds import LoopContext
from gpipe_compiler.codegen.sizes import ReadSize
from gpipe_compiler.codegen.value_names import is_result
from gpipe_compiler.ir import Mode, Op
from gpipe_compiler.ir.arguments import map_argument
from gpipe_compiler.ir.blocks import (
    BlockCall,
    BlockClass,
    Parameter,
    calls_in,
    is_chain,
    outer_states,
    regions_around,
    turns_around,
)
from gpipe_compiler.ir.classes import MethodBlocks, Methods
from gpipe_compiler.ir.contents import Contents, class_of_torch, is_under
from gpipe_compiler.ir.forms import ConstantSlot, LocalSizes
from gpipe_compiler.plan import Stage

DEVICE = "device"
"""The argument of functions that are given no tensor to read the device off."""


@dataclass(frozen=True)
class StageMethods:
    """What a stage runs and holds.

    Attributes:
        ops: all, those of the loss included.
        outputs: what `forward` returns.
        methods: those that are written with calls of blocks, by name, in the order in which they
            run: `forward`, and the segments that it calls.
        losses: `loss`, where the stage has it.
        again: the paths of modules whose calls run again in the backward.
    """

    stage: Stage
    state: StageState
    ops: tuple[Op, ...]
    outputs: tuple[str, ...]
    methods: Mapping[str, Method]
    losses: tuple[Method, ...]
    again: frozenset[str]

    @property
    def class_name(self) -> str:
        return f"Stage{self.stage.index}"


@dataclass
class StageBlocks:
    """The blocks of a stage.

    Attributes:
        helpers: the calls of functions, by their paths.
        searched: what was looked through.
        written: the blocks of all stages that may be constructed, by their ids.
        worth: the storages of all stages that are worth letting go of early.
    """

    facts: CodeFacts
    own: StageMethods
    helpers: Mapping[str, HelperCall]
    searched: Methods
    blocks: MethodBlocks
    written: dict[int, WrittenBlock]
    worth: set[int]
    file: SourceFile

    @property
    def contents(self) -> Contents:
        return self.searched.contents

    @cached_property
    def holders(self) -> Mapping[str, ModuleNode]:
        return {holder.prefix[:-1]: holder for holder in self.own.state.root.all()}

    @cached_property
    def bodies(self) -> Mapping[str, BlockCall]:
        """What the methods run, by their names."""
        pairs = zip(self.own.methods.items(), self.blocks.bodies, strict=True)
        return {
            label: BlockCall("", parts, method.arguments, method.returns)
            for (label, method), parts in pairs
        }

    @cached_property
    def peaks(self) -> Peaks:
        _, *segments = self.bodies.items()
        graph, runs = self.facts.graph, self.facts.runs
        return Peaks(graph, runs, self.blocks, dict(segments), self.worth)

    @property
    def again(self) -> frozenset[str]:
        """Of the modules that are to run again, those that are called once, as blocks."""
        methods = self.own.methods.values()
        calls = (c for parts in self.blocks.bodies for c in calls_in(parts) if c.again)
        counts = Counter(call.path for call in calls if call.outputs)
        turns = {*turns_around(op for method in methods for op in method.ops)}
        called = Counter(path for path, _ in turns)
        return frozenset(path for path, count in counts.items() if count == called[path] == 1)

    @cached_property
    def calls(self) -> Calls:
        return Calls(
            self.facts, self.contents, self.blocks, self.holders, self.written, self.helpers
        )

    def construction(self, file: SourceFile) -> Construction:
        return Construction(
            self.facts.graph,
            self.own.state,
            file,
            self.own.stage.index,
            self.holders,
            self.blocks.of_path,
            {path for path, _ in self.searched.parted}.__contains__,
            self.written,
        )

    def with_calls(self, index: int, method: Method) -> Method:
        """A method of the stage with calls of blocks in place of their ops."""
        parts = self.blocks.bodies[index]
        ops, draws = self.calls.ops(parts, method.returns, self.file), self.calls.draws(parts)
        read = {value for op in ops for value in op.inputs}.union(method.returns)
        given = tuple(item for item in method.given if item.value in read)
        looped = self._loops(draws).looped(ops, method.returns)
        return dataclasses.replace(method, ops=looped, given=given, draws=draws)

    def _loops(self, draws: Mapping[str, int]) -> LoopFinder:
        functions = self.calls.functions
        around = LoopContext(self.facts.graph, functions, self.holders, self.worth)
        return LoopFinder(around, draws)

    @property
    def places(self) -> Mapping[str, str]:
        """The expressions of the stage for its blocks."""
        modules = {path: holder.place for path, holder in self.holders.items()}
        return modules | self.calls.functions

    def write(self, block: BlockClass, wanted: str, file: SourceFile) -> WrittenBlock:
        """Adds the class of a block, whose first call is one of the stage, to a file."""
        first = block.first
        if first.path in self.helpers:
            return self._write_function(block, wanted, file)
        holder, parameters = self.holders[first.path], self._parameters(block)
        given = Arguments.of(parameters)
        inner = {part.path for part in first.parts if isinstance(part, BlockCall)}
        owners = {op.name for op in first.ops} | (inner & self.helpers.keys())
        attributes = {slot: own for slot, own in given.names.items() if slot.owner in owners}
        names = {slot: f"self.{own}" for slot, own in attributes.items()}
        ops = self.calls.ops(first.parts, first.outputs, file, names)
        # Torch's own lines are no comment, and its names unknown.
        if class_of_torch(self.facts.graph, first.path):
            ops = tuple(dataclasses.replace(op, source=None) for op in ops)
        method, passed = self._method(block, ops, names)
        chained = self._is_chain(block)
        file.imports.name("torch", "nn")
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
            file.imports.name("torch", "Tensor")
            body = self._body(block, method, file.imports)
            text = class_lines(
                f"{own_name}(nn.{base})",
                buffer_types(holder, file.imports, self.own.state.unread),
                init_lines(given.types, constructor),
                method_text(self.facts.graph, "forward", method, body, file.imports),
            )
        file.classes.append(text)
        return WrittenBlock(own_name, passed, parameters, shared=file.shared)

    def _write_function(self, block: BlockClass, wanted: str, file: SourceFile) -> WrittenBlock:
        """Adds a function; numbers that differ between its calls are its last arguments."""
        first, parameters = block.first, self._parameters(block)
        given = Arguments.of(parameters)
        ops = self.calls.ops(first.parts, first.outputs, file, given.names)
        method, passed = self._method(block, ops, given.names)
        file.imports.name("torch", "Tensor")
        own_name = file.names.take_numbered(wanted, "_")
        alone = not any(is_tensor(self.facts.graph, value) for value in method.arguments)
        also = {**({DEVICE: "torch.device"} if alone else {}), **given.types}
        if alone:
            file.imports.module("torch")
        body = self._body(block, method, file.imports, DEVICE if alone else "", also)
        graph = self.facts.graph
        file.classes.append(tuple(function_text(graph, own_name, method, body, file.imports, also)))
        return WrittenBlock(own_name, passed, parameters, shared=file.shared, on_device=alone)

    def _is_chain(self, block: BlockClass) -> bool:
        """Whether a block is an nn.Sequential, whose constructor describes all its modules.

        Its modules have numbers there, not the names by which others read what is in them.
        """
        holder = self.holders[block.first.path]
        return (
            is_chain(self.contents, block.first, self.facts.shapes)
            and not any(frozen_in_part(self.facts.graph, item) for _, item in holder.modules())
            and not self._is_read_elsewhere(block)
        )

    def _is_read_elsewhere(self, block: BlockClass) -> bool:
        """Whether a stage that calls a block reads what its modules hold in other ops, too."""
        graph = self.facts.graph
        within = {op.name for made in block.calls for op in made.ops}
        around = self.own.stage.ops if len(block.stages) == 1 else graph.op_of
        others = {
            state
            for name in around
            if name not in within
            for state in graph.op_of[name].states(graph.modules)
        }
        held = tuple(f"{path}." for path in block.paths)
        return any(self.contents.places.get(state, state).startswith(held) for state in others)

    def _parameters(self, block: BlockClass) -> dict[str, Parameter]:
        """The parameters of a constructor by name, in order: sizes first."""
        holder = self.holders.get(block.first.path)
        members = () if holder is None else holder.members
        names = Identifiers((*RESERVED, *dir(nn.Module()), *members))
        inside = InnerBlocks(self.blocks.of_path, self.written)
        found = inputs_first(constructor_names(self.facts.graph, block, inside, names))
        return dict(sorted(found.items(), key=lambda item: not by_position(item[1].name)))

    def _method(
        self, block: BlockClass, ops: Sequence[Op], names: Mapping[ConstantSlot, str]
    ) -> tuple[Method, tuple[int, ...]]:
        """What a call computes, and the inputs that it is passed."""
        first, graph, templates = block.first, self.facts.graph, self.facts.templates
        if first.mode is not Mode.ALWAYS:  # nobody calls it in another
            ops = [dataclasses.replace(op, mode=Mode.ALWAYS) for op in ops]
        if around := len(regions_around(first)):  # whoever calls it does so in these
            ops = [dataclasses.replace(op, regions=op.regions[around:]) for op in ops]
        read = {value for op in ops for value in op.inputs}
        told = graph.told(read.intersection(first.inputs))
        given = self.facts.shapes.read_off(first.inputs, told)
        names_of = parameter_names(graph, first)
        order = {value: place for place, value in enumerate(names_of)}
        # What a module makes and reads itself, in two stages, is none of the user's parameters.
        inside = {
            value: own
            for value, own in next(iter(self.own.methods.values())).names.items()
            if (maker := graph.producer.get(value)) and is_under(f"{maker.module}.", first.path)
            if not is_result(graph, value, first.path)
        }
        passed = tuple(
            index
            for index, value in sorted(
                enumerate(first.inputs), key=lambda item: order.get(item[1], len(order))
            )
            if value in read and value not in given
        )
        states = (outer_argument(name) for name in outer_states(self.contents, first))
        root = module_path(first.path)
        local = [self._local(op, root, names) for op in ops]
        draws = self.calls.draws(first.parts)
        method = Method(
            self._loops(draws).looped(local, first.outputs),
            (*(first.inputs[index] for index in passed), *states),
            first.outputs,
            self.facts.multiples,
            tuple(
                ReadSize(value, templates[value], graph.producer[value])
                for value in given
                if value in read
            ),
            {**names_of, **inside},
            draws,
        )
        return method, passed

    def _local(self, op: Op, root: str, names: Mapping[ConstantSlot, str]) -> Op:
        """An op as the block has it: paths in comments from its module on, numbers by name."""
        made = op.call
        if op.name in self.facts.graph.op_of and any(slot.owner == op.name for slot in names):
            numbers = itertools.count()

            def leaf(item: object) -> object:
                own = names.get(ConstantSlot(op.name, next(numbers)))
                return item if own is None else RawText(own)

            args, kwargs = map_argument(leaf, (made.args, dict(made.kwargs)))
            made = dataclasses.replace(made, args=args, kwargs=kwargs)
        return relative(dataclasses.replace(op, call=made), root)

    def _unlike(self, block: BlockClass) -> Mapping[str, int]:
        """The values of a block whose sizes are not the same in all calls; of how many first ones
        it is the same where they can be read. The numbers among them that follow from shapes, and
        not in the same way.

        Those that it is given are among them.
        """
        graph = self.facts.graph
        found: dict[str, int] = {}
        of_calls = [
            [*call.inputs, *(value for op in call.ops for value in op.outputs)]
            for call in block.calls
        ]
        read = [LocalSizes.of(graph, call.inputs) for call in block.calls]
        for own in zip(*of_calls, strict=True):
            known = [graph.values[value] for value in own if value in graph.values]
            numbers = {
                repr(sizes.relative(self.facts.templates.get(value)))
                for value, sizes in zip(own, read, strict=True)
            }
            if len(numbers) > 1:
                found[own[0]] = 0
            elif len({(value.dims, value.batch_dim) for value in known}) > 1:
                pairs = zip(known, read, strict=True)
                placed = [[at.places.get(dim, dim) for dim in value.dims] for value, at in pairs]
                sizes = zip(*placed, strict=False)
                alike = itertools.takewhile(lambda sizes: len(set(sizes)) == 1, sizes)
                same_batch = len({value.batch_dim for value in known}) == 1
                found[own[0]] = len([*alike]) if same_batch else 0
        return found

    def _body(
        self,
        block: BlockClass,
        method: Method,
        imports: Imports,
        device: str = "",
        reserved: Iterable[str] = (),
    ) -> MethodBody:
        """The statements of a block.

        Args:
            device: the argument that is the device, where it is given that.
        """
        root = block.first.path
        states = {
            name: self.calls.place(place, root)
            for name, place in self.own.state.places.items()
            if name in self.contents.places and is_under(self.contents.places[name], root)
        }
        modules = {
            path: self.calls.place(holder.place, root)
            for path, holder in self.holders.items()
            if path == root or is_under(path, root)
        }
        modules |= self.calls.functions
        writer = ExpressionWriter(imports, states, modules, given_device=device)
        worth, unlike = self.worth, self._unlike(block)
        return write_body(
            self.facts.graph, method, writer, worth, unlike, direct=True, reserved=reserved
        )
