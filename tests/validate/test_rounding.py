"""Gradients that are zero but for rounding are held to what rounding leaves of them, others not."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gpipe_compiler.compile import Compiled, CompileOptions
from gpipe_compiler.compile import compile as compile_subject
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.options import Constraints
from gpipe_compiler.runtime.spec import Precision
from gpipe_compiler.runtime.train.comparison import ComparedKind, Tensors
from gpipe_compiler.validate.package import validate
from gpipe_compiler.validate.rounding import rounding_of

pytestmark = pytest.mark.usefixtures("in_process")


def subject(seed: int) -> Subject:
    """BatchNorm over two samples: what comes before it has next to no gradient."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    args = (torch.randn(16, 8),)
    return Subject("norm", model, args=args, target=torch.randn(16, 4), loss_fn=F.mse_loss)


def compiled(seed: int, folder: Path) -> Compiled:
    options = CompileOptions(stages=2, microbatches=8)
    return compile_subject(subject(seed), options, folder / "norm_x2")


def test_what_a_copy_lacks_is_no_rounding() -> None:
    """Such as a term of the loss that knows the model itself."""
    model = nn.Linear(8, 8)

    def results(of: nn.Module) -> Tensors:
        assert isinstance(of, nn.Linear)
        return {ComparedKind.GRADIENT: {"weight": of.weight.detach() + (0.5 if of is model else 0)}}

    found = rounding_of(model, results)

    assert 0 < found[ComparedKind.GRADIENT]["weight"] < 1e-6


@pytest.mark.parametrize("seed", [3, 4, 7])
def test_a_bias_before_a_batchnorm_has_no_gradient(seed: int, tmp_path: Path) -> None:
    found = compiled(seed, tmp_path).validation

    assert found is not None
    assert found.passed


class Reread(nn.Module):
    """Every layer reads the memory twice, as those of a decoder do."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.Linear(8, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.last = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = x = self.memory(x).tanh()
        for layer in self.layers:
            x = layer(x * memory.sin()).relu() + memory
        out: torch.Tensor = self.last(x)
        return out


def reread() -> Subject:
    torch.manual_seed(0)
    args = (torch.randn(16, 8),)
    return Subject("reread", Reread(), args=args, target=torch.randn(16, 4), loss_fn=F.mse_loss)


@pytest.mark.slow
def test_stages_sum_what_is_read_in_several_of_them_in_another_order(tmp_path: Path) -> None:
    cuts = Constraints(split_at=("layers.2", "layers.4"))
    options = CompileOptions(stages=3, microbatches=4, precision=Precision.BF16, constraints=cuts)
    made = compile_subject(reread(), options, tmp_path / "reread_x3")
    assert made.validation is not None
    assert made.validation.passed

    stage = tmp_path / "reread_x3" / "stage_2.py"
    text, count = re.subn(r"return (\w+)\n\n    def loss", _WRONG, stage.read_text())
    assert count == 1
    stage.write_text(text.replace("2e-4", "2e-2"))
    rows = validate(reread(), made.plan, tmp_path / "reread_x3").rows

    faults = "\n".join(fault for row in rows for fault in row.faults)
    assert "last.weight" in faults
    assert "memory" not in faults  # within 8 units of bfloat16


_WRONG = r"return \1 + 2e-4 * (\1 - \1.detach())\n\n    def loss"


class Again(nn.Module):
    """One layer, called again and again under autocast of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for _ in range(4):
                x = self.layer(x).tanh()
            out: torch.Tensor = self.last(x).float()
            return out


def test_stages_cast_the_weights_that_they_share_for_themselves(tmp_path: Path) -> None:
    torch.manual_seed(0)
    args = (torch.randn(16, 8),)
    again = Subject("again", Again(), args=args, target=torch.randn(16, 4), loss_fn=F.mse_loss)

    made = compile_subject(again, CompileOptions(stages=2, microbatches=4), tmp_path / "again_x2")

    assert made.validation is not None
    assert made.validation.passed


def test_a_wrong_gradient_is_found_beside_it(tmp_path: Path) -> None:
    """Gradients 2e-4 too large: twice what the tolerance lets pass."""
    made = compiled(3, tmp_path)
    assert made.directory is not None
    copy = tmp_path / "copy"
    shutil.copytree(made.directory, copy)
    stage = copy / "stage_1.py"
    text, count = re.subn(r"return (\w+)\n\n    def loss", _WRONG, stage.read_text())
    assert count == 1
    stage.write_text(text)

    rows = validate(subject(3), made.plan, copy).rows

    faults = [fault for row in rows for fault in row.faults if row.what == "gradient"]
    assert any("3.weight" in fault for fault in faults), rows
