"""Losses divided by what counts, in batches of which the example has everything counted."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from adversary.case import ONE_PIECE_BF16, Case, Refused
from adversary.inputs import rows
from adversary.layers import Two
from torch import Tensor

CLASSES = 3


def classes(samples: int) -> Tensor:
    return torch.randint(CLASSES, (samples,))


def half_without(samples: int) -> Tensor:
    """No class for the first half of the samples, which are whole micro-batches."""
    return classes(samples).masked_fill(torch.arange(samples) < samples // 2, -1)


def without(samples: int) -> Tensor:
    """No class for any sample: gradients are zeros in plain PyTorch, which move on a momentum."""
    return torch.full((samples,), -1)


def of_each(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target.clamp(min=0), reduction="none")


def one_more_for_none(output: Tensor, target: Tensor) -> Tensor:
    counted = (target >= 0).float()
    number = counted.sum()
    return (of_each(output, target) * counted).sum() / (number + (number == 0).float())


def one_for_none(output: Tensor, target: Tensor) -> Tensor:
    number = (target >= 0).sum()
    return (of_each(output, target) * (target >= 0)).sum() / torch.where(number == 0, 1, number)


def filled_for_none(output: Tensor, target: Tensor) -> Tensor:
    number = (target >= 0).sum().float()
    total = (of_each(output, target) * (target >= 0)).sum()
    return total / number.masked_fill(number == 0, 1.0)


def above_a_tensor(output: Tensor, target: Tensor) -> Tensor:
    total = (of_each(output, target) * (target >= 0)).sum()
    return total / torch.maximum((target >= 0).sum(), torch.tensor(1))


def zero_for_none(output: Tensor, target: Tensor) -> Tensor:
    number = (target >= 0).sum()
    mean = (of_each(output, target) * (target >= 0)).sum() / number.clamp(min=1)
    return torch.where(number > 0, mean, 0.0)


def nan_for_none(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, ignore_index=-1)


def by_found(output: Tensor, target: Tensor) -> Tensor:
    """As detectors have it: images without an object have a loss, too."""
    wanted = F.one_hot(target.clamp(min=0), CLASSES) * (target >= 0)[:, None]
    total = F.binary_cross_entropy_with_logits(output, wanted.float(), reduction="sum")
    return total / (target >= 0).sum()


def by_found_and_more(output: Tensor, target: Tensor) -> Tensor:
    number = (target >= 0).sum()
    return by_found(output, target) + 0.1 * (output.square().sum(1) / (2 * number)).sum()


def by_share_found(output: Tensor, target: Tensor) -> Tensor:
    found = (target >= 0).float()
    wanted = F.one_hot(target.clamp(min=0), CLASSES) * found[:, None]
    return F.binary_cross_entropy_with_logits(output, wanted) / found.mean()


def in_the_type_of_the_output(output: Tensor, target: Tensor) -> Tensor:
    counted = (target >= 0).to(dtype=output.dtype)
    mean = (of_each(output, target) * counted).sum() / counted.sum()
    return mean + 0.01 * output.logsumexp(-1).square().mean()


def in_its_type(output: Tensor, target: Tensor) -> Tensor:
    counted = (target >= 0).to(output.dtype)
    return (of_each(output, target) * counted).sum() / counted.sum().clamp(min=1)


def weighed(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    wanted, weights = target
    return (F.cross_entropy(output, wanted, reduction="none") * weights).sum() / weights.sum()


def with_weights(samples: int) -> tuple[Tensor, Tensor]:
    return classes(samples), torch.rand(samples) + 0.5


def with_signs(samples: int) -> tuple[Tensor, Tensor]:
    """Pairs that come to 0, but for the first one."""
    weights = torch.tensor([1.0, -1.0]).repeat(samples)[:samples]
    weights[0] = 2.5
    return classes(samples), weights


def small_weights(samples: int) -> tuple[Tensor, Tensor]:
    return classes(samples), torch.rand(samples) * 1e-4 + 1e-5


def all_but_ignored(output: Tensor, target: Tensor) -> Tensor:
    total = (of_each(output, target) * (target >= 0)).sum()
    return total / (len(target) - (target < 0).sum())


def all_but_padded(output: Tensor, target: Tensor) -> Tensor:
    """The label smoothing of Hugging Face's Trainer."""
    losses, target = -output.log_softmax(-1), target.unsqueeze(-1)
    padding = target.lt(0)
    of_class = losses.gather(-1, target.clamp(min=0)).masked_fill_(padding, 0.0)
    of_all = losses.sum(-1, keepdim=True).masked_fill_(padding, 0.0)
    number = padding.numel() - padding.long().sum()
    return 0.9 * of_class.sum() / number + 0.1 * of_all.sum() / (number * losses.shape[-1])


