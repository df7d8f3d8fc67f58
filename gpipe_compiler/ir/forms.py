"""What ops are but for the names of their values and state, and but for the numbers in them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpipe_compiler.ir.arguments import (
    Argument,
    BatchMultiple,
    Ref,
    StateRef,
    leaves,
    map_argument,
    parts,
)
from gpipe_compiler.ir.graph import Graph
from gpipe_compiler.ir.ops import (
    FunctionCall,
    MethodCall,
    ModuleCall,
    Op,
    Region,
    Result,
)
from gpipe_compiler.ir.sizes import BATCH, is_free
from gpipe_compiler.runtime.sizes import Dim, Expression, Operation


@dataclass(frozen=True, slots=True)
class ConstantSlot:
    """A place for a constant.

    Attributes:
        owner: the name of the op, module, state or block that it belongs to.
        key: which of the owner's constants it is: a number or the name of a parameter.
    """

    owner: str
    key: str | int


@dataclass(frozen=True, slots=True)
class Constant:
    """A constant that need not be the same in two otherwise equal blocks.

    Attributes:
        name: what a parameter for it would be called.
    """

    slot: ConstantSlot
    value: object
    name: str

    @property
    def form(self) -> Hashable:
        """Equal for equal constants of one type."""
        return (type(self.value), repr(self.value))


def is_number(leaf: object) -> bool:
    """Whether a constant of an op may differ between equal blocks: a whole or real number."""
    return type(leaf) in (int, float)


class Former:
    """The forms of the ops of one block, whose values are numbered as they come.

    Attributes:
        numbers: of the values, and of the states that stand outside the block.
        constants: the numbers in the ops, in order.
    """

    def __init__(self, root: str, places: Mapping[str, str], around: int = 0) -> None:
        """Starts with no values.

        Args:
            root: the path of the module whose ops these are.
            places: canonical state names to the paths of modules that hold them.
            around: in how many regions all of them run that are entered outside of the block.
        """
        self.numbers: dict[str, int] = {}
        self.constants: list[Constant] = []
        self._places, self._around = places, around
        self._prefix = f"{root}." if root else ""

    def number(self, name: str) -> int:
        """That of a value or state."""
        return self.numbers.setdefault(name, len(self.numbers))

    def local(self, path: str) -> str | None:
        """A path relative to the block; None for what is outside."""
        return path.removeprefix(self._prefix) if path.startswith(self._prefix) else None

    def state(self, name: str) -> Hashable:
        """The form of a state that the block reads: by its place in the block, or outside."""
        local = self.local(self._places[name])
        return ("outer", self.number(name)) if local is None else ("state", local)

    def module(self, path: str) -> Hashable:
        """The form of a module of torch that the block calls."""
        return self.local(path) or path

    def op(self, op: Op, *, inside: bool = False) -> Hashable:
        """The form of an op.

        Args:
            inside: whether its numbers are part of the form.
        """
        call = op.call
        match call:
            case FunctionCall(function=function):
                called: Hashable = ("function", id(function))
            case MethodCall(method=method):
                called = ("method", method)
            case ModuleCall(module=module):
                called = ("module", self.module(module))
        made = [
            self._leaf(leaf, None if inside else Constant(ConstantSlot(op.name, index), leaf, name))
            for index, (leaf, name) in enumerate(_named_leaves(call))
        ]
        around = self.regions(op.regions)
        form = (op.mode, called, structure(op.arguments), tuple(made), self._result(op.result))
        return (*form, around) if around else form

    def regions(self, around: Sequence[Region]) -> tuple[Hashable, ...]:
        """The form of the regions that something in the block runs in, and not all of it."""
        return tuple(
            (
                region.context,
                f"{region.module}.".startswith(self._prefix),
                self.number(f"{region.module} {region.number}"),
            )
            for region in around[self._around :]
        )

    def _leaf(self, leaf: object, constant: Constant | None) -> Hashable:
        match leaf:
            case Ref(name=name):
                return ("value", self.number(name))
            case StateRef(name=name):
                return self.state(name)
        if constant is not None and is_number(leaf):
            self.constants.append(constant)
            return ("number", type(leaf))
        return ("constant", type(leaf), repr(leaf))

    def _result(self, result: Result) -> Hashable:
        if isinstance(result, tuple):
            return tuple(map(self._result, result))
        return None if result is None else self.number(result)


class OpForms:
    """What ops of a graph are but for the names of the values and state that they read."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._numbers: dict[Hashable, int] = {}

    def key(self, op: Op) -> int:
        """A number, the same for ops that are equal but for names."""
        form = _LoneFormer(self._graph).op(op, inside=True)
        return self._numbers.setdefault(form, len(self._numbers))


