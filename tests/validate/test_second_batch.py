"""The batch that a package is compared with besides the example."""

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

from gpipe_compiler.cluster import DEFAULT_HOST, Cluster, Link
from gpipe_compiler.compile import Compiled, CompileOptions
from gpipe_compiler.compile import compile as compile_subject
from gpipe_compiler.errors import ModelError, UnsplittableError
from gpipe_compiler.frontend.entry import Entry
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.validate.package import validate
from gpipe_compiler.validate.second_batch import (
    Use,
    integer_uses,
    other_batches,
    other_numbers,
)

OPTIONS = CompileOptions(
    stages=2,
    microbatches=2,
    cluster=Cluster.of(DEFAULT_HOST, Link(1e18, 0.0)),
)
ROWS, CLASSES, LENGTH = 50, 7, 6


class Tagger(nn.Module):
    """Tokens with a mask, the positions and kinds of each, and a class for each."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(ROWS, 8)
        self.kinds = nn.Embedding(3, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(
        self, ids: torch.Tensor, kinds: torch.Tensor, mask: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        h = self.tokens(ids.view(-1, LENGTH)) + self.kinds(kinds.long()) * mask.unsqueeze(-1)
        return self.head(torch.relu(h) / counts.clamp(min=1).view(-1, 1, 1))


def tagging_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=-1)


def tagger(samples: int = 8) -> Subject:
    torch.manual_seed(0)
    args = (
        torch.zeros(samples, LENGTH, dtype=torch.int64),
        torch.randint(2, (samples, LENGTH), dtype=torch.int32),
        torch.ones(samples, LENGTH, dtype=torch.int64),
        torch.randint(3, 6, (samples,)),
    )
    target = torch.randint(CLASSES, (samples, LENGTH))
    return Subject("tagger", Tagger(), args=args, target=target, loss_fn=tagging_loss)


def named(entry: Entry, batch: object) -> dict[str, torch.Tensor]:
    names = (source.name for source in entry.signature.inputs)
    return dict(zip(names, batch.inputs, strict=True))  # type: ignore[attr-defined]


def test_use_of_integers_is_seen_through_views_and_casts() -> None:
    """Rows of a table and classes of a loss; what arithmetic is done on has no known use."""
    entry = Entry(tagger(), training=False)

    assert integer_uses(entry, entry.signature.samples(4)) == {
        "ids": Use(ROWS),
        "kinds": Use(3),
        "target": Use(CLASSES, ignored=-1),
    }


def test_integers_cover_the_range_of_their_use() -> None:
    entry = Entry(tagger(64), training=False)
    batch = named(entry, next(other_batches(entry, [(63, 2), (64, 2)], seed=0)))

    assert set(batch["kinds"].flatten().tolist()) == {0, 1, 2}
    assert batch["kinds"].dtype == torch.int32
    assert int(batch["ids"].max()) > ROWS // 2
    assert set(batch["target"].flatten().tolist()) == {-1, *range(CLASSES)}
    assert set(batch["counts"].tolist()) <= {3, 4, 5}


def test_mask_of_ones_is_padded_at_the_end() -> None:
    """Each sample keeps its first entries, and one at least."""
    entry = Entry(tagger(64), training=False)
    mask = named(entry, next(other_batches(entry, [(63, 2), (64, 2)], seed=0)))["mask"]

    assert mask.shape == (63, LENGTH)
    assert bool((mask[:, 0] == 1).all())
    assert bool((mask.diff(dim=1) <= 0).all())
    assert bool((mask == 0).any())


@pytest.mark.parametrize(
    ("samples", "microbatches", "least", "expected"),
    [
        (8, 4, 1, [(5, 2), (9, 4), (8, 4)]),
        (4, 4, 1, [(5, 2), (5, 4), (4, 4)]),
        (12, 4, 2, [(5, 2), (11, 4), (12, 4)]),
        (5, 2, 1, [(9, 2), (6, 2), (5, 2)]),
        (1, 1, 1, [(2, 1), (1, 1)]),
        (2, 1, 1, [(3, 1), (2, 1)]),
    ],
)
def test_other_numbers(
    samples: int, microbatches: int, least: int, expected: list[tuple[int, int]]
) -> None:
    """The smallest batch that two micro-batches share unevenly, from an odd place on; one close to
    the example; and as many."""
    assert other_numbers(samples, microbatches, least) == expected


def test_few_targets_are_ignored_in_part() -> None:
    entry = Entry(tagger(3), training=False)
    target = named(entry, next(other_batches(entry, [(2, 2), (3, 2)], seed=0)))["target"]

    assert int(target.flatten()[0]) >= 0
    assert int(target.flatten()[-1]) == -1


def test_floats_are_other_numbers_of_the_same_domain() -> None:
    """Rows that are distributions stay so; a choice of two numbers stays one."""

    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(5, 5)

        def forward(self, p: torch.Tensor, m: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
            return self.head(p * m + z)

    shares = torch.rand(8, 5).softmax(1)
    args = (shares, (torch.rand(8, 5) > 0.5).float(), torch.zeros(8, 5))
    entry = Entry(Subject("three", Three(), args=args, training=False), training=False)
    batch = named(entry, next(other_batches(entry, [(7, 2), (8, 2)], seed=0)))

    torch.testing.assert_close(batch["p"].sum(1), torch.ones(7))
    assert not any(torch.allclose(row, own) for row in batch["p"] for own in shares)
    assert set(batch["m"].flatten().tolist()) == {0.0, 1.0}
    assert len(batch["z"].unique()) > 5


class Packs(nn.Module):
    def __init__(self, *, sorts: bool) -> None:
        super().__init__()
        self.cell, self.sorts = nn.LSTM(4, 3, batch_first=True), sorts

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), True, enforce_sorted=not self.sorts)
        return self.cell(packed)[1][0][0]


@pytest.mark.parametrize("sorts", [False, True])
def test_lengths_of_packed_sequences_stay_possible(sorts: bool) -> None:
    """From one step to all, at other numbers of steps too, and sorted, as torch may demand."""
    args = torch.randn(8, LENGTH, 4), torch.full((8,), LENGTH)
    entry = Entry(Subject("packs", Packs(sorts=sorts), args, training=False), training=False)
    fewer = args[0][:, :3], args[1].clamp(max=3)
    shorter = Entry(Subject("packs", Packs(sorts=sorts), fewer, training=False), training=False)
    resized = [({"x.1": 3}, shorter.signature)]

    found = [*other_batches(entry, [(64, 2), (8, 2)], seed=0, resized=resized)]

    for batch, most in zip(found[:3:2], (3, LENGTH), strict=True):
        x, lengths = batch.inputs
        assert x.shape == (64, most, 4)
        assert set(lengths.tolist()) == set(range(1, most + 1))
        assert bool((lengths.diff() <= 0).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_every_floating_type_is_changed(dtype: torch.dtype) -> None:
    args = (torch.randn(8, 3).to(dtype),)
    entry = Entry(Subject("x", nn.Flatten(), args=args, training=False), training=False)
    (changed,) = next(other_batches(entry, [(7, 2), (8, 2)], seed=0)).inputs

    assert (changed.dtype, changed.shape) == (dtype, (7, 3))
    assert not any(torch.equal(row, own) for row in changed for own in args[0])


class Noisy(nn.Module):
    """It draws in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x) + torch.rand_like(x))


