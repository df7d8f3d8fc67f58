"""Losses that micro-batches cannot give are told from those that they can.

Held against the plain model on the whole batch: losses that pair samples are refused with the line
at fault, losses over tokens that count pass, and what such a package trains equals one plain
forward and backward of the whole batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import shutil
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loading import load_package
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe_compiler.cli import asked
from gpipe_compiler.cli import main as cli
from gpipe_compiler.cluster import DEFAULT_HOST, IN_PROCESS, Cluster
from gpipe_compiler.compile import Compiled, CompileOptions
from gpipe_compiler.compile import compile as compile_subject
from gpipe_compiler.errors import GPipeCompilerError, ModelError, UnsplittableError
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.validate.loss_splitting import Losses
from gpipe_compiler.validate.package import validate

CLUSTER = Cluster.of(DEFAULT_HOST, IN_PROCESS)
OPTIONS = CompileOptions(stages=2, microbatches=4, cluster=CLUSTER)
VOCABULARY = 11


class Pairs(nn.Module):
    """Two towers, as in CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 4))
        self.text = nn.Linear(3, 4)

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1)


def contrast(output: Any, _: object) -> Tensor:
    similarity = output[0] @ output[1].T * 10
    return F.cross_entropy(similarity, torch.arange(similarity.size(0)))


def pairs(loss_fn: Callable[[Any, Any], Tensor] = contrast) -> Subject:
    torch.manual_seed(0)
    return Subject(
        "pairs", Pairs(), args=(torch.randn(8, 6), torch.randn(8, 3)), loss_fn=loss_fn, target=None
    )


class Writer(nn.Module):
    """A small language model with its own loss, as in Hugging Face: labels shift by one."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 8)
        self.mix = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("rare", torch.linspace(0.5, 2.0, VOCABULARY))

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        h, _ = self.mix(self.tokens(ids))
        logits = self.head(torch.tanh(h))
        following = F.pad(labels, (0, 1), value=-100)[:, 1:].reshape(-1)
        loss = F.cross_entropy(logits.reshape(-1, VOCABULARY), following, weight=self.rare)
        return {"loss": loss, "logits": logits}


def padded(samples: int, length: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Texts of every length down to none, with labels that ignore the padding."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (samples, length), generator=random)
    lengths = torch.randint(2, length + 1, (samples, 1), generator=random)
    lengths[-1] = 0
    labels = ids.masked_fill(torch.arange(length) >= lengths, -100)
    return ids, labels


def writer() -> Subject:
    torch.manual_seed(0)
    ids, labels = padded(8)
    return Subject("writer", Writer(), args=(ids, labels))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """Validated by `run.py check` in a process of its own."""
    return compile_subject(writer(), OPTIONS, tmp_path_factory.mktemp("out") / "writer_x2")


def here(code: str) -> int:
    """The number of the first line of this file that has this in it."""
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if code in line)


# --- what micro-batches cannot give ---------------------------------------------------------------


def test_a_contrastive_loss_is_refused(tmp_path: Path) -> None:
    """With both numbers, the value that pairs samples, the user's line and the ways out."""
    given = pairs()
    whole = contrast(given.model(*given.args), None).item()
    halves = [given.model(*(x.split(2)[part] for x in given.args)) for part in range(4)]
    together = sum(contrast(output, None).item() for output in halves) / 4

    with pytest.raises(UnsplittableError, match="pairs samples with one another") as raised:
        compile_subject(given, OPTIONS, tmp_path / "out")

    error = raised.value
    told = [float(number) for number in re.findall(r"\d+\.\d+", error.problem)]
    assert told == pytest.approx([whole, together], rel=1e-5)
    assert "shape 2x2 for 2 samples" in error.problem
    assert error.location is not None
    assert (Path(error.location.file).name, error.location.line) == (
        Path(__file__).name,
        here("output[0] @ output[1].T"),
    )
    assert "--microbatches 1" in error.hint
    assert "--per-microbatch" in error.hint
    assert error.exit_code == 1
    assert [*tmp_path.iterdir()] == []


@pytest.mark.usefixtures("in_process")
def test_what_is_accepted_is_noted(tmp_path: Path) -> None:
    accepted = dataclasses.replace(OPTIONS, per_microbatch=True)

    made = compile_subject(pairs(), accepted, tmp_path / "out")

    assert made.validation is not None
    assert made.validation.passed
    assert "accepted with --per-microbatch" in " ".join(made.validation.notes)
    assert made.directory is not None
    assert "pairs samples" in (made.directory / "report.html").read_text()


