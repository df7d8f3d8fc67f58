"""What values are in terms of the sizes that are free, by a run of the graph on symbolic shapes.

The run is the proof that the graph, as the passes have left it, is the model's at other sizes too:
whatever torch relies on while it runs is a requirement of the package.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from gpipe_compiler.dispatching import QuickFakes
from gpipe_compiler.errors import GPipeCompilerError, SourceLocation, summary
from gpipe_compiler.ir import (
    FunctionCall,
    Graph,
    Input,
    Mode,
    ModuleCall,
    ModuleSpec,
    Op,
    Ref,
    StateRef,
    called,
)
from gpipe_compiler.ir.arguments import leaves
from gpipe_compiler.ir.graph import found_once
from gpipe_compiler.ir.interpret import bind, recurrent_forms
from gpipe_compiler.ir.repeats import ShortenedGraph
from gpipe_compiler.ir.sizes import BATCH, SMALLEST, UNKNOWN_LINE, is_free
from gpipe_compiler.ir.symbolic import (
    AT_SYMBOLS,
    InexpressibleError,
    expression_of,
    general,
    plain_of,
    requirements,
    shape_of,
)
from gpipe_compiler.passes.dry_run import DryRun, base_batch, like_strides, modes
from gpipe_compiler.passes.effects import effects
from gpipe_compiler.passes.positions.coordinates import Affine, Cases
from gpipe_compiler.passes.positions.known import Positions
from gpipe_compiler.passes.unknown_sizes import of_ctc_loss, of_unknown_size
from gpipe_compiler.passes.verbs import changes_form
from gpipe_compiler.quiet import quiet
from gpipe_compiler.runtime.sizes import Dim, Relation, Requirement, Shape, Size, value_at


@dataclass(frozen=True)
class SymbolicRun:
    """The result of a run on symbolic shapes, in all modes of a graph.

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


@found_once
def symbolic(graph: Graph) -> SymbolicRun:
    """The symbolic run of a graph, kept with it.

    Raises:
        FixedSizeError: naming the op that does not run at other sizes, or hides what it does.
    """
    if not graph.sizes:
        return _NOTHING
    blocks = ShortenedGraph.of(graph)
    short = graph if blocks is None else blocks.short
    told = functools.reduce(
        _joined, (_run_of(short, training).told(short) for training in modes(graph))
    )
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


def required(graph: Graph) -> tuple[Requirement, ...]:
    """What a graph and the model that it was traced from demand of the sizes that are free."""
    if not graph.sizes:
        return ()
    known = [(graph.least.get(size.name, SMALLEST), size) for size in graph.sizes]
    least = [Requirement(n, Relation.AT_MOST, size, _ONE) for n, size in known if n]
    every = (*least, *within_tables(graph), *symbolic(graph).requires, *graph.requires)
    return tuple({(item.left, item.relation, item.right): item for item in every}.values())


def _joined(one: SymbolicRun, other: SymbolicRun) -> SymbolicRun:
    return SymbolicRun(
        {**other.shapes, **one.shapes},
        {**other.plain, **one.plain},
        one.hidden | other.hidden,
        tuple(dict.fromkeys((*one.requires, *other.requires))),
    )


def _with_symbolic_calls(graph: Graph) -> Graph:
    def symbolic_of(op: Op) -> Op:
        if isinstance(op.call, FunctionCall) and op.call.function in AT_SYMBOLS:
            call = dataclasses.replace(op.call, function=AT_SYMBOLS[op.call.function])
            return dataclasses.replace(op, call=call)
        return op

    return graph.replace(ops=tuple(map(symbolic_of, graph.ops)))


def _run_of(graph: Graph, training: bool) -> _Run:
    """The run in one mode that goes on from graph to graph, as passes change it."""
    if any(map(changes_form, graph.ops)):
        return _Run(graph, training)
    key = ("symbolic", training, graph.precision, graph.inputs)
    if key not in graph.kept:
        graph.kept[key] = _Run(graph, training)
    run: _Run = graph.kept[key]
    return run


