"""The schedule in time, and what is made of it: Gantt diagram, trace, HTML."""

from __future__ import annotations

import dataclasses
import html.parser
import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

from gpipe_compiler.cluster import Link
from gpipe_compiler.plan import Plan
from gpipe_compiler.plan.plan import stage_times, timeline
from gpipe_compiler.report.facts import (
    boundaries,
    boundary_bytes,
    modules_of,
)
from gpipe_compiler.report.gantt import LEFT, ROW, WIDTH, format_trace, gantt
from gpipe_compiler.report.html import format_report, write_report
from gpipe_compiler.runtime.spec import Remat
from gpipe_compiler.runtime.train.comparison import Row
from gpipe_compiler.simulate.step import Lane, StageTimes
from gpipe_compiler.validate.package import Validation

HELD = Validation(
    (
        Row("output", 1, 1e-7, 2e-7, 1e-3, "y", ()),
        Row("gradient", 5, 0.2, 0.1, 1e-3, "head.weight", ("head.weight differs by 0.2",)),
    ),
    ("the model mixes samples",),
)


@pytest.fixture
def without_links(plan: Plan) -> Plan:
    """The plan with links so fast that the times come out round."""
    cluster = dataclasses.replace(plan.cluster, link=Link(1e300, 0.0))
    return dataclasses.replace(plan, cluster=cluster)


def test_transfers_count_every_value_once_for_every_receiver(plan: Plan) -> None:
    _, middle, last = stage_times(plan)

    assert middle == StageTimes(2.0, 4.0, 128e-6, 128e-6)
    assert last.receive_s == pytest.approx((128 + 128 + 32) * 1e-6)
    assert last.gradient_s == pytest.approx((128 + 128) * 1e-6)
    assert boundary_bytes(plan) == 128 + 128 + 288 + 256


def test_boundaries_know_their_makers(plan: Plan) -> None:
    ids, embed, _ = boundaries(plan)

    assert (ids.bytes, ids.label, ids.source) == (32, "input of the model", "")
    assert (embed.bytes, embed.label, embed.source) == (
        128,
        "Embedding embed",
        "/home/user/model.py:10",
    )


def test_a_stage_is_told_by_its_modules_or_else_by_its_calls(plan: Plan) -> None:
    assert [modules_of(plan, stage) for stage in plan.stages] == [
        "embed",
        "body.conv … body",
        "head",
    ]
    bare = tuple(dataclasses.replace(note, module="") for note in plan.noted)
    plan = dataclasses.replace(plan, noted=bare)
    assert modules_of(plan, plan.stages[2]) == "operator.add … Linear"
    assert modules_of(dataclasses.replace(plan, noted=()), plan.stages[2]) == ""


def recomputing(plan: Plan) -> Plan:
    """The plan with stage 1 recomputing; of its two micro-batches, 0 alone needs it."""
    stages = tuple(
        dataclasses.replace(stage, remat=Remat.FULL if stage.index == 1 else Remat.NONE)
        for stage in plan.stages
    )
    prediction = dataclasses.replace(plan.prediction, recompute=2 / 60)
    return dataclasses.replace(plan, stages=stages, prediction=prediction)


def test_what_is_recomputed_is_drawn(without_links: Plan) -> None:
    """1B1 ends at 12; the forward of 0 again takes until 14, when its gradient has been there."""
    plan = recomputing(without_links)

    (again,) = [span for span in timeline(plan).timeline if span.recompute]
    (bar,) = [bar for bar in gantt(timeline(plan)).bars if bar.kind == "again"]
    events = json.loads(format_trace(plan))["traceEvents"]
    (event,) = [event for event in events if event.get("cat") == "recompute"]

    assert (str(again.action), again.start_s, again.end_s) == ("1B0", 12, 14)
    assert bar.text == "R0"
    assert "1B0: forward again of stage 1, micro-batch 0" in bar.tip
    assert event["name"] == "recompute for 1B0"
    assert (event["ts"], event["dur"]) == (12e6, 2e6)
    report = format_report(plan)
    assert "forward again, for the backward" in report
    assert ">full</td>" in report
    assert "forward again, for the backward" not in format_report(without_links)


