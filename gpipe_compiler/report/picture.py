"""Draws a plan as SVG: the stages with what crosses between them, or the ops of one stage.

Drawn from the notes of the plan and not from a stage's file, see `gpipe_compiler.plan.stages`.
The layout is Sugiyama's, by grandalf: pure Python, so that a picture needs no program besides.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpipe_compiler.errors import ModelError, UsageError
from gpipe_compiler.plan import Plan, Stage
from gpipe_compiler.plan.stages import OpNote
from gpipe_compiler.report.facts import Boundary, boundaries, modules_of, render
from gpipe_compiler.runtime.wording import counted, printable
from gpipe_compiler.text.units import format_bytes, format_seconds, format_source, format_type

LINE = 15.0
"""Pixels from one line of text to the next; letters are 11 pixels high."""
_LETTER = 6.7
"""Pixels of one letter of the fixed-width font."""
_HEADING_LETTER = 8.6
_PADDING = 9.0
_LONGEST = 44
"""Letters of a line of text; what is longer loses its middle."""
_CORNER = 10.0
"""Pixels before a bend at which an arrow begins to curve."""

GAP_X = 26.0
GAP_Y = 30.0
MARGIN = 24.0
_SWEEPS = 4
"""Passes over all layers that reduce crossings; more changes little."""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Box:
    """What is drawn as a box.

    Attributes:
        kind: the class of its style: `op`, `weights` (an op that has some), `again` (an op that
            other stages compute as well), `boundary`, `end` (input or output of the model),
            `stage`.
        lines: of text; the first is the title.
    """

    kind: str
    lines: tuple[str, ...]
    tip: str = ""

    @property
    def size(self) -> tuple[float, float]:
        letters = max(len(line) for line in self.lines)
        return letters * _LETTER + 2 * _PADDING, len(self.lines) * LINE + _PADDING


@dataclass(frozen=True)
class Drawing:
    """Boxes by name, and arrows between them with what they carry."""

    title: str
    boxes: Mapping[str, Box]
    arrows: Mapping[tuple[str, str], str]


@dataclass(frozen=True, slots=True)
class BoxPosition:
    """Where a box stands: its top left corner and its size."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class PictureLayout:
    """Where everything stands, and how large the whole is.

    Attributes:
        places: of every box by name.
        routes: of every arrow (from, to), from border to border.
    """

    places: Mapping[str, BoxPosition]
    routes: Mapping[tuple[str, str], tuple[Point, ...]]
    width: float
    height: float


def write_picture(plan: Plan, path: Path, *, stage: int | None = None) -> Path:
    """Draws the whole pipeline, or the ops of one stage; returns the file's path.

    Raises:
        UsageError: when there is no such stage, when the file is to be anything but SVG, or when
            the layout library is missing.
        ModelError: when the plan holds no notes about its ops.
    """
    if path.suffix.lower() != ".svg":
        raise UsageError(
            f"pictures are written as SVG, not as {path.name}",
            hint="-o name.svg; browsers show it, rsvg-convert or Inkscape make a PNG of it",
        )
    drawing = pipeline_drawing(plan) if stage is None else stage_drawing(plan, stage)
    path.write_text(draw(drawing), encoding="utf-8")
    return path


def pipeline_drawing(plan: Plan) -> Drawing:
    """A box for every stage, and between them one for every boundary value."""
    boxes = {f"stage {stage.index}": _stage_box(plan, stage) for stage in plan.stages}
    arrows: dict[tuple[str, str], str] = {}
    crossed = {crossing.value for crossing in plan.crossings}
    made = {value for note in plan.ops for value in note.outputs}
    for boundary in boundaries(plan):
        crossing = boundary.crossing
        key = f"value {crossing.value}"
        boxes[key] = _boundary_box(boundary)
        arrows[f"stage {crossing.source}", key] = crossing.value
        arrows |= {(key, f"stage {target}"): crossing.value for target in crossing.targets}
    for value in plan.stages[0].inputs:
        if value not in made:
            boxes[f"input {value}"] = Box("end", (value, "input"))
            arrows[f"input {value}", "stage 0"] = value
    for stage in plan.stages:
        for value in stage.outputs:
            if value not in crossed:
                boxes[f"output {value}"] = Box("end", (value, "output"))
                arrows[f"stage {stage.index}", f"output {value}"] = value
    return Drawing(f"{plan.name} in {len(plan.stages)} stages", boxes, arrows)


