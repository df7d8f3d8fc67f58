"""What the modules of a model hold: modules of torch, and parameters, buffers and constants."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import nn

from gpipe_compiler.ir.forms import Constant, ConstantSlot
from gpipe_compiler.ir.graph import Graph
from gpipe_compiler.ir.ops import ModuleSpec
from gpipe_compiler.ir.values import StateKind

LITERAL_ELEMENTS = 16
"""Constants up to this size are written out."""


@dataclass(frozen=True)
class Contents:
    """The modules of torch that some ops call or read whole, and the states that they read.

    Attributes:
        modules: paths, in order of first use.
        states: canonical names, in order of first use; those of `modules` may be among them.
        functions: the names of functions that are blocks too, by the paths of their calls.
    """

    graph: Graph
    modules: Sequence[str]
    states: Sequence[str]
    functions: Mapping[str, str] = field(default_factory=dict)

    def user(self, path: str) -> str:
        """The user's name for the class of a module, or for a function."""
        return self.functions.get(path) or self.graph.module_classes[path]

    @cached_property
    def places(self) -> Mapping[str, str]:
        """Canonical state names to the paths at which they are kept."""
        found: dict[str, str] = {}
        for path in self.modules:
            for local, name in self.graph.modules[path].state.items():
                found.setdefault(name, f"{path}.{local}")
        for name in self.states:
            found.setdefault(name, name)
        return found

    @cached_property
    def bare(self) -> tuple[str, ...]:
        """The states that are in no module of torch."""
        modules = self.graph.modules
        held = {name for path in self.modules for name in modules[path].state.values()}
        return tuple(name for name in dict.fromkeys(self.states) if name not in held)

    @property
    def holders(self) -> Collection[str]:
        """The paths of the modules in which any of these lie."""
        return self._under.keys()

    @cached_property
    def _under(self) -> Mapping[str, tuple[list[str], list[str]]]:
        """The modules and the bare states that lie in each module."""
        found: dict[str, tuple[list[str], list[str]]] = {}
        for kind, names in enumerate((dict.fromkeys(self.modules), self.bare)):
            for name in names:
                for root in ("", *tuple(prefixes(name))[:-1]):
                    found.setdefault(root, ([], []))[kind].append(name)
        return found

    def own(self, root: str, inner: Collection[str]) -> tuple[list[str], list[str]]:
        """The modules and bare states in the module at `root`, in none of its blocks.

        Args:
            inner: the paths of its blocks.
        """
        modules, states = self._under.get(root, ([], []))
        kept = [
            [name for name in names if block_around(name, inner) is None]
            for names in (modules, states)
        ]
        return kept[0], kept[1]

    def form(self, root: str, inner: Collection[str]) -> tuple[Hashable, list[Constant]]:
        """What the module at `root` holds by itself, but for numbers, and those."""
        modules, states = self.own(root, inner)
        places = self.graph.registered
        held = sorted(places.keys() & {*modules, *states, *inner}, key=places.__getitem__)
        forms: list[Hashable] = [tuple(_local(path, root) for path in held)]
        constants: list[Constant] = []
        for path in modules:
            form, found = self._module(self.graph.modules[path])
            forms.append((_local(path, root), form))
            constants.extend(found)
        for name in states:
            forms.append((_local(name, root), self._state(name)))
            sizes = self.graph.state[name].shape
            constants.extend(
                Constant(ConstantSlot(name, i), n, "size") for i, n in enumerate(sizes)
            )
        return tuple(forms), constants

    def _module(self, spec: ModuleSpec) -> tuple[Hashable, list[Constant]]:
        arguments = arguments_of(spec)
        trained = tuple(
            (local, self.graph.state[name].requires_grad, self.graph.state[name].dtype)
            for local, name in spec.state.items()
        )
        if arguments is None:
            return (spec.cls, repr((spec.args, dict(spec.kwargs))), trained), []
        found = [
            Constant(ConstantSlot(spec.path, key), value, key) for key, value in arguments.items()
        ]
        return (spec.cls, trained), found

    def _state(self, name: str) -> Hashable:
        state, tensor = self.graph.state[name], self.graph.tensors.get(name)
        unknown = tensor is None or tensor.is_meta
        values = None
        if state.kind is StateKind.CONSTANT and tensor is not None and not unknown:
            values = repr(tensor.tolist()) if tensor.numel() <= LITERAL_ELEMENTS else None
        flags = (state.requires_grad, state.persistent, len(state.shape), unknown)
        return (state.kind, state.dtype, flags, values)


def block_around(path: str, blocks: Collection[str]) -> str | None:
    """The outermost of some modules that a path leads into."""
    return next((prefix for prefix in prefixes(path) if prefix in blocks), None)


def class_of_torch(graph: Graph, path: str) -> type[nn.Module] | None:
    """Torch's own class that a module is of; None for one of the user's."""
    return getattr(nn, graph.module_classes[path]) if path in graph.of_torch else None


def is_under(path: str, root: str) -> bool:
    """Whether a path leads into the module at `root`."""
    return not root or path.startswith(f"{root}.")


def _local(path: str, root: str) -> str:
    return path.removeprefix(f"{root}.") if root else path


def arguments_of(spec: ModuleSpec) -> dict[str, object] | None:
    """All constructor arguments of a module by name, defaults included.

    None where the constructor does not name them.
    """
    try:
        bound = inspect.signature(spec.cls).bind(*spec.args, **spec.kwargs)
    except (TypeError, ValueError):
        return None
    kinds = {parameter.kind for parameter in bound.signature.parameters.values()}
    if inspect.Parameter.VAR_POSITIONAL in kinds or inspect.Parameter.VAR_KEYWORD in kinds:
        return None
    bound.apply_defaults()
    return dict(bound.arguments)


def prefixes(path: str) -> Iterator[str]:
    """The paths that lead to a module, the outermost first: `a`, `a.b`, `a.b.c`."""
    words = path.split(".") if path else []
    for count in range(1, len(words) + 1):
        yield ".".join(words[:count])
