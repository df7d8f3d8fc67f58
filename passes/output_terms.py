"""Which terms of a loss are known to be sums or means of rows, none of which takes other samples;
and the outputs that are losses of such terms.

Any other may be one in a way that is not seen here: it is held to that by numbers, which has to be
close. What micro-batches come to may differ from the whole by little on one batch, and by more on
the next.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from gpipe_compiler.ir import Graph, Loss, Op, Reduction
from gpipe_compiler.ir.arguments import value_names
from gpipe_compiler.ir.graph import found_once
from gpipe_compiler.passes.joined_outputs import Unjoined, Way, joined_outputs, kind_of, ways_of
from gpipe_compiler.passes.loss_functions import (
    ConstantTerm,
    Division,
    Other,
    Summand,
    Targets,
    loss_arguments,
)
from gpipe_compiler.passes.loss_weight import terms_of_loss
from gpipe_compiler.passes.split_loss import Tail, TermGroup, bare_terms, copies_of_parts
from gpipe_compiler.passes.verbs import AND, COMPARING, MOVES, NOT, OR, verb, writes
from gpipe_compiler.runtime.spec import Joined, LossTerm, OutputTerm

_BY_ELEMENT = frozenset(
    {
        *("add", "sub", "mul", "div", "pow", "neg", "abs", "square", "exp", "log", "log1p", "sqrt"),
        *("relu", "sigmoid", "logsigmoid", "tanh", "softplus", "masked_fill", "where", "clamp"),
    }
)
_BY_ROW = frozenset({"sum", "mean", "pad", "unflatten", "logsumexp"})
"""Functions that make rows of rows alone, where they make rows; those of elements among them."""


@found_once
def loss_is_proven(graph: Graph) -> bool:
    """Whether every term of the loss is, in both modes, and made of rows one by one."""
    assert graph.loss is not None
    if not all(_goes_by_row(graph, graph.op_of[name]) for name in graph.loss_only):
        return False
    groups, _ = terms_of_loss(graph.replace(loss=Loss(graph.loss.value)))
    return all(is_proven(graph, group, summand) for group in groups for summand in group.summands)


def _goes_by_row(graph: Graph, op: Op) -> bool:
    """Whether the rows that an op makes, if any, are each of one sample."""
    rows = [graph.values[name] for name in op.outputs if graph.values[name].batch_dim is not None]
    if not rows or loss_arguments(graph, op) is not None:
        return True
    name, (args, named) = verb(op), op.arguments
    match name:
        case "softmax" | "log_softmax":
            dim = named.get("dim", args[1] if len(args) > 1 else None)
            return isinstance(dim, int) and dim % len(rows[0].dims) != rows[0].batch_dim
        case "getitem":
            return not any(True for item in args[1:] for _ in value_names(item))
        case _:
            return name in _BY_ELEMENT | _BY_ROW | MOVES | COMPARING | AND | OR | NOT


def is_proven(graph: Graph, group: TermGroup, summand: Summand) -> bool:
    """Whether a term is known to be a sum or a mean of rows, none of which takes other samples."""
    ways = ways_of(graph)

    def are_rows(*names: str) -> bool:
        return all(ways[name] in (Unjoined.ROWS, Joined.SAME) for name in names)

    if group.weight is not None and group.weight.above > -math.inf:
        return False
    match summand.term:
        case ConstantTerm():
            return group.adds_up
        case Targets(op=op):
            return group.weight is not None and are_rows(*op.inputs)
        case Division(total=None):
            return False
        case Division(op=op):
            return group.weight is not None and _divides(graph, op, ways)
        case Other() if isinstance(summand.value, str) and group.reduction is not None:
            return kind_of(graph, summand.value) is group.reduction
        case _:
            return False


def _divides(graph: Graph, op: Op, ways: Mapping[str, Way]) -> bool:
    """Whether what is divided is a sum of rows, or their mean: before or after it is divided."""
    dividend = op.call.args[0]
    if ways[dividend.name] in (Joined.SUM, Joined.MEAN):
        return True
    maker = graph.producer.get(dividend.name)
    if maker is None or verb(maker) != "div":
        return False
    return ways[maker.call.args[0].name] is Unjoined.ROWS


# --- outputs that are losses ----------------------------------------------------------------------

# A model may return its loss beside its logits. Over a mini-batch it is the sum of those of the
# micro-batches, each weighed by what it is a mean over, such as the targets that are not ignored;
# and where it adds up several means, each of them by its own. So the stages hand out these terms,
# and what they are means over.


def weigh_outputs(graph: Graph) -> Graph:
    """The graph, with the terms of those of its outputs that are losses."""
    made, found = graph, dict[str, tuple[OutputTerm, ...]]()
    for name, way in joined_outputs(graph).items():
        known = graph.values[name]
        fraction = known.dtype is not None and known.dtype.is_floating_point
        if way is not Joined.APART or known.shape or not fraction:
            continue
        groups, adding = terms_of_loss(graph.replace(loss=Loss(name)), made.op_of)
        summands = [(group, summand) for group in groups for summand in group.summands]
        if any(map(writes, adding)) or not all(is_proven(graph, *pair) for pair in summands):
            continue
        copies = copies_of_parts(graph, groups, made.op_of) if bare_terms(groups) else ([], groups)
        if copies is not None:
            more, groups = copies
            made = made.replace(ops=(*made.ops, *more))
            made, found[name] = _with_terms(made, name, groups)
    if not found:
        return graph
    values = {} if len(made.ops) > len(graph.ops) else graph.values
    return dataclasses.replace(made, values=values, repeats=graph.repeats, output_terms=found)


def _with_terms(
    graph: Graph, output: str, groups: Sequence[TermGroup]
) -> tuple[Graph, tuple[OutputTerm, ...]]:
    """The graph with ops for the terms of an output and what they are means over, and the terms."""
    modes = {summand.mode for group in groups for summand in group.summands}
    tail = Tail(graph.replace(loss=Loss(output)), graph.ops, dict.fromkeys(modes, output))
    sums = [tail.sum(group.summands) for group in groups]
    ops, terms = [*graph.ops, *tail.made], []
    for group, value in zip(groups, sums, strict=True):
        if group.weight is None:
            terms.append(OutputTerm(value, LossTerm(group.reduction or Reduction.MEAN)))
            continue
        own = {op.name for op in ops}
        ops.extend(op for op in group.weight.ops if op.name not in own)
        counted = group.weight
        kind = LossTerm(Reduction.MEAN, True, counted.floor, counted.offset, least=counted.least)
        terms.append(OutputTerm(value, kind, group.weight.value))
    return graph.replace(ops=tuple(ops)), tuple(terms)
