"""Ops in place in some of several equal layers that might as well be out of place in all of them.

The first of several layers is given what others read or what has other strides, so that an op may
write over its operand in all the others alone. The layers would be of two kinds for nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence

from gpipe_compiler.ir import Graph, ModuleCall, Op, called
from gpipe_compiler.passes.saved_tensors import runs_of

_NUMBERED = re.compile(r"(?:.*?\.)??\d+(?=\.|$)")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def idle_writes(plain: Graph, changed: Graph, chosen: Collection[str]) -> frozenset[str]:
    """The ops in place that some equal layer has out of place, and that lower no layer's peak.

    Args:
        plain: the graph before.
        changed: that with the ops in place.
        chosen: these ops.
    """
    groups: dict[Hashable, list[str]] = {}
    counts: Counter[Hashable] = Counter()
    for op in plain.ops:
        path, kind = _path(op), called(op.call)
        if _NUMBERED.match(path):
            like = (_NUMBER.sub("#", path), kind, counts[path, kind])
            groups.setdefault(like, []).append(op.name)
            counts[path, kind] += 1
    uneven = {
        name
        for group in groups.values()
        if not set(chosen).issuperset(group)
        for name in group
        if name in chosen
    }
    return frozenset(name for name in uneven if _is_idle(plain, changed, name))


def _is_idle(plain: Graph, changed: Graph, name: str) -> bool:
    """Whether a layer's peak is no higher where one of its ops makes a tensor of its own."""
    op, run = plain.op_of[name], runs_of(plain).get(name)
    if run is None or not run.saved.isdisjoint(op.inputs):
        return False  # what it reads and what it makes would both be kept
    levels = _levels(changed)
    others = (levels[other] for other in _layers(plain)[_layer(op)] if other != name)
    return levels[name] + sum(run.sizes) <= max(others, default=0)


def _layers(graph: Graph) -> Mapping[str, Sequence[str]]:
    """The ops of each layer."""
    return graph.once("layers", lambda: _find_layers(graph))


def _find_layers(graph: Graph) -> Mapping[str, Sequence[str]]:
    found: dict[str, list[str]] = {}
    for op in graph.ops:
        found.setdefault(_layer(op), []).append(op.name)
    return found


def _levels(graph: Graph) -> Mapping[str, int]:
    """Bytes at most while each op of a forward runs, what autograd keeps included."""
    return graph.once("levels", lambda: _find_levels(graph))


def _find_levels(graph: Graph) -> Mapping[str, int]:
    runs = runs_of(graph)
    storage = {name: value.storage for name, value in graph.values.items()}
    last = {storage[name]: op.name for op in graph.ops for name in (*op.inputs, *op.outputs)}
    kept = {storage[name] for name in graph.ends}
    kept.update(storage[name] for run in runs.values() for name in run.saved)
    held: dict[int, int] = {}
    stays, found = 0, {}
    for op in graph.ops:
        run = runs.get(op.name)
        if run is None:
            found[op.name] = 0
            continue
        found[op.name] = stays + sum(held.values()) + run.peak
        stays += run.kept
        for name, size in zip(op.outputs, run.sizes, strict=True):
            held.setdefault(storage[name], size)
        for name in (*op.inputs, *op.outputs):
            if last[storage[name]] == op.name and storage[name] not in kept:
                held[storage[name]] = 0
    return found


def _path(op: Op) -> str:
    return op.call.module if isinstance(op.call, ModuleCall) else op.module


def _layer(op: Op) -> str:
    """The path of the outermost numbered module that an op is in."""
    found = _NUMBERED.match(_path(op))
    return found[0] if found else ""