@dataclass(frozen=True, eq=False)
class _Ran:
    """An op that has run.

    Attributes:
        module: the one that it calls.
    """

    op: Op
    reads: tuple[Any, ...]
    module: ModuleSpec | None
    returned: Any

    def fits(self, op: Op, reads: Sequence[Any], module: ModuleSpec | None) -> bool:
        return (
            (op is self.op or op.call == self.op.call)
            and module == self.module
            and len(reads) == len(self.reads)
            and all(map(operator.is_, reads, self.reads))
        )


def _form(value: Any) -> object:
    """Equal for values of which the ops that read them make equal ones."""
    match value:
        case torch.Tensor():
            sizes = (*value.shape, *value.stride(), value.storage_offset())
            return (value.dtype, value.device, value.dim(), *map(_form, sizes))
        case torch.SymInt() | torch.SymFloat() | torch.SymBool():
            return value.node.expr
        case tuple() | list():
            return (type(value), *map(_form, value))
        case dict():
            return {key: _form(item) for key, item in value.items()}
    return (type(value), value)


class _SymbolicFakes(QuickFakes):
    """A mode of fake tensors of sizes that are free; where values tell how many elements there are,
    as many as there can be."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        unknown: object = of_ctc_loss(self, func, args)
        if unknown is None:
            unknown = of_unknown_size(self, func, args, kwargs or {})
        return self.dispatch(func, types, args, kwargs or {}) if unknown is None else unknown


class _Run:
    """A run in one mode.

    Attributes:
        symbols: the sizes by the symbols that torch computes with.
    """

    def __init__(self, graph: Graph, training: bool) -> None:
        self._training = training
        self._sizes = graph.sizes
        self._environment = ShapeEnv()
        self._mode = _SymbolicFakes(self._environment)
        self._lines: dict[Any, SourceLocation] = {}
        self._ran: dict[str, _Ran] = {}
        self._relied = 0, 0
        self._required: tuple[Requirement, ...] = ()
        examples = [max(SMALLEST, graph.batch_size), *(size.example for size in graph.sizes)]
        with general(), quiet():
            rows = self._mode.from_tensor(
                torch.empty(examples, device="meta"),
                source=ConstantSource("sizes"),
                symbolic_context=StatelessSymbolicContext([DimDynamic.DYNAMIC] * len(examples)),
            )
            numbers = dict(zip((BATCH, *graph.sizes), rows.shape, strict=True))
            self.symbols: dict[Any, Dim] = {expression_of(n): size for size, n in numbers.items()}
            named = {size.name: number for size, number in numbers.items()}
            for demand in graph.requires:
                bool(demand.holds(named))  # torch relies on it from here on
            with self._mode:
                self._inputs = {
                    source.name: _input(graph, source, numbers) for source in graph.inputs
                }

    def told(self, graph: Graph) -> SymbolicRun:
        values = self._values(graph)
        shapes: dict[str, Shape] = {}
        plain: dict[str, Any] = {}
        hidden: set[str] = set()
        for name, value in values.items():
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
        return SymbolicRun(shapes, plain, frozenset(hidden), self._requirements())

    def _requirements(self) -> tuple[Requirement, ...]:
        relied = len(self._environment.guards), len(self._environment.replacements)
        if relied != self._relied:
            required = requirements(self._environment, self.symbols, self._where)
            try:
                self._required = tuple(dict.fromkeys(required))
            except InexpressibleError as error:
                raise self._fixed(
                    f"the model relies on {error}, which cannot be checked"
                ) from error
            self._relied = relied
        return self._required

    def _values(self, graph: Graph) -> dict[str, Any]:
        environment: dict[str, Any] = dict(self._inputs)
        other = Mode.EVAL if self._training else Mode.TRAIN
        run: DryRun | None = None
        with contextlib.ExitStack() as stack:
            for op in graph.ops:
                if op.mode is other:
                    continue
                # What it reads in the other mode alone is not there.
                reads = tuple(environment.get(name) for name in op.inputs)
                spec = graph.modules[op.call.module] if isinstance(op.call, ModuleCall) else None
                known = self._ran.get(op.name)
                if known is None or not known.fits(op, reads, spec):
                    if run is None:
                        run = self._begin(graph, stack)
                    returned = self._execute(run, op, environment)
                    if known is not None and _form(returned) == _form(known.returned):
                        returned = known.returned  # so that whoever reads it need not run again
                    known = self._ran[op.name] = _Ran(op, reads, spec, returned)
                bind(op.result, known.returned, environment)
        return environment

    def _begin(self, graph: Graph, stack: contextlib.ExitStack) -> DryRun:
        """The graph ready to run, until the stack is left."""
        made = _with_symbolic_calls(graph)
        run = DryRun.of(made, training=self._training, mode=self._mode)
        contexts = (
            general(),
            quiet(),
            recurrent_forms(),
            torch.no_grad(),
            self._mode,
            run.autocast(),
        )
        for context in (*contexts, enable_python_dispatcher()):
            stack.enter_context(context)
        return run

    def _execute(self, run: DryRun, op: Op, environment: Mapping[str, Any]) -> Any:
        """What an op returns; notes its line for what torch relies on in it."""
        known = len(self._environment.guards)
        try:
            returned = run.interpreter.alone(run.interpreter.graph.op_of[op.name], environment)
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
        names = ", ".join(map(str, self._sizes))
        return FixedSizeError(
            f"of the sizes {names} not all can be free: {what}",
            location=source,
            hint="leave out --free, and the size is that of the example",
        )


def _input(graph: Graph, source: Input, numbers: Mapping[Size, Any]) -> torch.Tensor:
    """An input of symbolic sizes, its dimensions in the order of the example's in memory."""
    example = graph.example[source.name]
    own = {size.name: number for size, number in numbers.items() if size != BATCH}
    shape: list[Any] = [value_at(dim, own) for dim in source.shape or example.shape]
    if source.batch_dim is not None:
        rows = example.shape[source.batch_dim] // base_batch(graph)
        shape[source.batch_dim] = numbers[BATCH] * rows
    strides = like_strides(example, shape)
    return torch.empty_strided(shape, strides, dtype=example.dtype, device="cpu")


