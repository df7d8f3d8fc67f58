"""What is asked of a search for settings: what is given, all choices, and what each costs at least
before anything is cut."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from gpipe_compiler.cluster import Cluster, core_count, is_here
from gpipe_compiler.errors import UsageError
from gpipe_compiler.options import Auto, CompileOptions, Policy, RematChoice
from gpipe_compiler.passes.cut.problem import CutProblem, Node, Seconds
from gpipe_compiler.plan.pareto import Choice
from gpipe_compiler.planner.planning import devices_there
from gpipe_compiler.runtime.core.devices import gpu_count
from gpipe_compiler.runtime.schedule.choosing import SCHEDULES, devices_for, splits_backward
from gpipe_compiler.runtime.spec import BatchNorm, ScheduleKind

MOST_COUNTS = 8
"""Numbers of micro-batches, and of devices, that are looked at, at most."""


@dataclass(frozen=True, slots=True)
class Free:
    """Which settings may be changed to find some that fit: those that were not explored."""

    stages: bool = True
    microbatches: bool = True
    schedule: bool = True
    remat: bool = True


EVERYTHING = Free()


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """What is given of the settings, and what is to be found.

    Attributes:
        microbatches: None for as many as are worth it, up to four per stage.
        remat: AUTO for one of all.
        devices: that one replica of the pipeline has at most.
    """

    stages: int | Auto
    microbatches: int | Auto | None
    schedule: ScheduleKind | Auto
    remat: RematChoice
    devices: int

    @classmethod
    def of(cls, options: CompileOptions) -> SearchSpace:
        """What the options give, and leave to be found.

        Raises:
            UsageError: where nobody says how many stages nor how many devices there are.
        """
        cluster, stages = options.cluster, options.stages
        if isinstance(stages, Auto):
            devices = devices_to_explore(cluster, options.data_parallel)
        else:
            devices = stages
            if not cluster.endless:
                devices = min(stages, devices_there(cluster, options.data_parallel))
        return cls(stages, options.microbatches, options.schedule, options.remat, devices)

    @property
    def free(self) -> Free:
        """What is given, and so is not explored."""
        return Free(
            not isinstance(self.stages, Auto),
            not isinstance(self.microbatches, Auto),
            not isinstance(self.schedule, Auto),
            self.remat is not RematChoice.AUTO,
        )


def devices_to_explore(cluster: Cluster, replicas: int) -> int:
    """How many devices a pipeline may have at most, where nobody says how many stages.

    Those of the cluster; of this machine's processor its cores, and of its GPUs as many as it has.

    Raises:
        UsageError: where only the kind of device is known.
    """
    if not cluster.endless:
        return devices_there(cluster, replicas)
    name = cluster.devices[0].name
    if (gpus := gpu_count()) and is_here(cluster.devices[0]):
        return max(1, gpus // replicas)
    if cluster.pooled:
        return max(1, core_count() // replicas)
    raise UsageError(
        f"--stages auto has to know how many {name} there are",
        hint=f"say so as in --devices 4x{name}, or describe them in a file for --cluster",
    )


def spread(numbers: Sequence[int], most: int = MOST_COUNTS) -> tuple[int, ...]:
    """At most `count` of ascending numbers, with the first and the last, evenly by their ratio."""
    if len(numbers) <= most:
        return tuple(numbers)
    first, last = math.log(numbers[0]), math.log(numbers[-1])
    goals = [first + (last - first) * i / (most - 1) for i in range(most)]
    # Rounded, as the last digit of a logarithm differs by processor: ties go to the smaller number.
    near = {min(numbers, key=lambda n: (round(abs(math.log(n) - g), 9), n)) for g in goals}
    return tuple(sorted(near))


def choices(
    wish: SearchSpace,
    batch_size: int,
    policy: Policy,
    *,
    training: bool,
    by_default: Callable[[int], Sequence[int]] | None = None,
) -> tuple[Choice, ...]:
    """All that is to be looked at, each once.

    Args:
        batch_size: samples of one replica.
        by_default: the micro-batches for a number of stages, where the wish leaves them open.

    AUTO stands beside NONE and FULL where `wish.remat` is AUTO.
    """
    schedules: Sequence[ScheduleKind] = list(ScheduleKind)
    if not isinstance(wish.schedule, Auto):
        schedules = [wish.schedule]
    elif not training or policy.batchnorm is BatchNorm.EXACT:
        schedules = [ScheduleKind.GPIPE]
    elif policy.division.always:
        schedules = [kind for kind in ScheduleKind if not splits_backward(kind)]
    remats = list(RematChoice) if wish.remat is RematChoice.AUTO else [wish.remat]
    if not training:
        remats = [RematChoice.NONE]
    divisors = [count for count in range(1, batch_size + 1) if batch_size % count == 0]
    found = []
    for schedule in schedules:
        for stages, devices in _places(wish, schedule):
            match wish.microbatches:
                case Auto():
                    counts: Sequence[int] = spread(divisors)
                case None:
                    assert by_default is not None
                    counts = by_default(stages)
                case given:
                    counts = [given]
            found += [
                Choice(stages, devices, schedule, count, remat)
                for count in counts
                for remat in remats
            ]
    return tuple(choice for choice in dict.fromkeys(found) if not _as_another(choice, found))


def _as_another(choice: Choice, others: Collection[Choice]) -> bool:
    """Whether a choice of a single micro-batch equals a plainer one."""
    kind = choice.schedule
    if choice.microbatches > 1 or SCHEDULES[kind].stages_a_device != (1,):
        return False
    if kind is ScheduleKind.ONE_F_ONE_B:
        kind = ScheduleKind.GPIPE
    plainer = dataclasses.replace(choice, schedule=kind, remat=RematChoice.NONE)
    return choice != plainer and plainer in others


def _places(wish: SearchSpace, schedule: ScheduleKind) -> Iterator[tuple[int, int]]:
    """Pairs of stages and devices that a schedule can have."""
    if not isinstance(wish.stages, Auto):
        try:
            wanted = devices_for(schedule, wish.stages)
        except ValueError:
            return
        yield wish.stages, min(wanted, wish.devices)
        return
    rule = SCHEDULES[schedule]
    for devices in spread(range(1, wish.devices + 1)):
        if devices > 1 or rule.for_one_device:
            yield from ((devices * several, devices) for several in rule.stages_a_device)


@dataclass(frozen=True, slots=True)
class WorkSums:
    """Sums over a problem, in seconds and bytes of one micro-batch.

    Of unequal devices the fastest counts for every node.

    Attributes:
        weight_s: the part of `backward_s` that a schedule may run later.
        most_forward_s, most_backward_s, most_s: of the node that takes longest, forward, backward
            and both.
        kept_bytes: held for good, counted once.
        most_kept_bytes: of the largest thing held for good.
        saved_bytes: held for a micro-batch between its forward and backward, counted once.
    """

    forward_s: float
    backward_s: float
    weight_s: float
    most_forward_s: float
    most_backward_s: float
    most_s: float
    kept_bytes: int
    most_kept_bytes: int
    saved_bytes: int

    @classmethod
    def of(cls, problem: CutProblem, *, training: bool) -> WorkSums:
        kinds: list[tuple[Node | Seconds, ...]] = [problem.nodes, *problem.other_kinds]
        forward = [min(node.forward_s for node in nodes) for nodes in zip(*kinds, strict=True)]
        backward = [min(node.backward_s for node in nodes) for nodes in zip(*kinds, strict=True)]
        weight = [max(node.weight_s for node in nodes) for nodes in zip(*kinds, strict=True)]
        if not training:
            backward = [0.0] * len(backward)
        both = [f + b for f, b in zip(forward, backward, strict=True)]
        return cls(
            sum(forward),
            sum(backward),
            sum(weight),
            max(forward, default=0.0),
            max(backward, default=0.0),
            max(both, default=0.0),
            sum(kept.bytes for kept in problem.kept),
            max((kept.bytes for kept in problem.kept), default=0),
            sum(kept.microbatch_bytes for kept in problem.kept) if training else 0,
        )


def least_step_s(work: WorkSums, choice: Choice) -> float:
    """No step takes less.

    Some device has its share of all work, and the one with the longest node has that. The first
    micro-batch goes forward and back through all, without gradients of parameters where these can
    wait. GPipe's devices are a line of machines in each direction (`cut.criteria.FillDrain`).
    """
    devices, count = choice.devices, choice.microbatches
    total = work.forward_s + work.backward_s
    waits = work.weight_s if splits_backward(choice.schedule) else 0.0
    least = max(count * total / devices, count * work.most_s, total - waits)
    if choice.schedule is ScheduleKind.GPIPE:
        forward = max(work.forward_s / devices, work.most_forward_s)
        backward = max(work.backward_s / devices, work.most_backward_s)
        least = max(least, total + (count - 1) * (forward + backward))
    return least


def surely_fits(work: WorkSums, choice: Choice, memory: int) -> bool:
    """Whether all the work on one device would fit it, with everything kept of all micro-batches.

    A device may hold what several of its stages use as often as it has stages.
    """
    times = -(-choice.stages // choice.devices)
    return times * (work.kept_bytes + work.saved_bytes * choice.microbatches) <= memory


def least_peak_bytes(work: WorkSums, choice: Choice) -> int:
    """No fullest device has less.

    Each device holds what is kept for good, and at some moment a micro-batch of each of its
    stages, unless these may recompute in segments; GPipe's hold all micro-batches of all their
    stages at once, unless they recompute. The fullest has no less than the mean of them.
    """
    held = 0.0
    if choice.remat is not RematChoice.AUTO:
        held = work.saved_bytes * choice.devices / choice.stages
    if choice.schedule is ScheduleKind.GPIPE and choice.remat is RematChoice.NONE:
        held = work.saved_bytes * choice.microbatches
    return max(int((work.kept_bytes + held) / choice.devices), work.most_kept_bytes)
