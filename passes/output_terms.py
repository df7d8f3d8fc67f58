"""Has outputs that are losses put together from micro-batches: as sums of means over their own.

A model may return its loss beside its logits. Over a mini-batch it is the sum of those of the
micro-batches, each weighed by what it is a mean over, such as the targets that are not ignored; and
where it adds up several means, each of them is weighed by its own. So the stages hand out these
terms, and what they are means over.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from gpipe_compiler.ir import Graph, Loss, Reduction
from gpipe_compiler.passes.bare_divisors import bare_terms, copies_of_parts
from gpipe_compiler.passes.joined_outputs import joined_outputs
from gpipe_compiler.passes.loss_weight import terms_of_loss
from gpipe_compiler.passes.proven_terms import is_proven
from gpipe_compiler.passes.split_loss import Tail, TermGroup
from gpipe_compiler.passes.verbs import writes
from gpipe_compiler.runtime.spec import Joined, LossTerm, OutputTerm


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
