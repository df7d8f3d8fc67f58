"""What values are in terms of the sizes that are free, by a run of the graph on symbolic shapes.

The run is the proof that the graph, as the passes have left it, is the model's at other sizes too:
whatever torch relies on while it runs is a requirement of the package.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from gpipe_compiler.errors import GPipeCompilerError, SourceLocation, summary
from gpipe_compiler.ir import FunctionCall, Graph, Input, Op
from gpipe_compiler.ir.arguments import leaves
from gpipe_compiler.ir.sizes import BATCH, SMALLEST, UNKNOWN_LINE, is_free
from gpipe_compiler.ir.symbolic import (
    InexpressibleError,
    expression_of,
    general,
    plain_of,
    requirements,
    shape_of,
)
from gpipe_compiler.passes.dry_run import DryRun, base_batch, like_strides, modes
from gpipe_compiler.passes.lookups import within_tables
from gpipe_compiler.passes.repeats import ShortenedGraph
from gpipe_compiler.quiet import quiet
from gpipe_compiler.runtime.sizes import (
    Dim,
    Relation,
    Requirement,
    Shape,
    Size,
    value_at,
)


@dataclass(frozen=True)
class SymbolicRun:
    """What a run on symbolic shapes tells, in all modes of a graph.

    Attributes:
        shapes: of tensors in which a size is free, by the name of the value.
        plain: what is no tensor, where sizes are in it: with expressions.
        hidden: values that are no tensors and follow from sizes in another way.
        requires: what the graph relies on.
    """

    shapes: Mapping[str, Shape]
    plain: Mapping[str, Any]
    hidden: frozenset[str]
    requires: tuple[Requirement, ...]


_ONE = "torch takes a dimension of one element for a constant, which is broadcast"

_NOTHING = SymbolicRun({}, {}, frozenset(), ())


class FixedSizeError(GPipeCompilerError):
    """A graph does not run at all sizes that were to be free."""


def symbolic(graph: Graph) -> SymbolicRun:
    """The symbolic run of a graph, kept with it.

    Raises:
        FixedSizeError: naming the op that does not run at other sizes, or hides what it does.
    """
    return graph.once("symbolic", lambda: _run(graph)) if graph.sizes else _NOTHING


def required(graph: Graph) -> tuple[Requirement, ...]:
    """What a graph and the model that it was traced from demand of the sizes that are free."""
    if not graph.sizes:
        return ()
    least = [Requirement(SMALLEST, Relation.AT_MOST, size, _ONE) for size in graph.sizes]
    every = (*least, *within_tables(graph), *symbolic(graph).requires, *graph.requires)
    return tuple({(item.left, item.relation, item.right): item for item in every}.values())


def _run(graph: Graph) -> SymbolicRun:
    blocks = ShortenedGraph.of(graph)
    short = graph if blocks is None else blocks.short
    told: SymbolicRun | None = None
    for training in modes(graph):
        told = _joined(told, _Run(short, training).told())
    assert told is not None
    if blocks is None:
        return told
    names = {source.name: source.name for source in graph.inputs}
    for op, known, _ in blocks.known():
        names.update(zip(op.outputs, short.op_of[known].outputs, strict=True))
    return SymbolicRun(
        {name: told.shapes[old] for name, old in names.items() if old in told.shapes},
        {name: told.plain[old] for name, old in names.items() if old in told.plain},
        frozenset(name for name, old in names.items() if old in told.hidden),
        told.requires,
    )


def _joined(one: SymbolicRun | None, other: SymbolicRun) -> SymbolicRun:
    if one is None:
        return other
    return SymbolicRun(
        {**other.shapes, **one.shapes},
        {**other.plain, **one.plain},
        one.hidden | other.hidden,
        tuple(dict.fromkeys((*one.requires, *other.requires))),
    )


_CASTS: Mapping[object, Callable[..., object]] = {float: torch.sym_float, int: torch.sym_int}
"""What stands for Python's casts, which would make a number of a size that is free."""


