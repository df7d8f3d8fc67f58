"""A compile asks for each thing once, however many passes want to know it."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor

from gpipe_compiler.compile import CompileOptions
from gpipe_compiler.compile import compile as compile_package
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.ir import Graph
from gpipe_compiler.passes.dry_run import DryRun

DRY_RUNS = 13
"""Of two graphs, before and after writes in place are chosen: at the batch size and at twice that,
in eval mode; a backward that proves the writes, costs and memory. And of the graph at the size of
the whole mini-batch, which one device would have without a pipeline: in each mode, and its
memory."""

WITHOUT_NUMBERS, WITH_NUMBERS = 6, 25
"""Forwards of the model. On fake tensors it is probed and traced in each mode, and held in other
precisions; with numbers the batch is proven, in a larger one too, with other weights, the graph
compared at two sizes in each mode and in a larger batch, and a second batch computed in
micro-batches and whole, in eval mode and for a step, and the example for a step."""


calls = Counter[str]()


class Layers(nn.Module):
    """Counts how often it runs, by the kind of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.last = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        calls["without numbers" if isinstance(x, FakeTensor) else "with numbers"] += 1
        hidden = torch.relu(self.norm(self.first(x)))
        return self.last(nn.functional.dropout(hidden, 0.1, self.training))


def subject() -> Subject:
    torch.manual_seed(0)
    return Subject(
        "layers",
        Layers(),
        (torch.randn(8, 8),),
        target=torch.randn(8, 4),
        loss_fn=nn.functional.mse_loss,
    )


@pytest.mark.usefixtures("in_process")
def test_a_compile_runs_its_graphs_and_its_model_so_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[Graph] = []
    plain_run = DryRun.run

    def counted(self: DryRun, *args: object) -> object:
        runs.append(self.graph)
        return plain_run(self, *args)  # type: ignore[arg-type]  # passed on as they come

    monkeypatch.setattr(DryRun, "run", counted)
    calls.clear()
    made = compile_package(subject(), CompileOptions(stages=2, microbatches=2), tmp_path / "p")
    assert made.validation is not None
    assert made.validation.passed
    assert len(runs) <= DRY_RUNS
    assert calls["without numbers"] <= WITHOUT_NUMBERS
    assert calls["with numbers"] <= WITH_NUMBERS
