"""The passes that transform a graph, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpipe_compiler.ir import Graph
from gpipe_compiler.ir.legality import check
from gpipe_compiler.passes.attention import call_attention_plainly
from gpipe_compiler.passes.inplace import write_in_place
from gpipe_compiler.passes.loss_weight import weigh_loss
from gpipe_compiler.passes.narrow_masks import narrow_masks
from gpipe_compiler.passes.shapes import annotate
from gpipe_compiler.passes.simplify import simplify
from gpipe_compiler.passes.stores import read_stores
from gpipe_compiler.runtime.spec import Precision


@dataclass(frozen=True, slots=True)
class Setting:
    """What a graph is transformed for.

    Attributes:
        samples: of a micro-batch.
        precision: in which the analyses run the ops.
        kept: names of ops that constraints name, and that are to stay.
    """

    samples: int
    precision: Precision = Precision.FP32
    kept: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Pass:
    """A transformation of an annotated graph.

    Attributes:
        name: what is said to be at fault where the result is no legal graph.
        run: returns the graph changed, with `values` in order, or empty to have them found anew.
    """

    name: str
    run: Callable[[Graph, Setting], Graph]


PASSES: tuple[Pass, ...] = (
    Pass("shapes", lambda graph, at: annotate(graph, at.samples, at.precision)),
    Pass("narrow_masks", lambda graph, at: narrow_masks(graph, at.kept)),
    Pass("simplify", lambda graph, at: simplify(graph, at.kept)),
    Pass("attention", lambda graph, at: call_attention_plainly(graph, at.kept)),
    Pass("stores", lambda graph, _: read_stores(graph)),
    Pass("loss_weight", lambda graph, _: weigh_loss(graph)),
)
"""In order. The first of them takes a graph that is not annotated."""

IN_PLACE: tuple[Pass, ...] = (Pass("inplace", lambda graph, _: write_in_place(graph)),)
"""After `PASSES`, where writes in place are wanted. Planning undoes those that a cut parts."""


def transform(graph: Graph, setting: Setting, passes: Sequence[Pass] | None = None) -> Graph:
    """The graph after every pass, annotated.

    Args:
        passes: by default `PASSES`.

    Raises:
        ModelError: naming the op that cannot run on so many samples.
        IllegalGraphError: naming the pass that has made an illegal graph.
    """
    for step in PASSES if passes is None else passes:
        graph = check(step.run(graph, setting), after=step.name)
        if not graph.values:
            graph = annotate(graph, setting.samples, setting.precision)
    return graph
