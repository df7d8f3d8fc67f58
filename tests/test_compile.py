"""The programmatic way: every step returns an object that prints, compares and is serialised."""

import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

import gpipe_compiler as gpc
from gpipe_compiler.cluster import DEFAULT_HOST, IN_PROCESS, Cluster
from gpipe_compiler.errors import PlanError, UsageError
from gpipe_compiler.ir.interpret import Interpreter
from gpipe_compiler.options import LossChoice, Policy
from gpipe_compiler.planner.microbatch_count import likely_microbatches
from gpipe_compiler.runtime.spec import BatchNorm

CLUSTER = Cluster.of(DEFAULT_HOST, IN_PROCESS)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


@pytest.fixture(scope="module")
def graph(model: nn.Module) -> gpc.Graph:
    return gpc.trace(model, torch.ones(8, 4), loss=LossChoice.SUM_OF_SQUARES)


@pytest.fixture(scope="module")
def planned(graph: gpc.Graph) -> gpc.Plan:
    return gpc.plan(graph, stages=2, cluster=CLUSTER)


def test_graph_prints_a_line_for_every_op(graph: gpc.Graph) -> None:
    lines = str(graph).splitlines()

    assert lines[0] == "graph Sequential (batch 8)"
    assert len(lines) == 1 + len(graph.inputs) + len(graph.ops) + 2


def test_graph_comes_back_from_a_pickle(model: nn.Module, graph: gpc.Graph) -> None:
    """With its tensors: it computes what the model computes."""
    again: gpc.Graph = pickle.loads(pickle.dumps(graph))
    x = torch.randn(8, 4)
    values = Interpreter(again, again.tensors).run({again.inputs[0].name: x})

    assert str(again) == str(graph)
    assert torch.equal(values[again.output_values[0]], model(x))


def test_plan_comes_back_from_json(planned: gpc.Plan) -> None:
    assert gpc.Plan.from_json(planned.to_json()) == planned


def test_plan_prints_stages_boundaries_and_prediction(planned: gpc.Plan) -> None:
    text = gpc.format_plan(planned)

    assert "2 stages" in text
    assert planned.crossings[0].value in text
    assert "lower bound" in text


def test_plan_read_from_json_cannot_be_emitted(planned: gpc.Plan, tmp_path: Path) -> None:
    """It has no graph, and the error says so."""
    with pytest.raises(gpc.GPipeCompilerError, match="no graph"):
        gpc.emit(gpc.Plan.from_json(planned.to_json()), tmp_path / "out")


def test_emit_writes_the_package(planned: gpc.Plan, tmp_path: Path) -> None:
    place = gpc.emit(planned, tmp_path / "out")

    assert {"run.py", "schedule.py", "stage_0.py", "stage_1.py", "plan.json", "report.html"} <= {
        path.name for path in place.iterdir()
    }


@pytest.mark.parametrize(
    ("batch", "stages", "count"), [(64, 4, 16), (6, 4, 6), (7, 2, 7), (30, 4, 15), (1, 4, 1)]
)
def test_default_microbatches_divide_the_batch(batch: int, stages: int, count: int) -> None:
    """The most that divide it, up to four per stage."""
    assert likely_microbatches(batch, stages)[0] == count


def test_impossible_plans_are_refused(graph: gpc.Graph) -> None:
    with pytest.raises(PlanError, match="does not split into 3"):
        gpc.plan(graph, stages=2, microbatches=3, cluster=CLUSTER)
    with pytest.raises(PlanError, match="stages"):
        gpc.plan(graph, stages=50, cluster=CLUSTER)
    with pytest.raises(UsageError):
        gpc.plan(graph, stages=0, cluster=CLUSTER)


def test_inputs_that_nothing_depends_on_are_told() -> None:
    class Ignores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, mask: torch.Tensor, kept: torch.Tensor) -> object:
            return self.layer(x), kept

    given = (torch.randn(4, 4), torch.randn(4, 2), torch.randn(4, 3))
    graph = gpc.trace(Ignores(), given, training=False)

    assert graph.unread_inputs == ("mask",)


class Normed(nn.Module):
    """A layer whose statistics are of the samples and of their pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.head(self.norm(self.conv(x)).relu().mean((2, 3)))
        return hidden


@pytest.mark.parametrize(("batch", "most"), [(8, 4), (12, 6), (7, 1), (1, 1), (64, 8)])
def test_batchnorm_has_two_samples_by_default(batch: int, most: int) -> None:
    graph = gpc.trace(Normed(), torch.randn(batch, 1, 8, 8), loss=LossChoice.SUM_OF_SQUARES)

    assert min(2, most) <= gpc.plan(graph, stages=2, cluster=CLUSTER).microbatches <= most


def test_where_batchnorm_takes_the_whole_batch_micro_batches_may_be_single_samples() -> None:
    graph = gpc.trace(Normed(), torch.randn(2, 1, 8, 8), loss=LossChoice.SUM_OF_SQUARES)
    exact = gpc.plan(graph, stages=2, cluster=CLUSTER, policy=Policy(batchnorm=BatchNorm.EXACT))
    inferring = gpc.trace(Normed().eval(), torch.randn(2, 1, 8, 8), training=False)

    assert exact.microbatches == 2
    assert gpc.plan(inferring, stages=2, cluster=CLUSTER).microbatches == 2