def within_tables(graph: Graph) -> Iterator[Requirement]:
    """That positions which follow from sizes lie within the tables in which they are looked up.

    torch checks indices when it has their values, on a GPU after the step.
    """
    positions = Positions(graph, effects(graph))
    for op in graph.ops:
        found = _lookup(graph, op)
        element = None if found is None else positions.element(Ref(found[0]))
        if found is None or not isinstance(element, Cases):
            continue
        index, rows = found
        for _, affine in element.cases:
            count = _count(affine, graph.values[index].dims)
            if is_free(count):
                where = op.source.brief if op.source is not None else UNKNOWN_LINE
                yield Requirement(count, Relation.AT_MOST, rows, where)


def _count(affine: Affine, dims: Sequence[Dim]) -> Dim:
    """How many rows a table has to have for indices up to the largest."""
    grows = [
        (weight, size) for weight, size in zip(affine.weights, dims, strict=True) if weight > 0
    ]
    rest = int(affine.offset) + 1 - sum(weight for weight, _ in grows)
    terms = [size if weight == 1 else size * weight for weight, size in grows]
    return functools.reduce(operator.add, [*terms, rest] if rest or not terms else terms)


def _lookup(graph: Graph, op: Op) -> tuple[str, int] | None:
    """The value of the indices of a look-up, and the rows of its table."""
    call = op.call
    if isinstance(call, ModuleCall):
        spec = graph.modules[call.module]
        if spec.cls is nn.Embedding and call.args and isinstance(call.args[0], Ref):
            return call.args[0].name, graph.state[spec.state["weight"]].shape[0]
        return None
    match called(call), call.args:
        case ("embedding", (Ref(name=index), StateRef(name=table), *_)):
            return index, graph.state[table].shape[0]
        case ("getitem", (StateRef(name=table), Ref(name=index))):
            return index, graph.state[table].shape[0]
        case _:
            return None
