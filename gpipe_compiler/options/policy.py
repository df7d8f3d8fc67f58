"""How a pipeline is to train, as its user asks for it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from gpipe_compiler.errors import UsageError
from gpipe_compiler.options.choices import Objective
from gpipe_compiler.options.optimizer_state import AnyOptimizer
from gpipe_compiler.runtime.spec import BatchNorm, OptimizerKind, Precision, Remat, ScheduleKind

CUT_INSIDE = 0.03
"""Below so large a share of a step, predictions cannot tell which of two cuts is faster."""


class Auto(Enum):
    """In place of a setting: the best is to be found."""

    AUTO = "auto"


class RematChoice(Enum):
    """Which stages keep only what they receive, and run their forward again for the backward.

    NONE: no stage. FULL: every stage. AUTO: as few as possible, such that every stage fits the
    memory of its device.
    """

    NONE = "none"
    FULL = "full"
    AUTO = "auto"

    @property
    def planned(self) -> Remat:
        """What every stage begins with, before AUTO has looked at memory."""
        return Remat.FULL if self is RematChoice.FULL else Remat.NONE


@dataclass(frozen=True, slots=True)
class Policy:
    """What a plan is to be made for, beside its sizes.

    Attributes:
        data_parallel: replicas of the pipeline, which share every mini-batch.
        optimizer: whose memory and time count.
        objective: what the stages are to make short.
        precision: in which the graph was annotated too.
        in_place: whether ops may write over what nobody needs any more (`passes.inplace`).
        cut_inside: the share of the best time with cuts anywhere that may be given for cuts which
            open fewer modules (`passes.cut.inside`).
        prove: whether to find out how far the cut may be from the best, however long that takes.
    """

    schedule: ScheduleKind = ScheduleKind.GPIPE
    remat: RematChoice = RematChoice.NONE
    batchnorm: BatchNorm = BatchNorm.MICRO
    precision: Precision = Precision.FP32
    data_parallel: int = 1
    optimizer: AnyOptimizer = OptimizerKind.SGD
    objective: Objective = Objective.STEP
    in_place: bool = True
    cut_inside: float = CUT_INSIDE
    prove: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.cut_inside < math.inf:
            raise UsageError(
                f"--cut-inside {self.cut_inside} is no share of a step's time",
                hint="such as 0.03 for 3%, or 0 for cuts anywhere",
            )
        if self.batchnorm is BatchNorm.EXACT and self.schedule is not ScheduleKind.GPIPE:
            raise UsageError(
                "--batchnorm exact normalises over the whole mini-batch, so every micro-batch goes "
                f"forward before any comes back: the schedule {self.schedule.value} cannot do that",
                hint="use --schedule gpipe, or --batchnorm micro or deferred",
            )
