"""Drops ops that change nothing, whatever the batch size, the types and the precision.

`x + 0` of integers, `x * 1.0` of floats, padding by nothing, `expand` and `reshape` to the shape
that is there, an index of the whole tensor, `contiguous()` twice, `where` and `&` of a condition on
positions that holds everywhere. Casts stay: what is fp32 here may be 16 bits elsewhere. So do ops
whose result or operand is written in place, unless nobody else has the operand, and those that the
model returns.
Attention loses the scale that it would take by itself.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch.nn import functional as F

from gpipe_compiler.ir import (
    Argument,
    Call,
    FunctionCall,
    Graph,
    MethodCall,
    Op,
    Ref,
    Value,
    ValueKind,
    called,
)
from gpipe_compiler.ir.arguments import leaves
from gpipe_compiler.ir.ops import reading, without_unread
from gpipe_compiler.ir.repeats import repeats
from gpipe_compiler.passes.effects import Effects, effects
from gpipe_compiler.passes.observe import SeenValue, in_the_other_mode
from gpipe_compiler.passes.positions.known import Positions

_INTEGERS = frozenset({torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8})


def simplify(graph: Graph, kept: Collection[str] = ()) -> Graph:
    """The graph without ops that change nothing; the very same where there are none.

    Args:
        graph: annotated; so is the result.
    """
    graph = _with_usual_scales(graph)
    found = effects(graph)
    chooses = any(called(op.call) in ("where", "and_") for op in graph.ops)
    positions = Positions(graph, found) if chooses else None
    idle = {
        op.name: source
        for op in graph.ops
        if isinstance(op.result, str) and op.result not in graph.ends and op.name not in kept
        for source in _unchanged(graph, found, positions, op)
    }
    if not idle:
        return graph
    elsewhere = in_the_other_mode(graph)
    reads = Counter(itertools.chain(graph.ends, *(op.reads for op in graph.ops)))
    names: dict[str, str] = {}  # what is read instead of the result of an op
    for op in graph.ops:
        source = idle.get(op.name)
        if source is None or not _of_one_shape(elsewhere, source, op.outputs[0]):
            continue
        alone = reads[source] == 1 and source not in names
        if not (alone and _is_private(graph, found, source)) and not (
            found.unwritten(source, op.outputs[0])
        ):
            continue
        (result,), source = op.outputs, names.get(source, source)
        others = reads[source] - 1
        # With three summands of a gradient, others would be added up first.
        if graph.values[result].requires_grad and others and others + reads[result] > 2:
            continue
        reads[source] = others + reads[result]
        names[result] = source
    return _without(graph, names, positions) if names else graph


def _of_one_shape(seen: Mapping[str, SeenValue], *names: str) -> bool:
    """Whether values have the same shape in a run, as far as it makes them."""
    forms = [seen[name].form for name in names if name in seen]
    return len({form.shape for form in forms if form is not None}) < 2


def _is_private(graph: Graph, found: Effects, source: str) -> bool:
    """Whether a tensor that one op reads is nobody else's memory, and no backward's either."""
    fresh = source in graph.producer and found.alias_set(source) <= {source}
    return fresh and not found.state_aliases.get(source) and not graph.values[source].requires_grad


def _unchanged(graph: Graph, found: Effects, positions: Positions | None, op: Op) -> Iterator[str]:
    """The tensor that an op returns as it is, if it does."""
    call = op.call
    if not isinstance(call, FunctionCall | MethodCall) or not call.args:
        return
    chosen = _chosen(graph, positions, op) or _held(found, positions, op)
    source, result = chosen or call.args[0], graph.values[op.outputs[0]]
    if not isinstance(source, Ref) or result.kind is not ValueKind.TENSOR:
        return
    before = graph.values[source.name]
    same = all(
        getattr(before, kind) == getattr(result, kind)
        for kind in ("dims", "dtype", "batch_dim", "splittable", "requires_grad")
    )
    if not same:
        return
    assert before.dtype is not None
    if (
        chosen is not None
        or _is_neutral(call, before.dtype)
        or _gives_shape(graph, call, before)
        or (_is_plain(call, "contiguous") and _is_contiguous(graph, source.name))
    ):
        yield source.name


def _chosen(graph: Graph, positions: Positions | None, op: Op) -> Ref | None:
    """The operand that `where` takes everywhere, at any size.

    It may have other strides than the result, so whoever reads that is to make it contiguous.
    """
    call = op.call
    if positions is None or called(call) != "where" or call.kwargs or len(call.args) != 3:
        return None
    readers = graph.consumers.get(op.outputs[0], ())
    condition = positions.element(call.args[0])
    if not isinstance(condition, bool) or not all(_is_plain(r.call, "contiguous") for r in readers):
        return None
    taken, other = call.args[1:] if condition else call.args[:0:-1]
    # A tensor in its place might be of a wider type where this one is of 16 bits, or learn.
    return taken if isinstance(taken, Ref) and isinstance(other, int | float) else None


def _held(found: Effects, positions: Positions | None, op: Op) -> Ref | None:
    """The operand of `&` whose partner holds everywhere, at any size.

    Of no view: that may have other strides than the result.
    """
    if positions is None or called(op.call) != "and_" or len(op.call.args) != 2:
        return None
    for one, other in (op.call.args, op.call.args[::-1]):
        if isinstance(one, Ref) and positions.element(other) is True:
            return one if found.alias_set(one.name) <= {one.name} else None
    return None


def _is_neutral(call: Call, dtype: torch.dtype) -> bool:
    """Whether arithmetic with a number gives the other operand, of a type, bit by bit."""
    if isinstance(call, FunctionCall) and call.function is F.dropout:
        names = ("p", "training", "inplace")
        given = {**dict(zip(names, call.args[1:], strict=False)), **call.kwargs}
        return given.get("p") == 0.0 and "inplace" not in given
    if isinstance(call, FunctionCall) and call.function is F.pad:
        given = {**dict(zip(("pad", "mode"), call.args[1:], strict=False)), **call.kwargs}
        return given.get("mode", "constant") == "constant" and not any(leaves(given.get("pad")))
    if not isinstance(call, FunctionCall | MethodCall) or len(call.args) != 2 or call.kwargs:
        return False
    number = call.args[1]
    if isinstance(number, bool) or not isinstance(number, int | float):
        return False
    floating = dtype.is_floating_point
    integer = dtype in _INTEGERS and isinstance(number, int)
    match called(call):
        case "mul":
            return number == 1 and (floating or integer)
        case "truediv" | "div":
            return number == 1 and floating
        case "sub":  # of floats, 0.0 - (-0.0) is 0.0
            return number == 0 and math.copysign(1, number) > 0 and (floating or integer)
        case "add":  # of floats, -0.0 + 0 is 0.0
            return number == 0 and integer
    return False


def _is_plain(call: Call, name: str) -> bool:
    return isinstance(call, MethodCall) and call.method == name and len(call.args) == 1


def _is_contiguous(graph: Graph, value: str) -> bool:
    """Whether it is made contiguous, whatever kernels do, or is that in another shape."""
    maker = graph.producer.get(value)
    match maker and maker.call:
        case MethodCall("view" | "reshape" | "unflatten", (Ref(name), *_)):
            return _is_contiguous(graph, name)
        case MethodCall("contiguous", (_,), kwargs):
            return not kwargs
        case _:
            return False


def _gives_shape(graph: Graph, call: Call, before: Value) -> bool:
    """Whether a call gives its operand a shape, of numbers and of sizes that are asked for.

    What has the operand's shape then, has it at any batch size.
    """
    if call.kwargs:
        return False
    given = call.args[1:]
    if isinstance(call, FunctionCall) and call.function is operator.getitem:
        entries = given[0] if isinstance(given[0], tuple) else given
        return all(entry is ... or entry == slice(None) for entry in entries)
    if not isinstance(call, MethodCall) or call.method not in ("expand", "view", "reshape"):
        return False
    if not before.splittable:
        return False
    wanted = given[0] if len(given) == 1 and isinstance(given[0], tuple | list) else given
    makers = [graph.producer.get(size.name) for size in wanted if isinstance(size, Ref)]
    return all(isinstance(size, int | Ref) for size in wanted) and all(
        maker is not None and called(maker.call) in ("size", "getattr") for maker in makers
    )


# --- the graph without them -----------------------------------------------------------------------


def _without(graph: Graph, names: Mapping[str, str], positions: Positions | None) -> Graph:
    """The graph without the makers of some values, in whose place others are read.

    Args:
        names: what is read instead of each.
    """

    def is_idle(op: Op) -> bool:
        of_positions = positions is not None and all(name in positions for name in op.outputs)
        return of_positions or only_asks(graph, op)

    memory = {graph.values[name].storage: graph.values[old].storage for name, old in names.items()}
    ops = [reading(op, names) for op in graph.ops if names.keys().isdisjoint(op.outputs)]
    changed = graph.replace(ops=without_idle(graph, ops, is_idle))
    kept = {source.name for source in graph.inputs} | changed.producer.keys()
    values = {
        name: dataclasses.replace(value, storage=memory.get(value.storage, value.storage))
        for name, value in graph.values.items()
        if name in kept
    }
    held = graph.held & changed.op_of.keys()
    return changed.replace(values=values, held=held, repeats=repeats(changed))


def without_idle(graph: Graph, ops: Sequence[Op], pure: Callable[[Op], bool]) -> tuple[Op, ...]:
    """These ops without those whose results nobody reads, though somebody did before.

    Args:
        graph: as it was before.
        pure: whether an op does nothing but make its results.
    """

    def droppable(op: Op) -> bool:
        return not graph.consumers.keys().isdisjoint(op.outputs) and pure(op)

    return without_unread(ops, graph.ends, droppable)


def only_asks(graph: Graph, op: Op) -> bool:
    """Whether an op makes numbers, such as a tensor's sizes, or asks for its type or device."""
    kinds = {graph.values[name].kind for name in op.outputs}
    asks = called(op.call) == "getattr" and ValueKind.TENSOR not in kinds
    return asks or kinds <= {ValueKind.SCALAR}