def test_second_batch_of_a_model_that_draws_in_inference(tmp_path: Path) -> None:
    """The package draws for it as in its first call."""
    subject = Subject("noisy", Noisy(), args=(torch.randn(8, 4),), training=False)
    made = compile_subject(subject, dataclasses.replace(OPTIONS, training=False), tmp_path / "x")

    assert made.validation is not None
    assert made.validation.passed


class Looked(nn.Module):
    """Gradients of its table are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4, sparse=True)
        self.head = nn.Linear(4, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids))


def test_sparse_gradients_are_compared(tmp_path: Path) -> None:
    subject = Subject(
        "looked",
        Looked(),
        args=(torch.randint(9, (8,)),),
        target=torch.randn(8, 2),
        loss_fn=F.mse_loss,
    )
    made = compile_subject(subject, OPTIONS, tmp_path / "x")

    assert made.validation is not None
    assert "compared on a second batch too: 5 samples, other values" in made.validation.notes


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    return compile_subject(tagger(), OPTIONS, tmp_path_factory.mktemp("out") / "tagger_x2")


def test_second_batch_is_compared(compiled: Compiled) -> None:
    assert compiled.validation is not None
    assert compiled.validation.passed
    assert "compared on a second batch too: 5 samples, other values" in compiled.validation.notes


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("stage_0.py", "self.tokens(ids", "self.tokens(ids.clamp(max=0)"),
        ("stage_0.py", "mask.unsqueeze(-1)", "mask.clamp(min=1).unsqueeze(-1)"),
    ],
)
def test_package_right_on_the_example_alone_fails(
    compiled: Compiled, tmp_path: Path, file: str, old: str, new: str
) -> None:
    """A change that shows on other tokens, or where something is masked, only."""
    assert compiled.directory is not None
    copy = tmp_path / "copy"
    shutil.copytree(compiled.directory, copy)
    text = (copy / file).read_text()
    assert old in text, text
    (copy / file).write_text(text.replace(old, new))
    found = validate(tagger(), compiled.plan, copy)

    assert not found.passed
    faults = [fault for row in found.rows for fault in row.faults]
    assert all(fault.startswith("on batch 2: ") for fault in faults), faults


class TakesEight(nn.Module):
    """In eval mode and outside of tracing it takes the example's number of samples only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if type(x) is torch.Tensor and x.shape[0] in (5, 9):
            raise ValueError(f"five or nine samples\nare refused: {x.shape[0]}")
        return self.layers(x)


