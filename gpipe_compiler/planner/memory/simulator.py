"""Simulates the memory of a device: the traces of its stages in the order of its program.

The engine's references are counted with them (`runtime.core.engine`, `runtime.core.stage_run`,
`runtime.core.distributed`): a value is held by the table until its last use here, by what is
under way until it has left, and by autograd as the traces tell. What is sent is taken to have left
at the next transfer of its device, as it has where the receiver is not behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpipe_compiler.passes.allocation_trace import AllocationTrace, BlockKind, StorageEvent
from gpipe_compiler.plan.memory_curve import Category, Curve
from gpipe_compiler.planner.memory.job import (
    DeviceJob,
    InFlight,
    MemoryRun,
    PeakTracker,
    StageMemory,
    counted,
    is_counted,
)
from gpipe_compiler.planner.memory.storages import (
    ActionDelta,
    ActionDeltas,
    Listener,
    Own,
    RefCounts,
    SharedBuffer,
    gradient_of,
)
from gpipe_compiler.runtime.core.wiring import ActionStep, GradientPart, Need, last_backwards
from gpipe_compiler.runtime.schedule.actions import (
    Compute,
    Phase,
    Receive,
    Send,
    SharedSum,
    Transfer,
)
from gpipe_compiler.runtime.spec import Remat

_NO_KINDS: frozenset[BlockKind] = frozenset()
_BUFFERS = frozenset({BlockKind.BUFFER})
_NEITHER = frozenset({BlockKind.BUFFER, BlockKind.CAST})
_WITHOUT_CASTS = {_NO_KINDS: frozenset({BlockKind.CAST}), _BUFFERS: _NEITHER}
"""For kinds of blocks that there are none of, these and casts."""
_NO_BLOCKS: frozenset[int] = frozenset()


class MemorySimulator:
    """The memory of a device over its program; for one run.

    Values are known by name and micro-batch, gradients by the stage that made them besides; those
    of the batch count elsewhere. What was received and not read yet is posted, what was sent and
    not released yet under way.

    Args:
        listener: called for every storage that comes and goes, in order.
    """

    def __init__(self, job: DeviceJob, listener: Listener | None = None) -> None:
        self.job = job
        self.counts = RefCounts(job.stages, listener)
        self._listener = listener
        self._flights: dict[tuple[int, int], InFlight] = {}
        self._values: dict[tuple[str, int], SharedBuffer | None] = {}
        self._gradients: dict[tuple[str, int, int], SharedBuffer | None] = {}
        self._posted: dict[Transfer, SharedBuffer] = {}
        self._under_way: list[SharedBuffer | None] = []
        self._ran: set[tuple[int, Phase]] = set()
        self._last = last_backwards(job.steps) if job.row_bytes else {}
        self._tracker = PeakTracker(self.counts, job.stages)
        self._last_first = sorted(job.stages, reverse=True)

    def run(self, until: int | None = None) -> MemoryRun:
        """All steps, or those before a position."""
        steps = self.job.steps[:until]
        for position, step in enumerate(steps):
            self._tracker.begin(position)
            self._step(step)
        if until is None:
            self._arrive()
        tracker, peak = self._tracker, self._tracker.peak
        points = Curve(counted(steps), tracker.peaks, tracker.afters)
        found = peak.bytes, peak.action, peak.position, peak.sizes
        return MemoryRun(*found, points, tracker.stage_peaks, self.counts.sizes)

    def _step(self, step: ActionStep) -> None:
        """Simulates one action, and releases what it is the last to use."""
        action = step.action
        match action:
            case Compute(phase=Phase.FORWARD):
                self._forward(action, step)
            case Compute(phase=Phase.BACKWARD):
                self._backward(action)
            case Compute():
                self._weight(action)
            case Send(transfer=transfer):
                self._send(transfer)
            case Receive():
                self._receive(action)
            case SharedSum(parameter=name):
                self._sum(name)
        self._drop(step)
        ended = self._last.get(self._tracker.position)
        if ended is not None:
            size = self.job.row_bytes[ended]
            self.counts.take(size, Category.COMMUNICATION, "gradients in rows", ended)
            self._tracker.mark(action, None, ended)
        if is_counted(step):
            self._tracker.point()

    # --- the actions -------------------------------------------------------------------------

    def _forward(self, action: Compute, step: ActionStep) -> None:
        stage = self.job.stages[action.stage]
        traces = stage.deltas.traces
        microbatches = self._microbatches(stage, action)
        flight = InFlight(stage.index)
        flight.again = stage.trains and stage.remat is Remat.FULL and step.waits
        if not (step.waits or stage.wiring.split):
            flight.without = _BUFFERS
        for need in stage.wiring.needs:
            self._read(stage, need, microbatches, flight)
        self._drop(step)
        arguments = flight.held_again() if flight.again else {}
        without = flight.without
        if (stage.index, Phase.FORWARD) in self._ran:
            without = _WITHOUT_CASTS[without]
        self._ran.add((stage.index, Phase.FORWARD))
        trace = traces.forward_again if flight.again else traces.forward
        left = self._run_trace(action, flight, trace, stage.deltas.handed_on, without)
        for name in stage.wiring.spec.outputs:
            held = flight.share(traces.returned.get(name), len(microbatches))
            for m in microbatches:
                self._values[name, m] = held
            if name in self.job.results:
                flight.share(traces.returned.get(name), 1)
        self._release(flight, left)
        if not stage.trains:
            self._release(flight, tuple(flight.blocks))
            return
        if flight.again:
            self._release(flight, tuple(flight.blocks))
            flight.blocks.update(arguments)
        self._flights[stage.index, microbatches[0]] = flight

    def _backward(self, action: Compute) -> None:
        stage = self.job.stages[action.stage]
        traces = stage.deltas.traces
        microbatches = self._microbatches(stage, action)
        flight = self._flights[stage.index, microbatches[0]]
        without = _WITHOUT_CASTS[flight.without]
        if flight.again:
            # The copies of buffers that the first forward has made are used up by the second.
            left = self._run_trace(action, flight, traces.forward, _NO_BLOCKS, _NEITHER)
            self._release(flight, left)
        for value, parts in stage.wiring.returned:
            held = self._gradient(stage, value, parts, microbatches)
            block = traces.arriving.get(value)
            if block is None or block in flight.blocks:
                self.counts.release(held)
            else:
                flight.blocks[block] = held
        trace = (
            traces.backward if (stage.index, Phase.BACKWARD) in self._ran else traces.first_backward
        )
        self._ran.add((stage.index, Phase.BACKWARD))
        left = self._run_trace(action, flight, trace, stage.deltas.handed_back, without)
        for need in stage.wiring.needs:
            if need.gradient:
                held = flight.share(traces.sent_back.get(need.value), len(microbatches))
                for m in microbatches:
                    self._gradients[need.value, stage.index, m] = held
        self._release(flight, left)
        if not stage.wiring.split:
            self._release(flight, tuple(flight.blocks))
            del self._flights[stage.index, microbatches[0]]

    def _weight(self, action: Compute) -> None:
        stage = self.job.stages[action.stage]
        flight = self._flights[stage.index, action.microbatch]
        traces = stage.deltas.traces
        trace = traces.weight if (stage.index, Phase.WEIGHT) in self._ran else traces.first_weight
        self._ran.add((stage.index, Phase.WEIGHT))
        if trace is not None:
            without = _WITHOUT_CASTS[flight.without]
            left = self._run_trace(action, flight, trace, _NO_BLOCKS, without)
            self._release(flight, left)
        self._release(flight, tuple(flight.blocks))
        del self._flights[stage.index, action.microbatch]

    def _send(self, transfer: Transfer) -> None:
        held: SharedBuffer | None = None
        gradients = self._gradients
        if not transfer.gradient:
            held = self._values.get((transfer.value, transfer.microbatch))
            if held is not None:
                held.holders += 1
        else:
            for stage in self._last_first:
                key = transfer.value, stage, transfer.microbatch
                if key in gradients:
                    held = self._summed(held, gradients.pop(key))
        self._arrive()
        self._under_way.append(held)

    def _receive(self, action: Receive) -> None:
        transfer = action.transfer
        size = self.job.crossing_bytes[transfer.value]
        name = gradient_of(transfer.value) if transfer.gradient else transfer.value
        held = self.counts.take(size, Category.BOUNDARY, name)
        self._posted[transfer] = held
        self._tracker.mark(action)

    def _sum(self, name: str) -> None:
        """Two more of the parameter's size: what comes from another owner, and the sum."""
        size = 2 * self.job.shared_bytes.get(name, 0)
        held = self.counts.take(size, Category.COMMUNICATION, name)
        self._tracker.mark(f"sum {name}")
        self.counts.release(held)

    # --- the engine's references -------------------------------------------------------------

    def _microbatches(self, stage: StageMemory, action: Compute) -> Sequence[int]:
        if stage.wiring.joint is None:
            return (action.microbatch,)
        return range(self.job.microbatches)

    def _drop(self, step: ActionStep) -> None:
        for key in step.drops:
            self.counts.release(self._values.pop(key, None))

    def _arrive(self) -> None:
        """What was sent has left."""
        for held in self._under_way:
            self.counts.release(held)
        self._under_way.clear()

    def _read(
        self, stage: StageMemory, need: Need, microbatches: Sequence[int], flight: InFlight
    ) -> None:
        """A stage takes a reference to a value that it reads."""
        values = self._values
        for m in microbatches:
            if need.sender is not None and (need.value, m) not in values:
                self._arrive()
                came = self._posted.pop(Transfer(need.value, m, need.sender, need.via))
                values[need.value, m] = came
        block = stage.deltas.traces.received.get(need.value)
        if block is None or block in flight.blocks:
            return
        joint = stage.wiring.joint
        if len(microbatches) > 1 and joint is not None and joint.get(need.value) is not None:
            size = stage.deltas.traces.blocks[block].bytes
            flight.blocks[block] = self.counts.take(size, Category.BOUNDARY, need.value)
            self._tracker.mark(f"{stage.index}F")
            return
        held = values.get((need.value, microbatches[0]))
        if held is not None:
            held.holders += 1
        flight.blocks[block] = held

    def _gradient(
        self,
        stage: StageMemory,
        value: str,
        parts: Sequence[GradientPart],
        microbatches: Sequence[int],
    ) -> SharedBuffer | None:
        """What has come for a value, summed; for a joint stage put together."""
        pieces = []
        for m in microbatches:
            total: SharedBuffer | None = None
            for part in parts:
                if part.remote:
                    self._arrive()
                    way = part.stage, stage.index
                    came = self._posted.pop(Transfer(value, m, *way, gradient=True))
                    total = self._summed(total, came)
                else:
                    total = self._summed(total, self._gradients.pop((value, part.stage, m)))
            pieces.append(total)
        if len(pieces) == 1:
            return pieces[0]
        block = stage.deltas.traces.arriving.get(value)
        size = 0 if block is None else stage.deltas.traces.blocks[block].bytes
        joined = self.counts.take(size, Category.BOUNDARY, gradient_of(value))
        self._tracker.mark(f"{stage.index}B")
        for piece in pieces:
            self.counts.release(piece)
        return joined

    def _summed(
        self, total: SharedBuffer | None, summand: SharedBuffer | None
    ) -> SharedBuffer | None:
        """The sum of two gradients, of which None is zeros."""
        if total is None or summand is None:
            return summand if total is None else total
        found = self.counts.take(total.bytes, Category.BOUNDARY, total.name)
        self._tracker.mark("sum")
        self.counts.release(total)
        self.counts.release(summand)
        return found

    # --- playing -----------------------------------------------------------------------------

    def _release(self, flight: InFlight, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.counts.release(flight.blocks.pop(block, None))

    def _run_trace(
        self,
        action: Compute,
        flight: InFlight,
        trace: AllocationTrace,
        handed: frozenset[int],
        without: frozenset[BlockKind],
    ) -> tuple[int, ...]:
        """Applies a trace; returns the shared blocks that the stage has released and others keep.

        Args:
            handed: the blocks that the trace makes for others, who take them afterwards.
        """
        deltas = self.job.stages[flight.stage].deltas
        left = tuple([b for b in deltas.ended(trace) if b in handed or flight.outlasts(deltas, b)])
        delta = deltas.of(trace, left, without)
        self._tracker.mark(action, delta, flight.stage)
        self.counts.add(delta.net, flight.stage)
        if self._listener is not None:
            self._follow(deltas, flight, delta)
        else:
            for move in delta.shared:
                self._move(deltas, flight, move)
        return left

    def _move(self, deltas: ActionDeltas, flight: InFlight, move: StorageEvent) -> None:
        """Allocates or frees a shared block, whose bytes are counted with its delta."""
        if not move.alive:
            self.counts.end_in(flight.stage, flight.blocks.pop(move.block, None))
            return
        flight.blocks[move.block] = self.counts.take(
            deltas.traces.blocks[move.block].bytes,
            deltas.category[move.block],
            deltas.names.get(move.block, ""),
            flight.stage,
            counted=False,
        )

    def _follow(self, deltas: ActionDeltas, flight: InFlight, delta: ActionDelta) -> None:
        """Applies the moves one by one, for the listener."""
        assert self._listener is not None
        for move in delta.moves:
            size = deltas.traces.blocks[move.block].bytes if move.alive else -1
            if move.block not in deltas.shared:
                if move.alive:
                    flight.own[move.block] = self.counts.number()
                number = flight.own[move.block] if move.alive else flight.own.pop(move.block)
                self._listener(number, size, Own(flight.stage, move.block))
                continue
            before = flight.blocks.get(move.block)
            self._move(deltas, flight, move)
            held = flight.blocks[move.block] if move.alive else before
            assert held is not None  # nothing of the batch ends
            self._listener(held.number, size, held)
