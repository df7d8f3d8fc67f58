"""Plans cut by hand, and emitted stages run in plain Python."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from gpipe_compiler.cluster import Cluster, Device, Link
from gpipe_compiler.frontend.auto import Frontend, trace
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.ir import Graph, ValueKind
from gpipe_compiler.passes.atoms import atoms
from gpipe_compiler.passes.duplicate import closure, duplicable
from gpipe_compiler.passes.effects import effects
from gpipe_compiler.passes.shapes import annotate
from gpipe_compiler.plan import Plan, Prediction, Stage
from gpipe_compiler.runtime.schedule import gpipe
from gpipe_compiler.runtime.spec import Crossing, ScheduleKind

CLUSTER = Cluster(Device("test", 1e12, 1e11, 1 << 34, 1e-6), Link(1e10, 1e-6))
MICROBATCHES = 2


def graph_of(
    model: nn.Module,
    *args: torch.Tensor,
    frontend: Frontend = Frontend.AUTO,
    target: object = None,
    loss_fn: Callable[[object, object], torch.Tensor] | None = None,
    kwargs: Mapping[str, object] | None = None,
    name: str = "example",
    training: bool = True,
) -> Graph:
    """The annotated graph of a model; the batch is the first input's dimension 0."""
    subject = Subject(name, model, args, kwargs or {}, target, loss_fn, training)
    graph = trace(subject, frontend)
    if not graph.example:
        call = {"args": args, "kwargs": subject.kwargs, "target": target}
        graph = graph.replace(
            example={source.name: _at(call, source.path) for source in graph.inputs}
        )
    return annotate(graph, graph.batch_size)


def _at(call: Any, path: Sequence[str | int]) -> Any:
    return functools.reduce(lambda found, key: found[key], path, call)


def cut(graph: Graph, count: int) -> Plan:
    """A plan with about equally many ops in each of `count` stages, atoms kept whole."""
    found = effects(graph)
    copied = duplicable(graph, found)
    groups = atoms(graph, found, copied)
    kept = [op.name for op in graph.ops if op.name not in copied]
    stage_of: dict[str, int] = {}
    for index, name in enumerate(kept):
        stage_of[name] = index * count // len(kept)
    changed = True
    while changed:  # nothing before what it reads, no atom apart, the loss last
        before = dict(stage_of)
        edges = [*groups.precedence]
        for name in kept:
            if name in groups.last_stage:
                stage_of[name] = count - 1
            for value in graph.op_of[name].inputs:
                maker = graph.producer.get(value)
                if maker is not None and maker.name in stage_of:
                    edges.append((maker.name, name))
        for first, second in edges:
            if first in stage_of and second in stage_of:
                stage_of[second] = max(stage_of[second], stage_of[first])
        for group in groups.groups:
            top = max(stage_of[name] for name in group)
            stage_of.update(dict.fromkeys(group, top))
        changed = before != stage_of
    return _plan(graph, stage_of, copied, count)


def _plan(graph: Graph, stage_of: dict[str, int], copied: frozenset[str], count: int) -> Plan:
    found = effects(graph)
    inputs = {source.name for source in graph.inputs}
    home = {value: stage_of.get(op.name, -1) for value, op in graph.producer.items()}
    home.update(dict.fromkeys(inputs, 0))
    reads: list[dict[str, None]] = [{} for _ in range(count)]
    ops: list[list[str]] = []
    for index in range(count):
        own = [name for name, stage in stage_of.items() if stage == index]
        needed = {*own, *closure(graph, found, copied, own)}
        ordered = [op.name for op in graph.ops if op.name in needed]
        ops.append(
            [n for n in ordered if n not in graph.loss_only]
            + [n for n in ordered if n in graph.loss_only]
        )
        for name in ordered:
            if name in stage_of:
                reads[index].update(dict.fromkeys(graph.op_of[name].inputs))
    crossings = []
    for value, source in home.items():
        targets = tuple(t for t in range(count) if t != source and value in reads[t])
        if source < 0 or not targets:
            continue
        known = graph.values[value]
        shape = list(known.shape)
        if known.batch_dim is not None:
            shape[known.batch_dim] //= MICROBATCHES
        crossings.append(
            Crossing(
                value,
                source,
                targets,
                tuple(shape),
                known.dtype or torch.float32,
                known.batch_dim,
                known.requires_grad,
            )
        )
    crossing_values = {crossing.value for crossing in crossings}
    stages = []
    for index in range(count):
        made = [value for value, source in home.items() if source == index]
        own_loss = {
            value
            for name in ops[index]
            if name in graph.loss_only
            for value in graph.op_of[name].inputs
        }
        stages.append(
            Stage(
                index=index,
                ops=tuple(ops[index]),
                duplicates=tuple(name for name in ops[index] if name in copied),
                inputs=tuple(
                    value
                    for value in reads[index]
                    if (value in inputs or home[value] not in (index, -1))
                ),
                outputs=tuple(
                    value
                    for value in made
                    if value not in inputs
                    and graph.values[value].kind is ValueKind.TENSOR
                    and (graph.producer[value].name not in graph.loss_only)
                    and (
                        value in crossing_values
                        or value in graph.output_values
                        or value in own_loss
                    )
                ),
                state=(),
                forward_s=1.0,
                backward_s=2.0,
                receive_bytes=0,
                gradient_bytes=0,
                parameter_bytes=0,
                parameter_count=0,
                saved_bytes=0,
            )
        )
    return Plan(
        name=graph.name,
        stages=tuple(stages),
        crossings=tuple(crossings),
        schedule=ScheduleKind.GPIPE,
        microbatches=MICROBATCHES,
        batch_size=graph.batch_size,
        training=graph.loss is not None,
        orders=gpipe(tuple(range(count)), MICROBATCHES),
        cluster=CLUSTER,
        cost_source="by hand",
        prediction=Prediction(1.0, 1.0, 0.0, 1.0, False, (0,) * count),
        graph=graph,
    )
