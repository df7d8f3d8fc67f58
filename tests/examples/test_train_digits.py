"""The digits example from its file to trained weights, by the commands that a user types.

Held against the plain loop over the plain model, with the same order of the same batches.
"""

from __future__ import annotations

import json
from pathlib import Path

import forked
import pytest
import torch
from safetensors.torch import load_file
from small_examples import EXAMPLES, load

from gpipe_compiler.cli.main import compile_command

EPOCHS = 3


def run(package: Path, *words: object) -> str:
    """What a command of the package prints."""
    done = forked.run([package / "run.py", *words])
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_digits_are_learnt_by_command(tmp_path: Path) -> None:
    """Passes with a smaller last batch, accuracy after each, a checkpoint gone on from, export."""
    pytest.importorskip("sklearn")
    digits = load("mlp_digits")
    package, log, file = tmp_path / "digits_x4", tmp_path / "log", tmp_path / "w.safetensors"
    words = [str(EXAMPLES / "mlp_digits.py"), "--stages", "4", "-m", "4", "-o", str(package)]
    assert compile_command([*words, "--no-validate"]) == 0

    words = ["--checkpoint-dir", tmp_path / "kept", "--log-file", log, "--resume"]
    run(package, "train", "--steps", 30, *words)  # ends within the second pass
    told = run(package, "train", "--epochs", EPOCHS, *words)
    run(package, "export", "--checkpoint", tmp_path / "kept", "--output", file)

    torch.manual_seed(0)
    model = digits.build_model()
    torch.manual_seed(0)
    optimizer = digits.make_optimizer(model.parameters())
    losses, accuracies = [], []
    for _ in range(EPOCHS):
        for pixels, labels in digits.train_data():
            optimizer.zero_grad()
            loss = digits.loss_fn(model(pixels), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        ((pixels, labels),) = digits.eval_data()
        accuracies.append(digits.metrics(model(pixels), labels)["accuracy"])
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["loss"] for line in lines if "step" in line] == pytest.approx(losses, rel=1e-4)
    found = {x["evaluation"]["step"]: x["evaluation"] for x in lines if "evaluation" in x}
    assert list(found) == [23, 30, 46, 69]
    assert [found[step]["accuracy"] for step in (23, 46, 69)] == pytest.approx(accuracies)
    assert f"evaluation after step 69: loss {found[69]['loss']:.6g}  accuracy" in told
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(load_file(file)[name], tensor, rtol=1e-4, atol=1e-5)
