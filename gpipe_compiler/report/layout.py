"""Places boxes in layers, and arrows between them so that they pass beside boxes, not through.

The layout is Sugiyama's, by grandalf: pure Python, so that a picture needs no program besides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpipe_compiler.errors import UsageError

GAP_X = 26.0
GAP_Y = 30.0
MARGIN = 24.0
_SWEEPS = 4
"""Passes over all layers that reduce crossings; more changes little."""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a box stands: its top left corner and its size."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything stands, and how large the whole is.

    Attributes:
        places: of every box by name.
        routes: of every arrow (from, to), from border to border.
    """

    places: Mapping[str, Place]
    routes: Mapping[tuple[str, str], tuple[Point, ...]]
    width: float
    height: float


class _View:
    """What grandalf asks of a box: its size, and an attribute `xy` for its centre."""

    def __init__(self, size: tuple[float, float]) -> None:
        self.w, self.h = size
        self.xy = (0.0, 0.0)


def lay_out(sizes: Mapping[str, tuple[float, float]], arrows: Iterable[tuple[str, str]]) -> Layout:
    """Places boxes of these sizes, arrows pointing downwards.

    Parts that no arrow joins stand side by side.

    Args:
        sizes: width and height of every box, by name.
        arrows: pairs of names; no cycles.

    Raises:
        UsageError: when grandalf is not installed.
    """
    try:
        # Not typed, and not installed where nobody draws.
        from grandalf.graphs import Edge, Graph, Vertex  # type: ignore[import-untyped]
        from grandalf.routing import EdgeViewer  # type: ignore[import-untyped]
    except ImportError as error:
        raise UsageError(
            "drawing needs the package grandalf", hint="pip install 'gpipe-compiler[picture]'"
        ) from error
    vertices = {name: Vertex(name) for name in sizes}
    for name, vertex in vertices.items():
        vertex.view = _View(sizes[name])
    edges = {arrow: Edge(vertices[arrow[0]], vertices[arrow[1]]) for arrow in dict.fromkeys(arrows)}
    for edge in edges.values():
        edge.view = EdgeViewer()
    graph = Graph(list(vertices.values()), list(edges.values()))
    right = MARGIN
    height = 0.0
    for component in graph.C:
        _draw(component)
        views = [vertex.view for vertex in component.sV]
        routes = [edge.view for edge in component.sE]
        points = [point for route in routes for point in route._pts]
        left = min([view.xy[0] - view.w / 2 for view in views] + [x for x, _ in points])
        top = min(view.xy[1] - view.h / 2 for view in views)
        _shift(views, routes, right - left, MARGIN - top)
        points = [point for route in routes for point in route._pts]
        right = max([view.xy[0] + view.w / 2 for view in views] + [x for x, _ in points])
        right += 2 * GAP_X
        height = max(height, *(view.xy[1] + view.h / 2 for view in views))
    return Layout(
        places={name: _place(vertex.view) for name, vertex in vertices.items()},
        routes={arrow: tuple(map(tuple, edge.view._pts)) for arrow, edge in edges.items()},
        width=right - 2 * GAP_X + MARGIN,
        height=height + MARGIN,
    )


def _draw(component: Any) -> None:
    """Lets grandalf place one connected part around its own origin."""
    from grandalf.layouts import SugiyamaLayout  # type: ignore[import-untyped]  # as above
    from grandalf.routing import route_with_lines

    layout = SugiyamaLayout(component)
    layout.xspace, layout.yspace = GAP_X, GAP_Y
    layout.route_edge = route_with_lines
    layout.init_all(optimize=True)
    layout.draw(_SWEEPS)


def _shift(views: Sequence[_View], routes: Sequence[Any], dx: float, dy: float) -> None:
    for view in views:
        view.xy = (view.xy[0] + dx, view.xy[1] + dy)
    for route in routes:
        route._pts = [(x + dx, y + dy) for x, y in route._pts]


def _place(view: _View) -> Place:
    return Place(view.xy[0] - view.w / 2, view.xy[1] - view.h / 2, view.w, view.h)
