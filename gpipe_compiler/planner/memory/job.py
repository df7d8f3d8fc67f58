"""The program of a device with its stages, and the result of its simulation."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gpipe_compiler.passes.allocation_trace import BlockKind
from gpipe_compiler.plan.memory_curve import Curve, Sizes
from gpipe_compiler.planner.memory.storages import (
    ActionDelta,
    ActionDeltas,
    RefCounts,
    SharedBuffer,
)
from gpipe_compiler.runtime.core.wiring import ActionStep, StageWiring
from gpipe_compiler.runtime.schedule.actions import Action, Compute, SharedSum
from gpipe_compiler.runtime.spec import Remat


@dataclass(frozen=True)
class StageMemory:
    """The memory traces of a stage, and its connections to the rest of the pipeline.

    Attributes:
        deltas: of its traces: for the whole mini-batch, where the stage is joint.
        remat: as its traces do not have it: `Remat.FULL` where the whole stage runs again.
        trains: whether it has a backward.
    """

    wiring: StageWiring
    deltas: ActionDeltas
    remat: Remat = Remat.NONE
    trains: bool = True

    @property
    def index(self) -> int:
        return self.wiring.index


@dataclass(frozen=True)
class DeviceJob:
    """The program of a device, and its stages.

    Attributes:
        crossing_bytes: of each boundary value of one micro-batch.
        shared_bytes: of each parameter that stages of several devices own.
        row_bytes: for each stage, of the rows in which its gradients go to other replicas, from
            its last backward on; none without replicas.
        results: in inference, the outputs of the model that are made here. Those of all
            micro-batches are held to the end.
        joined: bytes of what they are then put together in, and of what comes of other devices.
    """

    steps: Sequence[ActionStep]
    stages: Mapping[int, StageMemory]
    crossing_bytes: Mapping[str, int]
    shared_bytes: Mapping[str, int]
    row_bytes: Mapping[int, int]
    microbatches: int
    results: frozenset[str] = frozenset()
    joined: int = 0


@dataclass(slots=True)
class InFlight:
    """The shared blocks of one micro-batch in a stage, from its forward to its backward.

    Attributes:
        blocks: the storages behind the shared blocks of its traces; None for those of the batch.
        own: numbers of the stage's own blocks that are alive, where there is a listener.
        without: kinds of blocks that its traces have and this micro-batch has not.
    """

    stage: int
    blocks: dict[int, SharedBuffer | None] = field(default_factory=dict)
    own: dict[int, int] = field(default_factory=dict)
    again: bool = False
    without: frozenset[BlockKind] = frozenset()

    def share(self, block: int | None, holders: int) -> SharedBuffer | None:
        """A storage gets further holders."""
        held = None if block is None else self.blocks.get(block)
        if held is not None:
            held.holders += holders
        return held

    def outlasts(self, deltas: ActionDeltas, block: int) -> bool:
        if block not in self.blocks:
            return False
        held = self.blocks[block]
        if held is None or held.holders > 1:
            return True
        # Its end is counted in `RefCounts`.
        counted = deltas.traces.blocks[block].bytes, deltas.category[block]
        return (held.bytes, held.category) != counted

    def held_again(self) -> dict[int, SharedBuffer | None]:
        return {block: self.share(block, 1) for block in self.blocks}


@dataclass(frozen=True)
class MemoryRun:
    """The simulated memory of a device, without what is there all the time.

    Attributes:
        sizes: by category at the peak.
        points: after every compute action and sum.
        stage_peaks: by stage, of what is its own.
        after: bytes by category when all is done.
        grown: bytes of the peak that are sums of sparse gradients, beyond those of the traces.
    """

    peak: int
    action: str
    position: int
    sizes: Sizes
    points: Curve
    stage_peaks: Mapping[int, int]
    after: Sizes
    grown: int = 0


@dataclass(frozen=True, slots=True)
class Peak:
    """The highest moment so far."""

    bytes: int
    action: str
    position: int
    sizes: Sizes


# --- the highest moments --------------------------------------------------------------------------


class PeakTracker:
    """The peak of a device and of its stages, and the curve over its actions.

    Attributes:
        position: of the step that is simulated.
        peak: the highest moment so far.
        peaks, afters: of the steps that are points of the curve.
    """

    def __init__(self, counts: RefCounts, stages: Iterable[int]) -> None:
        self.position = 0
        self.peak = Peak(0, "", 0, counts.sizes)
        self.stage_peaks = dict.fromkeys(stages, 0)
        self.peaks: list[int] = []
        self.afters: list[int] = []
        self._counts = counts
        self._highest = 0

    def begin(self, position: int) -> None:
        self.position = position
        self._highest = self._counts.total

    def mark(
        self, action: object, delta: ActionDelta | None = None, stage: int | None = None
    ) -> None:
        """Records the memory at a moment: now, or at the peak of an action."""
        more = delta.peak if delta else 0
        now = self._counts.total + more
        if now > self._highest:
            self._highest = now
        if now > self.peak.bytes:
            sizes = self._counts.sizes
            if delta is not None:
                sizes = tuple(map(operator.add, sizes, delta.at_peak))
            self.peak = Peak(now, str(action), self.position, sizes)
        if stage is not None:
            own = self._counts.of_stage[stage] + more
            if own > self.stage_peaks[stage]:
                self.stage_peaks[stage] = own

    def point(self) -> None:
        """A step ends that is a point of the curve."""
        self.peaks.append(self._highest)
        self.afters.append(self._counts.total)


def is_counted(step: ActionStep) -> bool:
    return isinstance(step.action, Compute | SharedSum)


def counted(steps: Sequence[ActionStep]) -> list[Action]:
    return [step.action for step in steps if is_counted(step)]
