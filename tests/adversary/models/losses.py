"""Losses: what they are means over, sums of several, and those that micro-batches cannot give."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from adversary.case import FP32_ONLY, Case, Refused, RefusedAtStep
from adversary.inputs import rows, steps
from torch import Tensor, nn

CLASSES = 5
IGNORED = -100


def body(outputs: int = CLASSES) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, outputs))


def classes(samples: int) -> Tensor:
    return torch.randint(CLASSES, (samples,))


def tokens(samples: int) -> Tensor:
    """A class for every step, no padding."""
    return torch.randint(CLASSES, (samples, 4))


def padded(samples: int) -> Tensor:
    """The same with padding, of another length in every sample; never all of it."""
    found = tokens(samples)
    lengths = torch.randint(0, 5, (samples, 1))
    lengths[0] = 4
    return found.masked_fill(torch.arange(4) >= lengths, IGNORED)


def some_ignored(samples: int) -> Tensor:
    found = classes(samples)
    found[1::2] = IGNORED
    return found


def of_tokens(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=IGNORED)


def of_a_row(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target)  # refused: flattened_target


def z_loss(logits: Tensor) -> Tensor:
    return logits.logsumexp(-1).square().mean()


def tokens_and_z(logits: Tensor, target: Tensor) -> Tensor:
    return of_tokens(logits, target) + 1e-2 * z_loss(logits)


def smoothed(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(
        logits.flatten(0, 1), target.flatten(), ignore_index=IGNORED, label_smoothing=0.1
    )


WEIGHTS = torch.tensor([0.2, 1.0, 3.0, 0.5, 2.0])


def weighted(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target, weight=WEIGHTS)


def masked_mean(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    wanted, mask = target
    return ((output - wanted).square().mean(-1) * mask).sum() / mask.sum().clamp(min=1)


def mask_target(samples: int) -> tuple[Tensor, Tensor]:
    mask = (torch.rand(samples, 4) > 0.4).float()
    mask[0, 0] = 1
    return torch.randn(samples, 4, CLASSES), mask


def selected(logits: Tensor, target: Tensor) -> Tensor:
    """A mean over the tokens that boolean indexing leaves."""
    kept = target != IGNORED
    return F.cross_entropy(logits[kept], target[kept])


def two_heads(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    """Two token losses with paddings of their own."""
    return of_tokens(output, target[0]) + 0.5 * of_tokens(-output, target[1])


def regularised(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target) + 0.01 * output.square().sum(-1).mean()


def constant_term(output: Tensor, target: Tensor) -> Tensor:
    return of_tokens(output, target) + 1.5


def of_each(output: Tensor, target: Tensor) -> Tensor:
    """The mean over samples of each one's own mean over what is not padding."""
    losses = F.cross_entropy(output.transpose(1, 2), target, ignore_index=IGNORED, reduction="none")
    counted = (target != IGNORED).sum(1).clamp(min=1)
    return (losses.sum(1) / counted).mean()


