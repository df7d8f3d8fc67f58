"""The bodies of an ONNX model as nodes beside those that hold them, so that a run shows them all.

Of an `If` both branches, of a `Loop` or `Scan` one round. Nothing reads what they make.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from gpipe_compiler.onnx.frontend.nodes import subgraphs


@dataclass(frozen=True, eq=False)
class Body:
    """A body, as nodes and weights that can be added to the main graph."""

    nodes: tuple[NodeProto, ...] = ()
    weights: tuple[TensorProto, ...] = ()


def unfolded(nodes: Iterable[NodeProto]) -> Iterator[Body]:
    """Every body in these nodes, also those in bodies; each with all that it needs."""
    return _bodies(nodes, Body(), itertools.count())


def _bodies(nodes: Iterable[NodeProto], around: Body, numbers: Iterator[int]) -> Iterator[Body]:
    for node in nodes:
        for body in subgraphs(node):
            prefix = f"body {next(numbers)}/"
            names: dict[str, str] = {}
            entering, weights = [], []
            for name, given in _entered(node, body, prefix):
                if isinstance(given, NodeProto):
                    entering.append(given)
                elif isinstance(given, TensorProto):
                    weights.append(given)
                names[name] = _name_of(given)
            names |= {n: prefix + n for inner in body.node for n in inner.output if n}
            for tensor in body.initializer:
                copy = TensorProto()
                copy.CopyFrom(tensor)
                copy.name = names[tensor.name] = prefix + tensor.name
                weights.append(copy)
            inside = [_renamed(inner, names) for inner in body.node]
            found = Body((*around.nodes, *entering, *inside), (*around.weights, *weights))
            yield found
            yield from _bodies(inside, found, numbers)


def _name_of(given: str | NodeProto | TensorProto) -> str:
    if isinstance(given, str):
        return given
    return str(given.output[0] if isinstance(given, NodeProto) else given.name)


def _entered(
    node: NodeProto, body: GraphProto, prefix: str
) -> Iterator[tuple[str, str | NodeProto | TensorProto]]:
    """What the inputs of a body are in its first round: values, or what makes them."""
    inputs = [item.name for item in body.input]
    if node.op_type == "Loop":
        shape = [dim.dim_value for dim in body.input[0].type.tensor_type.shape.dim]
        yield inputs[0], numpy_helper.from_array(np.zeros(shape, np.int64), f"{prefix}number")
        yield inputs[1], numpy_helper.from_array(np.ones((), np.bool_), f"{prefix}again")
        yield from zip(inputs[2:], node.input[2:], strict=False)
    elif node.op_type == "Scan" and len(node.input) == len(inputs):
        attributes = {item.name: helper.get_attribute_value(item) for item in node.attribute}
        states = len(inputs) - attributes["num_scan_inputs"]
        axes = attributes.get("scan_input_axes", [0] * (len(inputs) - states))
        yield from zip(inputs[:states], node.input[:states], strict=True)
        first = numpy_helper.from_array(np.zeros((), np.int64), f"{prefix}first")
        yield f"{prefix}first", first
        for name, given, axis in zip(inputs[states:], node.input[states:], axes, strict=True):
            yield name, helper.make_node("Gather", [given, first.name], [prefix + name], axis=axis)


def _renamed(node: NodeProto, names: Mapping[str, str]) -> NodeProto:
    copy = NodeProto()
    copy.CopyFrom(node)
    copy.input[:] = [names.get(name, name) for name in node.input]
    copy.output[:] = [names.get(name, name) for name in node.output]
    for body in subgraphs(copy):
        inner = {item.name for item in (*body.input, *body.initializer)}
        inner.update(name for own in body.node for name in own.output)
        outer = {name: new for name, new in names.items() if name not in inner}
        nodes = [_renamed(own, outer) for own in body.node]
        del body.node[:]
        body.node.extend(nodes)
        for result in body.output:
            result.name = outer.get(result.name, result.name)
    return copy
