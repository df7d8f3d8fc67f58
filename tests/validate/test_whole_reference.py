"""What micro-batches cannot give is refused with its line, against the model on the whole batch."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe_compiler.cluster import DEFAULT_HOST, IN_PROCESS, Cluster
from gpipe_compiler.compile import Compiled, CompileOptions
from gpipe_compiler.compile import compile as compile_subject
from gpipe_compiler.errors import ModelError, UnsplittableError
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.runtime.spec import BatchNorm, Precision

OPTIONS = CompileOptions(stages=2, microbatches=4, cluster=Cluster.of(DEFAULT_HOST, IN_PROCESS))

pytestmark = pytest.mark.usefixtures("in_process")


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.register_buffer("state", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


class Calls(Two):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.state.add_(1)
        return super().forward(x)


class Fades(Two):
    """A count of samples that fades with every call."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.state.mul_(0.5).add_(len(x))  # fading
        return super().forward(x)


class Followed(Two):
    """A parameter without gradients that forward writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.average = nn.Parameter(torch.zeros(8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        if self.training:
            with torch.no_grad():
                self.average.mul_(0.5).add_(h.mean(0))
        return self.last(h - self.average)


class Samples(Two):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.state.add_(x.shape[0])
        return super().forward(x)


class Average(Two):
    """Takes off an average over the batch, in training alone."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        if self.training:
            h = h - h.mean(0)  # over samples
        return self.last(h)


class Ordered(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        if self.training:
            h = h + 0.1 * h[torch.randperm(h.shape[0])]  # another sample
        return self.last(h)


class OwnAutocast(Two):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            h = self.first(x)
        return self.last(torch.stack([h, h.tanh().bfloat16()]).float().sum(0))


class AutocastAverage(Two):
    """Takes off an average over the batch in 16 bits, in training alone."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            h = self.first(x)
            if self.training:
                h = h - h.mean(0)  # over samples in 16 bits
        return self.last(h.float())


class WithMean(Two):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = super().forward(x)
        return y, y.mean()


class WithRoundedMean(Two):
    """A mean of 16 bits, which is rounded once for a batch, and once for each micro-batch."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = super().forward(x)
        return y, y.square().mean().float()


class Casts(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).half() * 3
        return self.last(h.tanh().to(torch.bfloat16).float())


class Normed(Two):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).tanh())


class NormedAverage(Normed):
    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x)).tanh()
        if self.training:
            h = h - h.mean(0)  # beside BatchNorm
        return self.last(h)


class NormedOrdered(Normed):
    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x)).tanh()
        return self.last(h + h.cumsum(0) if self.training else h)


class NormedCalls(Normed):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.state.add_(1)
        return super().forward(x)


class NormedFades(Normed):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.state.mul_(0.5).add_(len(x))  # fading, beside BatchNorm
        return super().forward(x)


class NormedSamples(Normed):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.state.add_(x.shape[0])
        return F.dropout(super().forward(x), 0.1, self.training)


class NormedByFunction(Normed):
    def forward(self, x: Tensor) -> Tensor:
        h = (
            F.batch_norm(self.first(x), None, None, training=True)
            if self.training
            else x @ self.first.weight.T
        )
        return self.last(self.norm(h).tanh())


def loss(output: Tensor | tuple[Tensor, ...], target: Tensor) -> Tensor:
    return F.cross_entropy(output[0] if isinstance(output, tuple) else output, target)


def compiled(model: nn.Module, folder: Path, **options: object) -> Compiled:
    torch.manual_seed(0)
    subject = Subject(
        "model", model, (torch.randn(8, 6),), target=torch.randint(3, (8,)), loss_fn=loss
    )
    chosen = dataclasses.replace(OPTIONS, **options)  # type: ignore[arg-type]  # as the tests give them
    return compile_subject(subject, chosen, folder / "model_x2")


def line_of(code: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if code in line)