def _with_usual_scales(graph: Graph) -> Graph:
    """The graph without scales of attention that are those it takes by itself."""
    scaled = {op.name: graph.module_classes.get(op.module) for op in graph.ops if _scale(op)}
    kept = {scaled[name] for name in scaled if not _has_usual_scale(graph, graph.op_of[name])}
    # Of layers that are equal but for their widths, all are called alike.
    usual = {name for name, around in scaled.items() if around not in kept}
    ops = tuple(_without_scale(op) if op.name in usual else op for op in graph.ops)
    if all(map(operator.is_, ops, graph.ops)):
        return graph
    changed = graph.replace(ops=ops)
    return changed.replace(repeats=repeats(changed))


def _scale(op: Op) -> Argument:
    """The scale of a call of attention; None where it is given none."""
    call = op.call
    if not isinstance(call, FunctionCall) or call.function is not F.scaled_dot_product_attention:
        return None
    return call.kwargs.get("scale")


def _has_usual_scale(graph: Graph, op: Op) -> bool:
    """Whether attention is scaled by 1 / sqrt(E), where the width E of heads is a constant."""
    call = op.call
    assert isinstance(call, FunctionCall)
    query = graph.values.get(call.args[0].name) if isinstance(call.args[0], Ref) else None
    if query is None or not query.shape or not query.splittable:
        return False
    width, last = query.dims[-1], len(query.shape) - 1
    if query.batch_dim == last or not isinstance(width, int) or not width:
        return False
    # torch computes it so, in double precision: another last bit would be another result.
    return bool(_scale(op) == 1.0 / math.sqrt(width))


