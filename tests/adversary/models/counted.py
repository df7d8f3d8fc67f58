"""Counts that Python gets as numbers, adds up, or turns into a factor."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
import torch.nn.functional as F
from adversary.case import Case, Refused
from adversary.inputs import classes, rows, steps, tokens
from adversary.layers import Two
from torch import Tensor, nn

IGNORED = 2


def total(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, ignore_index=IGNORED, reduction="sum")


def of_each(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="none")


def counted(target: Tensor) -> Tensor:
    return (target != IGNORED).sum()


def by_number(output: Tensor, target: Tensor) -> Tensor:
    return total(output, target) / counted(target).item()


def by_one_at_least(output: Tensor, target: Tensor) -> Tensor:
    return total(output, target) / max(counted(target).item(), 1)


def by_one_at_least_as_a_tensor(output: Tensor, target: Tensor) -> Tensor:
    return total(output, target) / max(1.0, counted(target))


def by_their_own_sizes(output: Tensor, target: Tensor) -> Tensor:
    one, other = of_each(output, target).mean(), output.square().mean()
    return one / one.detach() + other / other.detach()  # refused: by_their_own_sizes


def by_a_little_more(output: Tensor, target: Tensor) -> Tensor:
    return total(output, target) / (counted(target).item() + 1e-6)


def in_place(output: Tensor, target: Tensor) -> Tensor:
    loss = total(output, target)
    loss /= max(1, counted(target).item())
    return loss


def element_by_element(output: Tensor, target: Tensor) -> Tensor:
    number = max(counted(target).item(), 1)
    return (of_each(output, target) * (target != IGNORED) / number).sum()


def by_weights(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    labels, weights = target
    return (of_each(output, labels) * weights).sum() / weights.sum().item()


def by_shares_of_weights(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    labels, weights = target
    return torch.dot(of_each(output, labels), weights / weights.sum())


def by_places(output: Tensor, target: Tensor) -> Tensor:
    return total(output, target) / len((target != IGNORED).nonzero())


def by_equal_masks(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    values, there = target
    return F.mse_loss(output[there.bool()], values[there.bool()])


def by_what_was_written(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    values, there = target
    weights = torch.ones_like(output)
    weights[there == 0] = 0.25
    return ((output - values) ** 2 * weights).sum() / weights.sum()


def by_keywords(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    values, there = target
    off = torch.where(condition=there > 0, input=output - values, other=torch.zeros_like(output))
    return torch.sum(input=off.square()) / torch.count_nonzero(input=there)


def by_what_is_selected(output: Tensor, target: Tensor) -> Tensor:
    found = output[target != IGNORED]
    wanted = target[target != IGNORED]
    return F.cross_entropy(found, wanted, reduction="sum") / found.shape[0]


def at_places(output: Tensor, target: Tensor) -> Tensor:
    """As in detectors: the places of what is found."""
    places = torch.nonzero(target != IGNORED).squeeze(1)
    return of_each(output[places], target[places]).sum() / max(places.numel(), 1)


def at_places_in_steps(output: Tensor, target: Tensor) -> Tensor:
    sample, step = torch.where(target != IGNORED)
    return of_each(output[sample, step], target[sample, step]).mean()


def selected_twice(output: Tensor, target: Tensor) -> Tensor:
    """The mask is made for each of both."""
    found = output.reshape(-1, 3)[target.reshape(-1) != IGNORED]
    return of_each(found, target.reshape(-1)[target.reshape(-1) != IGNORED]).mean()


def by_several(output: Tensor, target: Tensor) -> Tensor:
    return total(output, target) / sum((target == number).sum().item() for number in range(2))


def by_levels(output: Tensor, target: Tensor) -> Tensor:
    """One number for the levels of a pyramid, of which some may find nothing."""
    levels = [(output[:, :3], target[:, :3]), (output[:, 3:], target[:, 3:])]
    found = sum((labels != IGNORED).sum() for _, labels in levels)
    losses = [total(scores.flatten(0, 1), labels.flatten()) for scores, labels in levels]
    return torch.stack(losses).sum() / found.clamp(min=1)  # type: ignore[union-attr]  # no int


def by_share(output: Tensor, target: Tensor) -> Tensor:
    return total(output, target) * (1 / (counted(target) + 1))


def by_root(output: Tensor, target: Tensor) -> Tensor:
    return total(output, target) / (counted(target).item() + 1) ** 0.5  # refused: by_root


def logged(output: Tensor, target: Tensor) -> Tensor:
    loss = F.cross_entropy(output, target)
    logging.debug("%f of %d", loss.item(), counted(target).item())
    return loss


def by_loss(output: Tensor, target: Tensor) -> Tensor:
    """Two losses of one size: their sum is a mean over samples, and its gradient is none."""
    one, other = F.cross_entropy(output, target), output.square().mean()
    return one + other * (one.item() / (other.item() + 1e-8))


def by_integer(output: Tensor, target: Tensor) -> Tensor:
    return total(output, target) / max(1, int(counted(target)))


def by_fraction(output: Tensor, target: Tensor) -> Tensor:
    return total(output, target) / max(1.0, float(counted(target)))


WEIGHTS = torch.tensor([0.5, 1.0, 3.0])


def in_fp32(output: Tensor, target: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return F.cross_entropy(output.float(), target, WEIGHTS, ignore_index=IGNORED)


def divided_in_fp32(output: Tensor, target: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        loss, number = total(output.float(), target), counted(target).clamp(min=1)
    return loss / number


@torch.autocast("cpu", enabled=False)
def several_in_fp32(output: Tensor, target: Tensor) -> Tensor:
    output = output.float()
    of_classes = F.cross_entropy(output, target, ignore_index=IGNORED, label_smoothing=0.1)
    return of_classes + 0.01 * output.logsumexp(-1).square().mean()


class LossInFp32(Two):
    """As in a decoder that is given its labels."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = super().forward(x)
        with torch.autocast(device_type=x.device.type, enabled=False):
            loss = F.cross_entropy(scores.float(), labels, ignore_index=IGNORED)
        return {"loss": loss, "scores": scores}


