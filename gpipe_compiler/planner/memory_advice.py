"""What other settings come to: what they would save of a plan's memory, and which fit where it
does not. Every one is planned as a compile with it would be, in less time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from gpipe_compiler.errors import GPipeCompilerError, ModelError, PlanError, UsageError
from gpipe_compiler.options import Policy, RematChoice
from gpipe_compiler.plan import Plan
from gpipe_compiler.plan.pareto import Choice
from gpipe_compiler.plan.stages import Remedy, WhatIf
from gpipe_compiler.planner.microbatch_count import infers_whole
from gpipe_compiler.planner.planner import Planner
from gpipe_compiler.planner.search import AT_FIRST, most_over
from gpipe_compiler.planner.search_space import EVERYTHING, Free
from gpipe_compiler.runtime.schedule.choosing import devices_for, placement_for, splits_backward
from gpipe_compiler.runtime.spec import BatchNorm, Precision, Remat, ScheduleKind
from gpipe_compiler.runtime.wording import counted
from gpipe_compiler.text.units import format_bytes, format_limit, format_seconds

MOST_TRIED = 12
"""Settings that are planned to find nearby ones that fit, at most."""


class DoesNotFitError(PlanError):
    """No plan fits the memory of its devices; the hint names settings nearby that would."""


@dataclass(frozen=True, slots=True)
class _Change:
    """Another choice or policy, with what is changed, as on the command line."""

    choice: Choice
    policy: Policy
    words: tuple[str, ...] = ()

    def to(self, word: str, **settings: object) -> _Change:
        changed = dataclasses.replace(self.choice, **settings)  # type: ignore[arg-type]  # by name
        return _Change(changed, self.policy, (*self.words, word))

    def planned(self, planner: Planner) -> Plan:
        """Its plan.

        Raises:
            PlanError, UsageError, ModelError: where there can be none.
        """
        return planner.plan(self.choice, self.policy, AT_FIRST, exact_memory=True)

    def remedy(self, plan: Plan) -> Remedy:
        found = plan.prediction
        return Remedy(" ".join(self.words), found.device_bytes, found.step_s)


# --- what would save memory -----------------------------------------------------------------------


def what_if(planner: Planner, plan: Plan, policy: Policy) -> WhatIf:
    """What each remedy would save; those that the model or the schedule refuses are left out.

    Args:
        policy: that of the plan; the schedule is the plan's, whatever it says.
    """
    devices = len(plan.orders)
    choice = Choice(len(plan.stages), devices, plan.schedule, plan.microbatches, policy.remat)
    start = _Change(choice, policy)
    found = [r for change in _remedies(planner, plan, start) if (r := _remedy(planner, change))]
    full = next((r for r in found if r.change == "--remat full"), None)
    if full is not None:
        found += _in_part(planner, plan, start, full)
    return WhatIf(tuple(found))


def _remedies(planner: Planner, plan: Plan, start: _Change) -> Iterator[_Change]:
    """Twice as many micro-batches, or the next number; recomputing; another schedule for the same
    stages on the same devices, and that with more micro-batches; 16 bits."""
    yield from _twice_the_microbatches(planner, start)
    recomputing = (
        () if all(s.remat is Remat.FULL for s in plan.stages) else (*_full(planner, start),)
    )
    yield from recomputing
    if plan.training and plan.batchnorm is not BatchNorm.EXACT:
        placement = plan.placement or tuple(range(len(plan.stages)))
        for kind in ScheduleKind:
            with contextlib.suppress(ValueError):
                places = placement_for(kind, len(plan.stages), len(plan.orders))
                if kind is plan.schedule or splits_backward(kind) or places != placement:
                    continue
                other = start.to(f"--schedule {kind.value}", schedule=kind)
                yield other
                yield from _full(planner, other) if recomputing else ()
                if kind is ScheduleKind.ONE_F_ONE_B:
                    yield from _twice_the_microbatches(planner, other)
    yield from _half_precision(start)


def _remedy(planner: Planner, change: _Change) -> Remedy | None:
    try:
        made = change.planned(planner)
    except GPipeCompilerError:
        return None  # what it asks for cannot be had of this model
    return change.remedy(made)


def _in_part(planner: Planner, plan: Plan, start: _Change, full: Remedy) -> Iterator[Remedy]:
    """The fastest way to half of what recomputing everything would save."""
    most = (max(plan.prediction.device_bytes) + max(full.device_bytes)) // 2
    smaller = planner.with_memory(most)
    found = _remedy(smaller, start.to("--remat auto", remat=RematChoice.AUTO))
    if found is not None and max(full.device_bytes) < max(found.device_bytes) <= most:
        words = f"{found.change} --memory {format_limit(max(found.device_bytes))}"
        yield dataclasses.replace(found, change=words)


# --- settings -------------------------------------------------------------------------------------


def _full(planner: Planner, start: _Change) -> Iterator[_Change]:
    if planner.graph.loss is not None and start.choice.remat is not RematChoice.FULL:
        yield start.to("--remat full", remat=RematChoice.FULL)


def _more_microbatches(planner: Planner, start: _Change) -> Iterator[_Change]:
    batch_size = planner.batch_size // start.policy.data_parallel
    if infers_whole(planner.prepare(start.choice.microbatches, start.policy).graph):
        return
    for count in range(start.choice.microbatches + 1, batch_size + 1):
        if not batch_size % count:
            yield start.to(f"--microbatches {count}", microbatches=count)


def _twice_the_microbatches(planner: Planner, start: _Change) -> Iterator[_Change]:
    twice = 2 * start.choice.microbatches
    more = _more_microbatches(planner, start)
    yield from itertools.islice((c for c in more if c.choice.microbatches >= twice), 1)


def _one_f_one_b(planner: Planner, start: _Change) -> Iterator[_Change]:
    gpipe = start.choice.schedule is ScheduleKind.GPIPE and planner.graph.loss is not None
    if gpipe and start.policy.batchnorm is not BatchNorm.EXACT:
        kind = ScheduleKind.ONE_F_ONE_B
        yield start.to(f"--schedule {kind.value}", schedule=kind)


def _more_stages(planner: Planner, start: _Change) -> Iterator[_Change]:
    cluster, stages = planner.cluster, start.choice.stages
    there = len(cluster.devices) // start.policy.data_parallel
    for count in (stages + 1, 2 * stages, 4 * stages):
        with contextlib.suppress(ValueError):
            wanted = devices_for(start.choice.schedule, count)
            if cluster.endless or wanted <= there:
                yield start.to(f"--stages {count}", stages=count, devices=wanted)


def _half_precision(start: _Change) -> Iterator[_Change]:
    if start.policy.precision is Precision.FP32:
        half = dataclasses.replace(start.policy, precision=Precision.BF16)
        yield _Change(start.choice, half, (*start.words, "--precision bf16"))


def _kinds(planner: Planner, free: Free) -> list[Callable[[_Change], Iterator[_Change]]]:
    """What can be changed, in the order in which changes are put on top of one another."""
    given: Sequence[tuple[bool, Callable[[Planner, _Change], Iterator[_Change]]]] = (
        (free.remat, _full),
        (free.schedule, _one_f_one_b),
        (free.microbatches, _more_microbatches),
        (free.stages, _more_stages),
    )
    return [*(partial(kind, planner) for wanted, kind in given if wanted), _half_precision]


# --- what fits ------------------------------------------------------------------------------------


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
        f"{near.change}: {format_bytes(max(near.device_bytes, default=0))} at most, "
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
        f"{format_bytes(state)} of {_state_words(plan)}, and "
        f"{format_bytes(_live(plan, rank) - state)} of activations{_besides(plan, rank)}"
    )


def _live(plan: Plan, rank: int) -> int:
    """Bytes of tensors on a device, at its peak."""
    memory = plan.prediction.memory
    return memory[rank].peak if memory else plan.prediction.device_bytes[rank]


def _besides(plan: Plan, rank: int) -> str:
    """What a GPU or a process needs besides."""
    more = plan.prediction.device_bytes[rank] - _live(plan, rank)
    whose = "PyTorch's allocator and CUDA" if plan.process is None else "Python, torch and kernels"
    return f", and {format_bytes(more)} are for {whose}" if more > 0 else ""


def _state_words(plan: Plan) -> str:
    if not plan.training:
        return "parameters and buffers"
    return "parameters, buffers, gradients and what the optimizer keeps"


def nearby(
    planner: Planner, choice: Choice, policy: Policy, free: Free = EVERYTHING
) -> list[Remedy]:
    """The nearest settings that fit.

    Each kind of change by itself, as little of it as will do; where none does, one after the
    other on top, until all together fit or nothing is left to change. At most `MOST_TRIED` plans
    are made.
    """
    tries = iter(range(MOST_TRIED))

    def first(changes: Iterable[_Change]) -> Remedy | None:
        """The first of some changes that fits, as long as there are not too many."""
        for change, _ in zip(changes, tries, strict=False):
            with contextlib.suppress(PlanError, UsageError, ModelError):
                plan = change.planned(planner)
                if not most_over(plan):
                    return change.remedy(plan)
        return None

    start = _Change(choice, policy)
    kinds = _kinds(planner, free)
    found = [near for kind in kinds if (near := first(kind(start))) is not None]
    if found:
        return sorted(found, key=lambda near: near.step_s)
    for kind in kinds:
        furthest = list(kind(start))
        if furthest:
            start = furthest[-1]
            near = first([start])
            if near is not None:
                return [near]
    return []
