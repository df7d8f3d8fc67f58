"""What sparse gradients add to the memory of a device: they grow with every micro-batch.

A sum of two sparse tensors has the rows of both, in memory of its own (`add_out_sparse_cpu` in
ATen/native/sparse/SparseTensorMath.cpp); rows that are alike stay apart until the optimizer steps.
Traces are those of any micro-batch, and know nothing of it.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

from gpipe_compiler.memory.job import DeviceJob, MemoryRun
from gpipe_compiler.passes.allocation_trace import Growth
from gpipe_compiler.plan.memory_curve import CATEGORIES, Category, Curve
from gpipe_compiler.runtime.schedule.actions import Compute, Phase

_PLACE = CATEGORIES.index(Category.GRADIENTS)


def grown(job: DeviceJob, run: MemoryRun) -> MemoryRun:
    """What a device takes, with its sparse gradients as large as they become.

    Sums are taken to be the last that a backward does, as an embedding mostly is the first op of a
    model; and no index to be there twice in a row, which torch would take once.
    """
    found = {index: stage.deltas.traces.growth for index, stage in job.stages.items()}
    growths = {index: growth for index, growth in found.items() if growth is not None}
    if not growths:
        return run
    runs: Counter[int] = Counter()
    more = dict.fromkeys(growths, 0)
    points = run.points
    peaks, afters = list(points.peaks), list(points.afters)
    for place, action in enumerate(points.actions):
        extra = sum(more.values())
        peaks[place] += extra
        if isinstance(action, Compute) and action.stage in growths:
            split = job.stages[action.stage].wiring.split
            if action.phase is (Phase.WEIGHT if split else Phase.BACKWARD):
                runs[action.stage] += 1
                growth, count = growths[action.stage], runs[action.stage]
                others = extra - more[action.stage]
                level = points.afters[place] + others + _summing(growth, count)
                peaks[place] = max(peaks[place], level)
                more[action.stage] = _grown(growth, count)
        afters[place] += sum(more.values())
    last = sum(more.values())
    highest = max(range(len(peaks)), key=peaks.__getitem__)
    by_growth = max(peaks[highest] - run.peak, 0)
    return dataclasses.replace(
        run,
        peak=run.peak + by_growth,
        action=str(points.actions[highest]) if by_growth else run.action,
        sizes=_with_gradients(run.sizes, by_growth),
        points=Curve(points.actions, peaks, afters),
        stage_peaks={
            stage: peak + by_growth * (stage in growths) for stage, peak in run.stage_peaks.items()
        },
        after=_with_gradients(run.after, last),
        grown=by_growth,
    )


def _grown(growth: Growth, count: int) -> int:
    """Bytes above those of the traces after `count` micro-batches."""
    return 0 if count < 2 else count * growth.each - growth.first


def _summing(growth: Growth, count: int) -> int:
    """Bytes above those of the traces while the gradient of micro-batch `count` is added.

    There are the sum so far, what is added, and their sum.
    """
    if count < 2:
        return 0
    so_far = growth.first + _grown(growth, count - 1)
    return so_far + count * growth.each


def _with_gradients(sizes: tuple[int, ...], more: int) -> tuple[int, ...]:
    return (*sizes[:_PLACE], sizes[_PLACE] + more, *sizes[_PLACE + 1 :])
