"""What is in the memory of a device at its peak."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpipe_compiler.ir import Graph
from gpipe_compiler.memory.job import DeviceJob, MemoryRun
from gpipe_compiler.memory.ref_counts import Own, SharedBuffer
from gpipe_compiler.memory.simulator import MemorySimulator
from gpipe_compiler.passes.allocation_trace import BlockKind
from gpipe_compiler.plan.memory_curve import Category, PeakHolder

_GRADIENTS = "gradients of parameters"
_CASTS = "weights cast by autocast"
_SPARSE = "sums of sparse gradients"


@dataclass
class _Watch:
    """Follows every storage up to the peak.

    Attributes:
        found: the storages at the peak; None before it.
    """

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
