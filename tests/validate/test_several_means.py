"""Losses that add up means over different things train as in one piece, whatever the padding.

Everything is compared with one plain forward and backward of the whole batch: batches of other
sizes than the example's, with padded targets, of which in some micro-batches nothing counts.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from loading import load_package
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe_compiler.cluster import DEFAULT_HOST, IN_PROCESS, Cluster
from gpipe_compiler.compile import CompileOptions
from gpipe_compiler.compile import compile as compile_subject
from gpipe_compiler.frontend.subject import Subject

CLUSTER = Cluster.of(DEFAULT_HOST, IN_PROCESS)
OPTIONS = CompileOptions(stages=2, microbatches=4, cluster=CLUSTER)
LENGTH, CLASSES, WIDTH = 5, 7, 6
IGNORED = -100

Values = Mapping[str, Tensor]


class Tagger(nn.Module):
    """Classes of positions, a class of the whole, and boxes; besides, perhaps, a loss."""

    def __init__(self, own: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh())
        self.tags, self.whole, self.boxes = nn.Linear(8, CLASSES), nn.Linear(8, 2), nn.Linear(8, 4)
        self.register_buffer("of_class", torch.linspace(0.5, 2.0, CLASSES))
        self.balance = nn.Parameter(torch.tensor([0.3, -0.2]))
        self.own = own

    def forward(self, x: Tensor, labels: Tensor, mask: Tensor, label: Tensor) -> Any:
        h = self.body(x)
        found = {"tags": self.tags(h), "whole": self.whole(h.mean(1)), "boxes": self.boxes(h)}
        if self.own is None:
            return found
        return self.own(self, found, labels, mask, label)


def tokens(found: Any, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(found["tags"].flatten(0, 1), labels.flatten(), **options)


def z_loss(found: Any) -> Tensor:
    return found["tags"].logsumexp(-1).square().mean()


def each(found: Any, labels: Tensor) -> Tensor:
    return F.cross_entropy(found["tags"].transpose(1, 2), labels.clamp(min=0), reduction="none")


LossOf = Callable[[Tagger, Any, Tensor, Tensor, Tensor], Tensor]


def with_z(model: Tagger, found: Any, labels: Tensor, mask: Tensor, label: Tensor) -> Tensor:
    return tokens(found, labels) + 1e-2 * z_loss(found)


def two_heads(model: Tagger, found: Any, labels: Tensor, mask: Tensor, label: Tensor) -> Tensor:
    """As BERT is pretrained: masked words, and a class of the whole."""
    return tokens(found, labels) + F.cross_entropy(found["whole"], label)


def many(model: Tagger, found: Any, labels: Tensor, mask: Tensor, label: Tensor) -> Tensor:
    """Scaled as a whole, subtracted, written in place; class weights, smoothing, weights' size."""
    loss = 2.0 * tokens(found, labels, weight=model.of_class, label_smoothing=0.1)
    loss += (each(found, labels) * mask).sum() / mask.sum().clamp(min=1)
    loss = (loss - 0.25 * z_loss(found)) / 3
    loss += 0.01 * model.tags.weight.square().sum() + 0.5
    loss += F.mse_loss(found["boxes"], torch.zeros_like(found["boxes"]), reduction="sum") / 100
    return loss


def detection(model: Tagger, found: Any, labels: Tensor, mask: Tensor, label: Tensor) -> Tensor:
    """Boxes of the positions that hold something, classes of all; a number of samples besides."""
    off = F.smooth_l1_loss(found["boxes"], torch.ones_like(found["boxes"]), reduction="none")
    boxes = (off.sum(-1) * mask).sum() / (mask.sum() + 1e-3)
    classes = each(found, labels).sum() / labels.size(0)
    return torch.stack([boxes, classes, tokens(found, labels)]).mean()


def balanced(model: Tagger, found: Any, labels: Tensor, mask: Tensor, label: Tensor) -> Tensor:
    """Weighed by what is learned: Kendall's uncertainties."""
    one, other = (-model.balance).exp()
    terms = [one * tokens(found, labels) + model.balance[0], other * z_loss(found)]
    return sum(terms) + model.balance[1]


LOSSES: tuple[LossOf, ...] = (with_z, two_heads, many, detection, balanced)


