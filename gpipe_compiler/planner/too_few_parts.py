"""Says what goes together where a model has fewer parts than there are to be stages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from gpipe_compiler.errors import PlanError, SourceLocation
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
    if len(group) < 2:
        return None
    tie = max((tie for tie in facts.atoms.ties if tie.ops <= group), key=lambda tie: len(tie.ops))
    text = f"{len(group)} go together, mostly {said_of(tie, facts.graph)}"
    return text, facts.graph.op_of[tie.op].source
