"""Finds what every stage computes for itself instead of receiving it.

Batch sizes and arithmetic on them, masks, position and rotary tables: they depend on no data and
train nothing, so computing them again costs less than sending them, and numbers that are no tensors
could not be sent at all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gpipe_compiler.ir import Argument, Graph, Mode, Op, ValueKind
from gpipe_compiler.ir.arguments import BatchMultiple
from gpipe_compiler.ir.branches import is_requirement
from gpipe_compiler.ir.sizes import is_free
from gpipe_compiler.passes.dry_run import modes
from gpipe_compiler.passes.effects import Effects
from gpipe_compiler.passes.free_sizes import symbolic
from gpipe_compiler.passes.observe import SeenValue, observed
from gpipe_compiler.passes.random_ops import random_ops
from gpipe_compiler.passes.value_splits import sized_by_values
from gpipe_compiler.runtime.spec import Precision


@dataclass(frozen=True, slots=True)
class StageDevice:
    """The device of any tensor that the stage has, `t.device`."""


def shape_values(graph: Graph) -> Mapping[str, Argument]:
    """What the non-tensor values are, for those that follow from shapes alone.

    A template is a constant (the value at any size: int, float, bool, None, str, a torch dtype,
    ...), a `BatchMultiple`, an expression of sizes that are free, a `StageDevice`, or a tuple, list
    or dict of these (a `torch.Size` shows as a tuple). With it a stage writes the value down
    without the tensor that the model asked: `x.size(0)` becomes `h.size(0)`. Found by running at
    the graph's batch size and at twice that. A number that follows from the batch in another way,
    such as `n + 1`, has no template, so it is computed from those that do.
    """
    if all(value.kind is ValueKind.TENSOR for value in graph.values.values()):
        return {}
    return graph.once("shape values", lambda: _seen_shape_values(graph))


def _seen_shape_values(graph: Graph) -> Mapping[str, Argument]:
    run = symbolic(graph)
    hidden = run.hidden | sized_by_values(graph)
    found: dict[str, Argument] = {}
    for training in modes(graph):
        once, twice = (
            observed(graph, times * graph.batch_size, training=training).values for times in (1, 2)
        )
        elsewhere = _in_other_precisions(graph, once, training)
        for name, seen in once.items():
            if seen.form is None and not seen.storages and name not in found:
                if any(repr(other[name].plain) != repr(seen.plain) for other in elsewhere):
                    continue
                if name in hidden:
                    continue
                try:
                    found[name] = _template(
                        seen.plain,
                        twice[name].plain,
                        graph.batch_size,
                        run.plain.get(name, seen.plain),
                    )
                except _NoTemplateError:
                    continue
    return found


def _in_other_precisions(
    graph: Graph, values: Mapping[str, SeenValue], training: bool
) -> list[Mapping[str, SeenValue]]:
    """The values in every other precision that the graph is for, where some of them are types."""
    if not any(isinstance(value.plain, torch.dtype) for value in values.values()):
        return []
    others = [p for p in Precision if p is not graph.precision and p not in graph.unlike]
    return [observed(graph.replace(precision=other), training=training).values for other in others]


def duplicable(graph: Graph, effects: Effects) -> frozenset[str]:
    """Names of the ops of an annotated graph that any stage can compute for itself.

    They are those that only ask tensors for their shape (`shape_values` lists what they return),
    and, where they run in both modes, all that follow from such numbers, constants and buffers
    that nobody writes, as long as they are not random, need no gradient, and write in place only
    what is theirs.
    """
    templates = shape_values(graph)
    randoms = random_ops(graph)
    asking = {
        op.name for op in graph.ops if op.outputs and all(name in templates for name in op.outputs)
    }
    chosen: set[str] = set()
    for op in graph.ops:
        if op.name not in randoms and not is_requirement(op) and _is_constant(graph, effects, op):
            follows = op.mode is Mode.ALWAYS and _follows(graph, op, chosen)
            if (op.name in asking and op.name not in effects.writes) or follows:
                chosen.add(op.name)
    return _settle(graph, effects, chosen, asking)


def closure(
    graph: Graph, effects: Effects, duplicable: Collection[str], ops: Iterable[str]
) -> frozenset[str]:
    """The duplicable ops that some ops need, directly or through one another.

    What the ops read is made by them, and so are the writes in place on it that the ops see.

    Args:
        ops: names of ops, duplicable ones among them or not; those that are count as needed too.
    """
    position = {op.name: index for index, op in enumerate(graph.ops)}
    writers: dict[str, list[str]] = {}
    for op in graph.ops:
        if op.name in duplicable:
            for value in effects.writes.get(op.name, ()):
                writers.setdefault(value, []).append(op.name)
    pending = list(ops)
    needed = {name for name in pending if name in duplicable}
    while pending:
        reader = pending.pop()
        for value in graph.op_of[reader].inputs:
            maker = graph.producer.get(value)
            sources = [maker.name] if maker is not None and maker.name in duplicable else []
            sources += [w for w in writers.get(value, ()) if position[w] < position[reader]]
            fresh = [name for name in sources if name not in needed]
            needed.update(fresh)
            pending.extend(fresh)
    return frozenset(needed)


class _NoTemplateError(Exception):
    """The object does not follow from shapes in a way that a template can say."""


def _template(once: Any, twice: Any, batch_size: int, free: Any) -> Argument:
    """The template of an object seen with `batch_size` samples and with twice as many.

    Args:
        free: the same with what follows from free sizes as expressions.
    """
    if is_free(free):
        return free
    if type(once) is not type(twice):
        raise _NoTemplateError
    match once:
        case torch.device():
            return StageDevice()
        case tuple() | list() if len(once) == len(twice):
            nests = zip(once, twice, free, strict=True)
            items = [_template(a, b, batch_size, item) for a, b, item in nests]
            return items if isinstance(once, list) else tuple(items)
        case dict() if once.keys() == twice.keys():
            return {key: _template(once[key], twice[key], batch_size, free[key]) for key in once}
        case None | bool() | int() | float() | complex() | str() if once == twice:
            return once
        case torch.dtype() | torch.layout() | torch.memory_format() if once == twice:
            return once
        case int() if twice == 2 * once and once % batch_size == 0:
            return BatchMultiple(once // batch_size)
        case _:
            raise _NoTemplateError


def _is_constant(graph: Graph, effects: Effects, op: Op) -> bool:
    """Whether nothing that trains or changes enters or leaves an op."""
    states = effects.states_of(graph, op)
    return (
        not any(graph.values[name].requires_grad for name in op.outputs)
        and not any(graph.state[name].requires_grad for name in states)
        and effects.written_states.isdisjoint(states)
    )


def _follows(graph: Graph, op: Op, chosen: Collection[str]) -> bool:
    """Whether all that an op reads is made by ops already chosen."""
    makers = (graph.producer.get(name) for name in op.inputs)
    return all(maker is not None and maker.name in chosen for maker in makers)


def _settle(
    graph: Graph, effects: Effects, chosen: set[str], asking: Collection[str]
) -> frozenset[str]:
    """Takes back ops whose memory an op outside writes, and what follows from them.

    Args:
        asking: the ops that only ask tensors for their shape, whatever these hold.
    """
    while True:
        foreign = {
            value
            for op, values in effects.writes.items()
            if op not in chosen or not _makers(graph, values) <= chosen
            for value in values
        }
        lost = {
            name
            for name in chosen
            if name not in asking
            and not foreign.isdisjoint((*graph.op_of[name].outputs, *graph.op_of[name].inputs))
        }
        lost |= {
            name
            for name in chosen - lost
            if name not in asking and not _follows(graph, graph.op_of[name], chosen - lost)
        }
        if not lost:
            return frozenset(chosen)
        chosen -= lost


def _makers(graph: Graph, values: Iterable[str]) -> set[str]:
    """The ops that make some values; "" stands for the caller, who makes the inputs."""
    return {
        maker.name if (maker := graph.producer.get(name)) is not None else "" for name in values
    }
