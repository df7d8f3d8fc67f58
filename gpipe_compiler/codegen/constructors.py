"""What a stage holds, and its `__init__`: modules, parameters, buffers and constants.

A stage keeps its modules and tensors under the model's own names, so that its `state_dict` has the
model's keys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType

import torch
from torch import nn

from gpipe_compiler.codegen.constants import quote, write_literal
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
from gpipe_compiler.codegen.module_tree import ModuleNode, nested
from gpipe_compiler.frontend.own_statements import UnwritableError
from gpipe_compiler.ir import Graph, ModuleCall, ModuleSpec, Op, State, StateKind
from gpipe_compiler.ir.classes import SMALL
from gpipe_compiler.ir.contents import arguments_of, class_of_torch, prefixes
from gpipe_compiler.ir.forms import ConstantSlot, states_read


def outermost(names: Sequence[str], among: Iterable[str]) -> tuple[str, ...]:
    """Some tensors of a stage; the outermost modules instead, where all tensors in them are meant.

    Args:
        among: the tensors that the modules may hold.
    """
    meant = Counter(path for name in names for path in _modules_around(name))
    present = Counter(path for name in among for path in _modules_around(name))
    whole = (
        next((path for path in _modules_around(name) if meant[path] == present[path]), name)
        for name in names
    )
    return tuple(dict.fromkeys(whole))


def _modules_around(name: str) -> Iterator[str]:
    """The paths of the modules that a tensor is in, the outermost first."""
    parts = name.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts)))


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
        unread: canonical names of tensors that no op reads.
    """

    root: ModuleNode
    modules: Mapping[str, str]
    places: Mapping[str, str]
    originals: Mapping[str, str]
    renamed: Mapping[str, str]
    unread: frozenset[str]

    @property
    def displaced(self) -> Iterator[str]:
        """The paths of what stands elsewhere than in the model."""
        for holder in self.root.all():
            path = holder.prefix[:-1]
            if holder.spec is not None and (holder.spec.path != path or holder.members):
                yield from (holder.spec.path, path)
            for own, state in holder.tensors():
                if f"{holder.prefix}{own}" != state.name:
                    yield state.name

    @property
    def attributes(self) -> frozenset[str]:
        return frozenset(self.root.members)


def state_of(
    graph: Graph, ops: Sequence[Op], also: Iterable[str] = (), methods: Collection[str] = ()
) -> StageState:
    """The modules and tensors that some ops need, in the model's order.

    Args:
        also: names of further tensors to keep.
        methods: what the class has beside an nn.Module's methods.
    """
    used, unread = _used(graph, ops, also)
    chained = {path for op in ops for path in prefixes(op.module) if _is_in_chain(graph, path)}
    root = nested(used, frozenset(methods), sorted(chained | _without_state(graph, ops)))
    apart = frozenset(unread)  # blocks register these after all else
    root.arrange({path: n for path, n in graph.registered.items() if path not in apart})
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
        unread=apart,
    )


def _is_in_chain(graph: Graph, path: str) -> bool:
    """Whether a module of the user's is one of an nn.Sequential, which needs it though it may hold
    nothing."""
    around, _, last = path.rpartition(".")
    known = class_of_torch(graph, around) is nn.Sequential
    return known and last.isdecimal() and class_of_torch(graph, path) is None


def _without_state(graph: Graph, ops: Sequence[Op]) -> set[str]:
    """Modules of the user's that hold nothing and compute in several ops, all of them among these:
    they read as a class of their own."""
    counts = Counter(path for op in ops for path in prefixes(op.module))
    every = Counter(path for op in graph.ops for path in prefixes(op.module))
    return {
        path
        for path, count in counts.items()
        if count > SMALL
        and count == every[path]
        and path in graph.module_classes
        and class_of_torch(graph, path) is None
    }


