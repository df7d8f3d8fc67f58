"""Whatever the user's code raises, and wherever it is called, is told by its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpipe_compiler.cli import main as cli

MODEL = """
import sys
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.first(x).relu())

def build_model():
    return Model()

def example_inputs():
    return torch.rand(4, 4)

def example_target():
    return torch.rand(4, 4)

def loss_fn(output, target):
    return ((output - target) ** 2).mean()

class Left(BaseException):
    pass

"""
LINE = MODEL.count("\n") + 2

CASES = {
    "forward leaves": (
        "def left(self, x):\n    sys.exit(5)\nModel.forward = left\n",
        f"model.py:{LINE}: left() ends the program with exit(5)",
    ),
    "the loss leaves": (
        "def loss_fn(output, target):\n    sys.exit('enough')\n",
        f"model.py:{LINE}: loss_fn() ends the program with exit('enough')",
    ),
    "make_optimizer leaves": (
        "def make_optimizer(parameters):\n    sys.exit(0)\n",
        f"model.py:{LINE}: make_optimizer() ends the program with exit(0)",
    ),
    "no Exception in forward": (
        "def left(self, x):\n    raise Left('of old')\nModel.forward = left\n",
        f"model.py:{LINE}: left() raises Left: of old",
    ),
    "no Exception in the factory": (
        "def build_model():\n    raise Left('of old')\n",
        f"model.py:{LINE}: build_model() raises Left: of old",
    ),
    "train() raises": (
        "def kept(self, mode=True):\n    raise ValueError('as it is')\nModel.train = kept\n",
        f"model.py:{LINE}: kept() raises ValueError: as it is",
    ),
    "sparse samples": (
        "def example_inputs():\n    return torch.eye(4).to_sparse()\n",
        "the input x is a tensor of layout torch.sparse_coo, which cannot be cut",
    ),
    "nested samples": (
        "def example_inputs():\n"
        "    return torch.nested.nested_tensor([torch.rand(3, 4), torch.rand(2, 4)])\n",
        "example_inputs() holds a nested tensor, which torch.export does not follow",
    ),
    "scripted": (
        "def build_model():\n    return torch.jit.script(Model())\n",
        "torch.jit has compiled it",
    ),
}


def compiled(folder: Path, more: str) -> int:
    (folder / "model.py").write_text(MODEL + more)
    return cli.compile_command(["model.py", "--stages", "2", "--dry-run"])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", CASES)
def test_what_it_raises_is_told(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    more, said = CASES[name]

    assert compiled(tmp_path, more) == 1
    errors = capsys.readouterr().err
    assert said in errors
    assert "hint:" in errors


def test_a_parameter_of_eight_bits_beside_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no sums in torch, by which others are moved to look at them again."""
    monkeypatch.chdir(tmp_path)
    narrow = "nn.Parameter(torch.zeros(3).to(torch.float8_e4m3fn))"
    text = (
        f"def build_model():\n    model = Model()\n    model.table = {narrow}\n    return model\n"
    )

    assert compiled(tmp_path, text) == 0