def stage_drawing(plan: Plan, index: int) -> Drawing:
    """A box for every op of a stage, and one for every value it takes or hands on.

    Raises:
        UsageError: when there is no such stage.
        ModelError: when the plan holds no notes about its ops.
    """
    if not 0 <= index < len(plan.stages):
        raise UsageError(
            f"there is no stage {index}", hint=f"stages count from 0 to {len(plan.stages) - 1}"
        )
    if not plan.ops:
        raise ModelError(
            "the plan does not describe its ops", hint="compile the package again to draw it"
        )
    stage = plan.stages[index]
    own = [plan.note_of[name] for name in stage.ops]
    found = boundaries(plan)
    received = {b.crossing.value: b for b in found if b.crossing.source != index}
    sent = {b.crossing.value: b for b in found if b.crossing.source == index}
    made = {value: f"op {note.name}" for note in own for value in note.outputs}
    boxes = {f"op {note.name}": _op_box(note, note.name in stage.duplicates) for note in own}
    taken: dict[str, str] = {}
    for value in stage.inputs:
        taken[value] = f"in {value}"
        boundary = received.get(value)
        line = f"from stage {boundary.crossing.source}" if boundary else "input"
        boxes[f"in {value}"] = _end_box(value, boundary, line)
    arrows: dict[tuple[str, str], str] = {}
    for note in own:
        for value in note.inputs:
            origin = made.get(value) or taken.get(value)
            if origin is not None:
                _carry(arrows, origin, f"op {note.name}", value)
    for value in stage.outputs:
        origin = made.get(value) or taken.get(value)
        if origin is not None:
            boundary = sent.get(value)
            line = f"to {_stages(boundary.crossing.targets)}" if boundary else "output"
            boxes[f"out {value}"] = _end_box(value, boundary, line)
            _carry(arrows, origin, f"out {value}", value)
    return Drawing(f"{plan.name}, stage {index}", boxes, arrows)


def _carry(arrows: dict[tuple[str, str], str], origin: str, target: str, value: str) -> None:
    """Adds an arrow, or another value to the arrow that is there."""
    before = arrows.get((origin, target))
    arrows[origin, target] = value if before is None else f"{before}, {value}"


def _stage_box(plan: Plan, stage: Stage) -> Box:
    times = f"forward {format_seconds(stage.forward_s)}"
    if plan.training:
        times += f", backward {format_seconds(stage.backward_s)}"
    peak = plan.prediction.peak_bytes[stage.index]
    lines = [
        f"stage {stage.index}",
        modules_of(plan, stage),
        f"{counted(len(stage.ops), 'op')}, {counted(stage.parameter_count, 'parameter')}",
        times,
        f"peak memory {format_bytes(peak)}",
    ]
    return Box("stage", tuple(_shortened(line) for line in lines if line))


def _boundary_box(boundary: Boundary) -> Box:
    crossing = boundary.crossing
    size = f"{format_type(crossing.example_shape, crossing.dtype)}, {format_bytes(boundary.bytes)}"
    return Box("boundary", (_shortened(crossing.value), size), _tip(boundary))


def _stages(numbers: Sequence[int]) -> str:
    return f"stage{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _tip(boundary: Boundary) -> str:
    source = format_source(boundary.source) if boundary.source else ""
    return "\n".join(line for line in (boundary.label, source) if line)


def _end_box(value: str, boundary: Boundary | None, line: str) -> Box:
    """A value that a stage takes or hands on: of a boundary, with where from or to; else `line`."""
    if boundary is None:
        return Box("end", (_shortened(value), line))
    box = _boundary_box(boundary)
    return Box("boundary", (*box.lines, line), box.tip)


def _op_box(note: OpNote, again: bool) -> Box:
    kind = "again" if again else "weights" if note.state else "op"
    types = "; ".join(text for text in note.types if text)
    lines = (note.label, note.module or note.name, types)
    source = format_source(note.source) if note.source else ""
    tip = "\n".join(line for line in (note.name, *note.state, source) if line)
    return Box(kind, tuple(_shortened(line) for line in lines if line), tip)


