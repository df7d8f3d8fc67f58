"""Layers that are left out at random, as Python decides by a draw (LayerDrop).

A graph holds both ways. The ops of such a layer (`Op.layer`) run in any case, and `unless` then
takes what they have made, or what the model goes on with where it leaves the layer out. So every
analysis sees the layer as it runs. The code of a stage runs a layer that is the call of a module
only where it is not left out.
"""

from __future__ import annotations

import dataclasses
import operator

import torch
from torch._subclasses import FakeTensor

from gpipe_compiler.ir.graph import Graph
from gpipe_compiler.ir.ops import Call, FunctionCall, Op
from gpipe_compiler.runtime.core.random import passed_on


def unless(left_out: torch.Tensor | bool, made: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """What a layer has made, or what is passed on in its place.

    Args:
        left_out: whether the layer is; without numbers, it is not.
    """
    unknown = isinstance(left_out, torch.Tensor) and left_out.is_meta
    if isinstance(left_out, FakeTensor) or unknown or not left_out:
        return made
    return passed_on(given, gradient=made.requires_grad)


def may_leave_out(call: Call) -> bool:
    """Whether a call takes what a layer has made, unless it is left out."""
    return isinstance(call, FunctionCall) and call.function is unless


def with_all_layers(graph: Graph, *, left_out: bool = False) -> Graph:
    """The graph, in which no layer is left out, or each one, whatever is drawn."""
    ops = tuple(_with_layer(op, left_out) for op in graph.ops)
    return graph if all(map(operator.is_, ops, graph.ops)) else graph.replace(ops=ops)


def _with_layer(op: Op, left_out: bool) -> Op:
    call = op.call
    if isinstance(call, FunctionCall) and may_leave_out(call):
        return dataclasses.replace(
            op, call=dataclasses.replace(call, args=(left_out, *call.args[1:]))
        )
    return op
