"""What is drawn of a stage is what its emitted file does."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path

import pytest
import torch
from loading import load_package
from torch import fx, nn
from torch.nn import functional as F

from gpipe_compiler.cluster import DEFAULT_HOST, GLOO, Cluster
from gpipe_compiler.compile import plan, trace
from gpipe_compiler.plan import Plan
from gpipe_compiler.targets.torch_stages import emit


class Skipping(nn.Module):
    """A skip over two layers, and a functional call."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = F.relu(self.norm(self.first(x)))
        y = F.relu(self.second(skip)) + skip
        scores: torch.Tensor = self.head(y.mean((2, 3)))
        return scores


def stage_module(folder: Path, index: int) -> nn.Module:
    package = load_package(folder)
    schedule = importlib.import_module(f"{package.__name__}.schedule")
    spec_of = next(v for v in vars(schedule).values() if hasattr(v, "crossings"))
    module: nn.Module = spec_of.stages[index].module()
    return module


def leaves(module: nn.Module) -> Counter[str]:
    """The torch.nn modules that a stage calls, by class."""
    graph = fx.symbolic_trace(module).graph
    called = (module.get_submodule(str(n.target)) for n in graph.nodes if n.op == "call_module")
    return Counter(type(leaf).__name__ for leaf in called)


@pytest.mark.parametrize("stage", [0, 1])
def test_notes_agree_with_the_emitted_stage(stage: int, tmp_path: Path) -> None:
    graph = trace(Skipping(), (torch.randn(4, 3, 8, 8),), training=False)
    made = plan(graph, stages=2, microbatches=2, cluster=Cluster.of(DEFAULT_HOST, GLOO))
    folder = emit(made, tmp_path / "skipping_x2")

    back = Plan.from_json((folder / "plan.json").read_text())
    notes = {note.name: note for note in back.ops}
    drawn = Counter(
        label
        for label in (notes[name].label for name in back.stages[stage].ops)
        if hasattr(nn, label)
    )

    assert sum(drawn.values()) > 0
    assert drawn == leaves(stage_module(folder, stage))


def test_source_lines_are_the_users(tmp_path: Path) -> None:
    graph = trace(Skipping(), (torch.randn(4, 3, 8, 8),), training=False)

    made = plan(graph, stages=2, microbatches=2, cluster=Cluster.of(DEFAULT_HOST, GLOO))

    lines = Path(__file__).read_text().splitlines()
    for note in made.ops:
        file, _, line = note.source.rpartition(":")
        assert Path(file).resolve() == Path(__file__).resolve()
        if note.module:
            assert note.module in lines[int(line) - 1]
