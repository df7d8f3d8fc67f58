"""Lets ops write their result over an operand that nobody needs any more.

That takes a tensor less while the op runs, and one less for the backward where both would be kept
(a ReLU6 after a normalisation). No number changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from gpipe_compiler.errors import ModelError
from gpipe_compiler.ir import FunctionCall, Graph, MethodCall, Mode, ModuleCall, Op
from gpipe_compiler.ir.legality import check
from gpipe_compiler.ir.ops import autocasts, records_gradients
from gpipe_compiler.ir.repeats import NameKind
from gpipe_compiler.passes.dry_run import modes
from gpipe_compiler.passes.effects import Effects, shares_by_mode, written_memory
from gpipe_compiler.passes.inplace_variants import (
    Variant,
    functional,
    half_precision,
    makes_new,
    may_return_its_argument,
    variants,
)
from gpipe_compiler.passes.observe import ObservedRun, SeenValue, observed
from gpipe_compiler.passes.shapes import annotate

_NOBODY: frozenset[str] = frozenset()

_ASKS = frozenset({"size", "dim", "numel", "stride"})
"""Methods that read nothing of a tensor's content."""


def write_in_place(graph: Graph) -> Graph:
    """The graph with every op in place that may be, described anew.

    An op may write over an operand when, in train and eval mode alike,

    - a result of the same shape, type and layout goes into memory that an op of the graph has made
      for itself, that no other value or state looks into, and that the model does not return;
    - the op is its only reader, so that nobody reads it later, and nobody keeps it for the
      backward but, perhaps, its maker or the op itself: that is observed on fake tensors, and once
      more of what comes of it, by the versions of all that autograd keeps;
    - autocast gives both operands the same type, whichever precision the package is run in.

    Where a cut lies between an op and the maker of its operand, the op is `undone` again.

    Raises:
        ModelError: naming the op that cannot run.
    """
    refused: frozenset[str] = frozenset()
    while chosen := _choose(graph, refused):
        changed, wrong = _tried(graph, chosen)
        if changed is not None:
            return check(changed, after="inplace")
        refused |= wrong
    return graph


def torn(graph: Graph, plain: Graph, found: Effects, stage_of: Mapping[str, int]) -> frozenset[str]:
    """The ops that would write over what another stage has made, were they in place.

    Args:
        graph: what `write_in_place` has made of `plain`.
        found: the effects of `graph`.
        stage_of: the stage of every op that runs in one stage alone.
    """
    changed = {op.name for op in graph.ops if op is not plain.op_of[op.name]}
    ops = [op for op in graph.ops if op.name in stage_of]
    wrong = set()
    for memory in written_memory(graph, found, ops):
        stages: set[int] = set()
        for name in memory.touchers:
            if name in memory.writers & changed and stages - {stage_of[name]}:
                wrong.add(name)
                stages = set()
            stages.add(stage_of[name])
    return frozenset(wrong)


def undone(graph: Graph, plain: Graph, wrong: Collection[str]) -> Graph:
    """The graph with these ops as they are in the plain one; for `torn` ones."""
    calls = [plain.op_of[name].call for name in wrong]
    paths = {call.module for call in calls if isinstance(call, ModuleCall)}

    def replaced(op: Op) -> Op:
        before = plain.op_of[op.name]
        call = before.call
        if op.name in wrong:
            return before
        if op is before or not isinstance(call, ModuleCall) or call.module not in paths:
            return op
        other = functional(call, plain.modules[call.module])
        return dataclasses.replace(before, call=other) if other else before

    modules = {**graph.modules, **{path: plain.modules[path] for path in paths}}
    changed = graph.replace(ops=tuple(map(replaced, graph.ops)), modules=modules, values={})
    described = annotate(changed, graph.batch_size, graph.precision, alike=graph.values)
    return check(described, after="inplace")


Chosen = Mapping[str, Variant]
"""By op, the variant that takes its place."""


def _asks_for_shape(op: Op) -> bool:
    match op.call:
        case MethodCall(method=method):
            return method in _ASKS
        case FunctionCall(function=function):
            return function is getattr
    return False


# --- what is chosen --------------------------------------------------------------------------


def _choose(graph: Graph, refused: frozenset[str]) -> Chosen:
    """The first legal variant of every op, in all modes in which values share other memory."""
    training = graph.loss is not None
    by_mode = training and (False in modes(graph) or shares_by_mode(graph))
    seen = (True, False) if by_mode else (training,)
    runs = tuple(observed(graph, training=training) for training in seen)
    legal = _Legal(graph, runs, half_precision(graph))
    # What the model itself computes under autocast has other types on other kinds of devices.
    chosen: dict[str, Variant] = {}
    for op in graph.ops:
        fixed = autocasts(op) or op.name in refused | graph.loss_only
        if op.mode is Mode.ALWAYS and not fixed:
            found = (item for item in variants(graph, op) if legal.variant(op, item))
            if (variant := next(found, None)) is not None:
                chosen[op.name] = variant
    return chosen


