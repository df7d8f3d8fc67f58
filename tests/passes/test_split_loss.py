"""Drawn losses, sums of means over whatever, come to that of the whole batch in plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from taggers import (
    BATCH,
    CLASSES,
    LABELS,
    LENGTH,
    MASK,
    WIDTH,
    Tagger,
    by_class,
    clamped,
    guarded,
    masked,
    module,
    rows,
    summed,
    tokens,
)
from torch import Tensor
from torch.nn import functional as F

from gpipe_compiler.frontend.recorded import trace_mode
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.ir.interpret import Interpreter
from gpipe_compiler.passes.loss_weight import weigh_loss
from gpipe_compiler.passes.shapes import annotate
from gpipe_compiler.validate.loss_splitting import loss_shares

TermOf = Callable[..., Any]


def z_loss(model: Tagger, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return rows(model, x).logsumexp(-1).square().mean()


def total(model: Tagger, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return F.huber_loss(model.other(x), model.head(x), reduction="sum")


def per_sample(model: Tagger, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return (model.other(x).square().sum(-1) * mask).sum() / x.shape[0]


def decay(model: Tagger, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return model.head.weight.square().sum()


def number(model: Tagger, x: Tensor, labels: Tensor, mask: Tensor) -> float:
    return 0.75


TERMS: tuple[TermOf, ...] = (
    *(tokens, by_class, module, summed, masked, clamped, guarded),
    *(z_loss, total, per_sample, decay, number),
)

STEPS: tuple[Callable[[Any, Any], Any], ...] = (
    lambda loss, term: loss + term,
    lambda loss, term: term + loss,
    lambda loss, term: loss - term,
    lambda loss, term: (loss + term) * 0.5,
    lambda loss, term: -(term / 3 - loss) / 2,
    lambda loss, term: torch.add(loss, term, alpha=0.25),
    lambda loss, term: torch.stack([loss, loss * 0.1 + term]).mean(),
)


@st.composite
def losses(draw: st.DrawFn) -> TermOf:
    first = draw(st.sampled_from(TERMS[:-2]))
    rest = draw(
        st.lists(st.tuples(st.sampled_from(TERMS), st.sampled_from(STEPS)), min_size=1, max_size=3)
    )

    def loss(*args: Any) -> Tensor:
        found = first(*args)
        for term, step in rest:
            found = step(found, term(*args))
        return found  # type: ignore[no-any-return]  # a scalar tensor

    loss.__name__ = "_".join([first.__name__, *(term.__name__ for term, _ in rest)])
    return loss


@st.composite
def batches(draw: st.DrawFn) -> tuple[dict[str, Tensor], list[int]]:
    """In the last micro-batch nothing counts, in others not everything."""
    sizes = [*draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)), 1]
    random = torch.Generator().manual_seed(draw(st.integers(0, 1 << 16)))
    samples = sum(sizes)
    labels = torch.randint(CLASSES, (samples, LENGTH), generator=random)
    labels[torch.rand(labels.shape, generator=random) < 0.4] = -100
    labels[0, 0], labels[-1] = 1, -100
    mask = torch.rand(samples, LENGTH, generator=random).double()
    mask[-1] = 0.0
    x = torch.randn(samples, LENGTH, WIDTH, generator=random).double()
    return {"x": x, "labels": labels, "mask": mask}, sizes


@settings(max_examples=8, deadline=None)
@given(loss=losses(), drawn=batches())
def test_terms_come_to_the_whole(loss: TermOf, drawn: tuple[dict[str, Tensor], list[int]]) -> None:
    """To 1e-12; traced with an example in which everything counts."""
    inputs, sizes = drawn
    torch.manual_seed(0)
    model = Tagger(loss).double()
    example = {
        "x": torch.randn(BATCH, LENGTH, WIDTH).double(),
        "labels": LABELS.clamp(min=0),
        "mask": torch.ones_like(MASK).double(),
    }
    subject = Subject("tagger", model, (), example)
    graph = weigh_loss(annotate(trace_mode(subject, True).replace(example=example), 2))
    assert graph.loss is not None
    states = {**graph.tensors, **dict(model.named_parameters()), **dict(model.named_buffers())}
    pieces = {name: tensor.split(sizes) for name, tensor in inputs.items()}
    parts = [{name: piece[m] for name, piece in pieces.items()} for m in range(len(sizes))]

    with torch.no_grad():
        whole = float(model(**inputs)["loss"])
        found = []
        shares = loss_shares(graph, states, parts, sizes)
        for part, own in zip(parts, shares, strict=True):
            values = Interpreter(graph, states, training=True).run(part)
            for term, share in zip(graph.loss.summands, own, strict=True):
                found.append(float(values[term.value]) * share if share else 0.0)

    assert math.fsum(found) == pytest.approx(whole, rel=1e-12, abs=1e-12)
