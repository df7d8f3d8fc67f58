"""Several plans of one trace: each as if it were planned alone."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import gpipe_compiler as gpc
from gpipe_compiler.cluster import Cluster, Device, Link
from gpipe_compiler.ir import Graph
from gpipe_compiler.options import CompileOptions, LossChoice
from gpipe_compiler.plan.plan import SweepPoint
from gpipe_compiler.report.comparisons import show_sweep, sweep_document, sweep_notes
from gpipe_compiler.report.text import plain_text
from gpipe_compiler.runtime.spec import ScheduleKind
from gpipe_compiler.targets.planning import planner_of, sweep

WIDTH, SAMPLES, LAYERS = 64, 8, 4
FLAT = Device("flat", 1e9, 1e18, 1 << 34, 0.0)
CLUSTER = Cluster.of(FLAT, Link(1e9, 0.0))


@pytest.fixture(scope="module")
def graph() -> Graph:
    return traced(SAMPLES)


def traced(samples: int) -> Graph:
    layers = (nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
    x = torch.randn(samples, WIDTH)
    return gpc.trace(nn.Sequential(*layers), x, loss=LossChoice.SUM_OF_SQUARES)


def swept(
    graph: Graph, *devices: int, largest_batch: bool = False, **changed: object
) -> tuple[SweepPoint, ...]:
    options = CompileOptions(stages=2, cluster=CLUSTER)
    options = dataclasses.replace(options, **changed)
    planner = planner_of(graph, options)
    return sweep(planner, options, devices, largest_batch=largest_batch, progress=lambda _: None)


def test_each_number_of_devices_is_planned_as_if_alone(graph: Graph):
    for point in swept(graph, 1, 2, 4):
        alone = gpc.plan(graph, stages=point.devices, cluster=CLUSTER)

        assert point.plan is not None
        assert point.plan.prediction == alone.prediction
        assert point.batch_size == SAMPLES


def test_a_schedule_has_as_many_stages_as_its_devices_hold(graph: Graph):
    (point,) = swept(graph, 2, schedule=ScheduleKind.INTERLEAVED)

    assert point.plan is not None
    assert (len(point.plan.orders), len(point.plan.stages)) == (2, 4)


def test_what_cannot_be_planned_says_why_beside_the_others(graph: Graph):
    one, many = swept(graph, 1, 40)

    assert one.fits
    assert many.plan is None
    assert "more than the model's" in many.problem
    assert "more than the model's" in plain_text(show_sweep((one, many)))


def test_a_mini_batch_of_another_size_is_planned_as_if_it_were_the_example(graph: Graph):
    little = CLUSTER.with_memory(200_000)
    points = swept(graph, largest_batch=True, cluster=little, microbatches=2)

    assert [point.batch_size for point in points] == [
        SAMPLES << times for times in range(len(points))
    ]
    assert [point.fits for point in points] == [True] * (len(points) - 1) + [False]
    for point in points:
        alone = gpc.plan(traced(point.batch_size), stages=2, microbatches=2, cluster=little)
        assert point.plan is not None
        assert point.plan.prediction == alone.prediction
        assert point.plan.batch_size == point.batch_size


def test_a_mini_batch_that_does_not_fit_is_halved():
    """Of so many samples the activations are nearly all: half of them need half the memory."""
    samples = 4096
    half = gpc.plan(traced(samples // 2), stages=2, microbatches=1, cluster=CLUSTER)
    little = CLUSTER.with_memory(max(half.prediction.device_bytes))
    points = swept(traced(samples), largest_batch=True, cluster=little, microbatches=1)

    assert [point.batch_size for point in points] == [samples // 2, samples]
    assert [point.fits for point in points] == [True, False]


def test_the_notes_name_the_largest_and_the_fastest(graph: Graph):
    points = swept(graph, largest_batch=True, cluster=CLUSTER.with_memory(200_000), microbatches=2)
    fitting = [point for point in points if point.plan is not None and point.fits]
    rates = {p.batch_size: p.batch_size / p.plan.here_s for p in fitting if p.plan is not None}

    largest, fastest = sweep_notes(points)
    assert f"{max(rates):,} samples" in largest
    assert f"with a mini-batch of {max(rates, key=rates.__getitem__):,}." in fastest
    assert sweep_notes(points[-1:]) == ["Nothing fits."]


def test_the_document_has_the_figures_of_each(graph: Graph):
    points = swept(graph, 2, 40)
    good, bad = sweep_document(points)

    assert points[0].plan is not None
    assert good["step_s"] == points[0].plan.prediction.step_s
    assert [whole["devices"] for whole in good["whole"]] == [1, 2]
    assert bad["problem"] == points[1].problem
    assert "step_s" not in bad
