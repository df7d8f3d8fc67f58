"""The methods of a stage: which ops `forward` runs and which `loss`, on what, for what.

Numbers that follow from shapes are read off a tensor that the method has.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gpipe_compiler.codegen.constants import quote
from gpipe_compiler.codegen.expressions import RawText, again
from gpipe_compiler.codegen.facts import CodeFacts
from gpipe_compiler.codegen.functions import BINARY, UNARY
from gpipe_compiler.codegen.layout import Expression, consecutive, lay_out, name, tuple_of
from gpipe_compiler.codegen.names import Identifiers
from gpipe_compiler.codegen.sizes import ReadSize
from gpipe_compiler.errors import EmitError
from gpipe_compiler.ir import FunctionCall, Graph, Op, Ref, Result, ValueKind
from gpipe_compiler.ir.ops import without_unread
from gpipe_compiler.ir.sizes import asked, is_told
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
        before: what the stages before call what they return.
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
    before: Mapping[str, str] = field(default_factory=dict)

    def size_of(self, value: str) -> Dim | None:
        """The number of samples (1) or the free size that a value is; else None."""
        size = self.multiples.get(value)
        return size if size == 1 or isinstance(size, Size) else None


def value_kind(graph: Graph, value: str) -> ValueKind:
    """What a value is; what the graph does not know, such as a state, is a tensor."""
    known = graph.values.get(value)
    return ValueKind.TENSOR if known is None else known.kind


def is_tensor(graph: Graph, value: str) -> bool:
    return value_kind(graph, value) is ValueKind.TENSOR


def forward_method(facts: CodeFacts, stage: Stage, returns: tuple[str, ...]) -> Method:
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
        if is_told(item.template, graph.told(arguments)):
            return arguments
        if size not in graph.told(arguments):
            telling = (value for value in inputs if size in graph.told([value]))
            arguments = (*arguments, *itertools.islice(telling, 1))
    return arguments


def _rebase(
    facts: CodeFacts, ops: Sequence[Op], inputs: tuple[str, ...]
) -> tuple[list[Op], list[ReadSize]]:
    """Splits off the ops that ask for the shape of a tensor which the stage does not have.

    What several modules compute of sizes is computed once in the graph; each reads it by itself.
    """
    graph = facts.graph
    known = graph.told(inputs)
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


# --- segments that run again in the backward: calls of modules, else methods ----------------------


def modules_run_again(facts: CodeFacts, stage: Stage, forward: Method) -> frozenset[str]:
    """The paths of the modules of which one call may be a segment, as far as the stage has it."""
    runs = _runs(forward.ops, stage)
    here = [facts.graph.op_of[name] for name in stage.ops]
    dead = set(stage.ops).difference(op.name for op in forward.ops)
    return frozenset(
        module
        for index, run in runs
        if index is not None and (module := _module_of(here, run, dead))
    )


def split_off(
    facts: CodeFacts,
    stage: Stage,
    forward: Method,
    attributes: Iterable[str],
    again: Collection[str],
) -> tuple[Method, dict[str, Method]]:
    """The `forward` that calls the segments of its stage as methods, and these by name.

    Args:
        attributes: what the stage calls its modules and tensors.
        again: the paths of modules that run again where they are called.
    """
    names = Identifiers(attributes)
    here = [facts.graph.op_of[name] for name in stage.ops]
    dead = set(stage.ops).difference(op.name for op in forward.ops)
    ops: list[Op] = []
    segments: dict[str, Method] = {}
    unnamed = 0
    for index, run in _runs(forward.ops, stage):
        module = "" if index is None else _module_of(here, run, dead)
        method = None if index is None or module in again else _segment(facts.graph, run, forward)
        if method is None:
            ops.extend(run)
            continue
        unnamed += not module
        own = names.take(module or f"segment_{unnamed}")
        segments[own] = method
        ops.append(_call(facts.graph, own, method))
    return dataclasses.replace(forward, ops=tuple(ops)), segments


def _runs(ops: Sequence[Op], stage: Stage) -> list[tuple[int | None, list[Op]]]:
    """The ops of each segment of a stage, and those between them."""
    of_op = {name: index for index, inside in enumerate(stage.segments) for name in inside}
    runs = itertools.groupby(ops, key=lambda op: of_op.get(op.name))
    return [(index, list(run)) for index, run in runs]


def _segment(graph: Graph, ops: Sequence[Op], forward: Method) -> Method | None:
    """What a segment computes; None where nothing of it is used."""
    made = {value for op in ops for value in op.outputs}
    inside = {op.name for op in ops}
    read_after = {value for op in forward.ops if op.name not in inside for value in op.inputs}
    returns = tuple(v for op in ops for v in op.outputs if v in read_after.union(forward.returns))
    if not returns:
        return None
    fixed = tuple(item for item in forward.given if not asked(item.template))
    known = made.union(item.value for item in fixed)
    arguments = tuple(dict.fromkeys(v for op in ops for v in op.inputs if v not in known))
    tensors = [v for v in arguments if is_tensor(graph, v)]
    if not tensors:
        # Devices that were fixed by tracing become that of a tensor, where the stage is given any.
        tensors = [v for v in forward.arguments if is_tensor(graph, v)][:1]
    others = (v for v in arguments if not is_tensor(graph, v))
    read = {value for op in ops for value in op.inputs}
    return Method(
        ops=tuple(ops),
        arguments=(*tensors, *others),
        returns=returns,
        multiples=forward.multiples,
        given=tuple(item for item in fixed if item.value in read),
    )


def _module_of(here: Sequence[Op], ops: Sequence[Op], dead: Collection[str]) -> str:
    """The path of the module of which the stage runs all of these ops and no others, else "".

    Args:
        here: the ops of the stage.
        dead: ops that nobody writes.
    """
    common = ops[0].path.split(".")
    for op in ops:
        pairs = zip(common, op.path.split("."), strict=False)
        common = [word for word, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]
    module = ".".join(common)
    names = {op.name for op in ops}.union(dead)
    within = (op.name for op in here if f"{op.path}.".startswith(f"{module}."))
    return module if module and names.issuperset(within) else ""


def _call(graph: Graph, name: str, method: Method) -> Op:
    """The op by which `forward` calls a segment: it stands where its last result is made."""
    source = graph.producer[method.returns[-1]].source
    return Op(
        name,
        again(RawText(f"self.{name}"), map(Ref, method.arguments)),
        unpacked(method.returns),
        source,
    )


def unpacked(returns: tuple[str, ...]) -> Result:
    """What a call of a method is bound to."""
    return returns[0] if len(returns) == 1 else returns


def segments_lines(held: Mapping[str, Sequence[str]]) -> list[str]:
    """`SEGMENTS = {...}`; layers in a row with the like buffers are one entry."""
    entries: list[Expression] = []
    for (before, after, rests), group in itertools.groupby(
        held, lambda label: _layer(label, held[label])
    ):
        labels = list(group)
        span = consecutive([own.removeprefix(before).removesuffix(after) for own in labels])
        if span and len(labels) > 1:
            own = f"{before}{{i}}{after}"
            names = ", ".join(f'f"{own}{rest}"' for rest in rests)
            listed = f"({names}{',' if len(rests) == 1 else ''})"
            entries.append(name(f'**{{f"{own}": {listed} for i in {span}}}'))
            continue
        for own in labels:
            buffers = [name(quote(buffer)) for buffer in held[own]]
            listing = tuple_of(buffers, exploded=len(buffers) > 1)
            entries.append(listing.prefixed(f"{quote(own)}: "))
    lines = (line for entry in entries for line in lay_out(entry, suffix=",", indent=1))
    return ["SEGMENTS = {", *lines, "}"] if held else []


def _layer(label: str, buffers: Sequence[str]) -> tuple[str, str, tuple[str, ...]]:
    """What stands before and after the number of a layer, and its buffers by their names in it."""
    numbered = re.fullmatch(r"((?:[\w.]*\.)?)\d+((?:\.[A-Za-z_]\w*)*)", label)
    inside = tuple(own.removeprefix(label) for own in buffers if own.startswith(label))
    plain = all(re.fullmatch(r"[\w.]*", own) for own in inside)
    if numbered is None or len(inside) < len(buffers) or not plain:
        return label, "", ()
    return numbered[1], numbered[2], inside