def ctc(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    """torch's default mean: of each sample's loss by its own target length."""
    labels, lengths = target
    log_probabilities = output.log_softmax(-1).transpose(0, 1)
    frames = torch.full((output.shape[0],), output.shape[1], dtype=torch.long)
    return F.ctc_loss(log_probabilities, labels, frames, lengths)


def ctc_target(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randint(1, CLASSES, (samples, 2)), torch.full((samples,), 2)


def ctc_later(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randint(1, CLASSES, (samples, 2)), torch.randint(1, 3, (samples,))


def root(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean().sqrt()  # refused: root


def root_of_mean(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean().sqrt()


def contrastive(output: Tensor, target: Tensor) -> Tensor:
    keys = F.normalize(output, dim=1)
    scores = keys @ F.normalize(target, dim=1).t()  # refused: contrastive
    return F.cross_entropy(scores * 10, torch.arange(len(output)))


def covariance(output: Tensor, _: Tensor) -> Tensor:
    """Barlow Twins' redundancy: a product over the batch."""
    centred = output - output.mean(0)  # refused: covariance
    redundancy = centred.t() @ centred / len(output)  # refused: covariance
    return (redundancy - torch.eye(CLASSES)).square().sum()  # refused: covariance


def dice(output: Tensor, target: Tensor) -> Tensor:
    chance = output.sigmoid()
    both = (chance * target).sum()
    return 1 - 2 * both / (chance.sum() + target.sum() + 1e-6)  # refused: dice


def largest(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).abs().max()  # refused: largest


def of_sum(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def perplexity(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target).exp()  # refused: perplexity


class Balanced(nn.Module):
    """A mixture's own loss with its balancing term, a product of means over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(6, 3), nn.ModuleList(body() for _ in range(3))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        chances = self.gate(x).softmax(-1)
        logits = sum(
            c.unsqueeze(-1) * e(x) for c, e in zip(chances.unbind(-1), self.experts, strict=True)
        )
        chosen = F.one_hot(chances.argmax(-1), 3).float()
        balance = 3 * (chosen.mean(0) * chances.mean(0)).sum()  # refused: balancing
        return {"loss": F.cross_entropy(logits, labels) + 0.1 * balance, "logits": logits}


class NoLoss(nn.Module):
    """Returns a tuple, logits and loss, which nobody can tell apart by name."""

    def __init__(self) -> None:
        super().__init__()
        self.body = body()

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.body(x)
        return logits, F.cross_entropy(logits, labels)


def wanted(samples: int) -> Tensor:
    return torch.randn(samples, CLASSES)


def chances(samples: int) -> Tensor:
    return torch.rand(samples, CLASSES)


PER_MICROBATCH = ("--per-microbatch", "--microbatches 1")


def refused(cause: str) -> Refused:
    return Refused((cause,), PER_MICROBATCH, accept="--per-microbatch")


def not_of_parts(name: str, loss: object, target: object, **options: object) -> Case:
    """One that micro-batches cannot give; by itself in each when its user says so."""
    return Case(
        name,
        body,
        rows,
        loss,
        target,
        sizes=(8,),
        manners=FP32_ONLY,
        expect=refused("micro-batches"),
        **options,
    )


class Heads(nn.Module):
    """With a head in training alone, as GoogLeNet and DeepLab have it."""

    def __init__(self, named: bool) -> None:
        super().__init__()
        self.body, self.head, self.aux = nn.Linear(6, 8), nn.Linear(8, 5), nn.Linear(8, 5)
        self.named = named

    def forward(self, x: Tensor) -> object:
        hidden = self.body(x).tanh()
        if self.named:
            aux = {"aux": self.aux(hidden)} if self.training else {}
            return {"out": self.head(hidden), **aux}
        return (self.head(hidden), self.aux(hidden)) if self.training else self.head(hidden)


def of_heads(output: dict[str, Tensor], target: Tensor) -> Tensor:
    loss = of_tokens(output["out"], target)
    return loss + 0.5 * of_tokens(output["aux"], target) if "aux" in output else loss


def of_head_and_z(output: Tensor | tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """Means over different things, in training alone."""
    if not isinstance(output, tuple):
        return of_tokens(output, target)
    return of_tokens(output[0], target) + 0.1 * z_loss(output[1]) + 0.5


def of_masked_head(output: Tensor | tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """A mean over what a mask counts in training, over what is not ignored in eval mode."""
    if not isinstance(output, tuple):
        return of_tokens(output, target)
    mask = target != IGNORED
    each = F.cross_entropy(output[0].transpose(1, 2), target, reduction="none")
    return (each * mask).sum() / mask.sum() + output[1].square().mean()


class Halved(nn.Module):
    """Counts its loss in another way in each mode."""

    def __init__(self) -> None:
        super().__init__()
        self.body = body()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.body(x)
        loss = of_tokens(logits, labels) * (0.5 if self.training else 1.0)
        return {"loss": loss, "logits": logits}


def counted_apart(logits: Tensor, target: Tensor) -> Tensor:
    with torch.no_grad():
        mask = (target != IGNORED).float()
        count = mask.sum().clamp(min=1)
    each = F.cross_entropy(logits.transpose(1, 2), target, reduction="none")
    return (each * mask).sum() / count


def of_shares(logits: Tensor, target: Tensor) -> Tensor:
    """Weights that are 1 on average."""
    weights = 1 + target.float()
    weights = weights / weights.sum() * len(weights)
    return (F.cross_entropy(logits, target, reduction="none") * weights).mean()


def of_shares_of_both(logits: Tensor, target: Tensor) -> Tensor:
    """Weights of the targets, and of what the model makes of them."""
    weights, sizes = 1 + target.float(), logits.detach().abs().sum(-1)
    weights = weights / weights.sum() * (sizes / sizes.sum())
    each = F.cross_entropy(logits, target, reduction="none")
    return (each * weights).sum()  # refused: shares_of_both


def where_finite(logits: Tensor, target: Tensor) -> Tensor:
    loss = of_tokens(logits, target)
    return torch.where(loss.isfinite(), loss, torch.zeros_like(loss))


def where_not_nan(logits: Tensor, target: Tensor) -> Tensor:
    return of_tokens(logits, target).nan_to_num() + 0.1 * logits.square().mean()


def all_ignored_but_one(samples: int) -> Tensor:
    found = torch.full((samples, 4), IGNORED)
    found[0, 1] = 2
    return found


def with_heads(
    name: str, named: bool, loss: Callable[..., Tensor], target: Callable[[int], Tensor]
) -> Case:
    return Case(
        name,
        lambda: Heads(named),
        steps,
        loss,
        target,
        later_target=padded,
        as_evaluated=True,
    )


CASES = (
    Case("counted_apart", body, steps, counted_apart, padded),
    Case("shares", body, rows, of_shares, classes),
    Case(
        "shares_of_both",
        body,
        rows,
        of_shares_of_both,
        classes,
        expect=Refused(("no mean over samples",), ("--loss-over batch",)),
    ),
    Case("where_finite", body, steps, where_finite, padded, later_target=all_ignored_but_one),
    Case("where_not_nan", body, steps, where_not_nan, padded, later_target=all_ignored_but_one),
    with_heads("head_in_training", True, of_heads, tokens),
    with_heads("head_in_training_and_z", False, of_head_and_z, padded),
    with_heads("head_in_training_masked", False, of_masked_head, padded),
    Case("halved_in_training", Halved, lambda n: {"x": steps(n), "labels": padded(n)}),
    Case("cross_entropy", body, rows, F.cross_entropy, classes),
    Case("mse", body, rows, F.mse_loss, wanted),
    Case("l1", body, rows, F.l1_loss, wanted),
    Case("huber", body, rows, F.huber_loss, wanted),
    Case("sum", body, rows, of_sum, wanted),
    Case("binary", body, rows, F.binary_cross_entropy_with_logits, chances),
    Case("nll", lambda: nn.Sequential(body(), nn.LogSoftmax(-1)), rows, F.nll_loss, classes),
    Case(
        "kl",
        lambda: nn.Sequential(body(), nn.LogSoftmax(-1)),
        rows,
        lambda y, t: F.kl_div(y, t, reduction="batchmean"),
        lambda n: chances(n).softmax(-1),
    ),
    Case("soft_targets", body, rows, F.cross_entropy, lambda n: chances(n).softmax(-1)),
    Case("class_weights", body, rows, weighted, classes),
    Case("ignored_rows", body, rows, F.cross_entropy, classes, later_target=some_ignored),
    Case("tokens", body, steps, of_tokens, tokens, later_target=padded),
    Case(
        "flattened_target",
        body,
        steps,
        of_a_row,
        lambda n: tokens(n).flatten(),
        expect=Refused(
            ("batch_size (16) to match", "(32)", "a batch of 4 samples"),
            ("row for each", "flatten it in loss_fn"),
        ),
    ),
    Case("tokens_padded_example", body, steps, of_tokens, padded),
    Case("tokens_and_z", body, steps, tokens_and_z, tokens, later_target=padded, quick=True),
    Case("tokens_and_z_padded_example", body, steps, tokens_and_z, padded),
    Case("smoothed", body, steps, smoothed, tokens, later_target=padded),
    Case("masked_mean", body, steps, masked_mean, mask_target),
    Case("selected", body, steps, selected, padded),
    Case(
        "two_paddings",
        body,
        steps,
        two_heads,
        lambda n: (tokens(n), tokens(n)),
        later_target=lambda n: (padded(n), padded(n)),
    ),
    Case("regularised", body, rows, regularised, classes),
    Case("constant_term", body, steps, constant_term, tokens, later_target=padded),
    Case("of_each", body, steps, of_each, tokens, later_target=padded),
    Case("ctc", body, steps, ctc, ctc_target, later_target=ctc_later, manners=FP32_ONLY),
    not_of_parts("root", root, wanted, quick=True),
    not_of_parts("contrastive", contrastive, wanted),
    not_of_parts("covariance", covariance, wanted),
    not_of_parts("dice", dice, chances),
    not_of_parts("largest", largest, wanted),
    not_of_parts("perplexity", perplexity, classes),
    Case(
        "root_in_one_piece",
        body,
        rows,
        root_of_mean,
        wanted,
        microbatches=1,
        manners=({}, {"precision": "bf16"}),
        expect=RefusedAtStep(
            lambda: rows(8), ("micro-batch",), lambda: wanted(8), arguments={"microbatches": 4}
        ),
    ),
    Case(
        "balancing",
        Balanced,
        lambda n: (rows(n), classes(n)),
        sizes=(8,),
        manners=FP32_ONLY,
        expect=refused("micro-batches"),
    ),
    Case(
        "none",
        body,
        rows,
        expect=Refused(("loss",), ("loss_fn", "--mode infer"), "--mode infer", False, "whole"),
    ),
    Case(
        "misspelt",
        body,
        rows,
        hooks={"loss_function": F.cross_entropy},
        expect=Refused(("loss_function",), ("loss_fn",), at_line=False),
    ),
    Case(
        "logits_and_loss",
        NoLoss,
        lambda n: (rows(n), classes(n)),
        expect=Refused(("loss",), ("loss_fn", "output[1]"), at_line=False),
    ),
    Case(
        "per_sample",
        body,
        rows,
        lambda y, t: F.cross_entropy(y, t, reduction="none"),
        classes,
        expect=Refused(("loss",), (".mean()", ".sum()"), at_line=False),
    ),
)
