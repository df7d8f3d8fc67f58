"""A package of free sizes, trained by its command in several processes."""

from __future__ import annotations

import json
from pathlib import Path

import forked
import pytest
import sized_model
import torch
from torch.nn import functional as F

from gpipe_compiler.cli.main import compile_command

MODEL = Path(sized_model.__file__)


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sized") / "made"
    words = ["--stages", "2", "--microbatches", "2", "--output", str(folder), "--no-validate"]
    free = ["--free", "tokens=ids.1", "--free", "tokens=target.1"]
    assert compile_command([str(MODEL), *words, *free]) == 0
    return folder


@pytest.fixture(scope="module")
def expected():
    """The losses of the plain loop: of two passes over the data, with evaluation after each."""
    model = sized_model.build_model()
    optimizer = sized_model.make_optimizer(model.parameters())
    losses = []

    def loss_of(batches):
        """The mean over all words of some batches, whatever their lengths."""
        summed = sum(
            F.cross_entropy(
                *(model(ids).flatten(0, 1), following.flatten()),
                reduction="sum",
                ignore_index=sized_model.PADDING,
            )
            for ids, following in batches
        )
        return summed / sum(int((t != sized_model.PADDING).sum()) for _, t in batches)

    for _ in range(2):
        for inputs, target in sized_model.train_data():
            listed = isinstance(inputs, list)
            batches = list(zip(inputs, target, strict=True)) if listed else [(inputs, target)]
            optimizer.zero_grad()
            loss = loss_of(batches)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        with torch.no_grad():
            losses.append(float(loss_of(list(sized_model.eval_data()))))
    return losses


@pytest.mark.parametrize(
    ("ranks", "words"), [(2, ["--schedule", "1f1b"]), (4, ["--data-parallel", "2"])]
)
def test_training_on_texts_of_any_length(package, expected, ranks, words, tmp_path):
    """Padded to the longest of each batch, or of each micro-batch."""
    log = tmp_path / "log"
    command = [package / "run.py", "train", "--epochs", 2, "--log-file", log, *words]
    done = forked.run(command, ranks=ranks)

    assert done.returncode == 0, done.stderr
    lines = map(json.loads, log.read_text().splitlines())
    found = [line.get("evaluation", line)["loss"] for line in lines]
    assert found == pytest.approx(expected, rel=2e-5)
