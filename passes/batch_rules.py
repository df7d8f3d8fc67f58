"""With which numbers a model compares the size of a batch, or the places of samples in it.

`x.shape[0] > 1000`, `y[600:]` and `torch.arange(len(x)) < 500` tell batches, or samples, apart by
nothing that a sample holds. A trial shows that where it has more samples than such a number.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd, lcm

from gpipe_compiler.ir import (
    FunctionCall,
    Graph,
    MethodCall,
    Op,
    Ref,
    StateRef,
    ValueKind,
    called,
)
from gpipe_compiler.ir.sizes import BATCH, LARGEST_BATCH, SMALLEST, SampleRule, asked, in_order
from gpipe_compiler.passes.verbs import BOUNDING, ORDER

_COMPARING = ORDER | BOUNDING | {"eq", "ne", "min", "max", "sym_min", "sym_max"}

_NUMBERING = frozenset({"arange", "cumsum", "linspace"})
"""What gives samples numbers."""

_FROM_NUMBERS = frozenset(
    {"tensor", "scalar_tensor", "as_tensor", "add", "sub", "mul", "div", "truediv"}
)
"""What makes tensors of numbers that are none."""


def all_rules(graph: Graph) -> tuple[SampleRule, ...]:
    """The rules by which the model or its graph tells them apart, in order."""
    found = ((number, op.source) for op in graph.ops for number in _compared(graph, op))
    rules = (SampleRule(int(n) + 1, line) for n, line in found if 0 < n <= LARGEST_BATCH)
    return in_order((*graph.sample_rules, *rules))


def counting_in_loss(graph: Graph) -> Op | None:
    """The first op of the loss that computes with the number of samples, as what numbers them."""

    def counts(op: Op) -> bool:
        scalars = (graph.values[name].kind is ValueKind.SCALAR for name in op.inputs)
        return BATCH in asked(op.leaves) or any(scalars)

    # Where the loss is all that the model returns, all of it is the loss.
    late = graph.loss_only or graph.op_of.keys()
    return next((op for op in graph.ops if op.name in late and counts(op)), None)


def takes_several(graph: Graph) -> bool:
    """Whether one sample is not computed as it is among others."""
    return other_alone(graph) is not None


def other_alone(graph: Graph) -> SampleRule | None:
    """Where one sample is not computed as it is among others: by a rule, or since its batch
    dimension is squeezed."""
    squeezing = filter(_squeezes_any, graph.ops)
    rules = (*graph.alone.values(), *(SampleRule(SMALLEST, op.source) for op in squeezing))
    return rules[0] if rules else None


def taken_together(graph: Graph, *, by_loss: bool = True) -> SampleRule:
    """How many samples, one after another, a model takes together: 2 for the pairs of `x[::2]` and
    `x[1::2]`; and where.

    Args:
        graph: annotated, at a multiple of that number.
        by_loss: whether the loss counts, unless it is over the batch.
    """
    found = SampleRule(1)
    apart = graph.loss is not None and (graph.loss.over_batch or not by_loss)
    for op in graph.ops:
        for value in map(graph.values.__getitem__, op.outputs):
            dim = None if apart and op.name in graph.loss_only else value.batch_dim
            if dim is not None and not value.splittable:
                own = graph.batch_size // gcd(graph.batch_size, value.shape[dim])
                if found.samples % own:
                    found = SampleRule(lcm(found.samples, own), op.source)
    return found


def _squeezes_any(op: Op) -> bool:
    """Whether an op takes out every dimension of one."""
    call = op.call
    plain = isinstance(call, MethodCall | FunctionCall) and len(call.args) == 1 and not call.kwargs
    return plain and called(call) in ("squeeze", "squeeze_")


def _compared(graph: Graph, op: Op) -> Iterator[float]:
    """The numbers with which an op compares places in the batch, or its size."""
    numbers = [item for item in op.leaves if type(item) in (int, float)]
    if called(op.call) in ("getitem", "setitem"):
        yield from _sliced(graph, op)
    elif numbers and called(op.call).removesuffix("_") in _COMPARING and _counts_samples(graph, op):
        yield from numbers


def _sliced(graph: Graph, op: Op) -> Iterator[float]:
    """Where a slice along the batch begins and ends."""
    source, index, *_ = op.call.args
    known = graph.values.get(source.name) if isinstance(source, Ref) else None
    places = index if isinstance(index, tuple) else (index,)
    if known is None or known.batch_dim is None or len(places) <= known.batch_dim:
        return
    if any(item is None or item is Ellipsis for item in places):
        return
    place = places[known.batch_dim]
    if isinstance(place, slice):
        yield from (abs(end) for end in (place.start, place.stop) if type(end) is int)


def _counts_samples(graph: Graph, op: Op) -> bool:
    """Whether all that an op reads follows from the number of samples alone."""
    names = [name for name in op.inputs if name in graph.batched]
    known = [graph.values[name] for name in names]
    if not known or any(isinstance(item, StateRef) for item in op.leaves):
        return False
    if all(value.kind is ValueKind.SCALAR for value in known):
        return True
    before = [graph.op_of[name] for name in graph.ancestors(names)]
    batched = {source.name for source in graph.inputs if source.batched}
    computing = [
        maker
        for maker in (*before, op)
        if any(graph.values[name].kind is ValueKind.TENSOR for name in maker.outputs)
    ]
    return all(batched.isdisjoint(maker.inputs) for maker in computing) and any(
        called(maker.call) in _NUMBERING or _takes_number(graph, maker) for maker in before
    )


def _takes_number(graph: Graph, op: Op) -> bool:
    """Whether an op makes a tensor whose elements follow from the number of samples."""
    return called(op.call) in _FROM_NUMBERS and any(
        graph.values[name].kind is ValueKind.SCALAR and name in graph.batched for name in op.inputs
    )
