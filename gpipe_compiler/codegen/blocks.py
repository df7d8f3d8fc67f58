"""The blocks of a stage as classes of their own, and the calls of them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import nn

from gpipe_compiler.codegen.body import Body as WrittenBody
from gpipe_compiler.codegen.body import write_body
from gpipe_compiler.codegen.constants import write_literal
from gpipe_compiler.codegen.constructors import StageState, construct
from gpipe_compiler.codegen.expressions import Layers, OwnAttribute, Writer, outer_argument, repeat
from gpipe_compiler.codegen.facts import Facts
from gpipe_compiler.codegen.imports import Imports
from gpipe_compiler.codegen.layout import Expression, call, consecutive, lay_out, name
from gpipe_compiler.codegen.loops import Loop, find_loops
from gpipe_compiler.codegen.method_text import is_tensor, method_text, returned_type, types_of
from gpipe_compiler.codegen.methods import Given, Method
from gpipe_compiler.codegen.names import RESERVED, Names, class_name
from gpipe_compiler.codegen.nested import Holder
from gpipe_compiler.codegen.peaks import Content, Peaks
from gpipe_compiler.codegen.templates import contains_batch, tells_batch
from gpipe_compiler.ir import FunctionCall, ModuleCall, Op, Ref, RegionCall, StateRef
from gpipe_compiler.ir.arguments import map_argument
from gpipe_compiler.ir.blocks import BlockCall, BlockClass, Body, Parameter, Part
from gpipe_compiler.ir.classes import Blocks, find_blocks, outer_states
from gpipe_compiler.ir.contents import Contents, is_under, prefixes
from gpipe_compiler.ir.forms import Slot
from gpipe_compiler.ir.ops import Result
from gpipe_compiler.passes.duplicate import BatchMultiple
from gpipe_compiler.plan import Stage

_BY_POSITION = ("in_", "out_", "num_", "normalized_")
"""How parameters begin that people pass by position."""


@dataclass(frozen=True, eq=False)
class WrittenBlock:
    """A block as a class.

    Attributes:
        passed: the inputs of a call that are passed, by their places.
        parameters: what its constructor is given: names, and the parameters of the block.
    """

    name: str
    passed: tuple[int, ...]
    parameters: Mapping[str, Parameter]
    lines: tuple[str, ...]


@dataclass
class StageBlocks:
    """The blocks of a stage.

    Attributes:
        split: the paths of modules of which other stages run ops.
        written: the classes, inner ones first.
    """

    facts: Facts
    state: StageState
    imports: Imports
    contents: Contents
    blocks: Blocks
    split: Collection[str]
    names: Names
    peaks: Peaks
    written: dict[int, WrittenBlock] = field(default_factory=dict)

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
            made.written[id(block)] = made._write(block)
        return made

    def with_calls(self, index: int, method: Method) -> Method:
        """A method of the stage with calls of blocks in place of their ops."""
        ops = self._ops(self.blocks.bodies[index], method.returns, "")
        read = {value for op in ops for value in op.inputs}.union(method.returns)
        given = tuple(item for item in method.given if item.value in read)
        return dataclasses.replace(method, ops=ops, given=given)

    @property
    def places(self) -> Mapping[str, str]:
        """The expressions of the stage for its blocks."""
        return {path: self._holders[path].place for path in self.blocks.of_path}

    def constructor(self) -> list[str]:
        """The lines of the stage's own `__init__`."""
        parts = (part for body in self.blocks.bodies for part in body)
        inner = dict.fromkeys(part.path for part in parts if isinstance(part, BlockCall))
        made = {path: self._construct(path, {}) for path in inner}
        return construct(self.facts.graph, self.state, self.imports, None, made)

    def _class_of(self, call: BlockCall) -> BlockClass:
        return self.blocks.of_path[call.path]

    @cached_property
    def _holders(self) -> Mapping[str, Holder]:
        """The modules of the stage by their paths."""
        return {holder.prefix[:-1]: holder for holder in self.state.root.all()}

    def _place(self, place: str, root: str) -> str:
        """An expression of the stage in a method of the module at `root`."""
        return "self" + place.removeprefix(self._holders[root].place)

    # Calls of blocks

    def _ops(self, parts: Sequence[Part], returns: Sequence[str], root: str) -> tuple[Op, ...]:
        """Parts of a method as ops: calls of blocks are calls of modules."""
        ops: list[Op] = []
        for number, part in enumerate(find_loops(parts, returns, self._class_of)):
            match part:
                case Loop():
                    ops.append(self._loop(part, number, root))
                case BlockCall():
                    made = ModuleCall(part.path, self._arguments(part))
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
        known = self.facts.graph.module_classes
        around = next((path for path in reversed(outer) if path in known), "")
        return Op(f"{block.path}({number})", made, result, None, around, block.mode)

    def _arguments(self, block: BlockCall) -> tuple[Ref | StateRef, ...]:
        passed = self.written[id(self._class_of(block))].passed
        states = outer_states(self.contents, block)
        return (*(Ref(block.inputs[index]) for index in passed), *map(StateRef, states))

    def _loop(self, loop: Loop, number: int, root: str) -> Op:
        first, last = loop.calls[0], loop.calls[-1]
        passed = self.written[id(self._class_of(first))].passed
        carried = tuple(passed.index(index) for index in loop.carried)
        each = self._each([call.path for call in loop.calls], root, carried)
        made = FunctionCall(repeat, (each, *self._arguments(first)))
        return self._op(first, made, last.outputs, number)

    def _each(self, paths: Sequence[str], root: str, carried: tuple[int, ...]) -> Layers:
        """How a loop runs over modules of one list."""
        around = paths[0].rpartition(".")[0]
        holder = self._holders[around]
        held = self._place(holder.place, root)
        words = [path.rpartition(".")[2] for path in paths]
        singular = around.rpartition(".")[2].removesuffix("s")
        one = singular if singular.isidentifier() and len(singular) > 1 else "layer"
        if list(holder.keyed) == list(holder.members) == words:
            return Layers(f"{held}.values()", one, "", carried)
        span = consecutive(words)
        if span and holder.keyed.keys() >= set(words):
            return Layers(span, "index", f"{held}[str({{}})]", carried)
        places = ", ".join(self._place(self._holders[path].place, root) for path in paths)
        return Layers(f"({places})", one, "", carried)

    # Classes

    def _write(self, block: BlockClass) -> WrittenBlock:
        first = block.first
        root = first.path
        ops = self._ops(first.parts, first.outputs, root)
        parameters = self._parameters(block)
        attributes = {
            slot: own
            for own, parameter in parameters.items()
            for slot in parameter.slots
            if slot.owner in {op.name for op in ops}
        }
        method, passed = self._method(block, ops, attributes)
        names = {slot: own for own, item in parameters.items() for slot in item.slots}
        lines = [f"        self.{own} = {own}" for own in dict.fromkeys(attributes.values())]
        inner = dict.fromkeys(part.path for part in first.parts if isinstance(part, BlockCall))
        made = {path: self._construct(path, names) for path in inner}
        holder = self._holders[root]
        lines += construct(self.facts.graph, self.state, self.imports, holder, made, names)
        typed = [f"{own}: {_type(item.values.values())}" for own, item in parameters.items()]
        body = self._body(block, method, root)
        text = [*_init(typed, lines), *self._forward(method, body)]
        own_name = self._name(block)
        base = self._holders[root].cls.__name__
        header = f"class {own_name}(nn.{base if base == 'ModuleDict' else 'Module'}):"
        return WrittenBlock(own_name, passed, parameters, (header, *text))

    def _name(self, block: BlockClass) -> str:
        """The user's name; of several classes that have one, with what tells it from the others."""
        own = class_name(block.user)
        alike = (other.first.path for other in self.blocks.classes if other.user == block.user)
        if block.first.path in self.split:
            own = f"{own}Part"
        else:
            whole = [self._holders[path].members for path in alike if path not in self.split]
            holding = {
                word: sum(word in members for members in whole)
                for word in self._holders[block.first.path].members
                if word.isidentifier()
            }
            rarest = min(holding, key=holding.__getitem__, default="")
            if rarest and holding[rarest] < len(whole):
                own = f"{own}With{class_name(rarest)}"
        numbered = (f"{own}{number}" for number in itertools.count(2))
        return self.names.take(
            next(free for free in itertools.chain((own,), numbered) if free not in self.names)
        )

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
        return _relative(dataclasses.replace(op, call=made), root)

    def _body(self, block: BlockClass, method: Method, root: str) -> WrittenBody:
        graph = self.facts.graph
        states = {
            name: self._place(place, root)
            for name, place in self.state.places.items()
            if is_under(self.contents.places[name], root)
        }
        modules = {
            path: self._place(holder.place, root)
            for path, holder in self._holders.items()
            if is_under(path, root)
        }
        writer = Writer(self.imports, states, modules)
        return write_body(graph, method, writer, self.peaks.worth, unnoted=self._unlike(block))

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

    def _forward(self, method: Method, body: WrittenBody) -> list[str]:
        graph = self.facts.graph
        returned = returned_type([is_tensor(graph, value) for value in method.returns])
        types = types_of(graph, method.arguments, body.arguments)
        return method_text("forward", body, returned, [], types)

    # Constructors

    def _parameters(self, block: BlockClass) -> dict[str, Parameter]:
        """The parameters of a constructor by name, in order: sizes first."""
        names = Names((*RESERVED, *dir(nn.Module()), *self._holders[block.first.path].members))
        found = {names.take(parameter.name): parameter for parameter in block.parameters}
        return dict(sorted(found.items(), key=lambda item: not _by_position(item[0])))

    def _construct(self, path: str, names: Mapping[Slot, str]) -> Expression:
        """The call that constructs a block.

        Args:
            names: what the class around it calls its own parameters.
        """
        block = self.blocks.of_path[path]
        written = self.written[id(block)]
        arguments = []
        for own, parameter in written.parameters.items():
            slot = Slot(path, block.parameters.index(parameter))
            known = names.get(slot)
            value = name(known) if known else write_literal(parameter.values[path], self.imports)
            arguments.append(value if _by_position(own) else value.prefixed(f"{own}="))
        return call(written.name, arguments)


def _relative(op: Op, root: str) -> Op:
    """An op whose module is called as the module at `root` calls it."""
    made = op.call
    if isinstance(made, RegionCall):
        body = dataclasses.replace(
            made.body, ops=tuple(_relative(inner, root) for inner in made.body.ops)
        )
        made = dataclasses.replace(made, body=body)
    module = op.module.removeprefix(root).removeprefix(".")
    return dataclasses.replace(op, call=made, module=module)


def _by_position(parameter: str) -> bool:
    return parameter.startswith(_BY_POSITION)


def _init(parameters: Sequence[str], lines: Sequence[str]) -> list[str]:
    """The constructor of a class; none where it makes nothing."""
    if not lines:
        return []
    signature = call("def __init__", [name("self"), *map(name, parameters)])
    head = lay_out(signature, suffix=" -> None:", indent=1)
    return [*head, "        super().__init__()", *lines, ""]


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
