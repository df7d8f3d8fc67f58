"""Says what goes together where a model has fewer parts than there are to be stages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from gpipe_compiler.errors import PlanError, SourceLocation
from gpipe_compiler.ir import Graph, ops_within
from gpipe_compiler.passes.cut import TooFewPartsError
from gpipe_compiler.planner.cut_problem import CutFacts, said_of


@contextlib.contextmanager
def saying_what_goes_together(facts: CutFacts) -> Iterator[None]:
    """Around a search for a cut."""
    try:
        yield
    except TooFewPartsError as error:
        largest = _largest_part(facts)
        if largest is None:
            raise
        text, location = largest
        raise PlanError(f"{error.problem}: {text}", location=location, hint=error.hint) from error


Held = tuple[str, SourceLocation | None]
"""What goes together, in words, and where it is written."""


def _largest_part(facts: CutFacts) -> Held | None:
    """What holds the most ops together; None for nothing."""
    group = max(facts.atoms.groups, key=len, default=frozenset[str]())
    region = largest_region(facts.graph, len(group))
    if region is not None or len(group) < 2:
        return region
    tie = max((tie for tie in facts.atoms.ties if tie.ops <= group), key=lambda tie: len(tie.ops))
    text = f"{len(group)} go together, mostly {said_of(tie, facts.graph)}"
    return text, facts.graph.op_of[tie.op].source


def largest_region(graph: Graph, least: int = 2) -> Held | None:
    """What stands in one context and is not cut; None where it has fewer ops, or one."""
    region = max(([*ops_within(op)][1:] for op in graph.ops), key=len, default=[])
    if len(region) < max(least, 2):
        return None
    return f"the {len(region)} ops in one `with` are never cut apart", region[0].source