@pytest.mark.usefixtures("in_process")
def test_one_micro_batch_gives_every_loss(tmp_path: Path) -> None:
    made = compile_subject(pairs(), dataclasses.replace(OPTIONS, microbatches=1), tmp_path / "out")

    assert made.validation is not None
    assert made.validation.passed
    (note,) = made.validation.notes
    assert "second batch" in note
    assert made.directory is not None
    pipeline = load_package(made.directory).Pipeline
    pipeline().close()
    for parts in ({"microbatches": 4}, {"data_parallel": 2}):
        with pytest.raises(Exception, match="pairs samples with one another") as raised:
            pipeline(**parts)
        assert type(raised.value).__name__ == "UsageError"
        assert f"test_loss_splitting.py:{here('output[0] @ output[1].T')}" in str(raised.value)
        assert "microbatches=1" in str(raised.value)
        assert "--per-microbatch" in str(raised.value)


def root_of_mean(output: Any, _: object) -> Tensor:
    return (output[0] - output[1]).square().mean().sqrt()


def centred(output: Any, _: object) -> Tensor:
    middle = output[0].mean(0)
    return (output[0] - middle).square().mean()


@pytest.mark.parametrize(
    ("loss_fn", "error", "cause", "line"),
    [
        (root_of_mean, ModelError, "takes the sqrt of a mean", "mean().sqrt()"),
        (centred, UnsplittableError, "no mean over samples", "middle).square()"),
    ],
)
def test_the_cause_is_told(
    loss_fn: Callable[[Any, Any], Tensor],
    error: type[GPipeCompilerError],
    cause: str,
    line: str,
    tmp_path: Path,
) -> None:
    """Where the graph proves it, and where numbers show it."""
    labels = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])
    ignored = labels.masked_fill(torch.arange(8) < 3, -100)
    given = dataclasses.replace(pairs(loss_fn), target=(labels, ignored))

    with pytest.raises(error, match=cause) as raised:
        compile_subject(given, OPTIONS, tmp_path / "out")

    assert raised.value.location is not None
    assert raised.value.location.line == here(line)


def test_samples_that_meet_in_the_model_are_found(tmp_path: Path) -> None:
    """By the op in which they do, BatchNorm apart, which does nothing of the kind in eval mode."""

    class Batchwise(Pairs):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(6)

        def forward(self, image: Tensor, text: Tensor) -> Tensor:
            h = self.image(self.norm(image))
            centre = h.mean(0)
            return (h - centre) * self.text(text)

    given = dataclasses.replace(
        pairs(), model=Batchwise(), loss_fn=lambda output, _: output.square().mean()
    )
    with pytest.raises(ModelError, match="takes the samples of a batch together") as raised:
        compile_subject(given, OPTIONS, tmp_path / "out")

    assert raised.value.location is not None
    assert raised.value.location.line == here("centre = h.mean(0)")


@pytest.mark.usefixtures("in_process")
def test_mixing_in_train_mode_alone_is_no_fault(tmp_path: Path) -> None:
    """The reference runs micro-batch by micro-batch."""

    class Normed(Pairs):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(6)

        def forward(self, image: Tensor, text: Tensor) -> Tensor:
            return self.image(self.norm(image)) * self.text(text)

    given = dataclasses.replace(
        pairs(), model=Normed(), loss_fn=lambda output, _: output.square().mean()
    )

    made = compile_subject(given, OPTIONS, tmp_path / "out")

    assert made.validation is not None
    assert made.validation.passed


@pytest.mark.parametrize(
    ("whole", "parts", "equal"),
    [
        (2.0, (1.0, 3.0), True),
        (2.0, (1.0, 3.01), False),
        (1e-9, (-1.0, 1.0), True),  # what cancels is measured by what it was
        (float("nan"), (1.0, 3.0), True),
        (2.0, (float("nan"), 3.0), False),
    ],
)
def test_rounding_is_allowed_for(whole: float, parts: tuple[float, ...], equal: bool) -> None:
    losses = Losses(
        torch.tensor(whole), tuple((torch.tensor(part),) for part in parts), ((0.5,), (0.5,))
    )

    assert losses.equal is equal


