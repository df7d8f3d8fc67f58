"""The plan that the options ask for: of the settings given, or of the best that are found; and
plans of one trace for several numbers of devices, and for mini-batches of several sizes.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

from gpipe_compiler.codegen.package import Progress
from gpipe_compiler.errors import ModelError, PlanError, UsageError
from gpipe_compiler.ir import Graph
from gpipe_compiler.options import Auto, CompileOptions
from gpipe_compiler.passes.pipeline import PassPipeline
from gpipe_compiler.plan import Plan
from gpipe_compiler.plan.pareto import Frontier
from gpipe_compiler.plan.plan import SweepPoint
from gpipe_compiler.planner.memory_advice import DoesNotFitError, refuse_too_large
from gpipe_compiler.planner.planner import Planner
from gpipe_compiler.planner.search import explore
from gpipe_compiler.planner.search_space import SearchSpace
from gpipe_compiler.planner.without_pipeline import without_pipeline
from gpipe_compiler.runtime.schedule.choosing import SCHEDULES
from gpipe_compiler.runtime.spec import WeightSharding
from gpipe_compiler.runtime.wording import counted

MOST_IN_PLAN = 40
"""Settings beside those on the frontier that go into a plan's JSON."""


def planner_of(graph: Graph, options: CompileOptions) -> Planner:
    """What plans a traced graph, with the passes that the options ask for."""
    pipeline = PassPipeline().asked(options.print_after, options.pass_options)
    return Planner(
        graph,
        options.cluster,
        options.measured,
        options.constraints,
        pipeline=pipeline,
        calibration=options.calibration,
    )


def plan_as_asked(
    planner: Planner, options: CompileOptions, progress: Progress
) -> tuple[Plan, Frontier | None]:
    """The plan, and the settings that it was chosen from where these are not all given.

    Raises:
        DoesNotFitError: when nothing fits the devices, and that is asked or explored.
        PlanError, UsageError: when there can be no plan.
    """
    if isinstance(options.sharding, Auto):
        return _sharded(planner, options, progress)
    stages, microbatches = options.stages, options.microbatches
    if not (
        isinstance(stages, Auto)
        or isinstance(microbatches, Auto)
        or isinstance(options.schedule, Auto)
    ):
        choice, made = planner.planned(stages, microbatches, options)
        if options.must_fit:
            refuse_too_large(planner, made, options, choice)
        return _compared(planner, made, options, progress), None
    wish = SearchSpace.of(options)
    found = explore(planner, wish, options, seconds=options.search_s, progress=progress)
    frontier = found.frontier
    if not found.fits:
        progress("looking for settings nearby that fit")
        nearest = frontier.points[0].choice
        refuse_too_large(planner, found.plan, options, nearest, wish.free, len(frontier.points))
    plan = dataclasses.replace(found.plan, frontier=frontier.shortened(MOST_IN_PLAN))
    return _compared(planner, plan, options, progress), frontier


def _sharded(
    planner: Planner, options: CompileOptions, progress: Progress
) -> tuple[Plan, Frontier | None]:
    """With what replicas divide so that a step takes less time, of what fits; or else of all."""
    less = dataclasses.replace(options, sharding=WeightSharding.OPTIMIZER)
    if not options.sharding_may_be_full:
        return plan_as_asked(planner, less, progress)
    for sharding in (WeightSharding.OPTIMIZER, WeightSharding.FULL):
        asked = dataclasses.replace(options, sharding=sharding, must_fit=False)
        with contextlib.suppress(DoesNotFitError):
            found = plan_as_asked(planner, asked, progress)
            if found[0].fits:
                return found
    return plan_as_asked(planner, less, progress)


def _compared(planner: Planner, plan: Plan, options: CompileOptions, progress: Progress) -> Plan:
    """The plan, with what its devices would do without a pipeline, and what it is calibrated by."""
    progress("comparing with plain training" if plan.training else "comparing with one device")
    known = options.calibration
    return dataclasses.replace(
        plan,
        whole=without_pipeline(planner, plan, options),
        calibration=(1.0, 1.0) if known is None else (known.forward, known.backward),
    )


_MOST_DOUBLINGS = 14
"""Times that a mini-batch is doubled or halved to find the largest that fits."""


def sweep(
    planner: Planner,
    options: CompileOptions,
    devices: Sequence[int],
    *,
    largest_batch: bool,
    progress: Progress,
) -> tuple[SweepPoint, ...]:
    """A plan for each number of devices; in their order, and of growing mini-batches.

    What cannot be planned is told in the points.

    Args:
        options: whose stages count where `devices` is empty.
        largest_batch: whether mini-batches are doubled, or halved, from the example's on, as long
            as they fit.

    Raises:
        FixedSizeError: where a size that was to be free cannot be.
    """
    options = dataclasses.replace(options, must_fit=False)
    found: list[SweepPoint] = []
    for count in devices or (None,):
        stages = options.stages if count is None else _stages_on(count, options)
        asked = dataclasses.replace(options, stages=stages)
        found += _points(planner, asked, count, largest_batch=largest_batch, progress=progress)
    return tuple(found)


def _stages_on(devices: int, options: CompileOptions) -> int:
    """How many stages a schedule has on all of these devices."""
    if isinstance(options.schedule, Auto):
        return devices
    return devices * SCHEDULES[options.schedule].stages_a_device[0]


def _points(
    planner: Planner,
    options: CompileOptions,
    devices: int | None,
    *,
    largest_batch: bool,
    progress: Progress,
) -> list[SweepPoint]:
    first = planner.batch_size
    points = [_point(planner, options, devices, first, progress)]
    if largest_batch and points[0].plan is not None:
        for size in _sizes(first, up=points[0].fits):
            point = _point(planner, options, devices, size, progress)
            points.append(point)
            if point.plan is None or point.fits != points[0].fits:
                break
    return sorted(points, key=lambda point: point.batch_size)


def _sizes(first: int, *, up: bool) -> Iterator[int]:
    for times in range(1, _MOST_DOUBLINGS + 1):
        size = first << times if up else first >> times
        if size < 1:
            return
        yield size


def _point(
    planner: Planner, options: CompileOptions, devices: int | None, size: int, progress: Progress
) -> SweepPoint:
    what = counted(devices, "device") if devices is not None else "the pipeline"
    progress(f"planning: {what}, a mini-batch of {size:,}")
    sized = dataclasses.replace(planner, samples=size)
    try:
        plan = plan_as_asked(sized, options, lambda _: None)[0]
    except (ModelError, PlanError, UsageError) as error:
        return SweepPoint(devices or 0, size, None, error.problem)
    return SweepPoint(len(plan.orders), size, plan)