def _used(
    graph: Graph, ops: Sequence[Op], also: Iterable[str]
) -> tuple[list[tuple[str, ModuleSpec | State]], list[str]]:
    """Modules and tensors by their paths, in the order of first use; and the names of unread ones.

    Args:
        also: names of further tensors, which come last.
    """
    called, read = dict[str, int](), dict[str, int]()
    for place, op in enumerate(ops):
        if isinstance(op.call, ModuleCall):
            called.setdefault(op.call.module, place)
        for tensor in states_read(op):
            read.setdefault(tensor, place)
    in_called = {tensor for path in called for tensor in graph.modules[path].state.values()}
    bare = [tensor for tensor in dict.fromkeys((*read, *also)) if tensor not in in_called]
    around: dict[str, int] = {}
    for tensor in bare:
        around.setdefault(tensor.rpartition(".")[0], read.get(tensor, len(ops)))
    whole = {path: place for path, place in around.items() if _holds_whole(graph, path, bare)}
    specs = {graph.modules[path].path: place for path, place in (called | whole).items()}
    in_modules = {tensor for path in specs for tensor in graph.modules[path].state.values()}
    tensors = [tensor for tensor in bare if tensor not in in_modules]
    places = specs | {tensor: read.get(tensor, len(ops)) for tensor in tensors}
    items = {path: graph.modules[path] for path in specs} | {n: graph.state[n] for n in tensors}
    unread = [tensor for tensor in tensors if tensor not in read]
    return [(path, items[path]) for path in sorted(items, key=lambda path: places[path])], unread


def _holds_whole(graph: Graph, path: str, held: Collection[str]) -> bool:
    """Whether some tensors are all that a module of torch has, under its own names."""
    spec = graph.modules.get(path)
    names = {} if spec is None else spec.state
    return bool(names) and all(
        name in held and name == f"{path}.{local}" for local, name in names.items()
    )


def renamed_table(state: StageState) -> list[str]:
    """`RENAMED = {...}`: own names of state that are no names of the model, and the model's."""
    if not state.renamed:
        return []
    pairs = [(name(quote(own)), name(quote(model))) for own, model in state.renamed.items()]
    return lay_out(dict_of(pairs, exploded=True), prefix="RENAMED = ")


NO_NAMES: Mapping[ConstantSlot, str] = MappingProxyType({})


def frozen_in_part(graph: Graph, holder: ModuleNode) -> bool:
    """Whether some of the parameters of a module of torch.nn are frozen, and others not."""
    return holder.spec is not None and not frozen_parameters(holder.spec, graph.state)[1]


def construct_module(
    graph: Graph, spec: ModuleSpec, imports: Imports, names: Mapping[ConstantSlot, str]
) -> Expression:
    """`nn.Conv2d(64, 64, 3, padding=1, bias=False)`, frozen where all its parameters are.

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
    made = call(callee, [*args, *(value.prefixed(f"{key}=") for key, value in kwargs.items())])
    frozen, whole = frozen_parameters(spec, graph.state)
    return Expression(f"{made.flat}.requires_grad_(False)") if frozen and whole else made


def frozen_parameters(spec: ModuleSpec, states: Mapping[str, State]) -> tuple[list[str], bool]:
    """A module's own names of parameters that are not to be trained; whether all are, or none."""
    own = {local: states[name] for local, name in spec.state.items()}
    trained = {o: s.requires_grad for o, s in own.items() if s.kind is StateKind.PARAMETER}
    frozen = [local for local, trains in trained.items() if not trains]
    return frozen, len(frozen) in (0, len(trained))


def memory_for(function: str, state: State, names: Mapping[ConstantSlot, str]) -> Expression:
    """`torch.empty(3, 4)`: memory to load values into."""
    options = [] if state.dtype is torch.float32 else [name(f"dtype={state.dtype}")]
    sizes = [
        name(names.get(ConstantSlot(state.name, dim), str(size)))
        for dim, size in enumerate(state.shape)
    ]
    return call(function, [*(sizes or [name("()")]), *options])


def dict_of_modules(items: Sequence[tuple[str, Expression]]) -> Expression:
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


def tensor_of_values(tensor: torch.Tensor, imports: Imports) -> Expression:
    """`torch.tensor([0.0, 1.0])`."""
    values = tensor.detach().cpu().tolist()
    inferred = torch.tensor(values).dtype == tensor.dtype
    options = [] if inferred else [name(f"dtype={tensor.dtype}")]
    return call("torch.tensor", [write_literal(values, imports), *options])