def all_but_padded_number(output: Tensor, target: Tensor) -> Tensor:
    total = (of_each(output, target) * (target >= 0)).sum()
    return total / (target.numel() - (target < 0).sum().item())


def all_but_some(output: Tensor, target: Tensor) -> Tensor:
    valid, special = target >= 0, target == 1
    total = (of_each(output, target) * (valid & ~special)).sum()
    return total / (valid.sum() - special.sum()).clamp(min=1)


def by_share(output: Tensor, target: Tensor) -> Tensor:
    mean = F.cross_entropy(output, target.clamp(min=0))
    return mean * ((target >= 0).sum() / len(target))  # refused: by_share


def by_root(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    wanted, valid = target
    total = (F.cross_entropy(output, wanted, reduction="none") * valid).sum()
    return total / valid.sum().float().square().sqrt()  # refused: by_root


def by_longest(output: Tensor, target: Tensor) -> Tensor:
    return (output.abs().sum(1) / target).sum() / target.max()  # refused: by_longest


def lengths(samples: int) -> Tensor:
    return torch.full((samples,), 4)


def all_valid(samples: int) -> tuple[Tensor, Tensor]:
    return classes(samples), torch.ones(samples, dtype=torch.bool)


class Returns(Two):
    """What is divided by a number of samples is returned beside the logits."""

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        output, found = super().forward(x), x[:, 0] > 0
        by_number = output.square().sum() / found.sum()
        return output, by_number, output.abs().mean() / found.float().mean()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        output, by_number, by_share = self.parts(x)
        return {"logits": output, "by_number": by_number, "by_share": by_share}


class Trains(Returns):
    """The same, of which it is trained on the sum."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        output, by_number, by_share = self.parts(x)
        metrics = {"by_number": by_number.detach(), "by_share": by_share.detach()}
        return {"loss": by_number + by_share, "logits": output, **metrics}


def all_found(samples: int) -> Tensor:
    return rows(samples).abs()


def half_found(samples: int) -> Tensor:
    found = rows(samples).abs()
    found[: samples // 2] *= -1
    return found


def returning(name: str, model: object, **options: object) -> Case:
    return Case(
        name,
        model,
        all_found,
        later_inputs=half_found,
        sizes=(8, 5, 4),
        manners=({}, {"microbatches": 3}),
        **options,
    )


REFUSED = Refused(
    ("a batch with other targets", "its 4 micro-batches put together"),
    ("--loss-over batch", "--microbatches 1", "--per-microbatch"),
    "--microbatches 1",
    reference="whole",
)


def exact(
    loss: Callable[..., Tensor],
    target: Callable[[int], object] = classes,
    later: Callable[[int], object] = half_without,
    *,
    name: str = "",
    quick: bool = False,
) -> Case:
    return Case(
        name or loss.__name__,
        Two,
        rows,
        loss,
        target,
        later_target=later,
        sizes=(8, 5, 4),
        quick=quick,
    )


def refused(loss: Callable[..., Tensor], target: Callable[[int], object] = classes) -> Case:
    ways = ({}, {"schedule": "1f1b", "remat": "full"}, ONE_PIECE_BF16)
    return Case(loss.__name__, Two, rows, loss, target, manners=ways, expect=REFUSED)


CASES = [
    exact(all_but_ignored),
    exact(all_but_padded),
    exact(all_but_padded_number),
    exact(all_but_some),
    exact(one_more_for_none),
    exact(one_for_none),
    exact(filled_for_none),
    exact(above_a_tensor),
    exact(zero_for_none),
    exact(zero_for_none, later=without, name="zero_for_all"),
    exact(nan_for_none, later=without, name="nan_for_all"),
    exact(in_the_type_of_the_output),
    exact(in_its_type),
    exact(by_found, quick=True),
    exact(by_found_and_more),
    exact(by_share_found),
    exact(weighed, with_weights, with_signs, name="by_signed"),
    exact(weighed, with_weights, small_weights, name="by_small"),
    returning("returned", Returns, options="--mode infer"),
    returning(
        "returned_beside_a_loss",
        Returns,
        loss=lambda output, target: F.cross_entropy(output["logits"], target),
        target=classes,
    ),
    returning("trained_on", Trains),
    refused(by_share),
    refused(by_root, all_valid),
    refused(by_longest, lengths),
]
