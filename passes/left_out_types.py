"""Values of one type where all layers run, and of another where layers are left out.

Under autocast a layer may make 16 bits of the 32 that are passed on where it is left out. Such a
value cannot be sent: a stage that waits for it would have to know what was drawn.
"""

from __future__ import annotations

from gpipe_compiler.ir import Graph
from gpipe_compiler.ir.left_out import may_leave_out, with_all_layers
from gpipe_compiler.passes.observe import observed
from gpipe_compiler.runtime.spec import Precision


def types_left_open(graph: Graph, precision: Precision) -> frozenset[str]:
    """The values of a graph whose type is another, in a precision, where layers are left out."""
    if not any(may_leave_out(op.call) for op in graph.ops):
        return frozenset()
    return graph.once(("left_out_types", precision), lambda: _types_left_open(graph, precision))


def _types_left_open(graph: Graph, precision: Precision) -> frozenset[str]:
    graph = graph.replace(precision=precision)
    ways = [observed(with_all_layers(graph, left_out=way)).values for way in (False, True)]
    forms = {name: [way[name].form for way in ways] for name in ways[0]}
    return frozenset(
        name for name, both in forms.items() if len({form and form.dtype for form in both}) > 1
    )
