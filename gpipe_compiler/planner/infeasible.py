"""What to say of a plan that does not fit: by how much, where, and what nearby would fit."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from gpipe_compiler.errors import ModelError, PlanError, UsageError
from gpipe_compiler.options.policy import Policy, RematChoice
from gpipe_compiler.plan import Plan
from gpipe_compiler.plan.pareto import Choice
from gpipe_compiler.planner.planner import Planner
from gpipe_compiler.planner.search import AT_FIRST, most_over
from gpipe_compiler.planner.search_space import EVERYTHING, Free
from gpipe_compiler.runtime.schedule.choosing import devices_for
from gpipe_compiler.runtime.spec import BatchNorm, Precision, ScheduleKind
from gpipe_compiler.runtime.wording import counted
from gpipe_compiler.text.units import format_bytes, format_limit, format_seconds

MOST_TRIED = 12
"""Settings that are planned to find nearby ones that fit, at most."""


class DoesNotFitError(PlanError):
    """No plan fits the memory of its devices; the hint names settings nearby that would."""


def refuse_too_large(
    planner: Planner,
    plan: Plan,
    policy: Policy,
    choice: Choice,
    free: Free = EVERYTHING,
    tried: int = 1,
) -> None:
    """Makes sure that a plan fits its devices.

    Args:
        policy: that of the plan.
        choice: the rest of what it was made for.
        tried: settings of which none fits, and this is the nearest.

    Raises:
        DoesNotFitError: by how much it does not, and the nearest settings that would.
    """
    if not most_over(plan):
        return
    subject = "the plan"
    if tried > 1:
        subject = f"none of {tried:,} settings fits; the nearest, {describe(choice)},"
    hints = [f"--memory {format_limit(max(plan.prediction.device_bytes))} and nothing else changed"]
    hints += [
        f"{near.words}: {format_bytes(near.peak_bytes)} at most, "
        f"{format_seconds(near.step_s)} a step instead of {format_seconds(plan.prediction.step_s)}"
        for near in nearby(planner, choice, policy, free)
    ]
    listing = "".join(f"\n    {hint}" for hint in hints)
    raise DoesNotFitError(f"{subject} {_fault(plan)}", hint=f"what would fit:{listing}")


def describe(choice: Choice) -> str:
    """A choice in words."""
    return (
        f"{counted(choice.stages, 'stage')} on {counted(choice.devices, 'device')}, "
        f"{choice.schedule.value}, {counted(choice.microbatches, 'micro-batch', 'es')}, "
        f"remat {choice.remat.value}"
    )


def _fault(plan: Plan) -> str:
    """On which device how much is missing, and what is held there."""
    held = plan.prediction.device_bytes
    over = [size - device.memory for size, device in zip(held, plan.devices, strict=True)]
    rank = max(range(len(held)), key=over.__getitem__)
    places = plan.placement or tuple(range(len(plan.stages)))
    stages = [stage for stage in plan.stages if places[stage.index] == rank]
    state = sum(stage.state_bytes for stage in stages)
    numbers = ", ".join(str(stage.index) for stage in stages)
    others = sum(excess > 0 for excess in over) - 1
    further = ""
    if others:
        further = f"; {others} other{'s are' if others > 1 else ' is'} too small as well"
    return (
        f"needs {format_bytes(over[rank])} more than the {format_bytes(plan.devices[rank].memory)} "
        f"of device {rank} (stage{'s' if len(stages) > 1 else ''} {numbers}{further}): it holds "
        f"{format_bytes(state)} of {_state_words(plan)}, and {format_bytes(held[rank] - state)} "
        "of activations"
    )


def _state_words(plan: Plan) -> str:
    if not plan.training:
        return "parameters and buffers"
    return "parameters, buffers, gradients and what the optimizer keeps"


@dataclass(frozen=True, slots=True)
class Nearby:
    """Settings that fit: how they differ, in words, and what they come to."""

    words: str
    peak_bytes: int
    step_s: float


@dataclass(frozen=True, slots=True)
class _Change:
    """Another choice or policy, with what is changed, as on the command line."""

    choice: Choice
    policy: Policy
    words: tuple[str, ...] = ()


def nearby(
    planner: Planner, choice: Choice, policy: Policy, free: Free = EVERYTHING
) -> list[Nearby]:
    """The nearest settings that fit.

    Each kind of change by itself, as little of it as will do; where none does, one after the
    other on top, until all together fit or nothing is left to change. At most `MOST_TRIED` plans
    are made.
    """
    tries = _Tries(planner)
    start = _Change(choice, policy)
    kinds = _kinds(planner, choice, free)
    found = [near for kind in kinds if (near := tries.first(kind(start))) is not None]
    if found:
        return sorted(found, key=lambda near: near.step_s)
    for kind in kinds:
        furthest = list(kind(start))
        if furthest:
            start = furthest[-1]
            near = tries.first([start])
            if near is not None:
                return [near]
    return []


_Kind = Callable[[_Change], Iterator[_Change]]


def _kinds(planner: Planner, choice: Choice, free: Free) -> list[_Kind]:
    """What can be changed, in the order in which changes are put on top of one another."""
    training = planner.graph.loss is not None

    def remat(start: _Change) -> Iterator[_Change]:
        if training and start.choice.remat is not RematChoice.FULL:
            full = dataclasses.replace(start.choice, remat=RematChoice.FULL)
            yield _Change(full, start.policy, (*start.words, "--remat full"))

    def microbatches(start: _Change) -> Iterator[_Change]:
        batch_size = planner.batch_size // start.policy.data_parallel
        more = [n for n in range(choice.microbatches + 1, batch_size + 1) if not batch_size % n]
        for count in more:
            changed = dataclasses.replace(start.choice, microbatches=count)
            yield _Change(changed, start.policy, (*start.words, f"--microbatches {count}"))

    def schedule(start: _Change) -> Iterator[_Change]:
        gpipe = start.choice.schedule is ScheduleKind.GPIPE
        if training and gpipe and start.policy.batchnorm is not BatchNorm.EXACT:
            kind = ScheduleKind.ONE_F_ONE_B
            changed = dataclasses.replace(start.choice, schedule=kind)
            yield _Change(changed, start.policy, (*start.words, f"--schedule {kind.value}"))

    def stages(start: _Change) -> Iterator[_Change]:
        cluster = planner.cluster
        there = len(cluster.devices) // start.policy.data_parallel
        for count in (choice.stages + 1, 2 * choice.stages, 4 * choice.stages):
            with contextlib.suppress(ValueError):
                wanted = devices_for(start.choice.schedule, count)
                if cluster.endless or wanted <= there:
                    changed = dataclasses.replace(start.choice, stages=count, devices=wanted)
                    yield _Change(changed, start.policy, (*start.words, f"--stages {count}"))

    def precision(start: _Change) -> Iterator[_Change]:
        if start.policy.precision is Precision.FP32:
            half = dataclasses.replace(start.policy, precision=Precision.BF16)
            yield _Change(start.choice, half, (*start.words, "--precision bf16"))

    kinds: Sequence[tuple[bool, _Kind]] = (
        (free.remat, remat),
        (free.schedule, schedule),
        (free.microbatches, microbatches),
        (free.stages, stages),
        (True, precision),
    )
    return [kind for wanted, kind in kinds if wanted]


@dataclass
class _Tries:
    """Plans changes, as long as there are not too many."""

    planner: Planner
    left: int = MOST_TRIED

    def first(self, changes: Iterator[_Change] | Sequence[_Change]) -> Nearby | None:
        """The first of some changes that fits."""
        for change in changes:
            if not self.left:
                return None
            self.left -= 1
            try:
                policy = dataclasses.replace(
                    change.policy, schedule=change.choice.schedule, remat=change.choice.remat
                )
                plan = self.planner.plan(change.choice, policy, AT_FIRST, exact_memory=True)
            except (PlanError, UsageError, ModelError):
                continue
            if not most_over(plan):
                peak = max(plan.prediction.device_bytes, default=0)
                return Nearby(" ".join(change.words), peak, plan.prediction.step_s)
        return None