def _shortened(line: str) -> str:
    line = printable(line)
    if len(line) <= _LONGEST:
        return line
    half = (_LONGEST - 1) // 2
    return f"{line[:half]}…{line[-half:]}"


# --- from boxes to SVG -----------------------------------------------------------------------


def draw(drawing: Drawing) -> str:
    layout = lay_out({name: box.size for name, box in drawing.boxes.items()}, drawing.arrows)
    return render(
        "picture.svg.jinja",
        drawing=drawing,
        width=round(max(layout.width, len(drawing.title) * _HEADING_LETTER + 2 * MARGIN)),
        height=round(layout.height),
        line=LINE,
        boxes=[(drawing.boxes[name], place) for name, place in layout.places.items()],
        arrows=[(drawing.arrows[arrow], curve(points)) for arrow, points in layout.routes.items()],
    )


class _View:
    """What grandalf asks of a box: its size, and an attribute `xy` for its centre."""

    def __init__(self, size: tuple[float, float]) -> None:
        self.w, self.h = size
        self.xy = (0.0, 0.0)


def lay_out(
    sizes: Mapping[str, tuple[float, float]], arrows: Iterable[tuple[str, str]]
) -> PictureLayout:
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
    places: dict[str, BoxPosition] = {}
    routes: dict[tuple[str, str], tuple[Point, ...]] = {}
    right, height = MARGIN, 0.0
    for component in graph.C:
        _draw(component)
        views = {vertex.data: vertex.view for vertex in component.sV}
        lines = {(e.v[0].data, e.v[1].data): e.view._pts for e in component.sE}
        points = [point for line in lines.values() for point in line]
        left = min([view.xy[0] - view.w / 2 for view in views.values()] + [x for x, _ in points])
        top = min(view.xy[1] - view.h / 2 for view in views.values())
        dx, dy = right - left, MARGIN - top
        for name, view in views.items():
            x, y = view.xy[0] - view.w / 2 + dx, view.xy[1] - view.h / 2 + dy
            places[name] = BoxPosition(x, y, view.w, view.h)
        routes |= {arrow: tuple((x + dx, y + dy) for x, y in line) for arrow, line in lines.items()}
        own = [places[name] for name in views]
        right = max([place.x + place.width for place in own] + [x + dx for x, _ in points])
        right += 2 * GAP_X
        height = max(height, *(place.y + place.height for place in own))
    return PictureLayout(places, routes, right - 2 * GAP_X + MARGIN, height + MARGIN)


def _draw(component: Any) -> None:
    """Lets grandalf place one connected part around its own origin."""
    from grandalf.layouts import SugiyamaLayout  # type: ignore[import-untyped]  # as above
    from grandalf.routing import route_with_lines

    layout = SugiyamaLayout(component)
    layout.xspace, layout.yspace = GAP_X, GAP_Y
    layout.route_edge = route_with_lines
    layout.init_all(optimize=True)
    layout.draw(_SWEEPS)


def curve(points: Iterable[Point]) -> str:
    """A path along straight lines, its bends rounded, in the language of SVG."""
    route = [point for point, _ in itertools.groupby(points)]
    commands = [f"M {_pair(route[0])}"]
    for before, bend, after in zip(route, route[1:], route[2:], strict=False):
        commands.append(f"L {_pair(_towards(bend, before))}")
        commands.append(f"Q {_pair(bend)} {_pair(_towards(bend, after))}")
    commands.append(f"L {_pair(route[-1])}")
    return " ".join(commands)


def _towards(start: Point, end: Point) -> Point:
    """The point `_CORNER` pixels from start, or half way if the end is nearer than that."""
    dx, dy = end[0] - start[0], end[1] - start[1]
    length = (dx * dx + dy * dy) ** 0.5
    share = min(_CORNER / length, 0.5) if length else 0.0
    return start[0] + dx * share, start[1] + dy * share


def _pair(point: Point) -> str:
    return f"{point[0]:.1f} {point[1]:.1f}"
