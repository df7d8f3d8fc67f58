"""What is in the memory of a device at its peak, and what sparse gradients add to it.

Sparse gradients grow with every micro-batch: a sum of two sparse tensors has the rows of both, in
memory of its own (`add_out_sparse_cpu` in ATen/native/sparse/SparseTensorMath.cpp); rows that are
alike stay apart until the optimizer steps. Traces are those of any micro-batch, without it.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from dataclasses import dataclass, field

from gpipe_compiler.ir import Graph
from gpipe_compiler.passes.allocation_trace import BlockKind, Growth
from gpipe_compiler.plan.memory_curve import Category, Curve, PeakHolder
from gpipe_compiler.planner.memory.job import DeviceJob, MemoryRun
from gpipe_compiler.planner.memory.simulator import MemorySimulator
from gpipe_compiler.planner.memory.storages import PLACE, Own, SharedBuffer
from gpipe_compiler.runtime.schedule.actions import Compute, Phase

GRADIENTS = "gradients of parameters"
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

    The same of several micro-batches, and of layers that repeat, is one holder.
    """
    watch = _Watch(run.peak - run.grown, run.position)
    MemorySimulator(job, watch.hear).run(until=run.position + 1)
    sums = HolderSums(graph)
    for size, what in watch.found or ():
        if isinstance(what, SharedBuffer):
            maker = graph.producer.get(what.name.removeprefix("gradient of "))
            op = maker.name if maker else ""
            sums.add(what.name, what.category, op, size, what.stage)
        else:
            sums.add(*_own(job, what), size, what.stage)
    if run.grown:
        sums.add(_SPARSE, Category.GRADIENTS, "", run.grown)
    return sums.holders


@dataclass
class HolderSums:
    """Adds up what is alike: the same of one stage, made at one line of the model, in modules whose
    paths differ in numbers only."""

    graph: Graph
    _sums: dict[tuple[object, ...], tuple[PeakHolder, set[str]]] = field(default_factory=dict)

    def add(self, what: str, category: Category, op: str, size: int, stage: int = -1) -> None:
        """Adds a storage; those of no bytes are left out."""
        if not size:
            return
        found = self.graph.op_of.get(op)
        path, line = ("", "") if found is None else (found.path, str(found.source))
        key = what, category, _NUMBERS.sub("*", path), line, stage
        held, paths = self._sums.get(key, (PeakHolder(what, category, op, 0, 0, stage), set()))
        paths.add(path)
        size, count = held.bytes + size, held.count + 1
        held = dataclasses.replace(held, bytes=size, count=count, modules=len(paths))
        self._sums[key] = held, paths

    def put(self, holder: PeakHolder) -> None:
        """Adds one that is like no other."""
        self._sums[holder, len(self._sums)] = holder, set()

    def of(self, category: Category) -> int:
        """Bytes of a category."""
        return sum(held.bytes for held, _ in self._sums.values() if held.category is category)

    @property
    def holders(self) -> tuple[PeakHolder, ...]:
        """The largest first."""
        found = (held for held, _ in self._sums.values())
        return tuple(sorted(found, key=lambda holder: -holder.bytes))


_NUMBERS = re.compile(r"\d+")


def _own(job: DeviceJob, what: Own) -> tuple[str, Category, str]:
    """What a storage of a stage is, what for, and its op."""
    deltas = job.stages[what.stage].deltas
    block = deltas.traces.blocks[what.block]
    category, op = deltas.category[what.block], deltas.traces.op(block.op)
    if block.kind is BlockKind.PARAMETER_GRADIENT:
        return GRADIENTS, category, op
    if block.kind is BlockKind.CAST:
        return _CASTS, category, op
    words = f"{block.shape} {block.dtype}"
    if block.kind is BlockKind.GRADIENT:
        words += ", a gradient"
    return words, category, op


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