REFUSED = {
    "fading": (Fades, "writes to state for each micro-batch", "# fading"),
    "average": (Average, "takes the samples of a batch together in training", "# over samples"),
    "order": (Ordered, "draws for pairs of samples", "# another sample"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_micro_batches_do_not_come_to_is_refused(name: str, tmp_path: Path) -> None:
    model, cause, code = REFUSED[name]
    with pytest.raises((ModelError, UnsplittableError), match=cause) as raised:
        compiled(model(), tmp_path)

    assert raised.value.location is not None
    assert raised.value.location.line == line_of(code)
    assert "--per-microbatch" in raised.value.hint
    assert "--microbatches 1" in raised.value.hint


@pytest.mark.parametrize("name", ["fading", "average"])
def test_what_is_accepted_is_held_against_micro_batches(name: str, tmp_path: Path) -> None:
    made = compiled(REFUSED[name][0](), tmp_path, per_microbatch=True)

    assert made.validation is not None
    assert made.validation.passed
    assert "compared with the plain loop of micro-batches" in " ".join(made.validation.notes)


@pytest.mark.parametrize("model", [Samples, Calls])
def test_writes_that_add_up_or_look_at_no_samples_are_exact(
    model: type[nn.Module], tmp_path: Path
) -> None:
    made = compiled(model(), tmp_path)

    assert made.validation is not None
    assert made.validation.passed
    assert "micro-batches" not in " ".join(made.validation.notes)


def test_writes_for_each_call_are_exact_in_one_piece(tmp_path: Path) -> None:
    made = compiled(Fades(), tmp_path, batchnorm=BatchNorm.EXACT)

    assert made.validation is not None
    assert made.validation.passed


def test_batchnorm_over_micro_batches_is_said(tmp_path: Path) -> None:
    made = compiled(Normed(), tmp_path, microbatches=2)

    assert made.validation is not None
    assert made.validation.passed
    note = made.validation.notes[0]
    assert "--batchnorm micro" in note
    assert f"{Path(__file__).name}:{line_of('self.norm(self.first')}" in note


@pytest.mark.parametrize("batchnorm", [BatchNorm.MICRO, BatchNorm.DEFERRED])
@pytest.mark.parametrize(
    ("model", "line"),
    [
        (NormedAverage, "# beside BatchNorm"),
        (NormedOrdered, ""),
        (NormedFades, "# fading, beside BatchNorm"),
    ],
)
def test_nothing_hides_beside_batchnorm(
    model: type[nn.Module], line: str, batchnorm: BatchNorm, tmp_path: Path
) -> None:
    with pytest.raises(UnsplittableError, match="BatchNorm apart") as caught:
        compiled(model(), tmp_path, batchnorm=batchnorm, microbatches=2)

    assert "--per-microbatch" in caught.value.hint
    if line:
        assert caught.value.location is not None
        assert caught.value.location.line == line_of(line)


@pytest.mark.parametrize("model", [NormedSamples, NormedCalls, NormedByFunction])
def test_what_samples_come_to_stands_beside_batchnorm(
    model: type[nn.Module], tmp_path: Path
) -> None:
    made = compiled(model(), tmp_path, microbatches=2)

    assert made.validation is not None
    assert made.validation.passed


def test_16_bits_are_the_whole_batch_s_too(tmp_path: Path) -> None:
    """In 32 bits; in 16 the package and the loop of micro-batches round at the same places."""
    made = compiled(Samples(), tmp_path, precision=Precision.BF16)

    assert made.validation is not None
    assert made.validation.passed
    with pytest.raises(ModelError, match="takes the samples of a batch together"):
        compiled(Average(), tmp_path / "other", precision=Precision.BF16)


@pytest.mark.parametrize("model", [OwnAutocast, Casts])
def test_16_bits_of_the_model_s_own_round_as_in_micro_batches(
    model: type[nn.Module], tmp_path: Path
) -> None:
    made = compiled(model(), tmp_path)

    assert made.validation is not None
    assert made.validation.passed


def test_16_bits_of_the_model_s_own_hide_no_departure(tmp_path: Path) -> None:
    with pytest.raises(UnsplittableError, match="what the model makes of the mini-batch"):
        compiled(AutocastAverage(), tmp_path)


@pytest.mark.parametrize(
    ("model", "microbatches"), [(Two, 1), (WithMean, 1), (WithMean, 4), (WithRoundedMean, 4)]
)
def test_outputs_that_do_not_grow_with_the_batch_are_in_16_bits_too(
    model: type[nn.Module], microbatches: int, tmp_path: Path
) -> None:
    made = compiled(model(), tmp_path, precision=Precision.BF16, microbatches=microbatches)

    assert made.validation is not None
    assert made.validation.passed


def test_a_parameter_that_forward_writes_stays_the_models(tmp_path: Path) -> None:
    """It begins each step that the package is compared with as the model has it."""
    model = Followed()

    validation = compiled(model, tmp_path, per_microbatch=True).validation

    assert validation is not None
    assert validation.passed
    assert not model.average.any()
