"""Packages whose blocks run through torch.compile, against plain PyTorch and against themselves.

Slow by what a C++ compiler takes; the files that it makes are shared by all tests here.
"""

from __future__ import annotations

import copy
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from safetensors.torch import load_file

from gpipe_compiler.cli.main import compile_command
from gpipe_compiler.runtime.core.compiled_blocks import check_compiler
from gpipe_compiler.runtime.errors import PipelineError

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

class Mixing(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.between = nn.LayerNorm(16), nn.LayerNorm(16)
        self.mixing = Mixing()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        x = x + self.mixing(self.norm(x))
        return x + F.dropout(self.down(F.gelu(self.up(self.between(x)))), DROPPED, self.training)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(16, 20)

    def forward(self, words):
        x = self.embedding(words)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if RECOMPUTED else layer(x)
        return self.head(x)

def build_model():
    torch.manual_seed(0)
    return Model()

def example_inputs():
    return torch.randint(20, (8, 6), generator=torch.Generator().manual_seed(1))

def example_target():
    return example_inputs().roll(1, 1)

def loss_fn(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())

def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)

def train_data():
    random = torch.Generator().manual_seed(3)
    sizes = ((8, 6), (8, 9), (7, 6), (8, 4)) if DROPPED == 0 else ((8, 6),) * 4
    for samples, length in sizes:
        words = torch.randint(20, (samples, length), generator=random)
        yield words, words.roll(1, 1)
"""
STEPS = 8

Trained = Callable[..., dict[str, torch.Tensor]]


@pytest.fixture(scope="module", autouse=True)
def compiler() -> None:
    """Without one --compile is refused, as the tests of `compiled_blocks.py` show."""
    try:
        check_compiler([torch.device("cpu")])
    except PipelineError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """With a cache of compiled files that every process uses."""
    with pytest.MonkeyPatch.context() as patch:
        made = tmp_path_factory.mktemp("compiled")
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(made / "cache"))
        yield made


@pytest.fixture(scope="module")
def package(folder: Path) -> Callable[..., Path]:
    """A package of the model, by its dropout and by whether it has its layers recomputed."""

    def made(dropped: float, *, recomputed: bool = False) -> Path:
        name = f"{str(dropped).replace('.', '')}{'_recomputed' if recomputed else ''}"
        place = folder / name
        if not place.exists():
            file = folder / f"model_{name}.py"
            file.write_text(f"DROPPED, RECOMPUTED = {dropped}, {recomputed}\n{MODEL}")
            own = [str(file), "--stages=2", "-m", "4", "-o", str(place), "--no-validate"]
            assert compile_command(own) == 0
        return place

    return made


def trained(package: Path, *words: object, ranks: int = 0) -> dict[str, torch.Tensor]:
    saved = package / "trained.safetensors"
    line = [package / "run.py", "train", "--steps", STEPS, "--save", saved, *words]
    done = forked.run(line, ranks=ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    return load_file(saved)


def plain(file: Path, **autocast: Any) -> dict[str, torch.Tensor]:
    """The weights after plain training on whole batches."""
    offered = runpy.run_path(str(file))
    model = offered["build_model"]()
    optimizer = offered["make_optimizer"](model.parameters())
    for _ in range(STEPS // 4):
        for words, target in offered["train_data"]():
            optimizer.zero_grad()
            with torch.autocast("cpu", **autocast) if autocast else torch.enable_grad():
                loss = offered["loss_fn"](model(words), target)
            loss.backward()
            optimizer.step()
    return copy.deepcopy(model.state_dict())


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference, as a share of the largest entry of its tensor."""
    assert one.keys() == other.keys()
    return max(float((one[n] - t).abs().max() / t.abs().max()) for n, t in other.items())


@pytest.mark.slow
def test_training_equals_the_plain_loop(package: Callable[..., Path]) -> None:
    """Batches of several sizes and lengths; in threads and in processes, in other schedules."""
    made = package(0.0)
    expected = plain(made.parent / f"model_{made.name}.py")

    assert distance(trained(made, "--compile"), expected) < 1e-4
    assert distance(trained(made, "--compile", "--schedule", "1f1b", ranks=2), expected) < 1e-4
    words = ["--compile", "--data-parallel", 2, "--remat", "full"]
    assert distance(trained(made, *words, ranks=4), expected) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "full", "segments"])
def test_masks_are_those_without(package: Callable[..., Path], remat: str) -> None:
    """Dropout stands outside of what is compiled, also where layers run again."""
    made = package(0.3, recomputed=remat == "segments")
    assert (remat == "segments") == ("segments=" in (made / "schedule.py").read_text())
    words = [] if remat == "segments" else ["--remat", remat]
    expected = trained(made, *words)

    assert distance(trained(made, *words, "--compile"), expected) < 1e-4
    assert distance(trained(made, "--seed", 1), expected) > 1e-2


@pytest.mark.slow
def test_segments_that_are_compiled_run_again(package: Callable[..., Path]) -> None:
    """They save as many tensors the second time."""
    made = package(0.0, recomputed=True)
    assert "segments=" in (made / "schedule.py").read_text()

    assert distance(trained(made, "--compile"), trained(made)) < 1e-4


@pytest.mark.slow
def test_in_bf16_it_is_as_far_from_fp32_as_without(package: Callable[..., Path]) -> None:
    made = package(0.0)
    exact = plain(made.parent / f"model_{made.name}.py")
    words = ["--precision", "bf16"]

    assert distance(trained(made, *words, "--compile"), exact) < 1.5 * distance(
        trained(made, *words), exact
    )


@pytest.mark.slow
def test_inference_equals_the_model(package: Callable[..., Path], folder: Path) -> None:
    """In eval mode layers with dropout are compiled whole."""
    made = package(0.3)
    offered = runpy.run_path(str(folder / f"model_{made.name}.py"))
    model, words = offered["build_model"]().eval(), offered["example_inputs"]()
    done = forked.run([made / "run.py", "infer", "--compile", "--output", folder / "y.safetensors"])
    assert done.returncode == 0, done.stderr
    (found,) = load_file(folder / "y.safetensors").values()

    torch.testing.assert_close(found, model(words), atol=1e-5, rtol=1e-4)
    checked = forked.run([made / "run.py", "check", "--compile"])
    assert checked.returncode == 0, checked.stdout


@pytest.mark.slow
def test_without_a_compiler_it_is_refused(package: Callable[..., Path], tmp_path: Path) -> None:
    """Torch looks for one as it is imported, so in a process of its own."""
    made = package(0.0)
    line = [sys.executable, made / "run.py", "train", "--steps=1", "--compile"]
    nothing = {"CXX": str(tmp_path / "none"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        line, capture_output=True, text=True, check=False, env={**os.environ, **nothing}
    )

    assert done.returncode == 1
    assert "error: --compile: torch.compile does not work here on cpu: " in done.stderr
    assert "hint: it needs a C++ compiler such as g++; or leave --compile out" in done.stderr
    done = forked.run([*line[1:], "--schedule", "zb-h1"])
    assert done.returncode == 2
    assert "error: --compile: the schedule zb-h1 makes the gradients of" in done.stderr
