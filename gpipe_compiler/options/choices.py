"""What the command line offers of parts that need torch, which takes seconds to import.

So a graph from elsewhere is planned, and `--help` told, without it.
"""

from __future__ import annotations

from enum import Enum

SEARCH_SECONDS = 300.0
"""That the search for the best settings takes, about, at most."""

SHOWN_HOLDERS = 8
"""Of what is in memory at a peak, the largest that are shown."""


class Frontend(Enum):
    """The ways to trace a model, by the name a user types."""

    AUTO = "auto"
    FX = "fx"
    EXPORT = "export"
    DYNAMO = "dynamo"


class LossChoice(Enum):
    """What a model is trained on.

    MODEL is the file's `loss_fn`, or the loss that the model returns; SUM_OF_SQUARES that of the
    model's outputs, whatever the file and the model offer: for experiments.
    """

    MODEL = "model"
    SUM_OF_SQUARES = "sum-of-squares"


class Objective(Enum):
    """What is to be short.

    STEP: the simulated step. BOTTLENECK: the longest stage, where a stage takes as long as its
    compute and all its transfers, in and out, forward and backward, in turn.
    """

    STEP = "step"
    BOTTLENECK = "bottleneck"
