"""Of how many things per sample a loss is the mean, where sizes are free.

Micro-batches of different sizes weigh by that in the loss of their mini-batch.
"""

from __future__ import annotations

import functools
import operator

from gpipe_compiler.ir import Graph, LossTerm, Op, Ref, called
from gpipe_compiler.ir.sizes import at_batch, is_free
from gpipe_compiler.runtime.sizes import Dim
from gpipe_compiler.runtime.spec import Reduction

_MEANS = frozenset(
    {
        *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "mean"),
        *("binary_cross_entropy", "binary_cross_entropy_with_logits"),
    }
)
"""Functions that are the mean over all elements of what they are given, unless told otherwise."""

_SCALES = frozenset({"mul", "div", "truediv", "neg"})


def per_sample(graph: Graph, term: LossTerm) -> Dim | None:
    """Of how many things per sample a term of the loss is the mean; None where that is not known.

    1 where it is a sum, where it is counted otherwise, and where it is as many at any size.
    """
    if not graph.sizes or term.reduction is Reduction.SUM or term.weight is not None:
        return 1
    op = graph.producer.get(term.value)
    while op is not None and called(op.call) in _SCALES and _scaled(graph, op) is not None:
        op = graph.producer.get(_scaled(graph, op) or "")
    if op is None or called(op.call) not in _MEANS or not op.call.args:
        return None
    first, *_ = op.call.args
    options = {"reduction": "mean", "beta": None, "delta": None} | dict(op.call.kwargs)
    plain = len(options) == 3 and options["reduction"] == "mean"
    known = graph.values.get(first.name) if isinstance(first, Ref) else None
    if known is None or known.batch_dim is None or not plain:
        return None
    if called(op.call) == "mean" and len(op.call.args) > 1:
        return None
    dims = [
        at_batch(size, 1) if is_free(size) or place != known.batch_dim else size // graph.batch_size
        for place, size in enumerate(known.dims)
    ]
    if not any(map(is_free, dims)):
        return 1
    return functools.reduce(operator.mul, (dim for dim in dims if is_free(dim)))


def _scaled(graph: Graph, op: Op) -> str | None:
    """The value that an op scales by a number that is the same in every micro-batch."""
    refs = [item for item in op.call.args if isinstance(item, Ref)]
    return refs[0].name if len(refs) == 1 and refs[0] is op.call.args[0] else None
