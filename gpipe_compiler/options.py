"""What a user asks for: the values that options of the commands and of the API take.

None of it needs torch, which takes seconds to import: so a graph from elsewhere is planned, and
`--help` told, without it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from gpipe_compiler import cluster as machines
from gpipe_compiler.cluster import Cluster
from gpipe_compiler.errors import UsageError
from gpipe_compiler.runtime.schedule.choosing import SCHEDULES
from gpipe_compiler.runtime.spec import (
    BatchNorm,
    OptimizerKind,
    Precision,
    Remat,
    ScheduleKind,
    WeightSharding,
)
from gpipe_compiler.text.escaping import shell_line

SEARCH_SECONDS = 300.0
"""That the search for the best settings takes, about, at most."""

SHOWN_HOLDERS = 12
"""Of what is in memory at a peak, the largest that are shown."""


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


# --- constraints ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Constraints:
    """What is asked of modules, which may also be single ops or values, by name.

    Attributes:
        pins: a module and its stage, from 0, or from the end as -1: all its ops lie there.
        together: all ops of each of these modules lie in one stage.
        split_at: a new stage begins with each of these modules: its first ops lie in a later
            stage than the ops that make what they read.
    """

    pins: tuple[tuple[str, int], ...] = ()
    together: tuple[str, ...] = ()
    split_at: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        """Each as on the command line."""
        return (
            *(pin_words(name, stage) for name, stage in self.pins),
            *(shell_line(["--keep-together", name]) for name in self.together),
            *(shell_line(["--split-at", name]) for name in self.split_at),
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The modules, ops and values that are named."""
        return tuple(dict.fromkeys((*(n for n, _ in self.pins), *self.together, *self.split_at)))


NO_CONSTRAINTS = Constraints()


def pin_words(name: str, stage: int) -> str:
    return shell_line(["--pin", f"{name}={stage}"])


# --- optimizers -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class OwnOptimizer:
    """The optimizer that `make_optimizer()` makes.

    Attributes:
        remembered: bytes that it keeps of every trained parameter from step to step.
        copies: the same in numbers for each number of a parameter, on average.
    """

    name: str
    remembered: Mapping[str, int] = field(hash=False)
    copies: float

    def __str__(self) -> str:
        return f"{self.name} of make_optimizer(), remembers {self.copies:.3g} times the parameters"


AnyOptimizer = OptimizerKind | OwnOptimizer

_COPIES = {
    OptimizerKind.SGD: 0,
    OptimizerKind.MOMENTUM: 1,
    OptimizerKind.ADAM: 2,
    OptimizerKind.ADAMW: 2,
}


def copies_of(optimizer: AnyOptimizer) -> float:
    """How many numbers an optimizer remembers of each number of a parameter, on average."""
    return _COPIES[optimizer] if isinstance(optimizer, OptimizerKind) else optimizer.copies


def remembered_bytes(optimizer: AnyOptimizer, parameter: str, size: int) -> int:
    """Bytes that an optimizer keeps for a parameter of this size."""
    if isinstance(optimizer, OptimizerKind):
        return _COPIES[optimizer] * size
    return optimizer.remembered.get(parameter, 0)


# --- plans and packages ---------------------------------------------------------------------------

