"""`run.py` on batches whose sizes differ, against the plain loop."""

from __future__ import annotations

import json

import pytest
import torch
from sized_pipelines import Plain, sized_batch, sized_spec, split_in

from gpipe_compiler.runtime.core.pipeline import Pipeline
from gpipe_compiler.runtime.core.weights import load_file, save_file, save_weights
from gpipe_compiler.runtime.train.command import main

HOOKS = """
import torch
from sized_pipelines import sized_batch

def train_data():
    yield sized_batch(5, 9, 4, seed=1)
    yield sized_batch(3, 2, 2, seed=2)
    # Micro-batches of lengths of their own.
    yield tuple(map(list, zip(*(sized_batch(2, tokens, 4, seed=3) for tokens in (17, 3)))))
    yield sized_batch(2, 30, 6, seed=4)

def make_optimizer(params):
    return torch.optim.SGD(params, lr=0.1)

def eval_data():
    yield from (sized_batch(4, tokens, 2, seed=tokens) for tokens in (3, 21))

def metrics(output, target):
    assert output["logits"].shape[:2] == target.shape
    return {}
"""


@pytest.fixture
def package(tmp_path):
    with Pipeline(sized_spec(), None, seed=1) as pipe:
        save_weights(pipe.gather_state_dict(), tmp_path / "weights")
    ((ids, mask), kwargs), target = sized_batch(4, 8, 4)
    example = {"ids": ids, "mask": mask, "memory": kwargs["memory"], "target": target}
    save_file(example, tmp_path / "weights" / "example.safetensors")
    (tmp_path / "hooks.py").write_text(HOOKS)
    return tmp_path


def run(package, *words):
    return main(sized_spec(), package, package / "weights", str(package / "hooks.py"), list(words))


def logged(path):
    lines = map(json.loads, path.read_text().splitlines())
    return [line.get("evaluation", line)["loss"] for line in lines]


def test_training_on_batches_of_any_size(package):
    """Two passes, the second one resumed, with evaluation after each."""
    words = ["train", "--checkpoint-dir", str(package / "checkpoints"), "--resume"]
    for epochs in ("1", "2"):
        log = ["--log-file", str(package / "log"), "--save", str(package / "out.safetensors")]
        assert run(package, *words, "--epochs", epochs, *log) == 0

    plain, expected = Plain(sized_spec(), _weights(package)), []
    data = {}
    exec(HOOKS, data)  # the user's file
    for epoch in range(2):
        for number, (inputs, target) in enumerate(data["train_data"]()):
            listed = isinstance(inputs, list)
            parts = list(zip(inputs, target)) if listed else split_in(2, inputs, target)  # noqa: B905
            expected.append(float(plain.step(parts, step=4 * epoch + number)[0]))
            plain.descend(0.1)
        batches = list(data["eval_data"]())
        expected.append(float(plain.step(batches, training=False)[0]))
    assert logged(package / "log") == pytest.approx(expected, rel=1e-4)
    for name, tensor in load_file(package / "out.safetensors").items():
        torch.testing.assert_close(tensor, plain.named[name].detach(), rtol=1e-4, atol=1e-5)


def _weights(package):
    with Pipeline(sized_spec(), package / "weights") as pipe:
        return pipe.gather_state_dict()


def test_the_example_at_other_sizes(package, capsys):
    assert run(package, "bench", "--steps", "1", "--at", "ids.1=21,memory.1=2") == 0
    assert "step at ids.1=21, memory.1=2: median" in capsys.readouterr().out
    assert run(package, "infer", "--at", "ids.1=3") == 0
    assert "logits: 4x3x5 float32" in capsys.readouterr().out
    assert run(package, "check", "--at", "memory.1=6") == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["infer", "--at", "memory.1=3"], "demands memory.1 divisible by 2, and memory.1 is 3"),
        (["train", "--at", "ids.1=3"], "--at is of the example data"),
    ],
)
def test_sizes_that_make_no_sense(package, capsys, words, said):
    assert run(package, *words) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("text", ["width=3", "ids.1", "ids.1=0"])
def test_a_size_is_a_name_and_a_number(package, capsys, text):
    with pytest.raises(SystemExit):
        run(package, "bench", "--at", text)

    assert "argument --at: " in capsys.readouterr().err
