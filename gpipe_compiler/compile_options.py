"""What a model is compiled to."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpipe_compiler.cluster import Cluster, local_cluster
from gpipe_compiler.errors import UsageError
from gpipe_compiler.options.choices import SEARCH_SECONDS, Frontend, Objective
from gpipe_compiler.options.constraints import NO_CONSTRAINTS, Constraints
from gpipe_compiler.options.optimizer_state import AnyOptimizer
from gpipe_compiler.options.policy import CUT_INSIDE, Auto, Policy, RematChoice
from gpipe_compiler.runtime.spec import BatchNorm, OptimizerKind, Precision, ScheduleKind


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """What to compile to.

    Attributes:
        stages, microbatches, schedule: AUTO where the best is to be found (`planner/search.py`);
            then `remat` AUTO also compares recomputing everywhere and nowhere.
        microbatches: None for the largest divisor of the batch up to four per stage.
        training: False for a package that only infers.
        measured: time the ops on this machine, instead of estimating them; and then the stages of
            the package.
        validate: hold the package against the model.
        force: replace a package that stands where this one goes.
        per_microbatch: accept that the loss of a mini-batch is that of its micro-batches, one by
            one, where they cannot give that of the whole.
        objective: what the stages are to make short.
        constraints: what the stages are to keep to.
        data_parallel: replicas of the pipeline that are planned for.
        optimizer: whose memory and time count; None for that of the user's file, else plain SGD.
        must_fit: refuse a plan that does not fit the memory of its devices.
        search_s: seconds after which no further setting is looked at.
        in_place: let ops write over what nobody needs any more (`passes.inplace`).
        cut_inside: the share of the best step that may be given for cuts which open fewer modules
            of the model; 0 for cuts anywhere.
        prove: find out how far the cut may be from the best, however long that takes.
        print_after: names of passes after which the graph is printed to standard error, and of
            analyses whose table is (`passes.pipeline`).
        pass_options: options of passes, as `PASS.OPTION=VALUE`.
        remedies: tell in the plan what other settings would save of memory.
        target: the output format, by its name in `targets.TARGETS`.
    """

    stages: int | Auto
    microbatches: int | Auto | None = None
    schedule: ScheduleKind | Auto = ScheduleKind.GPIPE
    remat: RematChoice = RematChoice.NONE
    batchnorm: BatchNorm = BatchNorm.MICRO
    precision: Precision = Precision.FP32
    training: bool = True
    frontend: Frontend = Frontend.AUTO
    measured: bool = False
    cluster: Cluster = field(default_factory=local_cluster)
    validate: bool = True
    force: bool = False
    seed: int = 0
    per_microbatch: bool = False
    objective: Objective = Objective.STEP
    constraints: Constraints = NO_CONSTRAINTS
    data_parallel: int = 1
    optimizer: AnyOptimizer | None = None
    must_fit: bool = False
    search_s: float = SEARCH_SECONDS
    in_place: bool = True
    cut_inside: float = CUT_INSIDE
    prove: bool = False
    remedies: bool = False
    target: str = "torch"
    print_after: tuple[str, ...] = ()
    pass_options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.policy  # noqa: B018  # refuses choices that do not go together
        if not self.training and (self.remat, self.batchnorm) != (
            RematChoice.NONE,
            BatchNorm.MICRO,
        ):
            raise UsageError(
                "--remat and --batchnorm are for training, and with --mode infer there is none",
                hint="leave them out, or compile with --mode train",
            )

    @property
    def policy(self) -> Policy:
        """How the pipeline trains; with GPipe's schedule where the best is to be found.

        Raises:
            UsageError: for choices that do not go together; so does making these options.
        """
        return Policy(
            ScheduleKind.GPIPE if isinstance(self.schedule, Auto) else self.schedule,
            self.remat,
            self.batchnorm,
            self.precision,
            self.data_parallel,
            self.optimizer or OptimizerKind.SGD,
            self.objective,
            self.in_place,
            self.cut_inside,
            self.prove,
        )
