"""What losses are means over, compared with counts by hand and against losses of whole batches.

For random targets, some of them ignored, and random sizes
of micro-batches, the micro-batches' losses, each with its share, come to the loss that the plain
model gives for the whole batch at once, in double precision.
"""

from __future__ import annotations

import functools
import math
import runpy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from taggers import (
    BATCH,
    BY_HAND,
    CLASSES,
    LABELS,
    LENGTH,
    MASK,
    WEIGHTED,
    WIDTH,
    LossOf,
    Tagger,
    alike,
    clamped,
    linear,
    nll,
    rows,
    tokens,
    traced,
)
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.frontend.tracing import trace
from gpipe_compiler.ir import Graph, Reduction
from gpipe_compiler.ir.interpret import Interpreter
from gpipe_compiler.passes import loss_functions
from gpipe_compiler.passes.loss_weight import different_means, weigh_loss
from gpipe_compiler.passes.shapes import annotate
from gpipe_compiler.validate.loss_splitting import loss_shares

Parts = dict[str, Tensor]


@functools.cache
def weighed(label: str) -> tuple[Graph, Tagger]:
    graph, model = traced(WEIGHTED[label])
    return weigh_loss(graph), model


def weight_of(graph: Graph, part: Parts) -> float:
    assert graph.loss is not None
    weight = graph.loss.weight
    assert weight is not None
    given = {name: part[name] for name in weight.inputs}
    apart = Interpreter(graph.replace(ops=weight.ops), graph.tensors, training=False)
    return float(apart.run(given)[weight.value])


@pytest.mark.parametrize("label", WEIGHTED)
def test_weights_are_those_counted_by_hand(label: str) -> None:
    """Sample by sample; and the weight of all is the sum."""
    graph, _ = weighed(label)

    found = [
        weight_of(graph, {"labels": LABELS[i : i + 1], "mask": MASK[i : i + 1].double()})
        for i in range(BATCH)
    ]

    assert found == pytest.approx(BY_HAND[label])
    whole = weight_of(graph, {"labels": LABELS, "mask": MASK.double()})
    assert whole == pytest.approx(sum(BY_HAND[label]))
    assert graph.loss is not None
    assert graph.loss.reduction is Reduction.MEAN


@pytest.mark.parametrize("label", ["tokens", "smoothed", "masked", "summed"])
def test_only_what_it_takes_is_computed(label: str) -> None:
    """From the labels or the mask, without flattening them, and from nothing else."""
    graph, _ = weighed(label)
    assert graph.loss is not None
    weight = graph.loss.weight
    assert weight is not None

    assert weight.inputs == (("mask",) if label == "masked" else ("labels",))
    assert not any("flatten" in op.name or "view" in op.name for op in weight.ops[1:])
    assert len(weight.ops) <= 6


@st.composite
def batches(draw: st.DrawFn) -> tuple[Parts, list[int]]:
    """A batch, of which labels are ignored at random, and sizes of micro-batches."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    random = torch.Generator().manual_seed(draw(st.integers(0, 1 << 16)))
    samples, share = sum(sizes), draw(st.sampled_from([0.0, 0.4, 0.8]))
    shape = (samples, LENGTH)
    labels = torch.randint(CLASSES, shape, generator=random)
    labels[torch.rand(shape, generator=random) < share] = -100
    mask = torch.rand(shape, generator=random).double()
    mask[torch.rand(shape, generator=random) < share] = 0.0
    nothing = draw(st.integers(-1, samples - 1))  # one sample, or none, in which nothing counts
    if nothing >= 0:
        labels[nothing], mask[nothing] = -100, 0.0
    x = torch.randn(samples, LENGTH, WIDTH, generator=random).double()
    return {"x": x, "labels": labels, "mask": mask}, sizes


@pytest.mark.parametrize("label", WEIGHTED)
@settings(max_examples=40, deadline=None)
@given(drawn=batches())
def test_micro_batches_come_to_the_whole(label: str, drawn: tuple[Parts, list[int]]) -> None:
    """To 1e-12, whatever the sizes, also where nothing counts in some of them."""
    inputs, sizes = drawn
    graph, model = weighed(label)
    assert graph.loss is not None
    pieces = {name: tensor.split(sizes) for name, tensor in inputs.items()}
    parts = [{name: piece[m] for name, piece in pieces.items()} for m in range(len(sizes))]
    with torch.no_grad():
        whole = float(model(**inputs)["loss"])
        own = Interpreter(graph, {**graph.tensors, **dict(model.named_parameters())})
        losses = [float(own.run(part)[graph.loss.value]) for part in parts]

    shares = [share for (share,) in loss_shares(graph, graph.tensors, parts, sizes)]

    together = math.fsum(s * loss for s, loss in zip(shares, losses, strict=True) if s)
    if math.isnan(whole):  # nothing counts in the whole batch
        assert not any(shares)
    else:
        assert together == pytest.approx(whole, rel=1e-12, abs=1e-12)


# --- what has no weight of its own ----------------------------------------------------------------


def squares(model: Tagger, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return F.mse_loss(model.head(x), model.other(x))


def probabilities(model: Tagger, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return F.cross_entropy(rows(model, x), x.softmax(-1)[..., :1].expand(-1, -1, 5).flatten(0, 1))


def total(model: Tagger, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return F.cross_entropy(rows(model, x), labels.view(-1), reduction="sum")


def unlike(model: Tagger, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Means over different labels."""
    shorter = F.cross_entropy(rows(model, x[:, 1:]), labels[:, 1:].flatten())
    return tokens(model, x, labels, mask) + shorter