def test_a_micro_batch_in_which_nothing_counts_is_left_out() -> None:
    losses = Losses(
        torch.tensor(3.0), ((torch.tensor(torch.nan),), (torch.tensor(3.0),)), ((0.0,), (1.0,))
    )

    assert losses.equal


# --- at the command line --------------------------------------------------------------------------

MODEL = """
    import torch
    import torch.nn.functional as F
    from torch import nn

    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.image, self.text = nn.Linear(6, 4), nn.Linear(3, 4)

        def forward(self, image, text):
            image, text = self.image(image), self.text(text)
            scores = image @ text.T
            loss = F.cross_entropy(scores, torch.arange(image.size(0)))
            return {"loss": loss, "image": image, "text": text}

    def build_model():
        return Towers()

    def example_inputs():
        return torch.randn(8, 6), torch.randn(8, 3)
"""


@pytest.mark.usefixtures("in_process")
def test_the_command_refuses_and_accepts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 1 with the line, and 0 with the flag."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(asked, "devices_named", lambda name: CLUSTER)
    Path("towers.py").write_text(textwrap.dedent(MODEL))
    words = ["towers.py", "-k", "2", "-m", "4"]
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        refused = cli.compile_command(words)
    accepted = cli.compile_command([*words, "--per-microbatch"])

    assert (refused, accepted) == (1, 0)
    assert "towers.py:13" in said.getvalue()
    assert "--per-microbatch" in said.getvalue()


# --- tokens that count ----------------------------------------------------------------------------


def test_a_language_model_with_padding_passes(written: Compiled) -> None:
    """Loss and gradients by class weights of the labels that are no padding."""
    assert written.validation is not None
    assert written.validation.passed
    (note,) = written.validation.notes
    assert "second batch" in note
    assert written.directory is not None
    assert "self.rare[" in (written.directory / "loss_weight.py").read_text()


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("old", "new"), [("self.rare[", "self.rare.clamp(min=1.0)["), ("[:, 1:]", "[:, :]")]
)
def test_a_wrong_weight_is_found(old: str, new: str, written: Compiled, tmp_path: Path) -> None:
    """One of other classes, and one that forgets that labels shift."""
    assert written.directory is not None
    copy = tmp_path / "copy"
    shutil.copytree(written.directory, copy)
    text = (copy / "loss_weight.py").read_text()
    assert old in text, text
    (copy / "loss_weight.py").write_text(text.replace(old, new))

    found = validate(writer(), written.plan, copy)

    assert {row.what for row in found.rows if not row.passed} >= {"loss", "gradient"}


@pytest.mark.parametrize("samples", [8, 7, 3, 1])
def test_every_batch_trains_as_in_one_piece(samples: int, written: Compiled) -> None:
    """Uneven batches with other padding: loss and gradients of one plain forward and backward."""
    assert written.directory is not None
    package = load_package(written.directory)
    model = writer().model
    ids, labels = padded(samples, seed=samples) if samples > 1 else padded(2)
    ids, labels = ids[:samples], labels[:samples]
    expected = model(ids, labels)["loss"]
    expected.backward()

    with package.Pipeline() as pipe:
        loss = pipe.step((ids, labels))

        torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=1e-6)
        found = {name: parameter.grad for name, parameter in pipe.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-5, atol=1e-6)


def test_a_model_of_hugging_face_trains_as_in_one_piece(tmp_path: Path) -> None:
    """A causal language model with padded labels, validated, then trained on other batches."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=VOCABULARY, n_positions=8,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    ids, labels = padded(4)
    given = Subject("gpt2", model, kwargs={"input_ids": ids, "labels": labels})
    options = CompileOptions(stages=2, microbatches=2, cluster=CLUSTER)

    made = compile_subject(given, options, tmp_path / "gpt2_x2")

    assert made.validation is not None
    assert made.validation.passed
    assert made.directory is not None
    assert (made.directory / "loss_weight.py").is_file()
    package = load_package(made.directory)
    ids, labels = padded(3, seed=5)
    expected = model(input_ids=ids, labels=labels).loss
    expected.backward()
    with package.Pipeline() as pipe:
        loss = pipe.step({"input_ids": ids, "labels": labels})

        torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=1e-6)
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(
                parameter.grad, model.get_parameter(name).grad, rtol=1e-4, atol=1e-6
            )
