"""The values that go into a stage and out of it."""

from __future__ import annotations

from collections.abc import Sequence

from gpipe_compiler.ir import Graph, ValueKind


def ends(graph: Graph, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """What some ops read of others, and others (or the caller) of them."""
    tensors = {name for name, value in graph.values.items() if value.kind is ValueKind.TENSOR}
    made = {value for name in names for value in graph.op_of[name].outputs}
    read = dict.fromkeys(value for name in names for value in graph.op_of[name].inputs)
    later = {value for op in graph.ops if op.name not in names for value in op.inputs}
    handed = later.union(graph.output_values).intersection(tensors, made)
    inputs = [value for value in read if value in tensors.difference(made)]
    return inputs, [value for value in graph.values if value in handed]
