"""The `__init__` of a stage: its modules, parameters, buffers and constants."""

from __future__ import annotations

import builtins
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from gpipe_compiler.codegen.comments import comment
from gpipe_compiler.codegen.constants import UnwritableError, quote, write_literal
from gpipe_compiler.codegen.functions import spell
from gpipe_compiler.codegen.imports import Imports
from gpipe_compiler.codegen.layout import Expression, call, dict_of, lay_out, name
from gpipe_compiler.codegen.names import RESERVED, Names
from gpipe_compiler.errors import EmitError
from gpipe_compiler.ir import Graph, ModuleCall, ModuleSpec, Op, RegionCall, State, StateKind
from gpipe_compiler.ir.arguments import state_names

LITERAL_ELEMENTS = 16
"""Constants up to this size are written out."""

ATTRIBUTES = frozenset(dir(nn.Module())) | {"loss"} | (RESERVED - frozenset(dir(builtins)))
"""Names that no attribute nor further method of a stage takes."""


@dataclass(frozen=True, slots=True)
class ModulePath:
    """A module of the model, by where the model keeps it."""

    path: str


@dataclass
class StageState:
    """What a stage owns and what it calls it.

    Attributes:
        modules: module paths to attributes.
        places: canonical state names to where the stage keeps them (`self.conv1.weight`).
        originals: the stage's own state names (`conv1.weight`) to canonical ones; a tensor that
            two modules of the stage share stands here under both names.
        lines: the body of `__init__`, without `super().__init__()`.
    """

    modules: dict[str, str] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    originals: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)


def state_of(graph: Graph, ops: Iterable[Op], also: Iterable[str], imports: Imports) -> StageState:
    """The modules and tensors that some ops need, in the order of first use.

    Args:
        also: names of further tensors to keep, which come last.

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
        return construct_state(graph, used, imports)
    except UnwritableError as error:
        raise EmitError(f"a module of the stage cannot be written as source: {error}") from error


def state_table(state: StageState) -> list[str]:
    """`STATE = {...}`: a stage's own names to the model's."""
    pairs = [(name(quote(own)), name(quote(model))) for own, model in state.originals.items()]
    return lay_out(dict_of(pairs, exploded=True), prefix="STATE = ")


def construct_state(graph: Graph, used: Iterable[ModulePath | str], imports: Imports) -> StageState:
    """The state of a stage.

    Args:
        used: the modules that the stage calls and the states it reads by itself, in the order in
            which they are to stand.

    Raises:
        UnwritableError: when a module's class or an argument of it has no spelling.
    """
    made = StageState()
    names = Names(ATTRIBUTES)
    used = tuple(used)
    for item in used:
        if isinstance(item, ModulePath):
            made.modules[item.path] = names.take(item.path or "module")
    for path, attribute in made.modules.items():
        for local, canonical in graph.modules[path].state.items():
            made.originals[f"{attribute}.{local}"] = canonical
            made.places.setdefault(canonical, f"self.{attribute}.{local}")
    lines: list[tuple[str, list[str]]] = []
    for item in used:
        if isinstance(item, ModulePath):
            lines.append((_parent(item.path), _module(graph, made, item.path, imports)))
        elif item not in made.places:
            attribute = names.take(item)
            made.originals[attribute] = item
            made.places[item] = f"self.{attribute}"
            tensor = graph.tensors.get(item)
            statement = _bare_state(graph.state[item], attribute, tensor, imports)
            lines.append((_parent(item), statement))
    made.lines = list(_grouped(lines))
    return made


def _grouped(lines: Iterable[tuple[str, list[str]]]) -> Iterator[str]:
    """Lines with a comment over each run that belongs to the same parent module."""
    current = ""
    first = True
    for parent, statement in lines:
        if parent != current:
            if not first:
                yield ""
            if parent:
                yield f"        {comment(parent)}"
            current = parent
        first = False
        yield from statement


def _module(graph: Graph, made: StageState, path: str, imports: Imports) -> list[str]:
    """The statements that construct a module."""
    spec, attribute = graph.modules[path], made.modules[path]
    expression = construct_module(spec, imports)
    frozen = _frozen(spec, graph.state)
    whole = frozen == _parameters(spec, graph.state)
    if frozen and whole:
        expression = Expression(f"{expression.flat}.requires_grad_(False)")
    lines = lay_out(expression, prefix=f"self.{attribute} = ", indent=2)
    for local, canonical in spec.state.items():
        own, place = f"self.{attribute}.{local}", made.places[canonical]
        if own != place:
            lines.append(f"        {own} = {place}  # shared")
        elif local in frozen and not whole:
            lines.append(f"        {own}.requires_grad_(False)")
    return lines


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


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
    state: State, attribute: str, tensor: torch.Tensor | None, imports: Imports
) -> list[str]:
    """The statement that registers a tensor which the model uses without a module of torch."""
    imports.torch()
    if state.kind is StateKind.PARAMETER:
        imports.from_torch("nn")
        memory = _memory("torch.empty", state, imports)
        flag = [] if state.requires_grad else [name("requires_grad=False")]
        parameter = call("nn.Parameter", [memory, *flag])
        return lay_out(parameter, prefix=f"self.{attribute} = ", indent=2)
    # Weights that are not loaded are initialised; of a buffer nobody can know its values.
    unknown = tensor is None or tensor.is_meta
    made = _memory("torch.zeros" if unknown else "torch.empty", state, imports)
    if state.kind is StateKind.CONSTANT and tensor is not None and not unknown:
        made = _values(tensor, imports) if tensor.numel() <= LITERAL_ELEMENTS else made
    persistent = state.persistent and state.kind is StateKind.BUFFER
    flag = [] if persistent else [name("persistent=False")]
    return lay_out(call("self.register_buffer", [name(quote(attribute)), made, *flag]), indent=2)


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