def product_in_fp32(output: Tensor, target: Tensor) -> Tensor:
    """Outside of the block, a product of matrices would be one of 16 bits."""
    with torch.autocast("cpu", enabled=False):
        near = output.float() @ WEIGHTS.diag()
        return F.cross_entropy(near, target)


class HeadInFp32(Two):
    """The last layer too, whose scores are returned."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.body(x)
        with torch.autocast("cpu", enabled=False):
            scores = self.last(hidden.float())
            loss = F.cross_entropy(scores, labels, ignore_index=IGNORED)
            loss = loss + 0.01 * scores.logsumexp(-1).square().mean()
        return {"loss": loss, "scores": scores}


class CriterionInFp32(Two):
    """The loss is a module, and all that is returned."""

    def __init__(self) -> None:
        super().__init__()
        self.criterion = nn.CrossEntropyLoss(WEIGHTS.clone(), ignore_index=IGNORED)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.body(x)
        with torch.autocast("cpu", enabled=False):
            return {"loss": self.criterion(self.last(hidden.float()), labels)}


class Guided(Two):
    """An input of one number, read as such."""

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return super().forward(x) * scale.item() + 1.5 * (scale.item() - 1)


class Cooled(Two):
    """A buffer that training moves on, read as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("temperature", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.temperature.mul_(0.9)
        return super().forward(x) / self.temperature.item()


class Sharpened(Two):
    """As in CLIP; its scale is read as a number, which has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * min(self.scale.exp().item(), 100.0) + self.scale


class Routed(Two):
    """Each sample goes through one of the layers, and none asks whether it has any."""

    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.asks, self.route = asks, nn.Linear(6, 3)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        chosen, routed = self.route(x).argmax(-1), torch.zeros_like(x)
        for number, layer in enumerate(self.layers):
            mask = chosen == number
            if self.asks:
                if mask.any():  # refused: asks
                    routed[mask] = layer(x[mask])
            else:
                routed[mask] = layer(x[mask])
        return super().forward(routed)


def values_there(samples: int) -> tuple[Tensor, Tensor]:
    """Numbers, and 1 for those that are known."""
    there = torch.randint(2, (samples, 3))
    there[:, 0] = 1
    return torch.randn(samples, 3), there


def simple(loss: Callable[..., Tensor], **options: object) -> Case:
    return Case(loss.__name__, Two, rows, loss, classes, **options)


def not_of_parts(*cause: str) -> Refused:
    return Refused(cause, ("--loss-over batch",), accept="--loss-over batch", reference="whole")


OVER_BATCH = ({}, {"remat": "full"})

CASES = (
    simple(by_number),
    simple(by_one_at_least, quick=True),
    simple(by_one_at_least_as_a_tensor),
    simple(
        by_their_own_sizes,
        expect=not_of_parts("in its loss or in a backward"),
        manners=OVER_BATCH,
    ),
    simple(by_a_little_more),
    simple(in_place),
    simple(element_by_element),
    Case("by_weights", Two, rows, by_weights, lambda n: (classes(n), torch.rand(n))),
    Case(
        "by_shares_of_weights",
        Two,
        rows,
        by_shares_of_weights,
        lambda n: (classes(n), torch.rand(n)),
    ),
    simple(by_places),
    *(
        Case(loss.__name__, Two, rows, loss, values_there)
        for loss in (by_equal_masks, by_what_was_written, by_keywords)
    ),
    simple(by_what_is_selected),
    simple(at_places),
    Case("at_places_in_steps", Two, steps, at_places_in_steps, tokens),
    Case("selected_twice", Two, steps, selected_twice, tokens),
    simple(by_several),
    Case("by_levels", Two, steps, by_levels, tokens),
    simple(by_share),
    simple(by_root, expect=not_of_parts("of a mean over the batch"), manners=OVER_BATCH),
    simple(logged),
    simple(
        by_loss,
        expect=Refused(
            ("takes the samples of a batch together",),
            ("--microbatches 1",),
            accept="--microbatches 1",
            at_line=False,
            reference="whole",
        ),
        manners=OVER_BATCH,
    ),
    simple(by_integer),
    simple(by_fraction),
    simple(in_fp32),
    simple(divided_in_fp32),
    simple(several_in_fp32),
    Case("loss_in_fp32", LossInFp32, lambda n: (rows(n), classes(n))),
    simple(product_in_fp32),
    Case("head_in_fp32", HeadInFp32, lambda n: (rows(n), classes(n))),
    Case("criterion_in_fp32", CriterionInFp32, lambda n: (rows(n), classes(n))),
    Case("guided", Guided, lambda n: (rows(n), torch.rand(()) + 1), F.cross_entropy, classes),
    Case("cooled", Cooled, rows, F.cross_entropy, classes),
    Case("sharpened", Sharpened, rows, F.cross_entropy, classes),
    Case("routed", lambda: Routed(asks=False), rows, F.cross_entropy, classes, manners=({},)),
    Case(
        "asks",
        lambda: Routed(asks=True),
        rows,
        F.cross_entropy,
        classes,
        expect=Refused(("decides by the values",), ("a mask that selects nothing",)),
    ),
)
