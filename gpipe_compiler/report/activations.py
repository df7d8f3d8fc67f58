"""What lives along the model, and where it is cut: a curve for the report."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from gpipe_compiler.passes.liveness import liveness
from gpipe_compiler.plan import Plan

WIDTH, HEIGHT = 960.0, 120.0
"""Pixels of the curve."""

_MOST_POINTS = 2000


@dataclass(frozen=True, slots=True)
class Cut:
    """A place between two stages.

    Attributes:
        stage: the one that begins there.
        x: pixels from the left.
        bytes: of the values that live there.
    """

    stage: int
    x: float
    bytes: int


@dataclass(frozen=True)
class Activations:
    """The bytes of the values of one micro-batch that live before every op of the forward.

    Attributes:
        curve: a path of SVG under which they lie.
        most: bytes.
    """

    curve: str
    most: int
    cuts: tuple[Cut, ...]


def activations(plan: Plan) -> Activations | None:
    """The curve of a plan, its ops in the order of the stages; None where its graph is not of torch
    or nothing lives in it."""
    order = [name for stage in plan.stages for name in stage.ops]
    graph = plan.graph
    if graph is None or sorted(order) != sorted(op.name for op in graph.ops):
        return None
    found = liveness(graph, order).bytes
    most = max(found)
    if not most:
        return None
    step = WIDTH / (len(found) - 1) if len(found) > 1 else WIDTH
    together = -(-len(found) // _MOST_POINTS)
    points = [
        f"L {place * step:.1f} {HEIGHT * (1 - max(found[place : place + together]) / most):.1f}"
        for place in range(0, len(found), together)
    ]
    curve = " ".join([f"M 0 {HEIGHT:g}", *points, f"L {WIDTH:g} {HEIGHT:g} Z"])
    begins = itertools.accumulate(len(stage.ops) for stage in plan.stages[:-1])
    cuts = (Cut(index, at * step, found[at]) for index, at in enumerate(begins, 1))
    return Activations(curve, most, tuple(cuts))
