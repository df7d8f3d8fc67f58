"""Losses that no weights make exact are told from how they are written; no other is accused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe_compiler.compile import CompileOptions, trace
from gpipe_compiler.compile import compile as compile_subject
from gpipe_compiler.errors import ModelError
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.passes.loss_additivity import never_additive
from gpipe_compiler.passes.loss_weight import weigh_loss
from gpipe_compiler.passes.shapes import annotate

LossOf = Callable[[Tensor, Any], Tensor]


def root(y: Tensor, t: Any) -> Tensor:
    return torch.sqrt(F.mse_loss(y, t["y"]) + 1e-6)


def log_of_sum(y: Tensor, t: Any) -> Tensor:
    return (y - t["y"]).square().sum().log() * 0.5


def exponential(y: Tensor, t: Any) -> Tensor:
    return (y - t["y"]).abs().mean().exp()


def hardest(y: Tensor, t: Any) -> Tensor:
    return F.mse_loss(y, t["y"], reduction="none").mean(1).max()


def deviation(y: Tensor, t: Any) -> Tensor:
    return F.mse_loss(y, t["y"]) - 0.1 * y.std()


def length(y: Tensor, t: Any) -> Tensor:
    return (y - t["y"]).norm()


def balance(y: Tensor, t: Any) -> Tensor:
    """As mixtures of experts are balanced."""
    gates = y.softmax(-1)
    chosen = F.one_hot(gates.argmax(-1), 3).float()
    return F.cross_entropy(y, t["c"]) + 0.01 * 3 * (gates.mean(0) * chosen.mean(0)).sum()


def squared(y: Tensor, t: Any) -> Tensor:
    return F.mse_loss(y, t["y"]) + (y.mean(0) ** 2).sum()


BENT: tuple[LossOf, ...] = (
    *(root, log_of_sum, exponential, hardest, deviation, length, balance, squared),
)


def normed(y: Tensor, t: Any) -> Tensor:
    return (y / y.norm(dim=-1, keepdim=True) - t["y"]).square().mean()


def cancelled(y: Tensor, t: Any) -> Tensor:
    """The mean over those that count, times their share: a mean over all."""
    mask = t["m"]
    found = ((y - t["y"]).square().mean(1) * mask).sum() / mask.sum()
    return found * mask.mean()


def sized(y: Tensor, t: Any) -> Tensor:
    return F.l1_loss(y, t["y"]) * y.shape[0] / 8 + y.square().sum() / y.shape[0]


def guarded(y: Tensor, t: Any) -> Tensor:
    loss = F.cross_entropy(y, t["c"])
    return torch.where(loss.isnan(), 0.0, loss).clamp(max=1e4) + 0.0 * y.std()


def per_sample(y: Tensor, t: Any) -> Tensor:
    return (y - t["y"]).square().sum(1).sqrt().mean() + y.logsumexp(-1).exp().log().mean()


def ones(y: Tensor, t: Any) -> Tensor:
    return F.mse_loss(y, t["y"]) * torch.ones_like(y).mean()


RIGHT: tuple[LossOf, ...] = (normed, cancelled, sized, guarded, per_sample, ones)


def subject(loss: LossOf) -> Subject:
    torch.manual_seed(0)
    target = {
        "y": torch.randn(8, 3),
        "c": torch.randint(3, (8,)),
        "m": (torch.rand(8) < 0.7).float(),
    }
    target["y"][4:] *= 3  # halves that are nearly alike would hide what is wrong
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    return Subject(loss.__name__, model, (torch.randn(8, 4),), loss_fn=loss, target=target)


@pytest.mark.parametrize("loss", [*BENT, *RIGHT])
def test_only_what_is_proven_is_accused(loss: LossOf) -> None:
    """Of the accused, the plain loss of a batch is none of its halves', summed or averaged."""
    given = subject(loss)
    graph = trace(given.model, given.args, target=given.target, loss_fn=loss)
    found = never_additive(weigh_loss(annotate(graph, 2)))

    assert (found is not None) is (loss in BENT)
    if found is None:
        return
    y = given.model(*given.args)
    target: Any = given.target
    halves = [
        float(loss(y[rows], {name: t[rows] for name, t in target.items()}).detach())
        for rows in (slice(4), slice(4, 8))
    ]
    whole = float(loss(y, target).detach())
    assert whole != pytest.approx(sum(halves) / 2, rel=1e-5)
    assert whole != pytest.approx(sum(halves), rel=1e-5)


@pytest.mark.parametrize("loss", [root, balance])
def test_they_are_refused_with_their_line_before_anything_runs(loss: LossOf) -> None:
    options = CompileOptions(stages=2, microbatches=4)

    with pytest.raises(ModelError, match="not that of its micro-batches") as raised:
        compile_subject(subject(loss), options, None)

    assert raised.value.location is not None
    code = loss.__code__
    last = max(line for *_, line in code.co_lines() if line)
    assert code.co_firstlineno < raised.value.location.line <= last
    assert "--per-microbatch" in raised.value.hint
