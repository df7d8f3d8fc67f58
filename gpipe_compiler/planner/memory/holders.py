"""What is in the memory of a device at its peak, and what sparse gradients add to it.

Sparse gradients grow with every micro-batch: a sum of two sparse tensors has the rows of both, in
memory of its own (`add_out_sparse_cpu` in ATen/native/sparse/SparseTensorMath.cpp); rows that are
alike stay apart until the optimizer steps. Traces are those of any micro-batch, without it.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field

from gpipe_compiler.ir import Graph
from gpipe_compiler.passes.allocation_trace import BlockKind, Growth
from gpipe_compiler.plan.memory_curve import Category, Curve, PeakHolder
from gpipe_compiler.planner.memory.job import DeviceJob, MemoryRun
from gpipe_compiler.planner.memory.simulator import MemorySimulator
from gpipe_compiler.planner.memory.storages import PLACE, Own, SharedBuffer
from gpipe_compiler.runtime.schedule.actions import Compute, Phase

_GRADIENTS = "gradients of parameters"
_CASTS = "weights cast by autocast"
_SPARSE = "sums of sparse gradients"


@dataclass
class _Watch:
    """Follows every storage up to the peak."""

    peak: int
    position: int
    alive: dict[int, tuple[int, SharedBuffer | Own]] = field(default_factory=dict)
    total: int = 0
    found: list[tuple[int, SharedBuffer | Own]] | None = None

    def hear(self, number: int, size: int, what: SharedBuffer | Own) -> None:
        """A storage comes, or goes (size -1)."""
        if size < 0:
            self.total -= self.alive.pop(number)[0]
            return
        self.alive[number] = size, what
        self.total += size
        if self.total == self.peak and self.found is None:
            self.found = list(self.alive.values())


def holders_at(graph: Graph, job: DeviceJob, run: MemoryRun) -> tuple[PeakHolder, ...]:
    """What is in memory at the peak of a device, beside what is there all the time.

    The same of several micro-batches is one holder, as are the gradients of a stage.
    """
    watch = _Watch(run.peak - run.grown, run.position)
    MemorySimulator(job, watch.hear).run(until=run.position + 1)
    sums: dict[tuple[str, Category, str, int], tuple[int, int]] = {}
    for size, what in watch.found or ():
        key = _shared(graph, what) if isinstance(what, SharedBuffer) else _own(job, what)
        total, count = sums.get(key, (0, 0))
        sums[key] = total + size, count + 1
    found = [
        PeakHolder(words, category, op, size, count, stage)
        for (words, category, op, stage), (size, count) in sums.items()
    ]
    if run.grown:
        found.append(PeakHolder(_SPARSE, Category.GRADIENTS, "", run.grown, 1, -1))
    return tuple(sorted(found, key=lambda holder: -holder.bytes))


def _shared(graph: Graph, held: SharedBuffer) -> tuple[str, Category, str, int]:
    maker = graph.producer.get(held.name.removeprefix("gradient of "))
    return held.name, held.category, maker.name if maker else "", held.stage


def _own(job: DeviceJob, what: Own) -> tuple[str, Category, str, int]:
    deltas = job.stages[what.stage].deltas
    block = deltas.traces.blocks[what.block]
    category = deltas.category[what.block]
    if block.kind is BlockKind.PARAMETER_GRADIENT:
        return _GRADIENTS, category, "", what.stage
    if block.kind is BlockKind.CAST:
        return _CASTS, category, "", what.stage
    words = f"{block.shape} {block.dtype}"
    if block.kind is BlockKind.GRADIENT:
        words += ", a gradient"
    return words, category, deltas.traces.op(block.op), what.stage


# --- sparse gradients -----------------------------------------------------------------------------

_GRADIENTS_AT = PLACE[Category.GRADIENTS]


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
    return (*sizes[:_GRADIENTS_AT], sizes[_GRADIENTS_AT] + more, *sizes[_GRADIENTS_AT + 1 :])
