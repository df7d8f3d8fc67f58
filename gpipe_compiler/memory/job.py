"""What a device is to play, what it holds meanwhile, and what has come of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpipe_compiler.memory.ref_counts import SharedBuffer
from gpipe_compiler.memory.script import Scripts
from gpipe_compiler.passes.allocation_trace import BlockKind
from gpipe_compiler.plan.memory_curve import Curve, Sizes
from gpipe_compiler.runtime.core.wiring import StageWiring, Step
from gpipe_compiler.runtime.schedule.actions import Compute, Phase
from gpipe_compiler.runtime.spec import Remat


@dataclass(frozen=True)
class StageMemory:
    """What a stage takes, and how it hangs in the pipeline.

    Attributes:
        scripts: of its tapes: for the whole mini-batch, where the stage is joint.
        remat: as its tapes do not have it: `Remat.FULL` where the whole stage runs again.
        trains: whether it has a backward.
    """

    wiring: StageWiring
    scripts: Scripts
    remat: Remat = Remat.NONE
    trains: bool = True

    @property
    def index(self) -> int:
        """The number of the stage."""
        return self.wiring.index


@dataclass(frozen=True)
class DeviceJob:
    """What a device is to play.

    Attributes:
        steps: its program.
        stages: that it holds, by number.
        crossing_bytes: of each boundary value of one micro-batch.
        shared_bytes: of each parameter that stages of several devices own.
        row_bytes: for each stage, of the rows in which its gradients go to other replicas, from
            its last backward on; none without replicas.
        results: in inference, the outputs of the model that are made here. Those of all
            micro-batches are held to the end.
        joined: bytes of what they are then put together in, and of what comes of other devices.
    """

    steps: Sequence[Step]
    stages: Mapping[int, StageMemory]
    crossing_bytes: Mapping[str, int]
    shared_bytes: Mapping[str, int]
    row_bytes: Mapping[int, int]
    microbatches: int
    results: frozenset[str] = frozenset()
    joined: int = 0

    def last_backwards(self) -> Mapping[int, int]:
        """The stage whose last backward stands at each of these places in the program."""
        places = {
            step.action.stage: place
            for place, step in enumerate(self.steps)
            if isinstance(step.action, Compute) and step.action.phase is not Phase.FORWARD
        }
        return {place: stage for stage, place in places.items()}


@dataclass(slots=True)
class InFlight:
    """What a stage holds of one micro-batch.

    Attributes:
        blocks: the storages behind the shared blocks of its tapes; None for those of the batch.
        own: numbers told for the stage's own blocks that are alive, where anybody listens.
        again: whether the forward has to run again before the backward.
        without: kinds of blocks that its tapes have and this micro-batch has not.
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

    def held_again(self) -> dict[int, SharedBuffer | None]:
        """All that is shared, each with another holder."""
        return {block: self.share(block, 1) for block in self.blocks}


@dataclass(frozen=True)
class Played:
    """What a device's program has come to, beside what is there all the time.

    Attributes:
        peak: bytes at most.
        action: during which that is.
        position: of that step.
        sizes: by category at the peak.
        points: after every compute action and sum.
        stage_peaks: by stage, of what is its own.
        after: bytes by category when all is done.
        grown: how many of the peak's bytes are sums of sparse gradients, beyond those of the tapes.
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
