"""What the methods of a stage are given."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe_compiler.codegen.imports import Imports
from gpipe_compiler.codegen.method_text import types_of
from gpipe_compiler.codegen.variables import Uses
from gpipe_compiler.ir import FunctionCall, Graph, Mode, Op, Ref, Value, ValueKind
from gpipe_compiler.options import LossChoice
from gpipe_compiler.plan import Plan
from gpipe_compiler.targets.torch_stages import emit


class Contrast(nn.Module):
    """Its loss compares all samples, with one row of labels for every sample of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(4, 4)
        self.right = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        similar = self.left(x) @ self.right(y).transpose(0, 1)
        loss = F.cross_entropy(similar, torch.arange(x.size(0), device=x.device))
        return {"loss": loss, "similar": similar}


def test_loss_reads_the_batch_size_where_its_own_values_do_not_tell(
    planned: Callable[..., Plan], load: Callable[[Path], ModuleType], tmp_path: Path
) -> None:
    """A B x B matrix tells no batch size, so `loss` gets another value of the stage too."""
    plan = planned(Contrast(), torch.rand(4, 4), torch.rand(4, 4), count=2, loss=LossChoice.MODEL)

    package = load(emit(plan, tmp_path / "out"))

    similar, telling = package.SPEC.stages[-1].loss_inputs
    assert not plan.graph.values[similar].splittable
    assert plan.graph.values[telling].batch_dim == 0


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        places = torch.arange(x.size(0), device=x.device)
        turned = self.second(self.first(x) @ self.first.weight.T)
        return turned, places


def test_a_batch_size_is_read_where_it_is_used_once(
    planned: Callable[..., Plan], tmp_path: Path
) -> None:
    """And is not named after what is made of it; `T` stays what it is."""
    directory = emit(planned(Rows(), torch.rand(4, 4), count=2), tmp_path / "out")

    text = "".join(path.read_text() for path in sorted(directory.glob("stage_*.py")))
    assert "torch.arange(matmul.shape[0], " in text
    assert "@ self.first.weight.T" in text


def test_an_argument_that_is_no_tensor_nor_number_is_of_any_type() -> None:
    values = {
        "x": Value("x", ValueKind.TENSOR),
        "rows": Value("rows", ValueKind.SCALAR),
        "dtype": Value("dtype", ValueKind.OTHER),
    }
    graph = Graph("g", (), (), (), {}, {}, 1, values=values)
    imports = Imports()

    found = types_of(graph, [*values], [*values], imports)
    assert found == {"x": "Tensor", "rows": "int", "dtype": "Any"}
    assert imports.lines() == ["from typing import Any"]


def test_what_training_alone_makes_may_be_returned_and_read_by_nothing_else() -> None:
    """A buffer's rows that go into the loss of a later stage, for example."""
    made = Op("made", FunctionCall(operator.gt, (Ref("x"), 2)), "made", mode=Mode.TRAIN)
    assert Uses.of((made,), returns=("made",)).count["made"] == 1
