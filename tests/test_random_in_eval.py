"""Models that draw random numbers in eval mode, compared with plain torch with the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from loading import load_package
from torch import nn
from torch.nn import functional as F

from gpipe_compiler.compile import CompileOptions, compile  # noqa: A004  # its name
from gpipe_compiler.errors import ModelError
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.runtime.core.random import mix


class AlwaysOn(nn.Module):
    """Dropouts for training alone, and others that are on in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 16)
        self.last = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.dropout(self.first(x), 0.3, self.training)
        y = F.dropout(y, 0.5, training=True)
        y = F.dropout(self.second(y), 0.3, self.training)
        return self.last(F.dropout(y, 0.5, training=True))


class Pairs(AlwaysOn):
    """One whose samples meet besides."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return (y @ y.T).softmax(-1) @ y


def subject_of(model: nn.Module) -> Subject:
    torch.manual_seed(0)
    x, target = torch.randn(8, 8), torch.randn(8, 8)
    return Subject("always_on", model, (x,), target=target, loss_fn=F.mse_loss)


def masked(rows: torch.Tensor, call: int, microbatch: int, number: int) -> torch.Tensor:
    """What a dropout of one half makes that is random op `number` of the model."""
    seed = mix(mix(0, 1 + call), 0, microbatch, number)
    keep = torch.empty_like(rows).bernoulli_(0.5, generator=torch.Generator().manual_seed(seed))
    return rows * (keep / 0.5)


def expected(model: AlwaysOn, x: torch.Tensor, call: int) -> torch.Tensor:
    """The outputs for two micro-batches, by hand: in training ops 1 and 3 of the four are these."""
    found = []
    for microbatch, rows in enumerate(x.chunk(2)):
        y = masked(model.first(rows), call, microbatch, 1)
        found.append(model.last(masked(model.second(y), call, microbatch, 3)))
    return torch.cat(found)


@pytest.mark.parametrize("stages", [1, 3])
def test_every_call_draws_anew_and_alike_in_any_cut(stages: int, tmp_path: Path) -> None:
    model = AlwaysOn()
    subject = subject_of(model)
    made = compile(subject, CompileOptions(stages, 2), tmp_path / "always_on")

    assert made.validation is not None
    assert made.validation.passed
    with load_package(tmp_path / "always_on").Pipeline() as pipe:
        first, second = pipe.eval()(*subject.args), pipe(*subject.args)
        assert pipe.evaluate(*subject.args, subject.target).isfinite()
        pipe.train().step(*subject.args, subject.target)
        with torch.no_grad():
            torch.testing.assert_close(first, expected(model, *subject.args, call=0))
            torch.testing.assert_close(second, expected(model, *subject.args, call=1))


class Depths(nn.Module):
    """Branches dropped in eval mode too: one sample by sample, one for the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 16)
        self.last = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.empty([x.shape[0], 1]).bernoulli_(0.5)
        y = self.first(x)
        y = y + rows * torch.tanh(self.second(y))
        return self.last(y + (torch.rand(1) < 0.5) * torch.tanh(y))


def kept(model: Depths, x: torch.Tensor, seed: int, sizes: tuple[int, ...]) -> torch.Tensor:
    """The whole batch at once, with the rows of each micro-batch and the number that all share."""
    rows = [
        torch.empty(size, 1).bernoulli_(0.5, generator=torch.Generator().manual_seed(drawn))
        for microbatch, size in enumerate(sizes)
        for drawn in [mix(seed, 0, microbatch, 0)]
    ]
    shared = torch.rand(1, generator=torch.Generator().manual_seed(mix(seed, 0, 1)))
    y = model.first(x)
    y = y + torch.cat(rows) * torch.tanh(model.second(y))
    return model.last(y + (shared < 0.5) * torch.tanh(y))


def test_another_batch_draws_as_one_piece_would(tmp_path: Path) -> None:
    """Outputs, loss and gradients of seven samples, which three micro-batches share unevenly."""
    model = Depths()
    subject = subject_of(model)
    made = compile(subject, CompileOptions(2, 4), tmp_path / "depths")

    assert made.validation is not None
    assert made.validation.passed
    assert not any("accepted" in note for note in made.validation.notes)
    x, target = torch.randn(7, 8), torch.randn(7, 8)
    loss = F.mse_loss(kept(model, x, 0, (2, 2, 2, 1)), target)
    loss.backward()
    with load_package(tmp_path / "depths").Pipeline() as pipe:
        with torch.no_grad():
            torch.testing.assert_close(pipe.eval()(x), kept(model, x, mix(0, 1), (2, 2, 2, 1)))
        torch.testing.assert_close(pipe.train().step(x, target), loss.detach())
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, model.get_parameter(name).grad)


def test_stages_that_draw_nothing_run_under_no_python_mode(tmp_path: Path) -> None:
    """Attention could draw, and does not: no mode sees its ops, and no lock is taken for it."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    x = torch.randn(4, 3, 8)
    subject = Subject(
        "encoder", nn.TransformerEncoder(layer, 2), (x,), target=x, loss_fn=F.mse_loss
    )
    options = CompileOptions(2, 2, validate=False)
    compile(subject, options, tmp_path / "encoder")
    modes: list[int] = []
    with load_package(tmp_path / "encoder").Pipeline() as pipe:
        assert all(not stage.random_ops + stage.random_in_eval for stage in pipe.spec.stages)
        for stage in pipe.stages.values():
            stage.register_forward_hook(
                lambda *_: modes.append(torch._C._len_torch_dispatch_stack())
            )
        pipe.step(x, x)
        pipe.eval()(x)

    assert modes == [0] * 8


def test_a_loss_whose_samples_meet_is_refused_by_its_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="takes the samples of a batch together") as raised:
        compile(subject_of(Pairs()), CompileOptions(1, 2), tmp_path / "pairs")
    assert f"{Path(__file__).name}:" in str(raised.value)