@dataclass(frozen=True)
class _Legal:
    """Says what may be written over."""

    graph: Graph
    runs: tuple[ObservedRun, ...]
    half: frozenset[str]

    def variant(self, op: Op, variant: Variant) -> bool:
        """Whether a variant may take the place of its op."""
        if not isinstance(op.result, str):
            return False
        names = {variant.operand, op.result}
        if not all(_are_tensors(run, names) for run in self.runs):
            return False
        operand, result = (self.graph.values[name] for name in (variant.operand, op.result))
        if (operand.batch_dim, operand.splittable) != (result.batch_dim, result.splittable):
            return False  # equal at this size, but not at others
        chain = self._chain(op.name, variant.operand)
        return (
            bool(chain)
            and self._same_type_in_any_precision(variant)
            and all(self._in_run(run, op, variant, frozenset(chain)) for run in self.runs)
        )

    def _chain(self, reader: str, value: str) -> list[str]:
        """The value, and what it may be the same tensor as; [] where somebody else needs it."""
        maker = self.graph.producer.get(value)
        known = self.graph.values[value]
        if (
            maker is None
            or maker.mode is not Mode.ALWAYS
            or maker.name in self.graph.loss_only
            or known.batch_dim is None
            or not self._is_read_by(value, reader)
        ):
            return []
        if makes_new(self.graph, maker):
            return [value]
        if may_return_its_argument(self.graph, maker) and len(maker.inputs) == 1:
            before = self._chain(maker.name, maker.inputs[0])
            return [value, *before] if before else []
        return []

    def _is_read_by(self, value: str, op: str) -> bool:
        """Whether this op, once, is all that reads the content of a value."""
        readers = [r for r in self.graph.consumers.get(value, ()) if not _asks_for_shape(r)]
        once = [r.name for r in readers] == [op] and readers[0].reads.count(value) == 1
        return once and value not in self.graph.ends

    def _same_type_in_any_precision(self, variant: Variant) -> bool:
        other = variant.other
        if other is None or isinstance(other, int | float):
            return True
        names = {variant.operand, getattr(other, "name", "")}
        return names <= self.half

    def _in_run(self, run: ObservedRun, op: Op, variant: Variant, chain: frozenset[str]) -> bool:
        assert isinstance(op.result, str)
        operand, result = run.values[variant.operand], run.values[op.result]
        (memory,), form = operand.storages, operand.form
        assert form is not None
        return (
            _layout(operand) == _layout(result)
            and memory not in result.storages
            and run.sharing[memory] <= chain
            and memory.name.kind is not NameKind.STATE
            and run.savers.get(memory, _NOBODY) <= {op.name}
            and not (form.requires_grad and (form.viewed or not records_gradients(op)))
        )


def _are_tensors(run: ObservedRun, names: Iterable[str]) -> bool:
    return all(name in run.values and run.values[name].form is not None for name in names)


def _layout(value: SeenValue) -> tuple[object, ...]:
    assert value.form is not None
    return value.form.shape, value.form.stride, value.form.dtype


# --- what comes of it ------------------------------------------------------------------------


def _written(graph: Graph, chosen: Chosen) -> Graph:
    callers: dict[str, list[str]] = {}
    for op in graph.ops:
        if isinstance(op.call, ModuleCall):
            callers.setdefault(op.call.module, []).append(op.name)
    modules = dict(graph.modules)
    ops = []
    for op in graph.ops:
        variant = chosen.get(op.name)
        if variant is None:
            ops.append(op)
            continue
        call = variant.call
        if variant.spec is not None:
            if all(name in chosen for name in callers[variant.spec.path]):
                modules[variant.spec.path] = variant.spec
            else:
                call = functional(op.call, variant.spec) or op.call
        ops.append(dataclasses.replace(op, call=call))
    return graph.replace(ops=tuple(ops), modules=modules, values={})


def _tried(graph: Graph, chosen: Chosen) -> tuple[Graph | None, frozenset[str]]:
    """The graph with these variants, described anew.

    None, and the rewrites to undo: ops that keep a copy, or all where autograd
    finds a tensor changed that it has kept.
    """
    try:
        written = _written(graph, chosen)
        changed = annotate(written, graph.batch_size, graph.precision, alike=graph.values)
    except (ModelError, RuntimeError):
        return None, frozenset(chosen)
    if graph.loss is None:
        return changed, frozenset()
    run = observed(changed)
    copying = frozenset(name for name in chosen if _keeps_a_copy(run, changed.op_of[name]))
    if copying:
        return None, copying
    before = observed(graph).ops
    if any(op.lost and not before[name].lost for name, op in run.ops.items()):
        return None, frozenset(chosen)
    return changed, frozenset()


def _keeps_a_copy(run: ObservedRun, op: Op) -> bool:
    names = (name for name in (*op.inputs, *op.outputs) if name in run.values)
    seen = {storage for name in names for storage in run.values[name].storages}
    saved = run.ops[op.name].saved
    return any(s not in seen and s.name.kind is not NameKind.STATE for s in saved)
