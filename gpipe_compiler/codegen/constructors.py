"""The `__init__` of a stage: its modules, parameters, buffers and constants."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from types import MappingProxyType

import torch
from torch import nn

from gpipe_compiler.codegen.constants import UnwritableError, quote, write_literal
from gpipe_compiler.codegen.functions import spell
from gpipe_compiler.codegen.imports import Imports
from gpipe_compiler.codegen.layout import (
    Expression,
    braces,
    call,
    comprehension,
    consecutive,
    dict_of,
    lay_out,
    name,
)
from gpipe_compiler.codegen.nested import ModuleNode, nested
from gpipe_compiler.errors import EmitError
from gpipe_compiler.ir import Graph, ModuleCall, ModuleSpec, Op, State, StateKind, ops_within
from gpipe_compiler.ir.contents import LITERAL_ELEMENTS, arguments_of
from gpipe_compiler.ir.forms import ConstantSlot, states_read


@dataclass(frozen=True)
class StageState:
    """What a stage owns.

    Attributes:
        root: the stage itself, with its modules nested as in the model.
        modules: module paths to the expressions for them (`self.layers["2"].conv1`).
        places: canonical state names to the expressions for them (`self.conv1.weight`).
        originals: the names in the stage's `state_dict` to canonical ones; a tensor that two
            modules of the stage share stands here under both names.
        renamed: those of `originals` that are no names of the model.
    """

    root: ModuleNode
    modules: Mapping[str, str]
    places: Mapping[str, str]
    originals: Mapping[str, str]
    renamed: Mapping[str, str]

    @property
    def displaced(self) -> Iterator[str]:
        """The paths of what stands elsewhere than in the model, or in a class of its own kind."""
        for holder in self.root.all():
            path = holder.prefix[:-1]
            if holder.spec is not None and (holder.spec.path != path or holder.members):
                yield from (holder.spec.path, path)
            if holder.spec is None and holder.cls not in (nn.Module, nn.ModuleDict):
                yield path
            for own, state in holder.tensors():
                if f"{holder.prefix}{own}" != state.name:
                    yield state.name

    @property
    def attributes(self) -> frozenset[str]:
        """The names that the stage itself gives to modules and tensors."""
        return frozenset(self.root.members)


def state_of(
    graph: Graph,
    ops: Sequence[Op],
    also: Iterable[str] = (),
    methods: Collection[str] = (),
) -> StageState:
    """The modules and tensors that some ops need, in the order of first use.

    Args:
        also: names of further tensors to keep, which come last.
        methods: what the class has beside an nn.Module's methods.
    """
    inner = [found.call for op in ops for found in ops_within(op)]
    called = dict.fromkeys(made.module for made in inner if isinstance(made, ModuleCall))
    specs = [graph.modules[path] for path in called]
    in_modules = {canonical for spec in specs for canonical in spec.state.values()}
    read = dict.fromkeys(chain((name for op in ops for name in states_read(op)), also))
    bare = ((item, graph.state[item]) for item in read if item not in in_modules)
    root = nested((*((spec.path, spec) for spec in specs), *bare), frozenset(methods))
    modules = {item.spec.path: item.place for item in root.all() if item.spec is not None}
    places: dict[str, str] = {}
    originals: dict[str, str] = {}
    for holder in root.all():
        for local, canonical in holder.spec.state.items() if holder.spec is not None else ():
            originals[f"{holder.prefix}{local}"] = canonical
            places.setdefault(canonical, f"{holder.place}.{local}")
        for own, state in holder.tensors():
            originals[f"{holder.prefix}{own}"] = state.name
            places[state.name] = holder.place_of(own)
    names = {
        alias: state.name
        for state in graph.state.values()
        if state.kind is not StateKind.CONSTANT
        for alias in state.aliases
    }
    return StageState(
        root=root,
        modules=modules,
        places=places,
        originals=originals,
        renamed={own: model for own, model in originals.items() if names.get(own, own) != model},
    )


def renamed_table(state: StageState) -> list[str]:
    """`RENAMED = {...}`: own names of state that are no names of the model, and the model's."""
    if not state.renamed:
        return []
    pairs = [(name(quote(own)), name(quote(model))) for own, model in state.renamed.items()]
    return lay_out(dict_of(pairs, exploded=True), prefix="RENAMED = ")


NO_BLOCKS: Mapping[str, Expression] = MappingProxyType({})
NO_NAMES: Mapping[ConstantSlot, str] = MappingProxyType({})


