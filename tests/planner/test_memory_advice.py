"""What is said of plans that do not fit: every figure is compared with a plan made as it says."""

from __future__ import annotations

import argparse
import dataclasses
import re

import pytest
import torch
from torch import nn

import gpipe_compiler as gpc
from gpipe_compiler.cli.arguments import compile_parser
from gpipe_compiler.cli.asked import schedule_of
from gpipe_compiler.cluster import IN_PROCESS, Cluster, Device
from gpipe_compiler.compile import silent
from gpipe_compiler.errors import ExitCode
from gpipe_compiler.options import Auto, RematChoice
from gpipe_compiler.plan.pareto import Frontier
from gpipe_compiler.planner.memory_advice import DoesNotFitError
from gpipe_compiler.planner.search import most_over
from gpipe_compiler.report.text import format_plan
from gpipe_compiler.runtime.spec import BatchNorm, OptimizerKind, Precision, ScheduleKind
from gpipe_compiler.targets.planning import plan_as_asked, planner_of
from gpipe_compiler.text.units import format_bytes, format_seconds

BATCH = 16


def toy(memory: int) -> Cluster:
    return Cluster.of(Device("toy", 1e9, 1e9, memory, 1e-7), IN_PROCESS)


class Wide(nn.Module):
    """Few parameters, much that autograd keeps."""

    def __init__(self, normed: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.norm = nn.BatchNorm1d(32) if normed else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(torch.sigmoid(torch.exp(self.norm(layer(x)))))
        return x


def traced(normed: bool = False) -> gpc.Graph:
    target = torch.ones(BATCH, 32)
    loss = nn.functional.mse_loss
    return gpc.trace(Wide(normed), torch.ones(BATCH, 32), target=target, loss_fn=loss)


@pytest.fixture(scope="module")
def graph() -> gpc.Graph:
    return traced()


def options(memory: int, **changes: object) -> gpc.CompileOptions:
    plain = gpc.CompileOptions(2, 2, cluster=toy(memory), must_fit=True)
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]  # fields by name


def as_asked(graph: gpc.Graph, asked: gpc.CompileOptions) -> tuple[gpc.Plan, Frontier | None]:
    return plan_as_asked(planner_of(graph, asked), asked, silent)


def refused(graph: gpc.Graph, asked: gpc.CompileOptions) -> DoesNotFitError:
    with pytest.raises(DoesNotFitError) as caught:
        as_asked(graph, asked)
    assert caught.value.exit_code is ExitCode.MODEL
    return caught.value


def least(graph: gpc.Graph, **changes: object) -> int:
    """The fullest device's bytes, where there is room."""
    plan, _ = as_asked(graph, options(10**9, **changes))
    return max(plan.prediction.device_bytes)


def follow(graph: gpc.Graph, asked: gpc.CompileOptions, advice: str) -> gpc.Plan:
    """The plan that a line of advice leads to."""
    words, *_ = re.split(r": | and nothing", advice.strip())
    given: argparse.Namespace = compile_parser().parse_args(
        [
            *("m.py", "--stages", "2", "--microbatches", "2"),
            *("--schedule", asked.schedule.value, "--remat", asked.remat.value),
            *words.split(),
        ]
    )
    cluster = asked.cluster if given.memory is None else asked.cluster.with_memory(given.memory)
    changed = dataclasses.replace(
        asked,
        stages=given.stages,
        microbatches=given.microbatches,
        schedule=schedule_of(given),
        remat=RematChoice(given.remat),
        precision=Precision(given.precision),
        cluster=cluster,
    )
    return as_asked(graph, changed)[0]


def lines(error: DoesNotFitError) -> list[str]:
    return error.hint.splitlines()[1:]


@pytest.mark.parametrize("share", [0.95, 0.8, 0.6])
def test_the_advice_is_true(graph: gpc.Graph, share: float) -> None:
    asked = options(int(least(graph) * share))
    error = refused(graph, asked)

    assert lines(error)
    for line in lines(error):
        plan = follow(graph, asked, line)
        assert not most_over(plan)
        if not line.strip().startswith("--memory"):
            assert format_bytes(max(plan.prediction.device_bytes)) in line
            assert format_seconds(plan.prediction.step_s) in line