def batch(samples: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Texts of every length; the first two samples have nothing that counts."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, LENGTH, WIDTH, generator=random)
    labels = torch.randint(CLASSES, (samples, LENGTH), generator=random)
    mask = (torch.rand(samples, LENGTH, generator=random) < 0.5).float()
    lengths = torch.randint(0, LENGTH + 1, (samples, 1), generator=random)
    lengths[:2] = 0
    lengths[-1] = LENGTH
    mask[:2] = 0.0
    outside = torch.arange(LENGTH) >= lengths
    label = torch.randint(2, (samples,), generator=random)
    return x, labels.masked_fill(outside, IGNORED), mask, label


def example() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """In which everything counts: nothing tells the means apart."""
    x, labels, mask, label = batch(8, 0)
    return x, labels.clamp(min=0), torch.ones_like(mask), label


def subject(loss: LossOf, *, own: bool) -> Subject:
    torch.manual_seed(0)
    if own:

        def returned(model: Tagger, found: Any, *given: Tensor) -> Any:
            return {"loss": loss(model, found, *given), "tags": found["tags"]}

        return Subject(loss.__name__, Tagger(returned), example())
    model = Tagger()

    def loss_fn(output: Any, target: Any) -> Tensor:
        return loss(model, output, *target)

    return Subject(loss.__name__, model, example(), loss_fn=loss_fn, target=example()[1:])


def plain(loss: LossOf, batches: Sequence[tuple[Tensor, ...]]) -> tuple[list[float], Values]:
    """The losses, and the gradients of their mean, of the plain model on whole batches."""
    model = subject(loss, own=True).model
    losses = []
    for given in batches:
        value = model(*given)["loss"]
        (value / len(batches)).backward()
        losses.append(float(value.detach()))
    return losses, {name: parameter.grad for name, parameter in model.named_parameters()}


def close(found: Values, expected: Values) -> None:
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.usefixtures("in_process")
def test_any_batch_trains_as_in_one_piece(loss: LossOf, tmp_path: Path) -> None:
    """Loss and gradients, of batches of other sizes and other padding than the example.

    Two at a time, too; and the loss of an evaluation is that of all its batches as one.
    """
    made = compile_subject(subject(loss, own=True), OPTIONS, tmp_path / "package")
    assert made.validation is not None
    assert made.validation.passed, str(made.validation)
    package = load_package(tmp_path / "package")
    given = [batch(samples, samples) for samples in (8, 7, 3)]
    with package.Pipeline() as pipe:
        for batches in ([given[0]], [given[1]], [given[2]], given):
            pipe.zero_grad()
            losses, gradients = plain(loss, batches)
            found = [pipe.step(one, weight=1 / len(batches)) for one in batches]

            assert [float(value) for value in found] == pytest.approx(losses, rel=1e-5, abs=1e-6)
            close({name: parameter.grad for name, parameter in pipe.named_parameters()}, gradients)
        one = tuple(torch.cat(parts) for parts in zip(*given, strict=True))
        (whole,), _ = plain(loss, [one])
        runtime = f"{package.__name__}.runtime"
        hooks = importlib.import_module(f"{runtime}.train.hooks").UserHooks
        evaluate = importlib.import_module(f"{runtime}.train.evaluation").evaluate
        found = evaluate(
            pipe, hooks("model.py", eval_data=lambda: [(item, None) for item in given])
        )
        assert found.loss == pytest.approx(whole, rel=1e-5, abs=1e-6)


@pytest.mark.usefixtures("in_process")
def test_a_loss_function_and_a_model_that_returns_nothing_but_its_loss(tmp_path: Path) -> None:
    model = subject(two_heads, own=True).model
    model.own = lambda *given: {"loss": two_heads(*given)}
    alone = Subject("alone", model, example())
    for number, given in enumerate((subject(two_heads, own=False), alone)):
        folder = tmp_path / f"package_{number}"
        made = compile_subject(given, OPTIONS, folder)
        assert made.validation is not None
        assert made.validation.passed, str(made.validation)
        package = load_package(folder)
        x, *rest = batch(7, 1)
        losses, gradients = plain(two_heads, [(x, *rest)])
        with package.Pipeline() as pipe:
            found = pipe.step((x, *rest), None if number else tuple(rest))
            assert float(found) == pytest.approx(losses[0], rel=1e-5)
            close({n: p.grad for n, p in pipe.named_parameters()}, gradients)


RANK = """
import sys, torch
sys.path[:0] = sys.argv[1].split(":")
from package import Pipeline
from test_several_means import batch
with Pipeline(data_parallel=2) as pipe:
    given = batch(9, 4)
    loss = pipe.step(*pipe.shard(given))
    found = {name: parameter.grad for name, parameter in pipe.named_parameters()}
    if pipe.rank == 0:
        torch.save((float(loss), found), sys.argv[2])
"""


def test_replicas_train_as_one(tmp_path: Path) -> None:
    """In one of them nothing counts for the first micro-batch; each counts what it has."""
    one_stage = dataclasses.replace(OPTIONS, stages=1, microbatches=2, validate=False)
    compile_subject(subject(many, own=True), one_stage, tmp_path / "package")
    (tmp_path / "rank.py").write_text(RANK)
    here = Path(__file__).parent
    paths = ":".join(map(str, (tmp_path, here, here.parent / "helpers")))
    done = forked.run([tmp_path / "rank.py", paths, tmp_path / "found"], ranks=2)
    assert done.returncode == 0, done.stderr

    loss, gradients = torch.load(tmp_path / "found")

    losses, expected = plain(many, [batch(9, 4)])
    assert loss == pytest.approx(losses[0], rel=1e-5)
    close(gradients, expected)
