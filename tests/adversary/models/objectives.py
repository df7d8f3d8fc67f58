"""Losses of several parts, with state of their own, and over nests of outputs."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from adversary.case import FP32_ONLY, Case, Refused
from adversary.inputs import classes, rows, steps, tokens
from torch import Tensor, nn

IGNORED = -100


class Heads(NamedTuple):
    """A NamedTuple in which a dataclass, a dict and None lie."""

    logits: Tensor
    more: object
    nothing: Tensor | None = None


@dataclass
class Inner:
    boxes: Tensor
    scores: dict[str, Tensor]
    sizes: tuple[int, ...] = (3, 2)


@dataclass(frozen=True)
class Frozen:
    logits: Tensor
    inner: Inner


@dataclass
class Later:
    """A field that the constructor does not take."""

    logits: Tensor
    doubled: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.doubled = self.logits * 2


Old = namedtuple("Old", "logits hidden")


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.boxes = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 4)

    def hidden(self, x: Tensor) -> Tensor:
        return self.first(x).tanh()


class GivesNested(Two):
    def forward(self, x: Tensor) -> Heads:
        hidden = self.hidden(x)
        logits = self.last(hidden)
        inner = Inner(self.boxes(hidden), {"best": logits.amax(-1), "which": logits.argmax(-1)})
        return Heads(logits, {"inner": inner, "list": [hidden, (logits > 0,)]})


class GivesFrozen(Two):
    def forward(self, x: Tensor) -> Frozen:
        hidden = self.hidden(x)
        logits = self.last(hidden)
        return Frozen(logits, Inner(self.boxes(hidden), {"top": logits.amax(-1)}))


class GivesLater(Two):
    def forward(self, x: Tensor) -> Later:
        return Later(self.last(self.hidden(x)))


class GivesOld(Two):
    def forward(self, x: Tensor) -> Old:
        hidden = self.hidden(x)
        return Old(self.last(hidden), hidden)


class TakesKeywords(Two):
    """Nothing but keywords, one of them for training only."""

    def forward(
        self, *, pixels: Tensor, labels: Tensor | None = None, weight: Tensor | None = None
    ) -> dict[str, Tensor]:
        logits = self.last(self.hidden(pixels))
        found = {"logits": logits}
        if labels is not None:
            losses = F.cross_entropy(logits, labels, reduction="none")
            found["loss"] = (losses if weight is None else losses * weight).mean()
        return found


class Decides(Two):
    """Booleans and integers only."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.last(self.hidden(x))
        return logits.argmax(-1), (logits > 0).any(-1)


class Body(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.hidden(x))


class OfSteps(Body):
    pass


class Detector(Two):
    """Classes and boxes."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.hidden(x)
        return {"classes": self.last(hidden), "boxes": self.boxes(hidden)}


class WithLogit(nn.Module):
    """A learnt temperature in the model, used in its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(6, 4), nn.Linear(5, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        image, text = F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1)
        return image, text, self.scale.exp()


WEIGHTS = torch.tensor([0.2, 1.0, 3.0])
TEACHER = nn.Linear(3, 3).requires_grad_(False)
with torch.no_grad():
    TEACHER.weight.copy_(torch.eye(3) * 2)
    TEACHER.bias.zero_()
CRITERION = nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1, ignore_index=1)


def weighted_smoothed(logits: Tensor, target: Tensor) -> Tensor:
    """Class weights, smoothing and an ignored index at once."""
    return CRITERION(logits, target)


def of_tokens_weighted(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.mT, target, weight=WEIGHTS, ignore_index=IGNORED)


def focal(logits: Tensor, target: Tensor) -> Tensor:
    losses = F.cross_entropy(logits, target, reduction="none")
    return ((1 - (-losses).exp()) ** 2 * losses).mean()


def focal_of_counted(logits: Tensor, target: Tensor) -> Tensor:
    """Divided by the positives of the batch, as detectors do."""
    hot = F.one_hot(target, 3).float()
    losses = F.binary_cross_entropy_with_logits(logits, hot, reduction="none")
    return losses.sum() / (target > 0).sum().clamp(min=1)


