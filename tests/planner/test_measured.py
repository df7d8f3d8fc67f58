"""Predictions from timed stages, against steps worked out by hand."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch import nn

from gpipe_compiler.codegen.package import emit
from gpipe_compiler.compile import CompileOptions, plan, trace
from gpipe_compiler.compile import compile as compile_package
from gpipe_compiler.errors import ValidationError
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.options import LossChoice, Policy, RematChoice
from gpipe_compiler.planner import measured as clocking
from gpipe_compiler.planner.measured import Start, step_seconds, time_stages
from gpipe_compiler.runtime.spec import ScheduleKind
from gpipe_compiler.runtime.train.stage_times import MeasuredStages, StageSeconds


def planned(schedule=ScheduleKind.GPIPE, remat=RematChoice.NONE):
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    graph = trace(model, torch.randn(4, 8), loss=LossChoice.SUM_OF_SQUARES)
    return plan(graph, stages=2, microbatches=2, policy=Policy(schedule=schedule, remat=remat))


def clocked(one, two=None, receive_s=0.0, around_s=0.0):
    """Two stages that take the same, alone and (`two`) together."""
    return MeasuredStages(
        (one,) * 2, (two or one,) * 2, (0.0, receive_s), (0.0, receive_s), around_s
    )


def test_stages_and_what_is_around_them_add_up_to_the_step():
    """Fill and drain of two micro-batches in two stages: 3 forwards, 3 backwards, 2 transfers."""
    found = clocked(StageSeconds(1.0, 2.0), receive_s=0.25, around_s=0.5)

    assert step_seconds(planned(), found) == pytest.approx(3 * 1.0 + 3 * 2.0 + 2 * 0.25 + 0.5)


def test_stages_that_work_side_by_side_are_slower():
    """Of three forwards in a row the middle one is beside another; of three backwards too."""
    found = clocked(StageSeconds(1.0, 2.0), StageSeconds(2.0, 3.0))

    assert step_seconds(planned(), found) == pytest.approx(1 + 2 + 1 + 2 + 3 + 2, rel=1e-3)


def test_a_split_backward_is_both_parts_where_the_schedule_splits_it():
    """ZB-H1 of two micro-batches: F0 F1, then B1 W0 and so on; the last stage is never idle after
    its first forward: 1 + 2 x (1 + 1 + 1) = 7."""
    found = clocked(StageSeconds(1.0, 1.0, 1.0))

    assert step_seconds(planned(ScheduleKind.ZB_H1), found) == pytest.approx(7.0)


def test_recomputing_counts_once_where_backwards_run_the_forward_again():
    """GPipe: the last micro-batch is not run again. Stage 1 ends at 3 + 2, recomputes 1, works 2;
    stage 0 recomputes beside it: 8, and its backward 2."""
    found = clocked(StageSeconds(1.0, 2.0, again_s=3.0))
    plan_ = planned(remat=RematChoice.FULL)

    assert step_seconds(plan_, found) == pytest.approx(10.0)
    without_plain = clocked(StageSeconds(1.0, 0.0, again_s=3.0))
    assert step_seconds(plan_, without_plain) == pytest.approx(10.0)


def test_a_package_times_its_stages(tmp_path):
    made = planned()
    emit(made, tmp_path / "package")

    found = time_stages(tmp_path / "package", 2, Start.THREADS)

    assert len(found.alone) == len(found.together) == 2
    assert all(stage.forward_s > 0 and stage.backward_s > 0 for stage in found.together)
    assert found.receive_s[0] == 0 < found.receive_s[1]
    assert step_seconds(made, found) > found.around_s


def test_a_package_that_does_not_run_is_told(tmp_path):
    made = planned()
    emit(made, tmp_path / "package")
    (tmp_path / "package" / "stage_1.py").write_text("raise RuntimeError('spoiled')")

    with pytest.raises(ValidationError, match="spoiled"):
        time_stages(tmp_path / "package", 2, Start.THREADS)


def test_a_start_that_fails_leaves_the_other_figure(monkeypatch, tmp_path):
    def time_stages(directory, devices, start):
        if start is Start.TORCHRUN:
            raise ValidationError("exit code 1\nno loopback")
        return clocked(StageSeconds(1.0, 2.0))

    monkeypatch.setattr(clocking, "time_stages", time_stages)
    monkeypatch.setattr(clocking, "_places", lambda: 2)
    told = []

    prediction = clocking.clocked(planned(), tmp_path, told.append).prediction

    assert (prediction.threads_s, prediction.torchrun_s) == (pytest.approx(9.0), None)
    assert told[-1] == "no prediction for torchrun: no loopback"


def test_measured_packages_know_what_their_bench_will_tell(monkeypatch, tmp_path):
    """The compile writes the figures of the given times where `run.py bench` and people look."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    subject = Subject("small", model, (torch.randn(4, 8),), loss=LossChoice.SUM_OF_SQUARES)
    monkeypatch.setattr(clocking, "time_stages", lambda *_: clocked(StageSeconds(1.0, 2.0)))
    monkeypatch.setattr(clocking, "_places", lambda: 2)
    options = CompileOptions(stages=2, microbatches=2, measured=True, validate=False)

    compiled = compile_package(subject, options, tmp_path / "package")

    assert compiled.plan.prediction.torchrun_s == pytest.approx(9.0)
    written = json.loads((tmp_path / "package" / "plan.json").read_text())["prediction"]
    assert written["threads_s"] == written["torchrun_s"] == pytest.approx(9.0)
    assert "9 s in threads, 9 s under torchrun" in str(compiled)
    assert "under torchrun" in (tmp_path / "package" / "report.html").read_text()


@pytest.mark.slow
def test_a_package_times_its_stages_under_torchrun(tmp_path):
    made = planned()
    emit(made, tmp_path / "package")

    found = time_stages(tmp_path / "package", 2, Start.TORCHRUN)

    assert all(stage.forward_s > 0 and stage.backward_s > 0 for stage in found.alone)
    assert all(stage.forward_s > 0 and stage.backward_s > 0 for stage in found.together)
    assert found.receive_s[0] == found.gradient_s[0] == 0.0


def test_the_figures_survive_json():
    made = planned()
    prediction = dataclasses.replace(made.prediction, threads_s=0.5, torchrun_s=0.75)
    made = dataclasses.replace(made, prediction=prediction)

    assert type(made).from_json(made.to_json()).prediction == prediction
