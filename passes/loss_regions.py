"""Blocks of a loss in a context that changes nothing in it, so that what it is a mean over is seen.

A loss may count under `no_grad`, and is often computed in fp32 where the model around it is not:
`with torch.autocast("cuda", enabled=False): return F.cross_entropy(output.float(), target)`. What
is given fp32 alone is left as it is by autocast, but for products of matrices and their kin.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

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
from gpipe_compiler.ir.arguments import map_argument
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

    Of a block under autocast, what follows in the loss alone leaves it, where that changes nothing.

    Args:
        graph: annotated; the result is not, where it is another one.
    """
    if graph.loss is None:
        return graph
    needed = graph.ancestors((graph.loss.value,))
    parts = {op.name: _taken_apart(graph, op) for op in graph.ops if op.name in needed}
    if not any(parts.values()):
        return graph
    ops = [part for op in graph.ops for part in parts.get(op.name) or (op,)]
    return graph.replace(ops=tuple(ops), values={})


def _taken_apart(graph: Graph, op: Op) -> list[Op]:
    """What a block is in the loss; [] for one that stays, and for another op."""
    call = op.call
    if not isinstance(call, RegionCall) or not isinstance(op.result, tuple):
        return []
    plain = [op for op in call.body.ops if isinstance(op.call, FunctionCall | MethodCall)]
    if any(writes(inner) or "out" in inner.call.kwargs for inner in plain):
        return []
    if isinstance(call.context, Autocast):
        outside = _outside(graph, op.result, call)
        return _left(graph, op, outside) if outside else []
    own = len(plain) == len(call.body.ops) and not op.states(graph.modules)
    counts = own and op.name in graph.loss_only and call.context == NoGrad()
    return [*_counted(op, call)] if counts else []


def _outside(graph: Graph, result: Sequence[Result], call: RegionCall) -> frozenset[str]:
    """The ops of a block under autocast, by name, that make the same outside of it, be autocast on,
    off or of another type there, and from which nothing but the loss follows."""
    pairs = zip(call.body.inputs, call.args, strict=True)
    fixed = {inner for inner, outer in pairs if _is_fixed(graph, outer)}
    alike = set()
    for op in call.body.ops:
        states = op.states(graph.modules)
        own = all(_is_fixed(graph, StateRef(name)) for name in states)
        given = own and fixed.issuperset(op.inputs)
        idle = verb(op) in _KEPT or _is_loss(graph, op)
        if _casts(op) or (given and idle):
            alike.add(op.name)
        if _casts(op) or (given and (idle or not getattr(call.context, "enabled", True))):
            fixed.update(op.outputs)
    ends = dict(zip(map(repr, call.body.outputs), result, strict=True))
    staying: set[str] = set()
    outside = set()
    for op in reversed(call.body.ops):
        outer = [ends[repr(Ref(name))] for name in op.outputs if repr(Ref(name)) in ends]
        if op.name in alike and staying.isdisjoint(op.outputs) and _of_loss(graph, outer):
            outside.add(op.name)
        else:
            staying.update(op.inputs)
    return frozenset(outside)


def _of_loss(graph: Graph, names: Sequence[Result]) -> bool:
    """Whether nothing but the loss follows from values."""
    assert graph.loss is not None
    return all(
        name == graph.loss.value
        or (
            isinstance(name, str)
            and name not in graph.output_values
            and all(op.name in graph.loss_only for op in graph.consumers.get(name, ()))
        )
        for name in names
        if name is not None
    )


def _left(graph: Graph, op: Op, outside: frozenset[str]) -> list[Op]:
    """What is left of a block, which gives what it makes to the ops that leave it; and these."""
    assert isinstance(op.call, RegionCall)
    assert isinstance(op.result, tuple)
    body = op.call.body
    named = {
        made.name: name
        for name, made in zip(op.result, body.outputs, strict=True)
        if isinstance(name, str) and isinstance(made, Ref)
    }
    given = dict(zip(body.inputs, op.call.args, strict=True))
    kept = tuple(inner for inner in body.ops if inner.name not in outside)
    gone = [inner for inner in body.ops if inner.name in outside]
    made = {name for inner in kept for name in inner.outputs}
    read = {name for inner in gone for name in inner.inputs}
    crossing = [name for name in made if name in read and name not in named]
    moved = {name for inner in gone for name in inner.outputs}

    def outer(leaf: object) -> object:
        if not isinstance(leaf, Ref):
            return leaf
        return given.get(leaf.name, Ref(named.get(leaf.name, leaf.name)))

    parts = []
    if kept:
        ends = [
            (name, item)
            for name, item in zip(op.result, body.outputs, strict=True)
            if not (isinstance(item, Ref) and item.name in moved)
        ]
        ends += [(name, Ref(name)) for name in sorted(crossing)]
        inputs = {name for inner in kept for name in inner.inputs}
        inputs.update(item.name for _, item in ends if isinstance(item, Ref))
        bound = [(name, given[name]) for name in body.inputs if name in inputs]
        inside = RegionBody(tuple(name for name, _ in bound), kept, tuple(item for _, item in ends))
        call = RegionCall(op.call.context, inside, tuple(item for _, item in bound))
        parts = [dataclasses.replace(op, call=call, result=tuple(name for name, _ in ends))]
    for inner in gone:
        result = map_result(lambda name: named.get(name, name), inner.result)
        parts.append(dataclasses.replace(_moved_out(inner, op, outer), result=result))
    return parts


def _moved_out(inner: Op, op: Op, outer: Callable[[object], object]) -> Op:
    """An op of a block where the block stands; with what `outer` has for its values."""
    call = with_arguments(inner.call, lambda argument: map_argument(outer, argument))
    return dataclasses.replace(inner, call=call, module=op.module, mode=op.mode)


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


def _counted(op: Op, call: RegionCall) -> Iterator[Op]:
    """The ops of a block under `no_grad`."""
    assert isinstance(op.result, tuple)
    given = dict(zip(call.body.inputs, call.args, strict=True))

    def outer(leaf: object) -> object:
        return given.get(leaf.name, leaf) if isinstance(leaf, Ref) else leaf

    for inner in call.body.ops:
        yield _moved_out(inner, op, outer)
    for name, made in zip(op.result, call.body.outputs, strict=True):
        if isinstance(name, str):
            yield dataclasses.replace(
                op, name=name, result=name, call=MethodCall("detach", (outer(made),))
            )