def test_the_timeline_by_hand(without_links: Plan) -> None:
    """F: 0-1, 1-2 | 1-3, 3-5 | 3-4, 5-6; B reversed: 6-8, 8-10 | 8-12, 12-16 | 12-14, 16-18."""
    spans = {
        str(span.action): (span.start_s, span.end_s)
        for span in timeline(without_links).timeline
        if span.lane is Lane.DEVICE
    }

    assert spans == {
        "0F0": (0, 1),
        "0F1": (1, 2),
        "1F0": (1, 3),
        "1F1": (3, 5),
        "2F0": (3, 4),
        "2F1": (5, 6),
        "2B1": (6, 8),
        "2B0": (8, 10),
        "1B1": (8, 12),
        "1B0": (12, 16),
        "0B1": (12, 14),
        "0B0": (16, 18),
    }


def test_bars_stand_where_their_time_is(without_links: Plan) -> None:
    diagram = gantt(timeline(without_links))
    scale = (WIDTH - LEFT) / 18

    bars = [bar for bar in diagram.bars if bar.kind != "transfer"]
    last = next(bar for bar in bars if bar.tip.startswith("1B0"))

    assert (last.x, last.width) == (pytest.approx(LEFT + 12 * scale), pytest.approx(4 * scale))
    assert (last.kind, last.text) == ("backward", "0")
    assert last.tip == "1B0: backward of stage 1, micro-batch 0, 12 s to 16 s"
    assert max(bar.x + bar.width for bar in bars) == pytest.approx(WIDTH)
    assert [label for label, _ in diagram.ticks] == ["0 s", "5 s", "10 s", "15 s"]
    assert diagram.height > 3 * ROW


def test_bars_of_a_device_do_not_overlap(plan: Plan) -> None:
    diagram = gantt(timeline(plan))

    for y in {bar.y for bar in diagram.bars}:
        row = sorted((bar.x, bar.x + bar.width) for bar in diagram.bars if bar.y == y)
        assert all(end <= start + 1e-6 for (_, end), (start, _) in pairwise(row))


def test_stages_show_where_devices_hold_several(plan: Plan) -> None:
    both = dataclasses.replace(
        plan,
        orders=(
            plan.orders[0][:2] + plan.orders[1][:2] + plan.orders[1][2:] + plan.orders[0][2:],
            plan.orders[2],
        ),
    )

    texts = {bar.text for bar in gantt(timeline(both)).bars}

    assert {"0F0", "1F1", "2B0"} <= texts


def test_a_plan_that_takes_no_time_draws(plan: Plan) -> None:
    stages = tuple(dataclasses.replace(s, forward_s=0.0, backward_s=0.0) for s in plan.stages)
    still = dataclasses.replace(plan, stages=stages, crossings=())

    assert gantt(timeline(still)).ticks == (("0 s", LEFT),)
    assert "<svg" in format_report(still)


def test_the_trace_has_an_event_for_every_span(plan: Plan) -> None:
    events = json.loads(format_trace(plan))["traceEvents"]
    spans = timeline(plan).timeline

    complete = [event for event in events if event["ph"] == "X"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]

    assert len(complete) == len(spans)
    assert names == ["device 0", "device 1", "device 2"]
    first = next(event for event in complete if event["name"] == "0F1")
    assert (first["ts"], first["dur"], first["pid"], first["tid"]) == (1e6, 1e6, 0, 0)


class Balanced(html.parser.HTMLParser):
    """Fails where a tag is closed that is not open."""

    VOID = frozenset({"meta", "link", "br", "img"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check_document(text: str) -> None:
    parser = Balanced()
    parser.feed(text)

    assert parser.open == []
    foreign = set(re.findall(r"""(?:https?:)?//[^"'\s<]+""", text)) - {"http://www.w3.org/2000/svg"}
    assert not foreign, "the report must need no network"


def test_the_report_is_one_well_formed_file(plan: Plan, tmp_path: Path) -> None:
    path = write_report(plan, tmp_path / "report.html", HELD)

    text = path.read_text()
    check_document(text)
    for said in (
        "55.6%",
        "/home/user/model.py:21",
        "head.weight differs by 0.2",
        "equal",
        "1B0:",
        "mixes",
    ):
        assert said in text


@pytest.mark.parametrize("training", [True, False])
def test_a_report_without_validation_says_so(plan: Plan, training: bool) -> None:
    forward = tuple(tuple(a for a in order if str(a)[1] == "F") for order in plan.orders)
    text = format_report(
        dataclasses.replace(plan, training=training, orders=plan.orders if training else forward)
    )

    check_document(text)
    assert "has not been compared with the model" in text
    assert ("backward" in text.partition("<body>")[2]) is training


def test_names_cannot_break_out_of_the_report(plan: Plan) -> None:
    text = format_report(dataclasses.replace(plan, name="<script>alert(1)</script>"))

    check_document(text)
    assert "<script>" not in text
