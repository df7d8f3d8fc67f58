"""The methods of a stage: which ops `forward` runs and which `loss`, on what, for what.

Numbers that follow from shapes are read off a tensor that the method has.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gpipe_compiler.codegen.facts import CodeFacts
from gpipe_compiler.codegen.functions import BINARY, UNARY
from gpipe_compiler.codegen.sizes import ReadSize, is_told, told
from gpipe_compiler.errors import EmitError
from gpipe_compiler.ir import FunctionCall, Graph, Op
from gpipe_compiler.ir.ops import without_unread
from gpipe_compiler.ir.sizes import asked
from gpipe_compiler.plan import Stage
from gpipe_compiler.runtime.sizes import Dim, Size, sizes_in

_PURE = frozenset({getattr, operator.getitem, len, *BINARY, *UNARY})


@dataclass(frozen=True, slots=True)
class Method:
    """What a method computes.

    Attributes:
        arguments: the values it is given.
        returns: the values it gives back.
        given: values that it reads off the shapes of its arguments.
        multiples: of values that grow with the samples, how many times these they are; of those
            that follow from other sizes, what they are.
        names: what arguments and other values are called, where that is told.
        draws: of ops of layers that may be left out, how many random ops they run; None where that
            is not known.
    """

    ops: tuple[Op, ...]
    arguments: tuple[str, ...]
    returns: tuple[str, ...]
    multiples: Mapping[str, Dim]
    given: tuple[ReadSize, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    draws: Mapping[str, int] | None = None

    def size_of(self, value: str) -> Dim | None:
        """The number of samples (1) or the free size that a value is; else None."""
        size = self.multiples.get(value)
        return size if size == 1 or isinstance(size, Size) else None


def forward_method(facts: CodeFacts, stage: Stage, returns: tuple[str, ...]) -> Method:
    """A stage's `forward`."""
    graph = facts.graph
    ops = [graph.op_of[name] for name in stage.ops if name not in graph.loss_only]
    read = {value for op in ops for value in op.inputs}
    inputs = [value for value in stage.inputs if value in read or value not in graph.targets]
    return _method(facts, ops, inputs, returns, frozenset(stage.duplicates))


def loss_method(facts: CodeFacts, stage: Stage, outputs: Sequence[str]) -> Method:
    """The last stage's `loss`, of outputs and inputs of that stage; it returns the terms."""
    graph = facts.graph
    assert graph.loss is not None
    known = dict.fromkeys((*outputs, *stage.inputs))
    names = {name for name in stage.ops if name in graph.loss_only}
    pending = list(names)
    while pending:
        for value in graph.op_of[pending.pop()].inputs:
            maker = graph.producer.get(value)
            if value in known or maker is None or maker.name in names:
                continue
            if maker.name in stage.ops:
                names.add(maker.name)
                pending.append(maker.name)
    ops = [graph.op_of[name] for name in stage.ops if name in names]
    terms = tuple(term.value for term in graph.loss.summands)
    return _method(facts, ops, tuple(known), terms, frozenset(stage.duplicates))


def _method(
    facts: CodeFacts,
    ops: Sequence[Op],
    inputs: Iterable[str],
    returns: tuple[str, ...],
    duplicates: frozenset[str],
) -> Method:
    inputs = tuple(inputs)
    rebased, given = _rebase(facts, ops, inputs)
    unwritten = frozenset(name for name in duplicates if not facts.writes(name))
    kept = drop_dead(rebased, returns, unwritten)
    read = {value for op in kept for value in op.inputs}.union(returns)
    given = [item for item in given if item.value in read]
    arguments = tuple(value for value in inputs if value in read)
    for item in given:
        arguments = _telling(facts.graph, item, arguments, inputs)
    return Method(
        ops=kept,
        arguments=arguments,
        returns=returns,
        multiples=facts.multiples,
        given=tuple(given),
    )


def _telling(
    graph: Graph, item: ReadSize, arguments: tuple[str, ...], inputs: Iterable[str]
) -> tuple[str, ...]:
    """The arguments, with more where a size does not follow from their shapes."""
    for size in sizes_in(asked(item.template)):
        if is_told(item.template, told(graph, arguments)):
            return arguments
        if size not in told(graph, arguments):
            telling = (value for value in inputs if size in told(graph, [value]))
            arguments = (*arguments, *itertools.islice(telling, 1))
    return arguments


def _rebase(
    facts: CodeFacts, ops: Sequence[Op], inputs: tuple[str, ...]
) -> tuple[list[Op], list[ReadSize]]:
    """Splits off the ops that ask for the shape of a tensor which the stage does not have.

    What several modules compute of sizes is computed once in the graph; each reads it by itself.
    """
    graph = facts.graph
    known = told(graph, inputs)
    available = set(inputs)
    kept: list[Op] = []
    given: list[ReadSize] = []
    for op in ops:
        lacking = [value for value in op.inputs if value not in available]
        if not lacking and not _is_shared_size(facts, op, known):
            available.update(op.outputs)
            kept.append(op)
            continue
        templated = [value for value in op.outputs if value in facts.templates]
        if len(templated) < len(op.outputs):
            raise EmitError(
                f"the op {op.name} reads {', '.join(lacking)}, which its stage does not have",
                location=op.source,
            )
        given.extend(ReadSize(value, facts.templates[value], op) for value in templated)
        available.update(templated)
    return kept, given


def _is_shared_size(facts: CodeFacts, op: Op, known: Collection[Dim]) -> bool:
    """Whether an op computes a size, of sizes alone, that another module reads too.

    Args:
        known: the sizes that can be read where the op is.
    """
    templates = facts.templates
    sizes = bool(op.inputs) and templates.keys() >= {*op.inputs, *op.outputs}
    sizes = sizes and all(is_told(templates[value], known) for value in op.outputs)
    readers = (reader for value in op.outputs for reader in facts.graph.consumers.get(value, ()))
    return sizes and bool(known) and any(reader.module != op.module for reader in readers)


def drop_dead(
    ops: Sequence[Op], returns: Iterable[str], droppable: frozenset[str] = frozenset()
) -> tuple[Op, ...]:
    """The ops without attribute look-ups, arithmetic and `droppable` ops that nothing reads."""

    def is_droppable(op: Op) -> bool:
        made = op.call
        pure = isinstance(made, FunctionCall) and made.function in _PURE
        return pure or op.name in droppable

    return without_unread(ops, returns, is_droppable)
