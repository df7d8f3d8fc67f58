"""Losses that take several samples, one after another, together: pairs, triples, every third."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from adversary.case import Case, Refused, RefusedAtStep
from adversary.inputs import classes, rows
from adversary.layers import Two
from torch import Tensor

TWELVE = 12
"""Samples of an example whose micro-batches begin at multiples of three."""


def neighbours(output: Tensor, target: Tensor) -> Tensor:
    """Of three samples in a micro-batch the third would be compared with each of the pair."""
    return F.mse_loss(output[0::2], output[1::2])  # refused: neighbours_one_by_one


def ranked(output: Tensor, target: Tensor) -> Tensor:
    better, worse = output[0::2, 0], output[1::2, 0]
    return F.margin_ranking_loss(better, worse, torch.ones_like(better), margin=0.5)


def preferred(output: Tensor, target: Tensor) -> Tensor:
    scores = output.view(-1, 2, 3).sum(-1)
    return -F.logsigmoid(scores[:, 0] - scores[:, 1]).mean()


def every_other(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output[::2], target[::2])


def every_third(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output[::3], target[::3])


def third_by_number(output: Tensor, target: Tensor) -> Tensor:
    counted = torch.arange(len(output)) % 3 == 0  # refused: third_by_number
    losses = F.cross_entropy(output, target, reduction="none")
    return (losses * counted).mean()


OF_TWELVE = {"example_inputs": lambda: rows(TWELVE), "example_target": lambda: classes(TWELVE)}


def torn(samples: int, words: str) -> RefusedAtStep:
    return RefusedAtStep(
        lambda: rows(samples),
        (words, "groups.py", "tear them apart"),
        lambda: classes(samples),
        ("drop_last=True", "microbatches=1"),
    )


CASES = (
    Case("neighbours", Two, rows, neighbours, classes, sizes=(8, 10, 6, 2), quick=True),
    Case(
        "neighbours_at_the_default",
        Two,
        rows,
        neighbours,
        classes,
        microbatches=None,
        sizes=(8, 14, 2),
    ),
    Case(
        "neighbours_one_by_one",
        Two,
        rows,
        neighbours,
        classes,
        microbatches=8,
        sizes=(8, 10),
        expect=Refused(
            ("samples are taken 2 at a time", "micro-batches of 1"),
            ("a multiple of that", "makes 4 or fewer"),
            accept="--microbatches 4",
            reference="whole",
        ),
    ),
    Case("ranked", Two, rows, ranked, classes, sizes=(8, 10, 6)),
    Case("preferred", Two, rows, preferred, classes, sizes=(8, 10, 2)),
    Case(
        "every_other",
        Two,
        rows,
        every_other,
        classes,
        sizes=(8, 10, 3),
        expect=torn(13, "takes samples 2 at a time"),
    ),
    Case(
        "every_third",
        Two,
        rows,
        every_third,
        classes,
        hooks=OF_TWELVE,
        sizes=(12, 15, 3),
        expect=torn(13, "takes samples 3 at a time"),
    ),
    Case(
        "third_by_number",
        Two,
        rows,
        third_by_number,
        classes,
        hooks=OF_TWELVE,
        sizes=(12, 13),
        expect=Refused(
            ("tells samples apart by their numbers",),
            ("--loss-over batch", "--microbatches 1"),
            accept="--loss-over batch",
            reference="whole",
        ),
    ),
)