def test_it_says_by_how_much_on_which_device_and_what_is_held(graph: gpc.Graph) -> None:
    memory = int(least(graph) * 0.8)
    error = refused(graph, options(memory))
    plan, _ = as_asked(graph, options(memory, must_fit=False))

    held = plan.prediction.device_bytes
    rank = max(range(2), key=lambda device: held[device])
    state = plan.stages[rank].state_bytes
    assert f"needs {format_bytes(held[rank] - memory)} more" in error.problem
    assert f"the {format_bytes(memory)} of device {rank} (stage {rank}" in error.problem
    assert f"{format_bytes(state)} of parameters, buffers, gradients" in error.problem
    assert f"{format_bytes(held[rank] - state)} of activations" in error.problem


def test_single_changes_are_the_least_that_will_do(graph: gpc.Graph) -> None:
    # Under 1F1B a stage holds two micro-batches at most: the more there are, the less it holds.
    alternate = {"schedule": ScheduleKind.ONE_F_ONE_B}
    asked = options(least(graph, microbatches=8, **alternate), **alternate)
    counts = [re.search(r"--microbatches (\d+)", line) for line in lines(refused(graph, asked))]
    (found,) = (int(match[1]) for match in counts if match)

    assert found == 8
    fewer = dataclasses.replace(asked, microbatches=4, must_fit=False)
    assert most_over(as_asked(graph, fewer)[0])


def test_changes_are_put_on_top_of_one_another_where_none_will_do_alone(graph: gpc.Graph) -> None:
    best = least(graph, microbatches=BATCH, schedule=ScheduleKind.ONE_F_ONE_B)
    pair = dataclasses.replace(toy(best).sized(2), endless=False)
    asked = options(best, cluster=pair)
    error = refused(graph, asked)

    *_, line = lines(error)
    assert line.count("--") > 1
    assert not most_over(follow(graph, asked, line))


def test_what_no_setting_mends_leaves_more_memory(graph: gpc.Graph) -> None:
    assert [line.split()[0] for line in lines(refused(graph, options(5000)))] == ["--memory"]


def test_exact_batchnorm_is_not_told_to_leave_gpipe() -> None:
    graph = traced(normed=True)
    asked = options(10**9, batchnorm=BatchNorm.EXACT)
    plan, _ = as_asked(graph, asked)
    tight = options(int(max(plan.prediction.device_bytes) * 0.8), batchnorm=BatchNorm.EXACT)
    assert "1f1b" not in refused(graph, tight).hint


class Spread(nn.Module):
    """An output that the batch in one piece alone gives."""

    def __init__(self) -> None:
        super().__init__()
        layers = (layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh()))
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made: torch.Tensor = self.layers(x)
        return made, made.std()


def test_a_batch_that_is_taken_in_one_piece_is_not_told_to_be_cut() -> None:
    graph = gpc.trace(Spread(), torch.randn(256, 16), training=False)
    plan, _ = as_asked(graph, options(10**9, microbatches=None))
    tight = options(int(max(plan.prediction.device_bytes) * 0.8), microbatches=None)

    assert plan.microbatches == 1
    assert "--microbatches" not in refused(graph, tight).hint


def test_without_being_asked_a_plan_that_does_not_fit_is_only_told(graph: gpc.Graph) -> None:
    plan, _ = as_asked(graph, options(5000, must_fit=False))
    assert "too much for" in format_plan(plan)


@pytest.mark.slow
def test_where_nothing_explored_fits_the_nearest_is_told(graph: gpc.Graph) -> None:
    asked = options(
        5000, stages=Auto.AUTO, microbatches=Auto.AUTO, schedule=Auto.AUTO, must_fit=False
    )
    asked = dataclasses.replace(
        asked, cluster=dataclasses.replace(toy(5000).sized(2), endless=False)
    )
    error = refused(graph, asked)

    assert re.match(
        r"none of \d+ settings fits; the nearest, \d+ stages on 2 devices", error.problem
    )
    assert "--schedule" not in error.hint
    assert "--microbatches" not in error.hint


def test_the_optimizer_counts(graph: gpc.Graph) -> None:
    sgd = least(graph)
    adam = least(graph, optimizer=OptimizerKind.ADAM)
    refused(graph, options((sgd + adam) // 2, optimizer=OptimizerKind.ADAM))
    as_asked(graph, options((sgd + adam) // 2))
