"""The batch is found in whichever dimension it lies, and packages are exact along it.

Held against plain PyTorch on whole batches, of other sizes than the example's.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from loading import load_package
from onnx_compiling import compile_exported
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe_compiler.compile import CompileOptions, trace
from gpipe_compiler.compile import compile as compile_subject
from gpipe_compiler.errors import ModelError, UsageError
from gpipe_compiler.frontend.batch_dims import find_batch_dims
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.runtime.train.comparison import flat_tensors

TIME, BATCH, WIDTH = 7, 8, 8


class Encoder(nn.Module):
    """torch's own default is time first."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


class Recurrent(nn.Module):
    def __init__(self, cls: type[nn.Module] = nn.LSTM, *, batch_first: bool = False) -> None:
        super().__init__()
        self.rnn = cls(WIDTH, WIDTH, 2, batch_first=batch_first)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, state: object = None) -> tuple[Tensor, object]:
        y, state = self.rnn(x, state)
        return self.head(y), state


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, attn_mask=mask)[0])


class Centred(nn.Module):
    """Every sample is compared with all of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        centre = y.mean((0, 1))
        return self.last(y - centre)


class Words(Encoder):
    """Without positions: where all words are equal, time mixes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(self.words(tokens))


class Noisy(nn.Module):
    """Draws in eval mode too, samples by themselves and numbers that all share."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(self.first(x), 0.5, training=True) + torch.randn(WIDTH)
        return self.last(torch.normal(y, 1.0))


def tokens_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def x(time: int = TIME, batch: int = BATCH) -> Tensor:
    return torch.randn(time, batch, WIDTH)


def states(batch: int, fill: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    return fill(2, batch, WIDTH), fill(2, batch, WIDTH)


def found(model: nn.Module, *args: object, **rest: object) -> dict[str, int | None]:
    torch.manual_seed(0)
    subject = dataclasses.replace(Subject("model", model, args), **rest)
    result = find_batch_dims(subject)
    assert not result.mixes
    return dict(result.subject.batch_dims)


@pytest.mark.parametrize(
    ("model", "args", "dims"),
    [
        (Encoder(), (x(),), {"x": 1}),
        (Encoder(), (x(BATCH, BATCH),), {"x": 1}),
        (Encoder(), (torch.zeros(TIME, BATCH, WIDTH),), {"x": 1}),
        (Encoder(), (x(TIME, 1),), {"x": 1}),
        (Recurrent(), (x(),), {"x": 1}),
        (Recurrent(nn.GRU, batch_first=True), (x(BATCH, TIME),), {"x": 0}),
        (
            Recurrent(),
            (x(2, 2), states(2, torch.zeros)),
            {"x": 1, "state_0": 1, "state_1": 1},
        ),
        (Attention(), (x(6, 6), torch.zeros(6, 6)), {"x": 1, "mask": None}),
        (Words(), (torch.zeros(6, BATCH, dtype=torch.long),), {"tokens": 1}),
        (Noisy(), (torch.randn(BATCH, WIDTH),), {"x": 0}),
        (nn.Linear(WIDTH, 2), (torch.randn(1, WIDTH),), {"input": 0}),
    ],
)
def test_the_dimension_that_is_proven(
    model: nn.Module, args: tuple[object, ...], dims: dict[str, int | None]
) -> None:
    assert found(model, *args) == dims


@pytest.mark.parametrize(
    ("target", "loss_fn", "dim"),
    [
        (torch.randint(5, (BATCH, BATCH)), tokens_loss, 1),
        (torch.randint(5, (BATCH,)), lambda y, t: F.cross_entropy(y[-1], t), 0),
        (torch.randint(5, (BATCH, BATCH)), lambda y, t: tokens_loss(y, t.T), 0),
    ],
)
def test_the_dimension_of_a_target_is_that_of_its_loss(
    target: Tensor, loss_fn: Callable[[Tensor, Tensor], Tensor], dim: int
) -> None:
    dims = found(Encoder(), x(BATCH, BATCH), target=target, loss_fn=loss_fn)

    assert dims == {"x": 1, "target": dim}


def test_a_loss_that_adds_up_by_chance_is_tried_on_other_values() -> None:
    torch.manual_seed(126)  # With these numbers the mean fits along the wrong dimension too.
    target = torch.randint(5, (BATCH, BATCH))

    dims = found(
        Encoder(), x(BATCH, BATCH), target=target, loss_fn=lambda y, t: tokens_loss(y, t.T)
    )

    assert dims == {"x": 1, "target": 0}


def test_a_model_that_returns_its_loss_alone_is_told_by_that() -> None:
    class Losing(Encoder):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"loss": super().forward(x).square().mean()}

    assert found(Losing(), x()) == {"x": 1}


def test_a_model_that_writes_to_its_parameters_stays_as_it_is() -> None:
    class Teacher(Encoder):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.head.weight.mul_(0.9)
                self.head.bias.data = self.head.bias.data * 0.9
            return super().forward(x)

    model = Teacher()
    before = copy.deepcopy(model.state_dict())

    assert found(model, x()) == {"x": 1}
    assert all(map(torch.equal, model.state_dict().values(), before.values()))


def test_what_the_user_says_is_tried_alone() -> None:
    either, square = nn.Linear(WIDTH, 3), x(BATCH, BATCH)
    graph = trace(either, square, training=False, batch_dims={"input": 1})

    assert found(either, square) == {"input": 0}
    assert [source.batch_dim for source in graph.inputs] == [1]
    with pytest.raises(UsageError, match="--batch-dim x=3: there is no such dimension"):
        trace(Encoder(), x(), training=False, batch_dims={"x": 3})
    with pytest.raises(UsageError, match="--batch-dim y: there is no such input"):
        trace(Encoder(), x(), training=False, batch_dims={"y": 0})


def made(subject: Subject, folder: Path, **options: object) -> object:
    """A pipeline of two stages, in this process."""
    given = CompileOptions(2, training=subject.training, validate=False, **options)
    compile_subject(subject, given, folder / subject.name)
    return load_package(folder / subject.name).Pipeline()


@pytest.mark.parametrize(
    ("model", "example", "others"),
    [
        (Encoder(), (x(),), lambda n: (x(TIME, n),)),
        (Recurrent(), (x(),), lambda n: (x(TIME, n),)),
        (
            Recurrent(),
            (x(), states(BATCH, torch.zeros)),
            lambda n: (x(TIME, n), states(n, torch.randn)),
        ),
        (
            Attention(),
            (x(), torch.zeros(TIME, TIME)),
            lambda n: (x(TIME, n), torch.randn(TIME, TIME)),
        ),
    ],
)
def test_sequence_first_models_serve_whole_batches(
    tmp_path: Path,
    model: nn.Module,
    example: tuple[object, ...],
    others: Callable[[int], tuple[object, ...]],
) -> None:
    pipe = made(Subject("serving", model, example, training=False), tmp_path, microbatches=4)
    for samples in (BATCH, 5, 3):
        args = others(samples)
        with torch.no_grad():
            expected = flat_tensors(copy.deepcopy(model).eval()(*args))
        actual = flat_tensors(pipe.eval()(args))

        assert expected.keys() == actual.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(actual[name], tensor)


def test_sequence_first_models_train_on_whole_batches(tmp_path: Path) -> None:
    """The gradients of a batch of another size are those of plain PyTorch on all of it."""
    torch.manual_seed(0)
    model = Encoder()
    target = torch.randint(5, (TIME, BATCH))
    subject = Subject("training", model, (x(),), target=target, loss_fn=tokens_loss)
    pipe = made(subject, tmp_path, microbatches=4)
    batch, labels = x(TIME, 5), torch.randint(5, (TIME, 5))

    loss = pipe.train().step(batch, labels)

    plain = copy.deepcopy(model).train()
    expected = tokens_loss(plain(batch), labels)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    gradients = {name: tensor.grad for name, tensor in pipe.named_parameters()}
    for name, tensor in plain.named_parameters():
        torch.testing.assert_close(gradients[name], tensor.grad)


def test_samples_that_meet_are_refused_by_the_line_where_they_do(tmp_path: Path) -> None:
    subject = Subject("centred", Centred(), (x(BATCH, TIME),), training=False)

    with pytest.raises(ModelError, match="takes the samples of a batch together") as raised:
        made(subject, tmp_path, microbatches=4)

    assert raised.value.location is not None
    assert raised.value.location.code == "centre = y.mean((0, 1))"
    for way_out in ("--batch-dim x=1", "--microbatches 1", "--per-microbatch"):
        assert way_out in raised.value.hint
    made(dataclasses.replace(subject, name="whole"), tmp_path, microbatches=1)
    made(dataclasses.replace(subject, name="parts"), tmp_path, microbatches=4, per_microbatch=True)


def test_packages_for_onnxruntime_are_cut_along_dimension_0_only(tmp_path: Path) -> None:
    subject = Subject("recurrent", Recurrent(), (x(),), training=False)
    options = CompileOptions(2, 4, training=False, validate=False)

    with pytest.raises(ModelError, match="the batch is dimension 1 of x") as raised:
        compile_exported(subject, options, None)

    assert "--microbatches 1" in raised.value.hint


class DrawsInPython(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * random.uniform(1, 2)


def test_the_batch_is_found_whatever_python_draws() -> None:
    """So that such a model is refused for its draws; they go on as if nobody had looked."""
    random.seed(1)
    drawn = random.random()
    random.seed(1)
    found = find_batch_dims(Subject("draws", DrawsInPython(), (torch.randn(BATCH, WIDTH),)))
    assert found.subject.batch_dims == {"x": 0}
    assert random.random() == drawn