def _with_symbolic_casts(graph: Graph) -> Graph:
    def symbolic_of(op: Op) -> Op:
        match op.call:
            case FunctionCall(function=function, args=args) if function in _CASTS:
                return dataclasses.replace(op, call=FunctionCall(_CASTS[function], args))
        return op

    return graph.replace(ops=tuple(map(symbolic_of, graph.ops)))


class _Run:
    """A run in one mode.

    Attributes:
        symbols: the sizes by the symbols that torch computes with.
    """

    def __init__(self, graph: Graph, training: bool) -> None:
        self._graph = graph
        self._training = training
        self._environment = ShapeEnv()
        self._lines: dict[Any, SourceLocation] = {}
        self.symbols: dict[Any, Dim] = {}

    def told(self) -> SymbolicRun:
        """What the run tells."""
        shapes: dict[str, Shape] = {}
        plain: dict[str, Any] = {}
        hidden: set[str] = set()
        for name, value in self._values().items():
            try:
                if isinstance(value, torch.Tensor):
                    shape = shape_of(value.shape, self.symbols)
                    if any(map(is_free, shape)):
                        shapes[name] = shape
                else:
                    found = plain_of(value, self.symbols)
                    if any(map(is_free, leaves(found))):
                        plain[name] = found
            except InexpressibleError as error:
                if isinstance(value, torch.Tensor):
                    raise self._fixed(f"{name} is of a size that follows by {error}") from error
                hidden.add(name)
        try:
            required = requirements(self._environment, self.symbols, self._where)
            return SymbolicRun(shapes, plain, frozenset(hidden), tuple(dict.fromkeys(required)))
        except InexpressibleError as error:
            raise self._fixed(f"the model relies on {error}, which cannot be checked") from error

    def _values(self) -> dict[str, Any]:
        """Every value by name."""
        graph = self._graph
        mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=self._environment)
        run = DryRun.of(_with_symbolic_casts(graph), training=self._training, mode=mode)
        examples = [max(SMALLEST, graph.batch_size), *(size.example for size in graph.sizes)]
        with general(), quiet():
            rows = mode.from_tensor(
                torch.empty(examples, device="meta"),
                source=ConstantSource("sizes"),
                symbolic_context=StatelessSymbolicContext([DimDynamic.DYNAMIC] * len(examples)),
            )
            numbers = dict(zip((BATCH, *graph.sizes), rows.shape, strict=True))
            self.symbols = {expression_of(n): size for size, n in numbers.items()}
            with torch.no_grad(), mode, run.autocast(), enable_python_dispatcher():
                inputs = {source.name: self._input(source, numbers) for source in graph.inputs}
                return run.interpreter.run(inputs, self._step)

    def _input(self, source: Input, numbers: Mapping[Size, Any]) -> torch.Tensor:
        """An input of symbolic sizes, its dimensions in the order of the example's in memory."""
        example = self._graph.example[source.name]
        own = {size.name: number for size, number in numbers.items() if size != BATCH}
        shape: list[Any] = [value_at(dim, own) for dim in source.shape or example.shape]
        if source.batch_dim is not None:
            rows = example.shape[source.batch_dim] // base_batch(self._graph)
            shape[source.batch_dim] = numbers[BATCH] * rows
        strides = like_strides(example, shape)
        return torch.empty_strided(shape, strides, dtype=example.dtype, device="cpu")

    def _step(self, op: Op, execute: Callable[[], Any]) -> Any:
        """Runs an op, and notes its line for what torch relies on in it."""
        known = len(self._environment.guards)
        try:
            returned = execute()
        except Exception as error:  # whatever torch raises where a shape is no number
            raise self._fixed(f"{op.name}: {summary(error)}", op.source) from error
        if op.source is not None:
            for guard in self._environment.guards[known:]:
                self._lines.setdefault(guard.expr, op.source)
        return returned

    def _where(self, guard: Any) -> str:
        found = self._lines.get(guard)
        return UNKNOWN_LINE if found is None else found.brief

    def _fixed(self, what: str, source: SourceLocation | None = None) -> FixedSizeError:
        names = ", ".join(map(str, self._graph.sizes))
        return FixedSizeError(
            f"of the sizes {names} not all can be free: {what}",
            location=source,
            hint="name those that are to be free (--free INPUT.DIM), or none",
        )
