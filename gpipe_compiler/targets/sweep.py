"""Plans of one trace for several numbers of devices, and for mini-batches of several sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from gpipe_compiler.codegen.package import Progress
from gpipe_compiler.errors import ModelError, PlanError, UsageError
from gpipe_compiler.options import Auto, CompileOptions
from gpipe_compiler.plan.plan import SweepPoint
from gpipe_compiler.planner.planner import Planner
from gpipe_compiler.runtime.schedule.choosing import SCHEDULES
from gpipe_compiler.runtime.wording import counted
from gpipe_compiler.targets.planning import plan_as_asked

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