def detected(output: Mapping[str, Tensor], target: tuple[Tensor, Tensor]) -> Tensor:
    """Classes over all, boxes over the positives."""
    classes, boxes = target
    found = F.smooth_l1_loss(output["boxes"], boxes, reduction="none").sum(-1)
    positive = (classes > 0).float()
    return F.cross_entropy(output["classes"], classes) + 2 * (
        found * positive
    ).sum() / positive.sum().clamp(min=1)


def distilled(logits: Tensor, target: Tensor) -> Tensor:
    soft = F.kl_div(
        (logits / 2).log_softmax(-1),
        (TEACHER(logits.detach()) / 2).softmax(-1),
        reduction="batchmean",
    )
    return 0.5 * F.cross_entropy(logits, target) + 0.5 * 4 * soft


def triplet(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    return F.triplet_margin_loss(output, *target)


def margins(output: Tensor, target: Tensor) -> Tensor:
    return F.multi_margin_loss(output, target, weight=WEIGHTS) + F.soft_margin_loss(
        output.amax(-1), (target > 0) * 2.0 - 1
    )


def gaussian(output: Tensor, target: Tensor) -> Tensor:
    likely = (output[:, 0] - target).square() * (-output[:, 1]).exp() + output[:, 1]
    return likely.mean() / 2 + F.poisson_nll_loss(output[:, 2], target.abs())


def checked(output: Tensor, target: Tensor) -> Tensor:
    """torch looks whether any variance is negative."""
    return F.gaussian_nll_loss(output[:, 0], target, output[:, 1].exp())


def clip(output: tuple[Tensor, Tensor, Tensor], _: object) -> Tensor:
    image, text, scale = output
    scores = scale * image @ text.t()  # refused: clip
    labels = torch.arange(len(image))
    return (F.cross_entropy(scores, labels) + F.cross_entropy(scores.t(), labels)) / 2


def flooded(output: Tensor, target: Tensor) -> Tensor:
    """The example lies above the level; micro-batches of later training do not all."""
    return (F.cross_entropy(output, target) - 0.05).abs() + 0.05  # refused: flooded


def flooded_tokens(output: Tensor, target: Tensor) -> Tensor:
    kept = (target != 0).float()
    wrong = F.cross_entropy(output, target, reduction="none") * kept
    level = wrong.sum() / kept.sum().clamp(min=1) - 0.05
    return level.abs() + 0.05  # refused: flooded_tokens


def free_bits(output: Tensor, _: Tensor) -> Tensor:
    spent = output.square().mean(0)
    return spent.clamp(min=1e-3).sum()  # refused: free_bits


def capped(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target).clamp(max=50.0)  # refused: capped


def worse_of_two(output: Tensor, target: Tensor) -> Tensor:
    one, other = F.cross_entropy(output, target), output.square().mean()
    return torch.maximum(one, other)  # refused: worse_of_two


def above_a_margin(output: Tensor, _: Tensor) -> Tensor:
    return F.relu(output.square().mean() - 1e-4)  # refused: above_a_margin


def chosen_by_level(output: Tensor, target: Tensor) -> Tensor:
    loss = F.cross_entropy(output, target)
    return torch.where(loss > 0.05, loss, 2 * loss - 0.05)  # refused: chosen_by_level


def bounded_where_it_lies(output: Tensor, target: Tensor) -> Tensor:
    """Bounds of each sample, and such of the mean as it never meets."""
    each = output.square().sum(1).clamp(min=0.5, max=2.0).mean()
    return F.relu(F.mse_loss(output[:, 0], target.float())) + each.abs().clamp(min=1e-8)


def masked(output: Tensor, target: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Squares, and which of them count."""
    wanted, counts = target
    return F.mse_loss(output, wanted, reduction="none"), counts


def where_any_counts(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    """Zero for a mini-batch in which nothing counts."""
    losses, counts = masked(output, target)
    number = counts.float().sum()
    total = (losses * counts).sum()
    return 0.5 * torch.where(number > 0, total / number.clamp(min=1), 0.0)


def where_none_counts(output: Tensor, target: Tensor) -> Tensor:
    """The same of classes; torch's own mean over none of them is nan."""
    number = (target != IGNORED).sum()
    loss = F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=IGNORED)
    return torch.where(number == 0, output.sum() * 0, loss) + 1e-2 * output.square().mean()


def of_one_at_least(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    losses, counts = masked(output, target)
    number = counts.sum()
    total = (losses * counts).sum()
    return total / torch.maximum(number, torch.ones(())) + total / torch.where(
        number > 0, number, 1
    )


def of_selected(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    losses, counts = masked(output, target)
    return losses[counts].mean() + F.l1_loss(output[counts], target[0][counts])


def of_selected_elements(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    losses, counts = masked(output, target)
    apart = F.l1_loss(output.masked_select(counts), target[0].masked_select(counts))
    return losses.masked_select(counts).mean() + apart


def of_first_selected(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    """The example has fewer."""
    losses, counts = masked(output, target)
    return losses[counts][:64].mean()  # refused: of_first_selected


def not_nan(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    losses, counts = masked(output, target)
    return losses.where(counts, float("nan")).nanmean()  # refused: not_nan


def above_nothing(output: Tensor, target: Tensor) -> Tensor:
    """The logistic loss is negative where targets lie outside of [0, 1]."""
    return F.relu(F.binary_cross_entropy_with_logits(output, target))  # refused: above_nothing


def above_nothing_of_classes(output: Tensor, target: Tensor) -> Tensor:
    """Such targets it never has."""
    hot = F.one_hot(target, 3).float()
    return F.relu(F.binary_cross_entropy_with_logits(output, hot)) + F.relu(
        F.cross_entropy(output, target)
    )


def switched_off(output: Tensor, target: Tensor) -> Tensor:
    loss = F.cross_entropy(output, target)
    return loss * (loss > 1e-3)  # refused: switched_off


def of_hard_ones(output: Tensor, target: Tensor) -> Tensor:
    """The example's are all of them; those that are learnt soon are not."""
    losses = F.cross_entropy(output, target, reduction="none")
    return losses[losses > 1e-3].mean()  # refused: of_hard_ones


def of_unsure_ones(output: Tensor, target: Tensor) -> Tensor:
    losses = F.cross_entropy(output, target, reduction="none")
    unsure = (losses.detach() > 1e-3).float()  # refused: of_unsure_ones
    return (losses * unsure).sum() / unsure.sum().clamp(min=1)


def of_the_best_two(output: Tensor, target: Tensor) -> Tensor:
    """Two of every sample, whatever the model computes."""
    best = (output >= output.topk(2).values[:, -1:]).float()
    return (output.square() * best).sum() / best.sum() + F.cross_entropy(output, target)


def of_the_first(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output[:400], target[:400])  # refused: of_the_first


def of_the_first_by_mask(output: Tensor, target: Tensor) -> Tensor:
    first = torch.arange(len(output)) < 500  # refused: of_the_first_by_mask
    return (F.cross_entropy(output, target, reduction="none") * first).mean()


def over_at_least(output: Tensor, target: Tensor) -> Tensor:
    losses = F.cross_entropy(output, target, reduction="none")
    return losses.sum() / max(len(output), 500)  # refused: over_at_least


def of_the_first_positives(output: Tensor, target: Tensor) -> Tensor:
    rank = (target > 0).long().cumsum(0)
    losses = F.cross_entropy(output, target, reduction="none")
    return (losses * (rank < 700)).mean()  # refused: of_the_first_positives


def signed_by_turns(output: Tensor, target: Tensor) -> Tensor:
    """The same for micro-batches that begin at even places."""
    signs = torch.arange(len(output)) % 2 * 2.0 - 1  # refused: signed_by_turns
    losses = F.cross_entropy(output, target, reduction="none")
    return (losses * signs).mean()


def both_sorted(output: Tensor, target: Tensor) -> Tensor:
    """At first every output lies below every target, where their order does not matter."""
    wanted = 9 + target.float().sort().values  # refused: both_sorted
    return (output[:, 0].sort().values - wanted).abs().mean()  # refused: both_sorted


def where_any_is_valid(output: Tensor, target: Tensor) -> Tensor:
    """Negative targets are ignored, as torch takes no others below zero."""
    loss = F.cross_entropy(output, target, ignore_index=-1)
    return torch.where((target >= 0).any(), loss, 0)


def with_hook(output: Tensor, target: Tensor) -> Tensor:
    loss = F.cross_entropy(output, target, ignore_index=-1)
    if loss.requires_grad:
        loss.register_hook(lambda gradient: 3 * gradient)
    return loss + 0.1 * output.square().mean()


def with_bounding_hook(output: Tensor, target: Tensor) -> Tensor:
    loss = F.cross_entropy(output, target)
    if loss.requires_grad:
        loss.register_hook(lambda gradient: gradient.clamp(max=0.5))  # refused: with_bounding_hook
    return loss


def with_hook_always(output: Tensor, target: Tensor) -> Tensor:
    loss = F.cross_entropy(output, target)
    loss.register_hook(lambda gradient: 3 * gradient)  # refused: with_hook_always
    return loss


def weighted_by_hand(output: Tensor, target: Tensor) -> Tensor:
    """What F.cross_entropy does with these weights and this index, and a mean."""
    total = F.cross_entropy(output, target, weight=WEIGHTS, ignore_index=1, reduction="sum")
    return total / WEIGHTS[target][target != 1].sum()


def of_each_length(output: Tensor, lengths: Tensor) -> Tensor:
    """The mean over each sample's own steps, and one over all of them."""
    mask = (torch.arange(4) < lengths[:, None]).float()
    losses = output.square().mean(-1) * mask
    return (losses.sum(1) / mask.sum(1)).mean() + losses.sum(1).mean() / mask.sum(1).mean()


def mean_by_mean(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    losses, counts = masked(output, target)
    return (losses * counts).mean() / counts.float().mean()


def each_step_apart(output: Tensor, target: Tensor) -> Tensor:
    """A mean of means, each over the targets of its step that count."""
    steps = [F.cross_entropy(output[:, n], target[:, n], ignore_index=IGNORED) for n in range(4)]
    return torch.stack(steps).mean()


def variance(output: Tensor, target: Tensor) -> Tensor:
    """A penalty of the deviation over the batch, as VICReg has it."""
    deviation = output.var(0).sqrt()  # refused: variance
    return F.cross_entropy(output, target) + (1 - deviation).relu().mean()


def log_of_sum(output: Tensor, target: Tensor) -> Tensor:
    chosen = output.gather(1, target[:, None]).mean()
    return output.logsumexp(0).sum() - chosen  # refused: log_of_sum


def with_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Entropy of the mean prediction."""
    mean = output.softmax(-1).mean(0)
    return F.cross_entropy(output, target) + (mean * mean.log()).sum()  # refused: entropy_of_mean


def explained(output: Tensor, target: Tensor) -> Tensor:
    """One minus R squared: divided by a number of the targets."""
    rest = (output[:, 0] - target).square().sum()
    return rest / target.square().sum()


def over_rows(output: Tensor, target: Tensor) -> Tensor:
    """A mean of the samples' own roots."""
    return (output - target[:, None]).square().sum(-1).add(1e-6).sqrt().mean()


def halves(output: Tensor, target: Tensor) -> Tensor:
    """One loss of the first half of the batch, another of the second."""
    half = len(output) // 2
    first = F.cross_entropy(output[:half], target[:half])  # refused: halves
    return first + output[half:].square().mean()  # refused: halves


def number_of_samples(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="sum") / len(output)


def half_of_samples(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="sum") / (target.shape[0] * 0.5)


def fixed_number(output: Tensor, target: Tensor) -> Tensor:
    """A sum by a number that is no count of the batch."""
    return F.cross_entropy(output, target, reduction="sum") / 32


def root_of_number(output: Tensor, target: Tensor) -> Tensor:
    summed = F.cross_entropy(output, target, reduction="sum")
    return summed / len(output) ** 0.5  # refused: root_of_number


def smooth_mask(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    """Weights for the samples that sum to anything."""
    labels, weight = target
    return (F.cross_entropy(output, labels, reduction="none") * weight).sum() / weight.sum()


def two_losses(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(output, target), output.square().mean()


def averaged(output: Tensor, target: Tensor) -> Tensor:
    """torch.mean of a stack of losses."""
    parts = [F.cross_entropy(output * k, target) for k in (1, 2, 3)]
    return torch.stack(parts).mean()


def numbers(samples: int) -> Tensor:
    return torch.randn(samples)


def padded(samples: int) -> Tensor:
    found = tokens(samples)
    lengths = torch.randint(0, 5, (samples, 1))
    lengths[0] = 4
    return found.masked_fill(torch.arange(4) >= lengths, IGNORED)


def some_invalid(samples: int) -> Tensor:
    """Of which some micro-batches have no others."""
    return torch.where(torch.arange(samples) < samples // 2, -1, classes(samples))


def of_steps(samples: int) -> Tensor:
    return torch.randint(1, 5, (samples,))


def logits_of(output: object, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits, target)


def with_boxes(samples: int) -> tuple[Tensor, Tensor]:
    return classes(samples), torch.randn(samples, 4)


def with_counts(samples: int) -> tuple[Tensor, Tensor]:
    """Some of them all, one sample none."""
    counts = torch.rand(samples, 3) < 0.6
    counts[0], counts[samples // 2 :] = True, False  # of a single sample none
    return torch.randn(samples, 3), counts


def with_some(samples: int) -> tuple[Tensor, Tensor]:
    counts = torch.rand(samples, 3) < 0.6
    counts[:, 0] = True
    return torch.randn(samples, 3), counts


def shares(samples: int) -> Tensor:
    return torch.rand(samples, 3)


def simple(name: str, loss: object, target: object = classes, **options: object) -> Case:
    return Case(name, Body, rows, loss, target, **options)


def not_of_parts(
    name: str,
    loss: object,
    target: object = classes,
    model: object = Body,
    inputs: object = rows,
) -> Case:
    expect = Refused(
        ("micro-batches",),
        ("--per-microbatch", "--microbatches 1"),
        accept="--per-microbatch",
    )
    return Case(name, model, inputs, loss, target, sizes=(8,), manners=FP32_ONLY, expect=expect)


CASES = (
    Case("nested", GivesNested, rows, logits_of, classes, quick=True),
    Case("nested_inference", GivesNested, rows, options="--mode infer"),
    Case("frozen", GivesFrozen, rows, logits_of, classes),
    Case("later_field", GivesLater, rows, logits_of, classes),
    Case("old_named_tuple", GivesOld, rows, logits_of, classes),
    Case("decisions_only", Decides, rows, options="--mode infer"),
    Case("keywords_only", TakesKeywords, lambda n: {"pixels": rows(n), "labels": classes(n)}),
    Case(
        "keywords_with_weights",
        TakesKeywords,
        lambda n: {"pixels": rows(n), "labels": classes(n), "weight": torch.rand(n)},
    ),
    Case(
        "keywords_inference", TakesKeywords, lambda n: {"pixels": rows(n)}, options="--mode infer"
    ),
    simple("weighted_smoothed", weighted_smoothed),
    Case("tokens_weighted", OfSteps, steps, of_tokens_weighted, tokens, later_target=padded),
    simple("focal", focal),
    simple("focal_of_counted", focal_of_counted),
    Case("detector", Detector, rows, detected, with_boxes),
    simple("distilled", distilled),
    simple("triplet", triplet, lambda n: (torch.randn(n, 3), torch.randn(n, 3)), manners=FP32_ONLY),
    simple("margins", margins),
    simple("gaussian", gaussian, numbers, manners=FP32_ONLY),
    simple("checked", checked, numbers, manners=FP32_ONLY),
    simple("bounded_where_it_lies", bounded_where_it_lies),
    simple("explained", explained, numbers),
    simple("over_rows", over_rows, numbers),
    simple("number_of_samples", number_of_samples),
    simple("half_of_samples", half_of_samples),
    simple("fixed_number", fixed_number),
    simple("weights_of_samples", smooth_mask, lambda n: (classes(n), torch.rand(n))),
    simple("averaged", averaged),
    simple(
        "two_losses",
        two_losses,
        expect=Refused(
            ("returns a tuple where a loss is expected",),
            ("return the loss alone", "outputs of the model"),
            at_line=False,
        ),
    ),
    not_of_parts("clip", clip, lambda n: None, WithLogit, lambda n: (rows(n), torch.randn(n, 5))),
    not_of_parts("variance", variance),
    not_of_parts("log_of_sum", log_of_sum),
    not_of_parts("entropy_of_mean", with_entropy),
    not_of_parts("halves", halves),
    not_of_parts("root_of_number", root_of_number),
    not_of_parts("flooded", flooded),
    not_of_parts("flooded_tokens", flooded_tokens),
    not_of_parts("free_bits", free_bits),
    not_of_parts("capped", capped),
    not_of_parts("worse_of_two", worse_of_two),
    not_of_parts("above_a_margin", above_a_margin),
    not_of_parts("chosen_by_level", chosen_by_level),
    simple("where_any_counts", where_any_counts, with_some, later_target=with_counts),
    Case("where_none_counts", OfSteps, steps, where_none_counts, tokens, later_target=padded),
    simple("of_one_at_least", of_one_at_least, with_some, later_target=with_counts),
    simple("of_selected", of_selected, with_some, later_target=with_counts),
    simple("of_selected_elements", of_selected_elements, with_some, later_target=with_counts),
    simple("above_nothing_of_classes", above_nothing_of_classes),
    not_of_parts("of_first_selected", of_first_selected, with_some),
    not_of_parts("not_nan", not_nan, with_some),
    not_of_parts("above_nothing", above_nothing, shares),
    not_of_parts("switched_off", switched_off),
    Case(
        "of_the_first",
        Body,
        rows,
        of_the_first,
        classes,
        sizes=(8, 500),
        manners=FP32_ONLY,
        expect=Refused(
            ("takes the samples of a batch together",),
            ("--per-microbatch", "--microbatches 1"),
            accept="--per-microbatch",
        ),
    ),
    not_of_parts("of_hard_ones", of_hard_ones),
    not_of_parts("of_unsure_ones", of_unsure_ones),
    simple("of_the_best_two", of_the_best_two, manners=FP32_ONLY),
    simple("where_any_is_valid", where_any_is_valid, later_target=some_invalid),
    simple("with_hook", with_hook, later_target=some_invalid),
    simple("weighted_by_hand", weighted_by_hand),
    Case("of_each_length", OfSteps, steps, of_each_length, of_steps),
    simple("mean_by_mean", mean_by_mean, with_some, later_target=with_counts),
    Case("each_step_apart", OfSteps, steps, each_step_apart, tokens, later_target=padded),
    simple(
        "with_bounding_hook",
        with_bounding_hook,
        expect=Refused(("a hook on gradients",), ("--microbatches 1",), accept="--microbatches 1"),
    ),
    simple(
        "with_hook_always",
        with_hook_always,
        expect=Refused(("doesn't require gradient",), ("requires_grad",)),
    ),
    simple(
        "over_at_least",
        over_at_least,
        expect=Refused(("micro-batches",), ("--per-microbatch", "--microbatches 1")),
    ),
    *(
        simple(
            rule.__name__,
            rule,
            sizes=(8, 600),
            manners=FP32_ONLY,
            expect=Refused(
                (cause,), ("--per-microbatch", "--microbatches 1"), accept="--per-microbatch"
            ),
        )
        for rule, cause in (
            (of_the_first_by_mask, "tells samples apart by their numbers"),
            (of_the_first_positives, "sets a bound to what is taken over the samples"),
        )
    ),
    *(
        simple(
            rule.__name__,
            rule,
            sizes=(8, 13),
            manners=FP32_ONLY,
            expect=Refused(
                ("micro-batches",),
                ("--per-microbatch", "--microbatches 1"),
                accept="--microbatches 1",
                reference="whole",
            ),
        )
        for rule in (signed_by_turns, both_sorted)
    ),
)