def _without_scale(op: Op) -> Op:
    call = op.call
    assert isinstance(call, FunctionCall)
    kwargs = {name: item for name, item in call.kwargs.items() if name != "scale"}
    return dataclasses.replace(op, call=dataclasses.replace(call, kwargs=kwargs))


# --- who reads a tensor whatever its strides are --------------------------------------------------


VIEWS = frozenset({"transpose", "permute", "unsqueeze", "expand", "getitem", "size", "getattr"})
"""Functions and methods that take any strides and hand them on."""

_OWN_STRIDES = frozenset({"scaled_dot_product_attention", "matmul"})
"""Functions whose results have strides of their own."""


def takes_any_strides(
    graph: Graph, found: Effects, name: str, besides: Collection[str] = ()
) -> bool:
    """Whether all who read a tensor give the same whatever its strides are.

    Args:
        besides: functions and methods that hand strides on, as views do; with such, also the model
            may return what has others.
    """
    if name in graph.ends and not besides:
        return False
    return all(_gives_same(graph, found, op, besides) for op in graph.consumers.get(name, ()))


def _gives_same(graph: Graph, found: Effects, op: Op, besides: Collection[str]) -> bool:
    does = called(op.call)
    if does in _OWN_STRIDES:
        return True
    if does in ("contiguous", "reshape"):
        # A copy or the tensor itself, as its strides are: a write would reach others or not.
        shared = {name for output in op.outputs for name in found.alias_set(output)}
        if not shared.isdisjoint(found.written_values):
            return False
    elif does not in VIEWS and does not in besides:
        return False
    return does == "contiguous" or all(
        takes_any_strides(graph, found, name, besides) for name in op.outputs
    )