class _LoneFormer(Former):
    """The form of an op alone: its modules and states are what they are, wherever they stand."""

    def __init__(self, graph: Graph) -> None:
        super().__init__("", {})
        self._graph = graph

    def regions(self, around: Sequence[Region]) -> tuple[Hashable, ...]:
        return tuple(region.context for region in around)

    def state(self, name: str) -> Hashable:
        state, tensor = self._graph.state[name], self._graph.tensors.get(name)
        stride = None if tensor is None else tensor.stride()
        return (state.kind, state.shape, stride, state.dtype, state.requires_grad)

    def module(self, path: str) -> Hashable:
        spec = self._graph.modules[path]
        given: Any = (spec.args, dict(spec.kwargs))
        made = tuple((type(leaf), repr(leaf)) for leaf in leaves(given))
        state = tuple((local, self.state(name)) for local, name in spec.state.items())
        return (spec.cls, structure(given), made, state)


@dataclass(frozen=True)
class LocalSizes:
    """Sizes in terms of the shapes of what a call is given: the same in calls that differ in them.

    Attributes:
        base: how many times the batch the size is off which the samples are read.
        places: of free sizes, the input in whose shape they stand first, and where.
    """

    base: float
    places: Mapping[Dim, tuple[int, int]]

    @classmethod
    def of(cls, graph: Graph, inputs: Sequence[str]) -> LocalSizes:
        """Those of a call with these inputs; of a base of 1 where no shape tells the samples."""
        known = [(i, graph.values[name]) for i, name in enumerate(inputs) if name in graph.values]
        samples = (v.shape[v.samples_dim] for _, v in known if v.samples_dim is not None)
        least = min(filter(None, samples), default=graph.batch_size)
        places: dict[Dim, tuple[int, int]] = {}
        for number, value in known:
            for place, dim in enumerate(value.dims):
                if is_free(dim):
                    places.setdefault(dim, (number, place))
        return cls(least / graph.batch_size, places)

    def relative(self, template: Argument) -> Argument:
        """What a value is that follows from shapes, in these terms."""

        def leaf(item: object) -> object:
            if isinstance(item, BatchMultiple):
                return ("times", item.factor / self.base)
            return self._placed(item) if isinstance(item, Expression) else item

        return map_argument(leaf, template)

    def _placed(self, dim: Dim) -> Hashable:
        if dim in self.places:
            return self.places[dim]
        if dim == BATCH:
            return ("times", 1 / self.base)
        if isinstance(dim, Operation):
            return (dim.applied, self._placed(dim.left), self._placed(dim.right))
        return dim


_TAKE_SIZES = frozenset({"expand", "repeat", "reshape", "unflatten", "view"})
"""Methods that are given sizes."""


def _named_leaves(call: FunctionCall | MethodCall | ModuleCall) -> Iterator[tuple[object, str]]:
    """Every leaf of a call's arguments, and what a parameter in its place would be called."""
    function = getattr(call, "function", None)
    own = getattr(call, "method", None) or getattr(function, "__name__", None) or "call"
    wanted = "size" if own in _TAKE_SIZES else f"{str(own).strip('_')}_number"
    for leaf in leaves(call.args):
        yield leaf, wanted
    for key, argument in call.kwargs.items():
        for leaf in leaves(argument):
            yield leaf, key


def structure(argument: Argument) -> Hashable:
    """An argument without its leaves."""
    inside = parts(argument)
    if inside is None:
        return None
    keys = tuple(argument) if isinstance(argument, dict) else None
    return type(argument), keys, tuple(map(structure, inside))


def states_read(op: Op) -> Iterator[str]:
    """The states that an op reads by itself, not through a module."""
    return (leaf.name for leaf in op.leaves if isinstance(leaf, StateRef))
