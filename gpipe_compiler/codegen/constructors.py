"""The `__init__` of a stage: its modules, parameters, buffers and constants."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from gpipe_compiler.codegen.constants import UnwritableError, quote, write_literal
from gpipe_compiler.codegen.functions import spell
from gpipe_compiler.codegen.imports import Imports
from gpipe_compiler.codegen.layout import Expression, call, dict_of, lay_out, name
from gpipe_compiler.codegen.nested import Holder, nested
from gpipe_compiler.errors import EmitError
from gpipe_compiler.ir import Graph, ModuleCall, ModuleSpec, Op, RegionCall, State, StateKind
from gpipe_compiler.ir.arguments import state_names

LITERAL_ELEMENTS = 16
"""Constants up to this size are written out."""


@dataclass(frozen=True, slots=True)
class ModulePath:
    """A module of the model, by where the model keeps it."""

    path: str


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
        lines: the body of `__init__`, without `super().__init__()`.
    """

    root: Holder
    modules: Mapping[str, str]
    places: Mapping[str, str]
    originals: Mapping[str, str]
    renamed: Mapping[str, str]
    lines: tuple[str, ...]

    @property
    def attributes(self) -> frozenset[str]:
        """The names that the stage itself gives to modules and tensors."""
        return frozenset(self.root.members)


def state_of(
    graph: Graph,
    ops: Iterable[Op],
    imports: Imports,
    also: Iterable[str] = (),
    methods: Collection[str] = (),
) -> StageState:
    """The modules and tensors that some ops need, in the order of first use.

    Args:
        also: names of further tensors to keep, which come last.
        methods: what the class has beside an nn.Module's methods.

    Raises:
        EmitError: when a module's class or an argument of it has no spelling.
    """
    used: dict[ModulePath | str, None] = {}

    def visit(op: Op) -> None:
        made = op.call
        if isinstance(made, ModuleCall):
            used.setdefault(ModulePath(made.module))
        used.update(dict.fromkeys(state_names((made.args, dict(made.kwargs)))))
        if isinstance(made, RegionCall):
            for inner in made.body.ops:
                visit(inner)
            used.update(dict.fromkeys(state_names(made.body.outputs)))

    for op in ops:
        visit(op)
    used.update(dict.fromkeys(also))
    try:
        return construct_state(graph, used, imports, methods)
    except UnwritableError as error:
        raise EmitError(f"a module of the stage cannot be written as source: {error}") from error


def renamed_table(state: StageState) -> list[str]:
    """`RENAMED = {...}`: own names of state that are no names of the model, and the model's."""
    if not state.renamed:
        return []
    pairs = [(name(quote(own)), name(quote(model))) for own, model in state.renamed.items()]
    return lay_out(dict_of(pairs, exploded=True), prefix="RENAMED = ")


def construct_state(
    graph: Graph,
    used: Iterable[ModulePath | str],
    imports: Imports,
    methods: Collection[str] = (),
) -> StageState:
    """The state of a stage.

    Args:
        used: the modules that the stage calls and the states it reads by itself, in the order in
            which they are to stand.

    Raises:
        UnwritableError: when a module's class or an argument of it has no spelling.
    """
    used = tuple(used)
    specs = [graph.modules[item.path] for item in used if isinstance(item, ModulePath)]
    in_modules = {canonical for spec in specs for canonical in spec.state.values()}
    bare = (item for item in used if isinstance(item, str) and item not in in_modules)
    root = nested(
        (
            *((spec.path, spec) for spec in specs),
            *((item, graph.state[item]) for item in bare),
        ),
        frozenset(methods),
    )
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
        lines=tuple(_Constructor(graph, places, imports).lines(root)),
    )