def construct(
    graph: Graph,
    state: StageState,
    imports: Imports,
    holder: ModuleNode | None = None,
    blocks: Mapping[str, Expression] = NO_BLOCKS,
    names: Mapping[ConstantSlot, str] = NO_NAMES,
) -> list[str]:
    """The body of the `__init__` of a stage or block, without `super().__init__()`.

    Args:
        holder: what the block is in the stage; None for the stage itself.
        blocks: by their paths, how the blocks in it are constructed.
        names: the arguments of `__init__` that stand for numbers.

    Raises:
        EmitError: when a module's class or an argument of it has no spelling.
    """
    root = holder or state.root
    constructor = _Constructor(graph, state.places, imports, root, blocks, names)
    try:
        return [*constructor.lines()]
    except UnwritableError as error:
        raise EmitError(f"a module of the stage cannot be written as source: {error}") from error


@dataclass(frozen=True, slots=True)
class _Constructor:
    """Writes the statements that make the modules and tensors of a stage or block."""

    graph: Graph
    places: Mapping[str, str]
    imports: Imports
    root: ModuleNode
    blocks: Mapping[str, Expression]
    names: Mapping[ConstantSlot, str]

    def lines(self) -> Iterator[str]:
        """All of them; what several modules of a stage share is shared when all are made."""
        yield from self._members(self.root)
        for holder in self.root.all() if not self.root.prefix else ():
            for local, canonical in holder.spec.state.items() if holder.spec is not None else ():
                own, place = f"{holder.place}.{local}", self.places[canonical]
                if own != place:
                    yield f"        {own} = {place}  # shared"

    def _place(self, place: str) -> str:
        """An expression of the stage as it is in the constructor."""
        return "self" + place.removeprefix(self.root.place)

    def _members(self, holder: ModuleNode) -> Iterator[str]:
        if holder.spec is not None:
            yield from self._frozen_apart(holder, holder.spec)
        for own, item in holder.members.items():
            if isinstance(item, State):
                yield from self._bare_state(item, holder, own)
                continue
            if own not in holder.keyed or holder is self.root:
                place = self._place(item.place)
                yield from lay_out(self._module(item), prefix=f"{place} = ", indent=2)
            if item.prefix[:-1] not in self.blocks:
                yield from self._members(item)

    def _module(self, holder: ModuleNode) -> Expression:
        """A module with all that its constructor takes."""
        block = self.blocks.get(holder.prefix[:-1])
        if block is not None:
            return block
        if holder.spec is None:
            inside = [(own, self._module(item)) for own, item in holder.keyed.items()]
            return call(f"nn.{holder.cls.__name__}", [_dict_of_modules(inside)] if inside else [])
        return construct_member(self.graph, holder, self.imports, self.names)

    def _frozen_apart(self, holder: ModuleNode, spec: ModuleSpec) -> Iterator[str]:
        """Statements for parameters that are frozen beside others of their module."""
        frozen = _frozen(spec, self.graph.state)
        if frozen == _parameters(spec, self.graph.state):
            return
        for local in frozen:
            if self.places[spec.state[local]] == f"{holder.place}.{local}":
                yield f"        {self._place(holder.place)}.{local}.requires_grad_(False)"

    def _bare_state(self, state: State, holder: ModuleNode, own: str) -> list[str]:
        """The statements that register a tensor which the model uses without a module of torch."""
        self.imports.torch()
        place = self._place(holder.place_of(own))
        tensor = self.graph.tensors.get(state.name)
        if state.kind is StateKind.PARAMETER:
            self.imports.from_torch("nn")
            memory = self._memory("torch.empty", state)
            flag = [] if state.requires_grad else [name("requires_grad=False")]
            return lay_out(call("nn.Parameter", [memory, *flag]), prefix=f"{place} = ", indent=2)
        # Weights that are not loaded are initialised; of a buffer nobody can know its values.
        unknown = tensor is None or tensor.is_meta
        made = self._memory("torch.zeros" if unknown else "torch.empty", state)
        if state.kind is StateKind.CONSTANT and tensor is not None and not unknown:
            made = _values(tensor, self.imports) if tensor.numel() <= LITERAL_ELEMENTS else made
        persistent = state.persistent and state.kind is StateKind.BUFFER
        around = self._place(holder.place)
        if holder.means_something_else(own):  # register_buffer refuses it
            transient = f"        {around}._non_persistent_buffers_set.add({quote(own)})"
            return [
                *lay_out(made, prefix=f"{place} = ", indent=2),
                *([] if persistent else [transient]),
            ]
        flag = [] if persistent else [name("persistent=False")]
        register = f"{around}.register_buffer"
        return lay_out(call(register, [name(quote(own)), made, *flag]), indent=2)

    def _memory(self, function: str, state: State) -> Expression:
        """`torch.empty(3, 4)`: memory to load values into."""
        options = [] if state.dtype is torch.float32 else [name(f"dtype={state.dtype}")]
        sizes = [
            name(self.names.get(ConstantSlot(state.name, dim), str(size)))
            for dim, size in enumerate(state.shape)
        ]
        return call(function, [*(sizes or [name("()")]), *options])


