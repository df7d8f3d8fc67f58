"""What a model itself gives to torch.utils.checkpoint: in its plans, and in its packages."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from loading import load_package
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gpipe_compiler.cluster import DEFAULT_HOST, Cluster, Link
from gpipe_compiler.compile import CompileOptions, compile, trace  # noqa: A004  # its name
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.ir import Graph
from gpipe_compiler.options import LossChoice, Policy, RematChoice
from gpipe_compiler.plan import Plan
from gpipe_compiler.planner.planner import Planner
from gpipe_compiler.runtime.spec import Remat


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 32), nn.Linear(32, 8), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(x))))


class Model(nn.Module):
    """Every other layer is checkpointed, in either way."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](self.first(x))
        x = checkpoint(self.layers[1], x, use_reentrant=False)
        x = self.layers[2](x)
        return checkpoint(self.layers[3], x, use_reentrant=True)


class Whole(Model):
    """One checkpoint around everything, others inside."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def graph_of(model: nn.Module) -> Graph:
    return trace(model, torch.randn(64, 8), loss=LossChoice.SUM_OF_SQUARES)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return graph_of(Model())


def planned(
    graph: Graph, remat: RematChoice, *, memory: int = 2**40, stages: int = 1
) -> tuple[Plan, list[set[str]]]:
    """A plan, and for every segment the modules whose forwards run again in it."""
    cluster = Cluster.of(dataclasses.replace(DEFAULT_HOST, memory=memory), Link(1e9, 1e-6))
    policy = Policy(remat=remat)
    planner = Planner(graph, cluster)
    plan = planner.plan(planner.choose(stages, 4, policy), policy, exact_memory=False)
    segments = [segment for stage in plan.stages for segment in stage.segments]
    return plan, [{graph.op_of[name].module for name in segment} for segment in segments]


def test_what_the_model_checkpoints_runs_again_and_nothing_else(graph: Graph) -> None:
    plan, segments = planned(graph, RematChoice.NONE)
    (stage,) = plan.stages

    assert segments == [{"layers.1"}, {"layers.3"}]
    assert stage.remat is Remat.SEGMENTS
    ops = [op.name for op in graph.ops if op.module in ("layers.1", "layers.3")]
    assert [name for segment in stage.segments for name in segment] == ops
    assert stage.segments_s > 0
    assert sum(stage.microbatch_bytes) < stage.saved_bytes


def test_all_is_run_again_on_top(graph: Graph) -> None:
    plan, segments = planned(graph, RematChoice.FULL)
    (stage,) = plan.stages

    assert stage.remat is Remat.FULL
    assert segments == [{"layers.1"}, {"layers.3"}]
    assert stage.segments_s > 0


def test_what_does_not_fit_is_run_again_on_top(graph: Graph) -> None:
    written, _ = planned(graph, RematChoice.NONE)
    plan, _ = planned(graph, RematChoice.AUTO, memory=written.prediction.device_bytes[0] - 1)
    (stage,) = plan.stages

    assert plan.prediction.device_bytes[0] < written.prediction.device_bytes[0]
    assert written.prediction.step_s < plan.prediction.step_s
    again = {name for segment in stage.segments for name in segment}
    ops = {op.name for op in graph.ops if op.module in ("layers.1", "layers.3")}
    assert stage.remat is Remat.FULL or ops < again


def test_a_cut_makes_two_of_one() -> None:
    graph = graph_of(Whole())
    plan, _ = planned(graph, RematChoice.NONE, stages=2)

    assert [len(stage.segments) for stage in plan.stages] == [1, 1]
    both = [name for stage in plan.stages for name in stage.segments[0]]
    assert both == [op.name for op in graph.ops if op.name not in graph.loss_only]


def test_recomputing_changes_no_bit(tmp_path: Path) -> None:
    """Dropout included; and the stage says what the user has written."""
    torch.manual_seed(0)
    batch = torch.randn(8, 8), torch.randn(8, 8)
    subject = Subject("written", Model(), (batch[0],), target=batch[1], loss_fn=F.mse_loss)
    compile(subject, CompileOptions(2, 4, validate=False), package := tmp_path / "written_checks")
    text = "".join((package / f"stage_{number}.py").read_text() for number in range(2))

    assert text.count(" = checkpoint(") == text.count("use_reentrant=False") == 2
    kept, *others = (gradients_of(package, batch, remat) for remat in ("none", None, "full"))
    for other in others:
        assert all(torch.equal(kept[name], other[name]) for name in kept)


def gradients_of(
    package: Path, batch: tuple[torch.Tensor, torch.Tensor], remat: str | None
) -> dict[str, torch.Tensor]:
    with load_package(package).Pipeline(remat=remat, seed=3) as pipe:
        pipe.step(*batch)
        return {name: parameter.grad.clone() for name, parameter in pipe.named_parameters()}