@dataclass(frozen=True, slots=True)
class _Constructor:
    """Writes the statements that make a stage's modules and tensors."""

    graph: Graph
    places: Mapping[str, str]
    imports: Imports

    def lines(self, root: Holder) -> Iterator[str]:
        """All of them; what several modules share is shared when all are made."""
        yield from self._members(root)
        for holder in root.all():
            for local, canonical in holder.spec.state.items() if holder.spec is not None else ():
                own, place = f"{holder.place}.{local}", self.places[canonical]
                if own != place:
                    yield f"        {own} = {place}  # shared"

    def _members(self, holder: Holder) -> Iterator[str]:
        if holder.spec is not None:
            yield from self._frozen_apart(holder, holder.spec)
        for own, item in holder.members.items():
            if isinstance(item, State):
                tensor = self.graph.tensors.get(item.name)
                yield from _bare_state(item, holder, own, tensor, self.imports)
                continue
            if own not in holder.keyed or holder.prefix == "":
                yield from lay_out(self._module(item), prefix=f"{item.place} = ", indent=2)
            yield from self._members(item)

    def _module(self, holder: Holder) -> Expression:
        """A module with all that its constructor takes."""
        if holder.spec is None:
            inside = [(name(quote(own)), self._module(holder.keyed[own])) for own in holder.keyed]
            return call(f"nn.{holder.cls.__name__}", [dict_of(inside)] if inside else [])
        made = construct_module(holder.spec, self.imports)
        frozen = _frozen(holder.spec, self.graph.state)
        if frozen and frozen == _parameters(holder.spec, self.graph.state):
            return Expression(f"{made.flat}.requires_grad_(False)")
        return made

    def _frozen_apart(self, holder: Holder, spec: ModuleSpec) -> Iterator[str]:
        """Statements for parameters that are frozen beside others of their module."""
        frozen = _frozen(spec, self.graph.state)
        if frozen == _parameters(spec, self.graph.state):
            return
        for local in frozen:
            if self.places[spec.state[local]] == f"{holder.place}.{local}":
                yield f"        {holder.place}.{local}.requires_grad_(False)"


def construct_module(spec: ModuleSpec, imports: Imports) -> Expression:
    """`nn.Conv2d(64, 64, 3, padding=1, bias=False)`.

    Raises:
        UnwritableError: when the class or an argument has no spelling.
    """
    callee = spell(spec.cls, imports)
    if callee is None:
        raise UnwritableError(f"the module class {spec.cls.__module__}.{spec.cls.__qualname__}")
    return call(
        callee,
        [
            *(write_literal(value, imports) for value in spec.args),
            *(
                write_literal(value, imports).prefixed(f"{key}=")
                for key, value in spec.kwargs.items()
            ),
        ],
    )


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


def _bare_state(
    state: State, holder: Holder, own: str, tensor: torch.Tensor | None, imports: Imports
) -> list[str]:
    """The statements that register a tensor which the model uses without a module of torch."""
    imports.torch()
    place = holder.place_of(own)
    if state.kind is StateKind.PARAMETER:
        imports.from_torch("nn")
        memory = _memory("torch.empty", state, imports)
        flag = [] if state.requires_grad else [name("requires_grad=False")]
        return lay_out(call("nn.Parameter", [memory, *flag]), prefix=f"{place} = ", indent=2)
    # Weights that are not loaded are initialised; of a buffer nobody can know its values.
    unknown = tensor is None or tensor.is_meta
    made = _memory("torch.zeros" if unknown else "torch.empty", state, imports)
    if state.kind is StateKind.CONSTANT and tensor is not None and not unknown:
        made = _values(tensor, imports) if tensor.numel() <= LITERAL_ELEMENTS else made
    persistent = state.persistent and state.kind is StateKind.BUFFER
    if holder.means_something_else(own):  # register_buffer refuses it
        transient = f"        {holder.place}._non_persistent_buffers_set.add({quote(own)})"
        return [
            *lay_out(made, prefix=f"{place} = ", indent=2),
            *([] if persistent else [transient]),
        ]
    flag = [] if persistent else [name("persistent=False")]
    register = f"{holder.place}.register_buffer"
    return lay_out(call(register, [name(quote(own)), made, *flag]), indent=2)


def _memory(function: str, state: State, imports: Imports) -> Expression:
    """`torch.empty(3, 4)`: memory to load values into."""
    options = [] if state.dtype is torch.float32 else [name(f"dtype={state.dtype}")]
    if not state.shape:
        return call(function, [name("()"), *options])
    return call(function, [*(write_literal(size, imports) for size in state.shape), *options])


def _values(tensor: torch.Tensor, imports: Imports) -> Expression:
    """`torch.tensor([0.0, 1.0])`."""
    values = tensor.detach().cpu().tolist()
    inferred = torch.tensor(values).dtype == tensor.dtype
    options = [] if inferred else [name(f"dtype={tensor.dtype}")]
    return call("torch.tensor", [write_literal(values, imports), *options])