def construct_member(
    graph: Graph, holder: ModuleNode, imports: Imports, names: Mapping[ConstantSlot, str] = NO_NAMES
) -> Expression:
    """A module of torch.nn, frozen where all its parameters are."""
    assert holder.spec is not None
    made = construct_module(holder.spec, imports, names)
    frozen = _frozen(holder.spec, graph.state)
    if frozen and frozen == _parameters(holder.spec, graph.state):
        return Expression(f"{made.flat}.requires_grad_(False)")
    return made


def frozen_in_part(graph: Graph, holder: ModuleNode) -> bool:
    """Whether some of the parameters of a module of torch.nn are frozen, and others not."""
    if holder.spec is None:
        return False
    frozen = _frozen(holder.spec, graph.state)
    return bool(frozen) and frozen != _parameters(holder.spec, graph.state)


def _dict_of_modules(items: Sequence[tuple[str, Expression]]) -> Expression:
    """`{"0": A(), "1": B()}`; equal modules of consecutive numbers by a comprehension."""
    parts: list[Expression] = []
    for _, group in groupby(items, key=lambda item: item[1].flat):
        run = list(group)
        numbers = consecutive([own for own, _ in run]) if len(run) > 1 else ""
        if numbers:
            item = run[0][1].prefixed("str(i): ")
            parts.append(comprehension("{", item, f"for i in {numbers}", "}"))
        else:
            parts.extend(made.prefixed(f"{quote(own)}: ") for own, made in run)
    if len(parts) == 1 and parts[0].opening == "{":
        return parts[0]
    return braces(part.prefixed("**") if part.opening == "{" else part for part in parts)


def construct_module(
    spec: ModuleSpec, imports: Imports, names: Mapping[ConstantSlot, str] = NO_NAMES
) -> Expression:
    """`nn.Conv2d(64, 64, 3, padding=1, bias=False)`.

    Args:
        names: of the arguments that stand for some of its own.

    Raises:
        UnwritableError: when the class or an argument has no spelling.
    """
    callee = spell(spec.cls, imports)
    if callee is None:
        raise UnwritableError(f"the module class {spec.cls.__module__}.{spec.cls.__qualname__}")
    args: list[Expression] = [write_literal(value, imports) for value in spec.args]
    kwargs = {key: write_literal(value, imports) for key, value in spec.kwargs.items()}
    for place, key in enumerate(arguments_of(spec) or ()):
        own = names.get(ConstantSlot(spec.path, key))
        if own is not None and place < len(args):
            args[place] = name(own)
        elif own is not None:
            kwargs[key] = name(own)
    return call(callee, [*args, *(value.prefixed(f"{key}=") for key, value in kwargs.items())])


def _parameters(spec: ModuleSpec, states: Mapping[str, State]) -> list[str]:
    """The module's own names of its parameters."""
    return [
        local
        for local, canonical in spec.state.items()
        if states[canonical].kind is StateKind.PARAMETER
    ]


def _frozen(spec: ModuleSpec, states: Mapping[str, State]) -> list[str]:
    """Those that are not to be trained."""
    found = _parameters(spec, states)
    return [local for local in found if not states[spec.state[local]].requires_grad]


def _values(tensor: torch.Tensor, imports: Imports) -> Expression:
    """`torch.tensor([0.0, 1.0])`."""
    values = tensor.detach().cpu().tolist()
    inferred = torch.tensor(values).dtype == tensor.dtype
    options = [] if inferred else [name(f"dtype={tensor.dtype}")]
    return call("torch.tensor", [write_literal(values, imports), *options])