class Bags(nn.Module):
    """The indices of all samples in one row, and where in it each sample's begin."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.EmbeddingBag(11, 6), nn.Linear(6, 3)

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(indices, offsets))


def test_samples_in_one_row_with_offsets_are_refused(tmp_path: Path) -> None:
    """A second micro-batch would begin at another offset than 0, which torch does not take."""
    subject = Subject(
        "bags",
        Bags(),
        args=(torch.randint(11, (24,)), torch.arange(8) * 3),
        target=torch.randn(8, 3),
        loss_fn=F.mse_loss,
    )
    with pytest.raises(UnsplittableError, match=r"on micro-batches.*offsets\[0\]") as caught:
        compile_subject(subject, dataclasses.replace(OPTIONS), tmp_path / "x")

    assert caught.value.location is not None
    assert caught.value.location.code == "return self.head(self.table(indices, offsets))"
    assert "pad them to one length" in caught.value.hint


def test_what_plain_pytorch_rejects_is_said(tmp_path: Path) -> None:
    """The size is rejected; other values are compared in the example's own."""
    subject = Subject(
        "eight",
        TakesEight(),
        args=(torch.randn(8, 6),),
        target=torch.randn(8, 6),
        loss_fn=F.mse_loss,
    )
    made = compile_subject(subject, dataclasses.replace(OPTIONS), tmp_path / "x")

    assert made.validation is not None
    (note,) = made.validation.notes
    assert "compared on a second batch too: 8 samples, other values" in note
    assert "ValueError: five or nine samples" in note
    assert "5 samples" in note


def test_model_that_takes_the_example_alone_says_so(tmp_path: Path) -> None:
    """No other batch is taken: the output says that, and why."""
    example = torch.randn(8, 6)

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        real = type(output) is torch.Tensor and not output.is_meta
        if real and len(target) > 2 and not torch.equal(target, example[: len(target)]):
            raise RuntimeError("another target")
        return F.mse_loss(output, target)

    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    subject = Subject("one", model, args=(torch.randn(8, 6),), target=example, loss_fn=loss_fn)
    made = compile_subject(subject, dataclasses.replace(OPTIONS), tmp_path / "x")

    assert made.validation is not None
    (note,) = made.validation.notes
    assert note.startswith("the example alone was compared")
    assert "RuntimeError: another target" in note


def test_loss_that_micro_batches_do_not_give_on_other_values_is_refused(tmp_path: Path) -> None:
    """On the example the loss is a mean over samples; with other values it is not."""

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(output, target) * (target != 0).float().mean().clamp(min=0.9)

    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    target = torch.ones(8, 6)
    target[0] = torch.tensor([2.0, 3.0, 4.0, 5.0, 6.0, 0.0])
    subject = Subject("one", model, args=(torch.randn(8, 6),), target=target, loss_fn=loss_fn)

    with pytest.raises(ModelError, match="bends a mean over the batch, by clamp") as caught:
        compile_subject(subject, OPTIONS, tmp_path / "x")
    assert caught.value.location is not None
    assert caught.value.location.file == __file__
