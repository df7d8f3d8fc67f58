"""Training runs of the examples by their commands: the same weights for any number of stages.

A run is compiled and trained as a user would do it. Half-way it is saved, and goes on in another
number of stages and in plain PyTorch; all end at the same weights.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import forked
import pytest
import torch
from safetensors.torch import load_file
from small_examples import EXAMPLES, load

from gpipe_compiler.cli.main import compile_command
from gpipe_compiler.runtime.checkpoint.folder import latest
from gpipe_compiler.runtime.checkpoint.loading import read_checkpoint

STEPS = 20
HALF = 10
NAMES = ("mlp_digits", "transformer")


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """Every example in 1, 2 and 4 stages."""
    pytest.importorskip("sklearn")
    folder = tmp_path_factory.mktemp("packages")
    for name, stages in itertools.product(NAMES, (1, 2, 4)):
        words = [str(EXAMPLES / f"{name}.py"), "--stages", str(stages), "-m", "4", "--no-validate"]
        assert compile_command([*words, "-o", str(folder / f"{name}_x{stages}")]) == 0
    return folder


def run(package: Path, *words: object) -> None:
    """`run.py train`, one thread per stage: with more, kernels sum in another order.

    By momentum: AdamW would make whole steps of the roundings that are the gradients of the biases
    of attention's keys.
    """
    command = [package / "run.py", "train", *words]
    if "transformer" in package.name:
        command += ["--optimizer", "momentum", "--lr", "0.1"]
    done = forked.run(command)
    assert done.returncode == 0, done.stderr


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module")
def whole_runs(packages):
    """The weights after all steps, by example and number of stages."""
    found = {}
    for name, stages in itertools.product(NAMES, (1, 2, 4)):
        saved = packages / f"{name}_{stages}.safetensors"
        run(packages / f"{name}_x{stages}", "--steps", STEPS, "--save", saved)
        found[name, stages] = load_file(saved)
    return found


@pytest.mark.parametrize("stages", [pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("name", NAMES)
def test_stages_do_not_change_the_run(whole_runs, name, stages):
    """Twenty steps with the example's own data and optimizer, dropout and tied weights."""
    assert_same(whole_runs[name, stages], whole_runs[name, 1])


@pytest.fixture(scope="module", params=NAMES)
def half(request, packages):
    """An example's checkpoint half-way in four stages."""
    name = request.param
    folder = packages / f"{name}_checkpoints"
    run(packages / f"{name}_x4", "--steps", HALF, "--checkpoint-dir", folder)
    return name, folder


def test_a_run_goes_on_in_other_stages(packages, whole_runs, half, tmp_path):
    """Saved in four stages, resumed in two."""
    name, folder = half
    saved = tmp_path / "weights.safetensors"
    package = packages / f"{name}_x2"
    run(package, "--steps", STEPS, "--save", saved, "--checkpoint-dir", folder, "--resume")
    assert_same(load_file(saved), whole_runs[name, 1])


def test_a_run_goes_on_in_plain_pytorch(packages, whole_runs):
    """Saved in four stages, resumed by the model and a loop that know nothing of pipelines."""
    digits = load("mlp_digits")
    folder = packages / "plain_checkpoints"
    run(packages / "mlp_digits_x4", "--steps", HALF, "--checkpoint-dir", folder)
    saved = read_checkpoint(latest(folder))
    model = digits.build_model()
    model.load_state_dict(saved.model)
    optimizer = digits.make_optimizer(model.parameters())
    optimizer.load_state_dict(saved.optimizer_for(optimizer, model))
    torch.manual_seed(0)
    batches = itertools.islice(
        itertools.chain.from_iterable(digits.train_data() for _ in range(2)), HALF, STEPS
    )
    for pixels, target in batches:
        optimizer.zero_grad()
        digits.loss_fn(model(pixels), target).backward()
        optimizer.step()
    assert_same(model.state_dict(), whole_runs["mlp_digits", 1])
