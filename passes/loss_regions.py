"""Blocks of a loss in a context that changes nothing in it, so that what it is a mean over is seen.

A loss may count under `no_grad`, and is often computed in fp32 where the model around it is not:
`with torch.autocast("cuda", enabled=False): return F.cross_entropy(output.float(), target)`. What
is given fp32 alone is left as it is by autocast, but for products of matrices and their kin.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from gpipe_compiler.ir import (
    Argument,
    Autocast,
    FunctionCall,
    Graph,
    MethodCall,
    NoGrad,
    Op,
    Ref,
    RegionCall,
    StateRef,
    called,
)
from gpipe_compiler.ir.arguments import map_argument, state_names
from gpipe_compiler.ir.ops import RegionBody, Result, map_result, with_arguments
from gpipe_compiler.passes.loss_functions import loss_arguments
from gpipe_compiler.passes.verbs import AND, BOUNDING, COMPARING, MOVES, NOT, OR, verb, writes

_FLOAT = frozenset({"float", "to", "type"})

_OF_ELEMENTS = frozenset(
    {
        *("add", "sub", "mul", "div", "neg", "pow", "square", "sqrt", "exp", "log", "log1p", "abs"),
        *("sum", "mean", "amax", "amin", "logsumexp", "softmax", "log_softmax", "sigmoid", "tanh"),
        *("logsigmoid", "relu", "softplus", "where", "masked_fill", "gather", "one_hot"),
        *("count_nonzero", "numel", "size", "max", "min", "norm"),
    }
)
"""Functions for which autocast has no rule, or one that leaves fp32 as it is."""

_KEPT = _OF_ELEMENTS | MOVES | COMPARING | BOUNDING | AND | OR | NOT


def without_idle_regions(graph: Graph) -> Graph:
    """The graph, its loss without blocks in a context that changes nothing but what requires
    gradients: with their ops, and a `detach` of what they give under `no_grad`.

    Args:
        graph: annotated; the result is not, where it is another one.
    """
    found = {op.name for op in graph.ops if op.name in graph.loss_only and _is_idle(graph, op)}
    if graph.loss is None or not found:
        return graph
    ops = [part for op in graph.ops for part in (_inside(op) if op.name in found else (op,))]
    return graph.replace(ops=tuple(ops), values={})


def _is_idle(graph: Graph, op: Op) -> bool:
    """Whether a block only computes on what it is given, and would compute the same outside."""
    call = op.call
    if not isinstance(call, RegionCall) or not isinstance(op.result, tuple):
        return False
    plain = not any(
        not isinstance(inner.call, FunctionCall | MethodCall)
        or writes(inner)
        or "out" in inner.call.kwargs
        for inner in call.body.ops
    )
    if isinstance(call.context, Autocast):
        return plain and _gives_own(call) and _keeps_types(graph, call)
    reads = any(True for inner in call.body.ops for _ in inner.states(graph.modules))
    return plain and call.context == NoGrad() and not reads


def _keeps_types(graph: Graph, call: RegionCall) -> bool:
    """Whether autocast changes no type in a block, be it on, off or of another type around it."""
    pairs = zip(call.body.inputs, call.args, strict=True)
    fixed = {inner for inner, outer in pairs if _is_fixed(graph, outer)}
    for op in call.body.ops:
        if not _casts(op) and not (
            fixed.issuperset(op.inputs)
            and all(_is_fixed(graph, StateRef(name)) for name in state_names(op.call.args))
            and (verb(op) in _KEPT or _is_loss(graph, op))
        ):
            return False
        fixed.update(op.outputs)
    return True


def _is_fixed(graph: Graph, argument: Argument) -> bool:
    """Whether a value is no fraction, or one of fp32 in whatever precision the model runs."""
    match argument:
        case StateRef(name=name):
            dtype: torch.dtype | None = graph.tensors[name].dtype
        case Ref(name=name):
            known, maker = graph.values.get(name), graph.producer.get(name)
            dtype = None if known is None else known.dtype
            if dtype is not None and dtype.is_floating_point and maker and not _casts(maker):
                return False
        case _:
            return True
    return dtype is None or not dtype.is_floating_point or dtype is torch.float32


def _casts(op: Op) -> bool:
    """Whether an op makes fp32 of anything."""
    args = op.call.args if isinstance(op.call, MethodCall) else ()
    return called(op.call) == "float" or (
        called(op.call) in _FLOAT and args[1:] == (torch.float32,)
    )


def _is_loss(graph: Graph, op: Op) -> bool:
    """Whether an op is a loss of torch's; autocast forbids one, that of chances."""
    forbidden = called(op.call) == "binary_cross_entropy"
    return not forbidden and loss_arguments(graph, op) is not None


def _gives_own(call: RegionCall) -> bool:
    """Whether a block gives nothing but what it makes itself, each once."""
    made = {name for inner in call.body.ops for name in inner.outputs}
    given = [item.name for item in call.body.outputs if isinstance(item, Ref)]
    return len(set(given) & made) == len(call.body.outputs)


def _inside(op: Op) -> Iterator[Op]:
    """The ops of a block, under the names by which what it gives is known outside."""
    assert isinstance(op.call, RegionCall)
    assert isinstance(op.result, tuple)
    body, stopped = op.call.body, op.call.context == NoGrad()
    given = dict(zip(body.inputs, op.call.args, strict=True))
    named = {} if stopped else _names_outside(op.result, body)

    def outer(leaf: object) -> object:
        if not isinstance(leaf, Ref):
            return leaf
        return given.get(leaf.name, Ref(named.get(leaf.name, leaf.name)))

    for inner in body.ops:
        call = with_arguments(inner.call, lambda argument: map_argument(outer, argument))
        result = map_result(lambda name: named.get(name, name), inner.result)
        yield dataclasses.replace(inner, call=call, result=result, module=op.module, mode=op.mode)
    for name, made in zip(op.result, body.outputs, strict=True):
        if isinstance(name, str) and stopped:
            yield dataclasses.replace(
                op, name=name, result=name, call=MethodCall("detach", (outer(made),))
            )


def _names_outside(result: Sequence[Result], body: RegionBody) -> dict[str, str]:
    pairs = zip(result, body.outputs, strict=True)
    return {
        made.name: name for name, made in pairs if isinstance(name, str) and isinstance(made, Ref)
    }
