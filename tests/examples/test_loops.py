"""Training loops of other libraries around a pipeline, against a plain loop."""

from __future__ import annotations

import runpy

import forked
import pytest
import torch
from small_examples import EXAMPLES, load

from gpipe_compiler.cli.main import compile_command

NORM = 0.5
"""The largest that the loops leave to the gradients."""


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A package of the digits example."""
    pytest.importorskip("sklearn")
    return package_of(EXAMPLES / "mlp_digits.py", tmp_path_factory.mktemp("digits"))


def package_of(file, folder):
    words = [str(file), "--stages", "2", "-m", "4", "--no-validate"]
    assert compile_command([*words, "-o", str(folder / "package_x2")]) == 0
    return folder / "package_x2"


def trained(script, package, tmp_path, ranks=0):
    """The weights that a loop ends with."""
    done = forked.run([EXAMPLES / script, package, tmp_path / "weights.pt"], ranks=ranks)
    assert done.returncode == 0, done.stderr
    return torch.load(tmp_path / "weights.pt")


def plain(example, model, batches, accumulated, loss_of):
    """Those of the plain loop."""
    optimizer = example.make_optimizer(model.train().parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for number, batch in enumerate(batches, start=1):
        (loss_of(model, *batch) / accumulated).backward()
        if number % accumulated == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), NORM)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return model.state_dict()


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.parametrize(
    ("script", "library"),
    [("loop_accelerate.py", "accelerate"), ("loop_fabric.py", "lightning_fabric")],
)
def test_loops_end_where_a_plain_one_does(digits, tmp_path, script, library, ranks):
    """Accumulation, clipping and a schedule; in one process, and in one for each stage."""
    pytest.importorskip(library)
    example = load("mlp_digits")
    torch.manual_seed(example.SEED)
    batches = [batch for _ in range(2) for batch in example.train_data()]
    loss_of = torch.nn.functional.cross_entropy
    expected = plain(
        *(example, example.build_model(), batches, 4), lambda model, x, y: loss_of(model(x), y)
    )
    assert_same(trained(script, digits, tmp_path, ranks), expected)


@pytest.mark.slow
def test_trainer_ends_where_a_plain_loop_does(tmp_path):
    """Hugging Face's Trainer, with its accumulation, clipping, schedule and evaluation."""
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    example, loop = load("gpt2_huggingface"), load("loop_trainer")
    text = (EXAMPLES / "gpt2_huggingface.py").read_text(encoding="utf-8")
    still = text.replace("GPT2Config(", "GPT2Config(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,")
    file = tmp_path / "gpt2_without_dropout.py"
    file.write_text(still, encoding="utf-8")
    model = runpy.run_path(str(file))["build_model"]()
    count = loop.STEPS * loop.ACCUMULATED
    batches = [
        (inputs,) for _, (inputs, _) in zip(range(count), example.train_data(), strict=False)
    ]
    expected = plain(
        *(loop, model, batches, loop.ACCUMULATED), lambda model, batch: model(**batch).loss
    )
    assert_same(trained("loop_trainer.py", package_of(file, tmp_path), tmp_path), expected)