def with_auxiliary(model: Tagger, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return tokens(model, x, labels, mask) + squares(model, x, labels, mask)


def drawn_mask(model: Tagger, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """A mask that no other run can know."""
    mask = torch.bernoulli(mask.clamp(max=1.0))
    return (nll(model, x, labels) * mask).sum() / mask.sum()


def confident(model: Tagger, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """A mask that depends on the weights."""
    mask = (model.head(x).amax(-1) > 0).double()
    return (nll(model, x, labels) * mask).sum() / mask.sum()


def learned(model: Tagger, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Class weights that training changes."""
    weights = model.learned[labels.clamp(min=0)]
    return (nll(model, x, labels) * weights).sum() / weights.sum()


def counting(model: Tagger, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Class weights that every forward changes."""
    model.seen.add_(1.0)
    return F.cross_entropy(rows(model, x), labels.flatten(), model.seen)


def per_sample(model: Tagger, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """A mean over samples of means over positions."""
    return ((nll(model, x, labels) * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


def contrast(model: Tagger, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Every sample against all others: the targets come from the batch size alone."""
    left, right = model.head(x).mean(1), model.other(x).mean(1)
    return F.cross_entropy(left @ right.T, torch.arange(x.size(0)))


def times_batch(model: Tagger, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return tokens(model, x, labels, mask) * x.size(0)


def sum_by_mean(model: Tagger, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """A sum over samples divided by a mean: no mean at all."""
    return (nll(model, x, labels) * mask).sum() / mask.mean()


def in_vain(model: Tagger, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Divided by what is the same for all samples."""
    return squares(model, x, labels, mask) / model.of_class.sum()


UNWEIGHTED = (
    *(squares, probabilities, total, drawn_mask, confident, learned),
    *(counting, per_sample, contrast, times_batch, sum_by_mean, in_vain),
)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("loss", UNWEIGHTED)
def test_others_go_by_samples(loss: LossOf, size: int) -> None:
    """Where the weight cannot be known before the step, or there is none.

    What one sample comes to is no total of all, even where the micro-batch has one sample.
    """
    graph, _ = traced(loss, size)

    found = weigh_loss(graph).loss
    assert found is not None
    assert found.weight is None
    assert not found.terms


@pytest.mark.parametrize("loss", [unlike, with_auxiliary])
def test_different_means_are_named(loss: LossOf) -> None:
    """By the ops that take them."""
    graph, _ = traced(loss)

    assert len(different_means(graph)) == 2


@pytest.mark.parametrize("loss", [tokens, alike, squares, total])
def test_one_mean_is_not_different(loss: LossOf) -> None:
    graph, _ = traced(loss)

    assert different_means(graph) == ()


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch 2.11 does not have it")
def test_a_fused_loss_counts_its_targets() -> None:
    graph, _ = traced(linear)

    loss: Any = weigh_loss(graph).loss
    weight = loss.weight

    assert weight is not None
    assert weight.what == "the targets other than -100"


def test_the_fused_loss_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(F, "linear_cross_entropy", raising=False)

    losses = runpy.run_path(loss_functions.__file__)["_LOSSES"]

    assert losses == (F.cross_entropy, F.nll_loss, nn.CrossEntropyLoss, nn.NLLLoss)


def test_a_loss_function_beside_the_model() -> None:
    """Its class weights are a constant of the graph."""
    loss_fn = nn.CrossEntropyLoss(torch.tensor([0.5, 1.0, 2.0]), ignore_index=1)
    target = torch.tensor([0, 1, 2, 2])
    subject = Subject("row", nn.Linear(4, 3), (torch.randn(4, 4),), {}, target, loss_fn)
    graph = weigh_loss(annotate(trace(subject), 2))

    assert weight_of(graph, {"target": target}) == 0.5 + 2 + 2


def test_a_mean_is_never_taken_for_a_sum() -> None:
    """Also where the second half of the example makes it look like one: nothing counts in it."""
    mask = torch.tensor([[1.0] * 3, [1.0] * 3, [0.0] * 3, [0.0] * 3]).double()
    model = Tagger(clamped).double()
    call = {"x": torch.randn(BATCH, LENGTH, WIDTH).double(), "labels": LABELS, "mask": mask}
    graph = annotate(trace(Subject("tagger", model, (), call)), 2)
    assert graph.loss is not None
    assert graph.loss.reduction is Reduction.SUM

    loss: Any = weigh_loss(graph).loss

    assert loss.reduction is Reduction.MEAN
    assert loss.weight.floor == 1.0