CUT_INSIDE = 0.03
"""Below so large a share of a step, predictions cannot tell which of two cuts is faster."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """By what factors stages took longer than was told, where a package was measured.

    Attributes:
        package: that was measured.
    """

    forward: float
    backward: float
    package: str

    def __str__(self) -> str:
        return (
            f"times {self.forward:.3g} forward and {self.backward:.3g} backward, as "
            f"{self.package} took"
        )


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
class Division:
    """Into how many parts replicas divide what they would all have.

    Attributes:
        parts: of what the optimizer remembers, and of trained weights between steps; 1 for all of
            it on each.
        always: whether weights and gradients are divided while a step runs, too.
    """

    parts: int = 1
    always: bool = False

    @classmethod
    def of(cls, sharding: WeightSharding, replicas: int) -> Division:
        if sharding is WeightSharding.NONE:
            return cls()
        return cls(replicas, sharding is WeightSharding.FULL)

    def part_of(self, size: int) -> int:
        """Bytes that each replica has of what they divide."""
        return -(-size // self.parts)


WHOLE = Division()


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What a plan is to be made for, beside its sizes.

    Attributes:
        schedule: AUTO, in options of a compile alone, where the best is to be found.
        data_parallel: replicas of the pipeline, which share every mini-batch.
        sharding: what they divide among them; AUTO, in options of a compile alone, for what takes
            less time, of what fits.
        optimizer: whose memory and time count; None for plain SGD, and in options of a compile for
            that of the user's file, where there is one.
        objective: what the stages are to make short.
        precision: in which the graph was annotated too.
        in_place: whether ops may write over what nobody needs any more (`passes.inplace`).
        cut_inside: the share of the best time with cuts anywhere that may be given for cuts which
            open fewer modules (`passes.cut.inside`); 0 for cuts anywhere.
        prove: whether to find out how far the cut may be from the best, however long that takes.
    """

    schedule: ScheduleKind | Auto = ScheduleKind.GPIPE
    loss_over_batch: bool = False
    remat: RematChoice = RematChoice.NONE
    batchnorm: BatchNorm = BatchNorm.MICRO
    precision: Precision = Precision.FP32
    data_parallel: int = 1
    sharding: WeightSharding | Auto = WeightSharding.NONE
    optimizer: AnyOptimizer | None = None
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
        if self.sharding is not WeightSharding.NONE and self.data_parallel == 1:
            raise UsageError(
                "--shard divides weights and optimizer among replicas, of which there is one",
                hint="plan for more with --data-parallel, such as --data-parallel 2, or leave it "
                "out",
            )
        known = self.schedule_kind
        if self.sharding is WeightSharding.FULL and not self.sharding_may_be_full:
            raise UsageError(
                "--shard full reduces the gradients of a block as its backward ends, which the "
                f"schedule {known.value} puts off",
                hint="use --schedule gpipe, 1f1b or interleaved, or --shard optimizer",
            )
        if self.loss_over_batch:
            if known is not ScheduleKind.GPIPE or self.data_parallel > 1:
                raise UsageError(
                    "--loss-over batch computes the loss of all micro-batches at once, so every "
                    "one goes forward before any comes back, through one pipeline",
                    hint="use --schedule gpipe, and --data-parallel 1",
                )
            # Each stage that needs all samples has them, the one with the loss among these.
            object.__setattr__(self, "batchnorm", BatchNorm.EXACT)
        if self.batchnorm is BatchNorm.EXACT and known is not ScheduleKind.GPIPE:
            raise UsageError(
                "--batchnorm exact normalises over the whole mini-batch, so every micro-batch goes "
                f"forward before any comes back: the schedule {known.value} cannot do that",
                hint="use --schedule gpipe, or --batchnorm micro or deferred",
            )

    @property
    def sharding_planned(self) -> WeightSharding:
        """What replicas divide; what takes less time where that is to be found."""
        return WeightSharding.OPTIMIZER if isinstance(self.sharding, Auto) else self.sharding

    @property
    def sharding_may_be_full(self) -> bool:
        """Whether the schedule lets replicas divide everything."""
        return not SCHEDULES[self.schedule_kind].splits_backward

    @property
    def division(self) -> Division:
        """Into how many parts what is, that replicas divide."""
        return Division.of(self.sharding_planned, self.data_parallel)

    @property
    def schedule_kind(self) -> ScheduleKind:
        """The schedule; GPipe's where the best is to be found."""
        return ScheduleKind.GPIPE if isinstance(self.schedule, Auto) else self.schedule

    @property
    def counted_optimizer(self) -> AnyOptimizer:
        """The optimizer whose memory and time count."""
        return self.optimizer or OptimizerKind.SGD


def _this_machine() -> Cluster:
    """Looked up when it is called: it needs torch."""
    return machines.local_cluster()


@dataclass(frozen=True, slots=True)
class CompileOptions(Policy):
    """What a model is compiled to: a policy, and all that is asked besides.

    Attributes:
        stages, microbatches: AUTO where the best is to be found (`planner/search.py`), as for
            `schedule`; then `remat` AUTO also compares recomputing everywhere and nowhere.
        microbatches: None for as many as are worth it, up to four per stage.
        training: False for a package that only infers.
        measured: time the ops on this machine, instead of estimating them; and then the stages of
            the package.
        validate: compare the package with the model.
        force: replace a package that stands where this one goes.
        per_microbatch: accept that the loss of a mini-batch is that of its micro-batches, one by
            one, where they cannot give that of the whole.
        constraints: what the stages are to keep to.
        must_fit: refuse a plan that does not fit the memory of its devices.
        search_s: seconds after which no further setting is looked at.
        print_after: names of passes after which the graph is printed to standard error, and of
            analyses whose table is (`passes.pipeline`).
        pass_options: options of passes, as `PASS.OPTION=VALUE`.
        calibration: by which op times are scaled; None for none.
        remedies: tell in the plan what other settings would save of memory.
        target: the output format, by its name in `targets.TARGETS`.
        words: the arguments of the command line that asks; none where there is no such.
    """

    stages: int | Auto
    microbatches: int | Auto | None = None
    training: bool = True
    measured: bool = False
    cluster: Cluster = field(default_factory=_this_machine)
    validate: bool = True
    force: bool = False
    seed: int = 0
    per_microbatch: bool = False
    constraints: Constraints = NO_CONSTRAINTS
    must_fit: bool = False
    search_s: float = SEARCH_SECONDS
    calibration: Calibration | None = None
    remedies: bool = False
    target: str = "torch"
    print_after: tuple[str, ...] = ()
    pass_options: tuple[str, ...] = ()
    words: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        Policy.__post_init__(self)  # super() does not see the class that slots make anew
        if not self.training and self.sharding is not WeightSharding.NONE:
            raise UsageError(
                "--shard is for training, and with --mode infer there is none",
                hint="leave it out, or compile with --mode train",
            )
        if not self.training and (self.remat, self.batchnorm) != (
            RematChoice.NONE,
            BatchNorm.MICRO,
        ):
            raise UsageError(
                "--remat and --batchnorm are for training, and with --mode infer there is none",
                hint="leave them out, or compile with --mode train",
            )
