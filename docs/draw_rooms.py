"""Draws architecture.svg: the rooms of the compiler on their floors, from the imports themselves.

    python docs/draw_rooms.py docs/architecture.svg

A room is a folder or a loose module of gpipe_compiler. It stands one floor above the highest room
that it imports from. Drawn are the arrows that do not follow from others (transitive reduction).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import escape

import grimp
import networkx as nx

ROOT = "gpipe_compiler"
LEFT_OUT = frozenset({"__main__", "templates", "dispatching", "no_gc", "quiet"})
"""The command's first line, text, and tools of a few lines that import nothing of the compiler."""

WIDTH, ROW, BOX, TOP = 760, 74, 34, 40
STYLE = (
    "text { font: 12px 'DejaVu Sans Mono', Menlo, Consolas, monospace; fill: #1b2430;"
    " text-anchor: middle } .arrow { fill: none; stroke: #9aa5b1; stroke-width: 1.1 }"
    " rect { fill: #dfeaf9; stroke: #3f6fb0 } .loose { fill: #f3f5f8; stroke: #8b97a6 }"
)


def rooms() -> nx.DiGraph:
    """The rooms, with an arrow from each to those that it imports from."""
    imports = grimp.build_graph(ROOT, exclude_type_checking_imports=True, cache_dir=None)
    found = nx.DiGraph()
    names = {child.removeprefix(f"{ROOT}.") for child in imports.find_children(ROOT)}
    found.add_nodes_from(sorted(names - LEFT_OUT), loose=False)
    for name in found:
        found.nodes[name]["loose"] = not imports.find_children(f"{ROOT}.{name}")
    arrows = (
        tuple(module.removeprefix(f"{ROOT}.").split(".")[0] for module in (importer, imported))
        for importer in sorted(imports.modules)
        for imported in sorted(imports.find_modules_directly_imported_by(importer))
    )
    found.add_edges_from((a, b) for a, b in arrows if a != b and a in found and b in found)
    return found


def floors(graph: nx.DiGraph) -> list[list[str]]:
    """The rooms of each floor, from the ground up. Raises where rooms import in a circle."""
    return [sorted(floor) for floor in nx.topological_generations(graph.reverse())]


def draw(graph: nx.DiGraph) -> str:
    """The picture."""
    stacked = floors(graph)
    height = TOP + ROW * len(stacked)
    shown = nx.transitive_reduction(graph)
    places: dict[str, tuple[float, float, float]] = {}

    def middle(name: str) -> float:
        above = [places[other][0] + places[other][2] / 2 for other in shown.predecessors(name)]
        return sum(above) / len(above) if above else WIDTH / 2

    for level, names in reversed(list(enumerate(stacked))):
        pitch = WIDTH / len(names)
        for place, name in enumerate(sorted(names, key=middle)):
            width = 9 * len(name) + 24
            x = pitch * (place + 0.5) - width / 2
            places[name] = x, height - ROW * (level + 1), width
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH}" height="{height}">',
            "<title>Rooms of gpipe_compiler: each imports from lower floors only</title>",
            f"<style>{STYLE}</style>",
            f'<rect width="{WIDTH}" height="{height}" style="fill: #ffffff; stroke: none"/>',
            *_arrows(shown, places),
            *_boxes(graph, places),
            "</svg>\n",
        )
    )


def _arrows(graph: nx.DiGraph, places: dict[str, tuple[float, float, float]]) -> Iterator[str]:
    for above, below in sorted(graph.edges):
        (x, y, width), (to_x, to_y, to_width) = places[above], places[below]
        start, end = x + width / 2, to_x + to_width / 2
        bend = (y + BOX + to_y) / 2
        # Around the rooms of the floors between.
        aside = 0 if to_y - y == ROW else (120 if end >= start else -120)
        yield (
            f'<path class="arrow" d="M {start:.0f} {y + BOX} C {start + aside:.0f} {bend:.0f} '
            f'{end + aside:.0f} {bend:.0f} {end:.0f} {to_y}"/>'
        )


def _boxes(graph: nx.DiGraph, places: dict[str, tuple[float, float, float]]) -> Iterator[str]:
    for name, (x, y, width) in places.items():
        kind = ' class="loose"' if graph.nodes[name]["loose"] else ""
        yield f'<rect{kind} x="{x:.0f}" y="{y}" width="{width}" height="{BOX}" rx="5"/>'
        yield f'<text x="{x + width / 2:.0f}" y="{y + 21}">{escape(name)}</text>'


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(draw(rooms()), encoding="utf-8")
