"""The list of passes: a pass is added by one entry, and an illegal graph names who made it."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from torch import nn

from gpipe_compiler.cluster import local_cluster
from gpipe_compiler.compile import trace
from gpipe_compiler.errors import IllegalGraphError
from gpipe_compiler.ir import Graph, MethodCall, Op
from gpipe_compiler.options import Constraints, Policy
from gpipe_compiler.passes import pipeline
from gpipe_compiler.passes.pass_setting import PassSetting
from gpipe_compiler.passes.pipeline import ANALYSES, PASSES, Pass, PassPipeline, transform
from gpipe_compiler.planner.planner import Planner


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).view(x.shape[0], -1) * 1.0).tanh()


@pytest.fixture(scope="module")
def graph() -> Graph:
    return trace(Twice(), (torch.randn(8, 4),), training=False)


def sigmoid_for_tanh(graph: Graph, at: PassSetting) -> Graph:
    def changed(op: Op) -> Op:
        call = op.call
        tanh = op.name == "tanh"
        return dataclasses.replace(op, call=MethodCall("sigmoid", call.args)) if tanh else op

    return graph.replace(ops=tuple(map(changed, graph.ops)), values={})


def test_a_pass_is_added_by_one_entry_of_the_list(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "PASSES", (*PASSES, Pass("toy", sigmoid_for_tanh)))

    planned = Planner(graph, local_cluster()).prepare(2, Policy()).graph

    assert [op.name for op in planned.ops] == ["first", "second", "tanh"]
    assert "sigmoid" in str(planned.ops[-1].call)
    assert set(planned.values) == {"x", "first", "second", "tanh"}
    assert planned.batch_size == 4


def test_an_illegal_graph_names_the_pass(graph: Graph) -> None:
    def forgets(graph: Graph, at: PassSetting) -> Graph:
        return graph.replace(ops=graph.ops[1:])

    with pytest.raises(IllegalGraphError, match="after forgets"):
        transform(graph, PassSetting(2), PassPipeline((*PASSES, Pass("forgets", forgets))))


def test_an_op_that_a_constraint_names_stays(graph: Graph) -> None:
    dropped = Planner(graph, local_cluster()).prepare(1, Policy()).graph
    assert "view" in graph.op_of
    assert "view" not in dropped.op_of

    named = Constraints(split_at=("view",))
    kept = Planner(graph, local_cluster(), constraints=named).prepare(1, Policy()).graph
    assert "view" in kept.op_of


def printed(graph: Graph, *names: str) -> list[str]:
    """What is written of a run of which these are printed."""
    lines: list[str] = []
    asked = dataclasses.replace(PassPipeline().asked(names), write=lines.append)
    transform(graph, PassSetting(2), asked)
    return lines


def test_the_graph_is_printed_as_it_is_after_a_pass(graph: Graph) -> None:
    (before,), (after,) = printed(graph, "shapes"), printed(graph, "simplify")

    assert before.startswith("# after shapes: 2 samples, fp32\ngraph Twice (batch 2)")
    assert "operator.mul" in before
    assert "operator.mul" not in after
    assert "view" not in after


def test_all_prints_after_every_pass_in_order(graph: Graph) -> None:
    titles = [re.findall(r"^# after (\w+)", text)[0] for text in printed(graph, "all")]

    assert titles == [step.name for step in PASSES]


@pytest.mark.parametrize("analysis", [analysis.name for analysis in ANALYSES])
def test_every_analysis_prints_its_table(graph: Graph, analysis: str) -> None:
    (text,) = printed(graph, analysis)

    assert text.startswith(f"# after {analysis}: ")
    assert text.count("\n") >= 2
