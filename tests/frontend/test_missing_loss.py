"""What is to be trained has a loss, or is refused with what to write."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gpipe_compiler as gpc
from gpipe_compiler.cli import main as cli
from gpipe_compiler.errors import ModelError
from gpipe_compiler.options import LossChoice

HEAD = """\
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x, labels):
        logits = self.head(self.body(x).relu())
        loss = nn.functional.cross_entropy(logits, labels)
        return RETURNED

build_model = Model

def example_inputs():
    return torch.randn(8, 4), torch.randint(3, (8,))

"""
"""What a test adds begins at line 19."""


def write(folder: Path, returned: str, added: str = "") -> None:
    (folder / "model.py").write_text(HEAD.replace("RETURNED", returned) + added)


def compiled(*words: str) -> int:
    return cli.compile_command(["model.py", "-k", "2", "-m", "2", *words])


@pytest.mark.parametrize(
    ("added", "name", "line"),
    [
        ("def loss_function(output, target):\n    return output.sum()\n", "loss_function", 19),
        ("\ndef lossfn(output, target):\n    return output.sum()\n", "lossfn", 20),
        ("def los_fn(output, target):\n    return output.sum()\n", "los_fn", 19),
        ("def loss(output, target):\n    return output.sum()\n", "loss", 19),
        ("criterion = nn.CrossEntropyLoss()\n", "criterion", 1),
        ("class FocalLoss(nn.Module):\n    pass\n", "FocalLoss()", 19),
    ],
)
def test_a_hook_that_looks_misspelt_is_named(
    workplace: Path,
    capsys: pytest.CaptureFixture[str],
    added: str,
    name: str,
    line: int,
) -> None:
    write(workplace, "logits", added)

    assert compiled("--dry-run") == 1
    said = capsys.readouterr().err
    assert f"error: model.py:{line}: " in said
    assert f"{name} is not looked at, as it is not called loss_fn" in said
    assert f"write loss_fn = {name}" in said
    assert "--mode infer" in said
    assert "--loss sum-of-squares" in said
    assert not (workplace / "model_x2").exists()


def test_without_anything_like_it_the_file_is_named(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(workplace, "logits", "def flossing(tooth): ...\ndef glossary(): ...\n")

    assert compiled() == 1
    said = capsys.readouterr().err
    assert "error: model.py:1: nothing says what to train on" in said
    assert "offer loss_fn(output, target)" in said


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("returned", "way"),
    [
        ("(logits, loss)", "output[1]"),
        ("{'logits': logits, 'total': loss}", "output['total']"),
        ("(logits, {'of_words': [loss]})", "output[1]['of_words'][0]"),
        ("loss", "output"),
    ],
)
def test_what_to_write_for_a_loss_that_is_somewhere_in_the_output(
    workplace: Path, capsys: pytest.CaptureFixture[str], returned: str, way: str
) -> None:
    """And what it says then compiles, to the loss of plain PyTorch."""
    write(workplace, returned)
    assert compiled() == 1
    said = capsys.readouterr().err
    assert f"def loss_fn(output): return {way}" in said

    write(workplace, returned, f"def loss_fn(output): return {way}\n")

    assert compiled() == 0


@pytest.mark.parametrize("words", ["--mode infer --dry-run", "--loss sum-of-squares --dry-run"])
def test_the_other_ways_out(workplace: Path, words: str) -> None:
    write(workplace, "logits")

    assert compiled(*words.split()) == 0


def test_inference_takes_no_loss(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(workplace, "logits")

    assert compiled("--mode", "infer", "--loss", "sum-of-squares") == 2
    assert "leave it out" in capsys.readouterr().err


@dataclass
class Record:
    loss: torch.Tensor
    logits: torch.Tensor


class Own(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        return Record(y.pow(4).mean(), y)


def test_the_library_refuses_too() -> None:
    with pytest.raises(ModelError, match="nothing says what to train on"):
        gpc.trace(nn.Linear(3, 3), torch.randn(4, 3))

    assert gpc.trace(nn.Linear(3, 3), torch.randn(4, 3), training=False).loss is None
    assert gpc.trace(Own(3, 3), torch.randn(4, 3)).loss is not None


def test_the_sum_of_squares_takes_the_place_of_any_loss() -> None:
    """Of a model with a loss of its own, that of its other outputs."""
    for model in (nn.Linear(3, 3), Own(3, 3)):
        graph = gpc.trace(
            model,
            torch.randn(4, 3),
            target=torch.randn(4, 3),
            loss_fn=nn.functional.l1_loss,
            loss=LossChoice.SUM_OF_SQUARES,
        )

        assert graph.loss is not None
        assert graph.loss.reduction.value == "sum"
        assert len(graph.outputs if isinstance(graph.outputs, dict) else "1") == 1
