"""Pictures: where boxes stand, and what they say."""

from __future__ import annotations

import dataclasses
import sys
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_compiler.errors import GPipeCompilerError
from gpipe_compiler.plan import Plan
from gpipe_compiler.report.picture import (
    BoxPosition,
    PictureLayout,
    curve,
    draw,
    lay_out,
    pipeline_drawing,
    stage_drawing,
    write_picture,
)

pytest.importorskip("grandalf")

TOLERANCE = 1e-6


def overlap(a: BoxPosition, b: BoxPosition) -> bool:
    return (
        a.x < b.x + b.width - TOLERANCE
        and b.x < a.x + a.width - TOLERANCE
        and a.y < b.y + b.height - TOLERANCE
        and b.y < a.y + a.height - TOLERANCE
    )


def touches(place: BoxPosition, point: tuple[float, float]) -> bool:
    x, y = point
    return (
        place.x - 1 <= x <= place.x + place.width + 1
        and place.y - 1 <= y <= place.y + place.height + 1
    )


@st.composite
def graphs(
    draw_from: st.DrawFn,
) -> tuple[dict[str, tuple[float, float]], list[tuple[str, str]]]:
    """Boxes of any size, arrows from earlier to later ones; parts may be unconnected."""
    count = draw_from(st.integers(1, 12))
    size = st.tuples(st.floats(20, 300), st.floats(20, 90))
    sizes = {f"box {i}": draw_from(size) for i in range(count)}
    pairs = [(f"box {i}", f"box {j}") for j in range(count) for i in range(j)]
    arrows = draw_from(st.lists(st.sampled_from(pairs), max_size=24)) if pairs else []
    return sizes, arrows


@settings(max_examples=60, deadline=None)
@given(graphs())
def test_boxes_never_overlap_and_arrows_join_them_downwards(
    graph: tuple[Mapping[str, tuple[float, float]], list[tuple[str, str]]],
) -> None:
    sizes, arrows = graph

    layout = lay_out(sizes, arrows)

    check_layout(layout, sizes)
    assert set(layout.routes) == set(arrows)
    for (start, end), points in layout.routes.items():
        assert touches(layout.places[start], points[0])
        assert touches(layout.places[end], points[-1])
        assert layout.places[start].y < layout.places[end].y


def check_layout(layout: PictureLayout, sizes: Mapping[str, tuple[float, float]]) -> None:
    places = list(layout.places.values())
    assert {n: (p.width, p.height) for n, p in layout.places.items()} == dict(sizes)
    assert not any(overlap(a, b) for i, a in enumerate(places) for b in places[:i])
    for place in places:
        assert place.x >= 0
        assert place.y >= 0
        assert place.x + place.width <= layout.width
        assert place.y + place.height <= layout.height


def test_the_pipeline_shows_stages_and_what_crosses(plan: Plan) -> None:
    drawing = pipeline_drawing(plan)

    assert drawing.boxes["value embed"].lines == ("embed", "4x8 float32, 128 B")
    assert drawing.boxes["value embed"].tip == "Embedding embed\n/home/user/model.py:10"
    assert drawing.boxes["stage 1"].lines == (
        "stage 1",
        "body.conv … body",
        "2 ops, 24 parameters",
        "forward 2 s, backward 4 s",
        "peak memory 2.93 KiB",
    )
    assert set(drawing.arrows) == {
        ("input ids", "stage 0"),
        ("stage 0", "value ids"),
        ("value ids", "stage 2"),
        ("stage 0", "value embed"),
        ("value embed", "stage 1"),
        ("value embed", "stage 2"),
        ("stage 1", "value relu"),
        ("value relu", "stage 2"),
        ("stage 2", "output head"),
    }


def test_a_stage_shows_its_ops_and_what_it_takes_and_gives(plan: Plan) -> None:
    drawing = stage_drawing(plan, 1)

    assert drawing.boxes["in embed"].lines == ("embed", "4x8 float32, 128 B", "from stage 0")
    assert drawing.boxes["op conv"].lines == ("Conv1d", "body.conv", "4x8 float32")
    assert drawing.boxes["op conv"].tip == "conv\n/home/user/model.py:20"
    assert drawing.boxes["out relu"].lines == ("relu", "4x8 float32, 128 B", "to stage 2")
    assert list(drawing.arrows) == [
        ("in embed", "op conv"),
        ("op conv", "op relu"),
        ("op relu", "out relu"),
    ]


def test_the_first_stage_takes_the_models_inputs(plan: Plan) -> None:
    boxes = stage_drawing(plan, 0).boxes

    assert boxes["in ids"].lines == ("ids", "input")
    assert boxes["out embed"].lines == ("embed", "4x8 float32, 128 B", "to stages 1, 2")


def test_ops_with_weights_and_duplicates_look_different(plan: Plan) -> None:
    notes = tuple(
        dataclasses.replace(note, state=("body.conv.weight",)) if note.name == "conv" else note
        for note in plan.noted
    )
    stages = list(plan.stages)
    stages[1] = dataclasses.replace(stages[1], duplicates=("relu",))

    boxes = stage_drawing(dataclasses.replace(plan, noted=notes, stages=tuple(stages)), 1).boxes

    assert (boxes["op conv"].kind, boxes["op relu"].kind) == ("weights", "again")


@pytest.mark.parametrize("stage", [None, 0, 1, 2])
def test_the_picture_is_svg(plan: Plan, tmp_path: Path, stage: int | None) -> None:
    path = write_picture(plan, tmp_path / "x.svg", stage=stage)

    root = ET.fromstring(path.read_text())
    width = float(root.attrib["width"])
    for rect in root.iter("{http://www.w3.org/2000/svg}rect"):
        assert 0 <= float(rect.attrib.get("x", 0)) <= width


def test_names_cannot_break_the_picture(plan: Plan) -> None:
    drawing = pipeline_drawing(dataclasses.replace(plan, name='<&"'))

    root = ET.fromstring(draw(drawing))

    assert root[0].text == '<&" in 3 stages'


def test_a_long_name_loses_its_middle(plan: Plan) -> None:
    notes = (dataclasses.replace(plan.noted[0], module="a" * 40 + "b" * 40), *plan.noted[1:])

    lines = stage_drawing(dataclasses.replace(plan, noted=notes), 0).boxes["op embed"].lines

    assert lines[1] == "a" * 21 + "…" + "b" * 21


def test_bends_are_rounded() -> None:
    assert curve([(0, 0), (0, 100), (100, 100)]) == (
        "M 0.0 0.0 L 0.0 90.0 Q 0.0 100.0 10.0 100.0 L 100.0 100.0"
    )


def test_an_older_plan_without_notes_draws_its_stages_only(plan: Plan) -> None:
    older = dataclasses.replace(plan, noted=())

    assert "value embed" in pipeline_drawing(older).boxes
    with pytest.raises(GPipeCompilerError, match="does not describe its ops"):
        stage_drawing(older, 0)


def test_the_missing_library_is_named(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "grandalf.graphs", None)

    with pytest.raises(GPipeCompilerError, match="drawing needs the package grandalf"):
        write_picture(plan, tmp_path / "x.svg")
