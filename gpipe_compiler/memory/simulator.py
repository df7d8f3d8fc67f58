"""Plays the tapes of a device's stages in the order of its program.

The engine's own holding is played with them (`runtime.core.engine`, `runtime.core.stage_run`,
`runtime.core.distributed`): a value is held by the table until its last use here, by what is
under way until it has left, and by autograd as the tapes tell. What is sent is taken to have left
at the next transfer of its device, as it has where the receiver is not behind.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from gpipe_compiler.memory.cycles import Cycles, cycles_of
from gpipe_compiler.memory.job import (
    DeviceJob,
    InFlight,
    PeakTracker,
    Played,
    StageMemory,
    Tables,
    counted,
    is_counted,
    posted,
)
from gpipe_compiler.memory.ref_counts import Own, RefCounts, SharedBuffer, Told, gradient_of
from gpipe_compiler.memory.script import Move, Script, Scripts
from gpipe_compiler.passes.allocation_trace import AllocationTrace, BlockKind
from gpipe_compiler.plan.memory_curve import Category, Curve
from gpipe_compiler.runtime.core.wiring import Need, Part, Step
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
    """Plays the program of a device once.

    Args:
        told: hears of every storage that comes and goes, in order.
    """

    def __init__(self, job: DeviceJob, told: Told | None = None) -> None:
        self.job = job
        self.ledger = RefCounts(job.stages, told)
        self._told = told
        self._tables = Tables()
        self._last = job.last_backwards() if job.row_bytes else {}
        self._marks = PeakTracker(self.ledger, job.stages)
        self._next = 0
        self._backwards = sorted(job.stages, reverse=True)

    def play(self, until: int | None = None) -> Played:
        """All steps, or those before a position.

        Where nobody listens, what repeats is not played to its end: see `_cycle`.
        """
        steps = self.job.steps
        end = len(steps) if until is None else min(until, len(steps))
        joint = any(stage.wiring.joint is not None for stage in self.job.stages.values())
        repeating = () if self._told or joint or until is not None else cycles_of(steps)
        for cycles in repeating:
            self._steps(cycles.start)
            self._cycle(cycles)
        self._steps(end)
        if until is None:
            self._arrive()
        marks, peak = self._marks, self._marks.peak
        points = Curve(counted(steps[:end]), marks.peaks, marks.afters)
        found = peak.bytes, peak.action, peak.position, peak.sizes
        return Played(*found, points, marks.stage_peaks, self.ledger.sizes)

    def _steps(self, end: int) -> None:
        """The steps up to a place."""
        for position in range(self._next, end):
            self._marks.begin(position)
            self._step(self.job.steps[position])
        self._next = end

    def _cycle(self, cycles: Cycles) -> None:
        """A part of the program that repeats.

        When two cycles end in the same state but for the numbers of the micro-batches, so do all
        others, and each has the curve of the second: only the last is played besides.
        """
        done, look = 0, 1
        while done < cycles.count:
            before = self._state(done * cycles.shift) if done == look else None
            total, first = self.ledger.total, len(self._marks.peaks)
            self._steps(self._next + cycles.period)
            done += 1
            if before is None:
                continue
            look *= 2
            left = cycles.count - 1 - done
            if left < 1 or total != self.ledger.total:
                continue
            if before == self._state(done * cycles.shift):
                self._marks.repeat(first, left)
                self._tables.move_on(left * cycles.shift)
                self._next += left * cycles.period
                done += left

    def _state(self, microbatch: int) -> Hashable:
        """What decides all that is to come, seen from a micro-batch."""
        ledger = self.ledger
        return ledger.sizes, tuple(ledger.of_stage.values()), self._tables.seen_from(microbatch)

    def _step(self, step: Step) -> None:
        """One action, and what is let go after it."""
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
        ended = self._last.get(self._marks.position)
        if ended is not None:
            size = self.job.row_bytes[ended]
            self.ledger.take(size, Category.COMMUNICATION, "gradients in rows", ended)
            self._marks.mark(action, None, ended)
        if is_counted(step):
            self._marks.point()

    # --- the actions -------------------------------------------------------------------------

    def _forward(self, action: Compute, step: Step) -> None:
        stage = self.job.stages[action.stage]
        tapes = stage.scripts.tapes
        microbatches = self._microbatches(stage, action)
        flight = InFlight(stage.index)
        flight.again = stage.trains and stage.remat is Remat.FULL and step.waits
        if not (step.waits or stage.wiring.split):
            flight.without = _BUFFERS
        for need in stage.wiring.needs:
            self._read(stage, need, microbatches, flight)
        self._drop(step)
        arguments = flight.held_again() if flight.again else {}
        tables = self._tables
        without = flight.without
        if stage.index in tables.forwards:
            without = _WITHOUT_CASTS[without]
        tables.forwards.add(stage.index)
        tape = tapes.forward_again if flight.again else tapes.forward
        left = self._play(action, flight, tape, stage.scripts.handed_on, without)
        for name in stage.wiring.spec.outputs:
            held = flight.share(tapes.returned.get(name), len(microbatches))
            for m in microbatches:
                tables.values[name, m] = held
            if name in self.job.results:
                flight.share(tapes.returned.get(name), 1)
        self._let_go(flight, left)
        if not stage.trains:
            self._let_go(flight, tuple(flight.blocks))
            return
        if flight.again:
            self._let_go(flight, tuple(flight.blocks))
            flight.blocks.update(arguments)
        tables.flights[stage.index, microbatches[0]] = flight

    def _backward(self, action: Compute) -> None:
        stage = self.job.stages[action.stage]
        tapes = stage.scripts.tapes
        microbatches = self._microbatches(stage, action)
        tables = self._tables
        flight = tables.flights[stage.index, microbatches[0]]
        without = _WITHOUT_CASTS[flight.without]
        if flight.again:
            # The copies of buffers that the first forward has made are used up by the second.
            left = self._play(action, flight, tapes.forward, _NO_BLOCKS, _NEITHER)
            self._let_go(flight, left)
        for value, parts in stage.wiring.returned:
            held = self._gradient(stage, value, parts, microbatches)
            block = tapes.arriving.get(value)
            if block is None or block in flight.blocks:
                self.ledger.let_go(held)
            else:
                flight.blocks[block] = held
        tape = tapes.backward if stage.index in tables.backwards else tapes.first_backward
        tables.backwards.add(stage.index)
        left = self._play(action, flight, tape, stage.scripts.handed_back, without)
        for need in stage.wiring.needs:
            if need.gradient:
                held = flight.share(tapes.sent_back.get(need.value), len(microbatches))
                for m in microbatches:
                    tables.gradients[need.value, stage.index, m] = held
        self._let_go(flight, left)
        if not stage.wiring.split:
            self._let_go(flight, tuple(flight.blocks))
            del tables.flights[stage.index, microbatches[0]]

    def _weight(self, action: Compute) -> None:
        stage = self.job.stages[action.stage]
        tables = self._tables
        flight = tables.flights[stage.index, action.microbatch]
        tapes = stage.scripts.tapes
        tape = tapes.weight if stage.index in tables.weights else tapes.first_weight
        tables.weights.add(stage.index)
        if tape is not None:
            without = _WITHOUT_CASTS[flight.without]
            left = self._play(action, flight, tape, _NO_BLOCKS, without)
            self._let_go(flight, left)
        self._let_go(flight, tuple(flight.blocks))
        del tables.flights[stage.index, action.microbatch]

    def _send(self, transfer: Transfer) -> None:
        held: SharedBuffer | None = None
        gradients = self._tables.gradients
        if not transfer.gradient:
            held = self._tables.values.get((transfer.value, transfer.microbatch))
            if held is not None:
                held.holders += 1
        else:
            for stage in self._backwards:
                key = transfer.value, stage, transfer.microbatch
                if key in gradients:
                    held = self._summed(held, gradients.pop(key))
        self._arrive()
        self._tables.under_way.append(held)

    def _receive(self, action: Receive) -> None:
        transfer = action.transfer
        size = self.job.crossing_bytes[transfer.value]
        name = gradient_of(transfer.value) if transfer.gradient else transfer.value
        held = self.ledger.take(size, Category.BOUNDARY, name)
        self._tables.posted[posted(transfer)] = held
        self._marks.mark(action)

    def _sum(self, name: str) -> None:
        """Two more of the parameter's size: what comes from another owner, and the sum."""
        size = 2 * self.job.shared_bytes.get(name, 0)
        held = self.ledger.take(size, Category.COMMUNICATION, name)
        self._marks.mark(f"sum {name}")
        self.ledger.let_go(held)

    # --- what the engine holds ---------------------------------------------------------------

    def _microbatches(self, stage: StageMemory, action: Compute) -> Sequence[int]:
        if stage.wiring.joint is None:
            return (action.microbatch,)
        return range(self.job.microbatches)

    def _drop(self, step: Step) -> None:
        for key in step.drops:
            self.ledger.let_go(self._tables.values.pop(key, None))

    def _arrive(self) -> None:
        """What was sent has left."""
        for held in self._tables.under_way:
            self.ledger.let_go(held)
        self._tables.under_way.clear()

    def _read(
        self, stage: StageMemory, need: Need, microbatches: Sequence[int], flight: InFlight
    ) -> None:
        """A stage holds a value that it reads."""
        values = self._tables.values
        for m in microbatches:
            if need.sender is not None and (need.value, m) not in values:
                self._arrive()
                came = self._tables.posted.pop((need.value, m, need.sender, need.via, False))
                values[need.value, m] = came
        block = stage.scripts.tapes.received.get(need.value)
        if block is None or block in flight.blocks:
            return
        joint = stage.wiring.joint
        if len(microbatches) > 1 and joint is not None and joint.get(need.value) is not None:
            size = stage.scripts.tapes.blocks[block].bytes
            flight.blocks[block] = self.ledger.take(size, Category.BOUNDARY, need.value)
            self._marks.mark(f"{stage.index}F")
            return
        held = values.get((need.value, microbatches[0]))
        if held is not None:
            held.holders += 1
        flight.blocks[block] = held

    def _gradient(
        self, stage: StageMemory, value: str, parts: Sequence[Part], microbatches: Sequence[int]
    ) -> SharedBuffer | None:
        """What has come for a value, summed; for a joint stage put together."""
        pieces = []
        tables = self._tables
        for m in microbatches:
            total: SharedBuffer | None = None
            for part in parts:
                if part.remote:
                    self._arrive()
                    came = tables.posted.pop((value, m, part.stage, stage.index, True))
                    total = self._summed(total, came)
                else:
                    total = self._summed(total, tables.gradients.pop((value, part.stage, m)))
            pieces.append(total)
        if len(pieces) == 1:
            return pieces[0]
        block = stage.scripts.tapes.arriving.get(value)
        size = 0 if block is None else stage.scripts.tapes.blocks[block].bytes
        joined = self.ledger.take(size, Category.BOUNDARY, gradient_of(value))
        self._marks.mark(f"{stage.index}B")
        for piece in pieces:
            self.ledger.let_go(piece)
        return joined

    def _summed(
        self, total: SharedBuffer | None, summand: SharedBuffer | None
    ) -> SharedBuffer | None:
        """The sum of two gradients, of which None is zeros."""
        if total is None or summand is None:
            return summand if total is None else total
        found = self.ledger.take(total.bytes, Category.BOUNDARY, total.name)
        self._marks.mark("sum")
        self.ledger.let_go(total)
        self.ledger.let_go(summand)
        return found

    # --- playing -----------------------------------------------------------------------------

    def _let_go(self, flight: InFlight, blocks: Iterable[int]) -> None:
        """A stage lets go of shared blocks."""
        for block in blocks:
            self.ledger.let_go(flight.blocks.pop(block, None))

    def _play(
        self,
        action: Compute,
        flight: InFlight,
        tape: AllocationTrace,
        handed: frozenset[int],
        without: frozenset[BlockKind],
    ) -> tuple[int, ...]:
        """Play a tape; gives the shared blocks that the stage has let go of and others hold.

        Args:
            handed: the blocks that the tape makes for others, who take them afterwards.
        """
        scripts = self.job.stages[flight.stage].scripts
        left = tuple([b for b in scripts.ended(tape) if b in handed or flight.outlasts(scripts, b)])
        script = scripts.of(tape, left, without)
        self._marks.mark(action, script, flight.stage)
        self.ledger.add(script.net, flight.stage)
        if self._told is not None:
            self._follow(scripts, flight, script)
        else:
            for move in script.shared:
                self._move(scripts, flight, move)
        return left

    def _move(self, scripts: Scripts, flight: InFlight, move: Move) -> None:
        """A shared block comes to life, or ends; its bytes are counted with its script."""
        if not move.alive:
            self.ledger.end_in(flight.stage, flight.blocks.pop(move.block, None))
            return
        flight.blocks[move.block] = self.ledger.take(
            scripts.tapes.blocks[move.block].bytes,
            scripts.category[move.block],
            scripts.names.get(move.block, ""),
            flight.stage,
            counted=False,
        )

    def _follow(self, scripts: Scripts, flight: InFlight, script: Script) -> None:
        """The moves one by one, told."""
        assert self._told is not None
        for move in script.moves:
            size = scripts.tapes.blocks[move.block].bytes if move.alive else -1
            if move.block not in scripts.shared:
                if move.alive:
                    flight.own[move.block] = self.ledger.number()
                number = flight.own[move.block] if move.alive else flight.own.pop(move.block)
                self._told(number, size, Own(flight.stage, move.block))
                continue
            before = flight.blocks.get(move.block)
            self._move(scripts, flight, move)
            held = flight.blocks[move.block] if move.alive else before
            assert held is not None  # nothing of the batch ends
            self._told(held.number, size, held)
