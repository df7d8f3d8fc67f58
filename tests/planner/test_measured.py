"""Steps of written packages, timed on this machine, and where the figures are told."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch import nn

from gpipe_compiler.compile import CompileOptions, plan, trace
from gpipe_compiler.compile import compile as compile_package
from gpipe_compiler.errors import ValidationError
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.options import LossChoice, Policy
from gpipe_compiler.planner import measured as clocking
from gpipe_compiler.planner.measured import Start, time_step
from gpipe_compiler.targets.torch_stages import emit


def planned():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    graph = trace(model, torch.randn(4, 8), loss=LossChoice.SUM_OF_SQUARES)
    return plan(graph, stages=2, microbatches=2, policy=Policy())


def test_a_package_times_its_steps(tmp_path):
    emit(planned(), tmp_path / "package")

    assert time_step(tmp_path / "package", 2, Start.THREADS) > 0


def test_a_package_that_does_not_run_is_told(tmp_path):
    made = planned()
    emit(made, tmp_path / "package")
    (tmp_path / "package" / "stage_1.py").write_text("raise RuntimeError('spoiled')")

    with pytest.raises(ValidationError, match="spoiled"):
        time_step(tmp_path / "package", 2, Start.THREADS)


def test_a_start_that_fails_leaves_the_other_figure(monkeypatch, tmp_path):
    def time_step(directory, devices, start):
        if start is Start.TORCHRUN:
            raise ValidationError("exit code 1\nno loopback")
        return 9.0

    monkeypatch.setattr(clocking, "time_step", time_step)
    monkeypatch.setattr(clocking, "_places", lambda: 2)
    told = []

    prediction = clocking.clocked(planned(), tmp_path, told.append).prediction

    assert (prediction.threads_s, prediction.torchrun_s) == (9.0, None)
    assert told[-1] == "not timed under torchrun: no loopback"


def test_measured_packages_know_what_their_bench_will_tell(monkeypatch, tmp_path):
    """The compile writes the figures of the given times where `run.py bench` and people look."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    subject = Subject("small", model, (torch.randn(4, 8),), loss=LossChoice.SUM_OF_SQUARES)
    monkeypatch.setattr(clocking, "time_step", lambda *_: 9.0)
    monkeypatch.setattr(clocking, "_places", lambda: 2)
    options = CompileOptions(stages=2, microbatches=2, measured=True, validate=False)

    compiled = compile_package(subject, options, tmp_path / "package")

    assert compiled.plan.prediction.torchrun_s == 9.0
    written = json.loads((tmp_path / "package" / "plan.json").read_text())["prediction"]
    assert written["threads_s"] == written["torchrun_s"] == 9.0
    assert "9 s in threads, 9 s under torchrun" in str(compiled)
    assert "under torchrun" in (tmp_path / "package" / "report.html").read_text()


@pytest.mark.slow
def test_a_package_times_its_steps_under_torchrun(tmp_path):
    emit(planned(), tmp_path / "package")

    assert time_step(tmp_path / "package", 2, Start.TORCHRUN) > 0


def test_the_figures_survive_json():
    made = planned()
    prediction = dataclasses.replace(made.prediction, threads_s=0.5, torchrun_s=0.75)
    made = dataclasses.replace(made, prediction=prediction)

    assert type(made).from_json(made.to_json()).prediction == prediction
