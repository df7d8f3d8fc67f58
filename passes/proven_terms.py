"""Which terms of a loss are known to be sums or means of rows, none of which takes other samples.

Any other may be one in a way that is not seen here: it is held to that by numbers, which has to be
close. What micro-batches come to may differ from the whole by little on one batch, and by more on
the next.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from gpipe_compiler.ir import Graph, Loss, Op, Reduction
from gpipe_compiler.passes.joined_outputs import Unjoined, Way, ways_of
from gpipe_compiler.passes.loss_functions import ConstantTerm, Division, Other, Summand, Targets
from gpipe_compiler.passes.loss_weight import terms_of_loss
from gpipe_compiler.passes.split_loss import TermGroup
from gpipe_compiler.passes.verbs import verb
from gpipe_compiler.runtime.spec import Joined

_KINDS = {Reduction.SUM: Joined.SUM, Reduction.MEAN: Joined.MEAN}


def loss_is_proven(graph: Graph) -> bool:
    """Whether every term of the loss is, in both modes."""
    assert graph.loss is not None
    groups, _ = terms_of_loss(graph.replace(loss=Loss(graph.loss.value)))
    return all(is_proven(graph, group, summand) for group in groups for summand in group.summands)


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
            return ways[summand.value] is _KINDS[group.reduction]
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
