"""Packages that leave layers out at random, as the model does in Python (LayerDrop)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from loading import load_package
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe_compiler.compile import CompileOptions, compile  # noqa: A004  # its name
from gpipe_compiler.errors import GPipeCompilerError
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.options import Constraints
from gpipe_compiler.runtime.spec import Precision

SAMPLES, LAYERS = 8, 4


class Layer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor]:
        residual = hidden_states
        hidden_states = self.dropout(self.up(self.norm(hidden_states)).relu())
        hidden_states = self.dropout(self.down(hidden_states))
        return (residual + hidden_states,)


class Encoder(nn.Module):
    """Layers as wav2vec 2.0 leaves them out."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        hidden_states = self.embed(x)
        for layer in self.layers:
            dropout_probability = torch.rand([])
            skip_the_layer = self.training and dropout_probability < 0.5
            if not skip_the_layer:
                layer_outputs = layer(hidden_states)
                hidden_states = layer_outputs[0]
        return self.head(hidden_states)


def batch(seed: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(SAMPLES, 6), torch.randint(3, (SAMPLES,))


def built(dropout: float) -> Encoder:
    torch.manual_seed(0)
    return Encoder(dropout)


def compiled(model: Encoder, folder: Path, microbatches: int = 4, **options: Any) -> Path:
    """A package in two stages of two layers each, which is validated."""
    x, target = batch(0)
    subject = Subject("left_out", model, (x,), target=target, loss_fn=F.cross_entropy)
    asked = Constraints(split_at=("layers.2",))
    wished = CompileOptions(2, microbatches, constraints=asked, **options)
    made = compile(subject, wished, folder / "left_out")
    assert made.validation is not None
    assert made.validation.passed
    return folder / "left_out"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without dropout, so that plain torch computes the same."""
    return compiled(built(0.0), tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def drops(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With dropout in the layers, whose draws are passed over where these are left out."""
    return compiled(built(0.1), tmp_path_factory.mktemp("drops"))


def calls_of_layers(pipe: Any) -> Iterator[list[int]]:
    """The layers that run, as often as they do."""
    called: list[int] = []
    for stage in pipe.stages.values():
        for name, module in stage.named_modules():
            if found := re.fullmatch(r"layers\.(\d+)", name):
                number = int(found[1])
                module.register_forward_pre_hook(lambda *_, number=number: called.append(number))
    while True:
        called.clear()
        yield called


@pytest.mark.parametrize(
    "manner",
    [{}, {"microbatches": 2}, {"remat": "full"}, {"schedule": "zb-h1"}],
    ids=["4 micro-batches", "2 micro-batches", "remat", "split backward"],
)
def test_a_step_is_that_of_the_layers_that_run(plain: Path, manner: dict[str, Any]) -> None:
    patterns = set()
    with load_package(plain).Pipeline(**manner) as pipe:
        calls = calls_of_layers(pipe)
        for step in range(6):
            called = next(calls)
            x, target = batch(1 + step)
            pipe.zero_grad()
            loss = pipe.step(x, target)
            ran = frozenset(called)
            patterns.add(ran)
            times = {called.count(layer) for layer in ran}
            assert times <= {4, 7, 8} if not manner.get("microbatches") else times == {2}

            model = built(0.0)
            hidden = model.embed(x)
            for number, layer in enumerate(model.layers):
                (hidden,) = layer(hidden) if number in ran else (hidden,)
            expected = F.cross_entropy(model.head(hidden), target)
            expected.backward()
            torch.testing.assert_close(loss, expected.detach())
            gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
            found = {name: parameter.grad for name, parameter in pipe.named_parameters()}
            # Optimizers leave alone what has no gradient, and not what has one of zeros.
            assert {name for name in found if found[name] is None} == {
                name for name in gradients if gradients[name] is None
            }
            for name, gradient in gradients.items():
                if gradient is not None:
                    torch.testing.assert_close(found[name], gradient)
    assert len(patterns) > 2


class Draws(Encoder):
    """Draws in the line that decides, and reads what all layers make."""

    def forward(self, x: Tensor) -> Tensor:
        hidden_states = self.embed(x)
        states = []
        for layer in self.layers:
            if not (self.training and torch.rand(()).item() < 0.5):
                (hidden_states,) = layer(hidden_states)
            states.append(hidden_states)
        return self.head(torch.stack(states).mean(0))


def test_a_draw_in_a_condition_is_made_once(tmp_path: Path) -> None:
    text = (compiled(Draws(0.0), tmp_path) / "stage_1.py").read_text()
    assert text.count("torch.rand(") == 2  # its layers


class Narrow(Encoder):
    """Layers that under autocast make 16 bits of the 32 that they are given."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(LAYERS))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not self.training or torch.rand(1).item() > 0.5:
                x = layer(x).relu()
        return self.head(x)


class Continues(Encoder):
    """Goes on with the next layer in the line that decides."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            if self.training and torch.rand(()).item() < 0.5:
                continue
            (x,) = layer(x)
        return self.head(x)


def test_a_loop_over_layers_is_one(tmp_path: Path) -> None:
    text = (compiled(Continues(0.0), tmp_path) / "stage_1.py").read_text()
    way = """\
        for layer in self.layers.values():
            if self.training and torch.rand([], device="cpu") < 0.5:
                x = passed_on(x)
            else:
                x = layer(x)  # (B, 8)
"""
    assert way in text, text


def test_no_stage_is_sent_another_type(tmp_path: Path) -> None:
    package = compiled(Narrow(), tmp_path)
    module = load_package(package)

    with pytest.raises(module.runtime.errors.UsageError, match="values of another type are sent"):
        module.Pipeline(precision="bf16")
    with pytest.raises(GPipeCompilerError, match="cannot be cut apart"):
        compiled(Narrow(), tmp_path / "bf16", precision=Precision.BF16)


def steps(package: Path, **manner: str) -> list[dict[str, Tensor | None]]:
    """Losses and gradients of some steps."""
    found = []
    with load_package(package).Pipeline(**manner) as pipe:
        for step in range(4):
            pipe.zero_grad()
            loss = pipe.step(*batch(1 + step))
            found.append(
                {"loss": loss, **{name: tensor.grad for name, tensor in pipe.named_parameters()}}
            )
    return found


def test_recomputing_changes_no_bit(drops: Path) -> None:
    for kept, again in zip(steps(drops), steps(drops, remat="full"), strict=True):
        assert kept.keys() == again.keys()
        for name, tensor in kept.items():
            other = again[name]
            if tensor is None or other is None:
                assert tensor is other, name
            else:
                assert torch.equal(tensor, other), name


@pytest.mark.parametrize(
    "manner",
    [pytest.param({"microbatches": 1}, marks=pytest.mark.slow), {"loss_over_batch": True}],
    ids=str,
)
def test_a_mini_batch_in_one_piece(manner: dict[str, Any], tmp_path: Path) -> None:
    """The model leaves out what its package does, and draws beyond it what its package draws."""
    compiled(built(0.1), tmp_path, **manner)


def test_all_layers_run_in_eval_mode(drops: Path) -> None:
    model = built(0.1).eval()
    x, _ = batch(1)
    with load_package(drops).Pipeline() as pipe, torch.no_grad():
        torch.testing.assert_close(pipe.eval()(x), model(x))


def test_every_rank_and_replica_draws_alike(drops: Path) -> None:
    """Four processes, of two replicas, go the way that one process does."""

    def losses(*words: object, ranks: int = 0) -> list[float]:
        ran = forked.run([drops / "run.py", "train", "--steps", 4, *words], ranks=ranks)
        assert ran.returncode == 0, ran.stderr
        return [float(loss) for loss in re.findall(r"loss (\S+)", ran.stdout)]

    alone = losses("--microbatches", 8)
    assert len(alone) == 4
    assert losses("--data-parallel", 2, ranks=4) == pytest.approx(alone, rel=1e-4)


def test_the_code_runs_a_layer_or_passes_it_over(drops: Path) -> None:
    text = (drops / "stage_1.py").read_text()
    way = """\
        for layer in self.layers.values():
            dropout_probability = torch.rand([], device="cpu")
            if self.training and dropout_probability < 0.5:
                hidden_states = passed_on(hidden_states, 2)
            else:
                hidden_states = layer(hidden_states)  # (B, 8)
"""
    assert way in text, text
