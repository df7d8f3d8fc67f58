"""Plays the tapes of a device's stages in the order of its program.

The engine's own holding is played with them (`runtime.engine`, `runtime.stage_run`,
`runtime.distributed`): a value is held by the table of values until its last use here, by what is
under way until it has left, and by autograd as the tapes tell. What is sent is taken to have left
at the next transfer of its device, as it has where the receiver is not behind.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

from gpipe_compiler.memory.curve import Category, Point
from gpipe_compiler.memory.job import DeviceJob, Flight, Peak, Played, StageMemory
from gpipe_compiler.memory.ledger import Held, Ledger, Own, Told
from gpipe_compiler.memory.script import Move, Script, Scripts
from gpipe_compiler.passes.tapes import BlockKind, Tape
from gpipe_compiler.runtime.schedule.actions import (
    Compute,
    Phase,
    Receive,
    Send,
    SharedSum,
    Transfer,
)
from gpipe_compiler.runtime.spec import Remat
from gpipe_compiler.runtime.wiring import Need, Part, Step

_CASTS = frozenset({BlockKind.CAST})
_BUFFERS = frozenset({BlockKind.BUFFER})
_NO_KINDS: frozenset[BlockKind] = frozenset()
_NO_BLOCKS: frozenset[int] = frozenset()


class Player:
    """Plays the program of a device once.

    Args:
        told: hears of every storage that comes and goes, in order.
    """

    def __init__(self, job: DeviceJob, told: Told | None = None) -> None:
        self.job = job
        self.ledger = Ledger(job.stages, told)
        self.flights: dict[tuple[int, int], Flight] = {}
        self._told = told
        self._values: dict[tuple[str, int], Held | None] = {
            (name, m): None for name in job.inputs for m in range(job.microbatches)
        }
        self._gradients: dict[tuple[str, int, int], Held | None] = {}
        self._posted: dict[Transfer, Held] = {}
        self._under_way: list[Held | None] = []
        self._forwards: set[int] = set()
        self._backwards: set[int] = set()
        self._weights: set[int] = set()
        self._last = job.last_backwards() if job.row_bytes else {}
        self._points: list[Point] = []
        self._peak = Peak(0, "", 0, self.ledger.sizes)
        self._stage_peaks = dict.fromkeys(job.stages, 0)
        self._position = 0
        self._highest = 0

    def play(self, until: int | None = None) -> Played:
        """All steps, or those before a position."""
        for position, step in enumerate(self.job.steps[:until]):
            self._position = position
            self._step(step)
        if until is None:
            self._arrive()
        peak = self._peak
        return Played(
            peak.bytes,
            peak.action,
            peak.position,
            peak.sizes,
            tuple(self._points),
            self._stage_peaks,
            self.ledger.sizes,
        )

    def _step(self, step: Step) -> None:
        """One action, and what is let go after it."""
        action = step.action
        self._highest = self.ledger.total
        match action:
            case Compute(phase=Phase.FORWARD):
                self._forward(action, step)
            case Compute(phase=Phase.BACKWARD):
                self._backward(action)
            case Compute():
                self._weight(action)
            case Send(transfer=transfer):
                self._send(transfer)
            case Receive(transfer=transfer):
                self._receive(transfer)
            case SharedSum(parameter=name):
                self._sum(name)
        self._drop(step)
        ended = self._last.get(self._position)
        if ended is not None:
            size = self.job.row_bytes[ended]
            self.ledger.take(size, Category.COMMUNICATION, "gradients in rows", ended)
            self._mark(str(action), None, ended)
        if isinstance(action, Compute | SharedSum):
            self._points.append(Point(str(action), self._highest, self.ledger.total))

    # --- the actions -------------------------------------------------------------------------

    def _forward(self, action: Compute, step: Step) -> None:
        stage = self.job.stages[action.stage]
        tapes = stage.scripts.tapes
        microbatches = self._microbatches(stage, action)
        flight = Flight(stage.index)
        flight.again = stage.trains and stage.remat is Remat.FULL and step.waits
        if not (step.waits or stage.wiring.split):
            flight.without = _BUFFERS
        for need in stage.wiring.needs:
            self._read(stage, need, microbatches, flight)
        self._drop(step)
        arguments = self._held_again(flight) if flight.again else {}
        without = flight.without | (_CASTS if stage.index in self._forwards else _NO_KINDS)
        self._forwards.add(stage.index)
        tape = tapes.forward_again if flight.again else tapes.forward
        handed = frozenset(tapes.returned.values())
        left = self._play(action, flight, tape, handed, without)
        for name in stage.wiring.spec.outputs:
            held = self._share(flight, tapes.returned.get(name), len(microbatches))
            self._values.update({(name, m): held for m in microbatches})
        self._let_go(flight, left)
        if not stage.trains:
            self._let_go(flight, tuple(flight.blocks))
            return
        if flight.again:
            self._let_go(flight, tuple(flight.blocks))
            flight.blocks.update(arguments)
        self.flights[stage.index, microbatches[0]] = flight

    def _backward(self, action: Compute) -> None:
        stage = self.job.stages[action.stage]
        tapes = stage.scripts.tapes
        microbatches = self._microbatches(stage, action)
        flight = self.flights[stage.index, microbatches[0]]
        without = flight.without | _CASTS
        if flight.again:
            # The copies of buffers that the first forward has made are used up by the second.
            left = self._play(action, flight, tapes.forward, _NO_BLOCKS, without | _BUFFERS)
            self._let_go(flight, left)
        for value, parts in stage.wiring.returned:
            held = self._gradient(stage, value, parts, microbatches)
            block = tapes.arriving.get(value)
            if block is None or block in flight.blocks:
                self.ledger.let_go(held)
            else:
                flight.blocks[block] = held
        tape = tapes.backward if stage.index in self._backwards else tapes.first_backward
        self._backwards.add(stage.index)
        left = self._play(action, flight, tape, frozenset(tapes.sent_back.values()), without)
        for need in stage.wiring.needs:
            if need.gradient:
                held = self._share(flight, tapes.sent_back.get(need.value), len(microbatches))
                self._gradients.update({(need.value, stage.index, m): held for m in microbatches})
        self._let_go(flight, left)
        if not stage.wiring.split:
            self._let_go(flight, tuple(flight.blocks))
            del self.flights[stage.index, microbatches[0]]

    def _weight(self, action: Compute) -> None:
        stage = self.job.stages[action.stage]
        flight = self.flights[stage.index, action.microbatch]
        tapes = stage.scripts.tapes
        tape = tapes.weight if stage.index in self._weights else tapes.first_weight
        self._weights.add(stage.index)
        if tape is not None:
            left = self._play(action, flight, tape, _NO_BLOCKS, flight.without | _CASTS)
            self._let_go(flight, left)
        self._let_go(flight, tuple(flight.blocks))
        del self.flights[stage.index, action.microbatch]

    def _send(self, transfer: Transfer) -> None:
        held: Held | None = None
        if not transfer.gradient:
            held = self._values.get((transfer.value, transfer.microbatch))
            if held is not None:
                held.holders += 1
        else:
            for stage in sorted(self.job.stages, reverse=True):
                key = transfer.value, stage, transfer.microbatch
                if key in self._gradients:
                    held = self._summed(held, self._gradients.pop(key))
        self._arrive()
        self._under_way.append(held)

    def _receive(self, transfer: Transfer) -> None:
        size = self.job.crossing_bytes[transfer.value]
        name = gradient_of(transfer.value) if transfer.gradient else transfer.value
        self._posted[transfer] = self.ledger.take(size, Category.BOUNDARY, name)
        self._mark(f"receive {transfer}")

    def _sum(self, name: str) -> None:
        """Two more of the parameter's size: what comes from another owner, and the sum."""
        size = 2 * self.job.shared_bytes.get(name, 0)
        held = self.ledger.take(size, Category.COMMUNICATION, name)
        self._mark(f"sum {name}")
        self.ledger.let_go(held)

    # --- what the engine holds ---------------------------------------------------------------

    def _microbatches(self, stage: StageMemory, action: Compute) -> Sequence[int]:
        if stage.wiring.joint is None:
            return (action.microbatch,)
        return range(self.job.microbatches)

    def _drop(self, step: Step) -> None:
        for key in step.drops:
            self.ledger.let_go(self._values.pop(key, None))

    def _arrive(self) -> None:
        """What was sent has left."""
        for held in self._under_way:
            self.ledger.let_go(held)
        self._under_way.clear()

    def _read(
        self, stage: StageMemory, need: Need, microbatches: Sequence[int], flight: Flight
    ) -> None:
        """A stage holds a value that it reads."""
        for m in microbatches:
            if (need.value, m) not in self._values and need.sender is not None:
                self._arrive()
                transfer = Transfer(need.value, m, need.sender, need.via)
                self._values[need.value, m] = self._posted.pop(transfer)
        block = stage.scripts.tapes.received.get(need.value)
        if block is None or block in flight.blocks:
            return
        joint = stage.wiring.joint
        if len(microbatches) > 1 and joint is not None and joint.get(need.value) is not None:
            size = stage.scripts.tapes.blocks[block].bytes
            flight.blocks[block] = self.ledger.take(size, Category.BOUNDARY, need.value)
            self._mark(f"{stage.index}F")
            return
        held = self._values.get((need.value, microbatches[0]))
        if held is not None:
            held.holders += 1
        flight.blocks[block] = held

    def _held_again(self, flight: Flight) -> dict[int, Held | None]:
        """What a stage has received, held until its forward runs again."""
        for held in flight.blocks.values():
            if held is not None:
                held.holders += 1
        return dict(flight.blocks)

    def _gradient(
        self, stage: StageMemory, value: str, parts: Sequence[Part], microbatches: Sequence[int]
    ) -> Held | None:
        """What has come for a value, summed; for a joint stage put together."""
        pieces = []
        for m in microbatches:
            total: Held | None = None
            for part in parts:
                if part.remote:
                    self._arrive()
                    transfer = Transfer(value, m, part.stage, stage.index, gradient=True)
                    total = self._summed(total, self._posted.pop(transfer))
                else:
                    total = self._summed(total, self._gradients.pop((value, part.stage, m)))
            pieces.append(total)
        if len(pieces) == 1:
            return pieces[0]
        block = stage.scripts.tapes.arriving.get(value)
        size = 0 if block is None else stage.scripts.tapes.blocks[block].bytes
        joined = self.ledger.take(size, Category.BOUNDARY, gradient_of(value))
        self._mark(f"{stage.index}B")
        for piece in pieces:
            self.ledger.let_go(piece)
        return joined

    def _summed(self, total: Held | None, summand: Held | None) -> Held | None:
        """The sum of two gradients, of which None is zeros."""
        if total is None or summand is None:
            return summand if total is None else total
        found = self.ledger.take(total.bytes, Category.BOUNDARY, total.name)
        self._mark("sum")
        self.ledger.let_go(total)
        self.ledger.let_go(summand)
        return found

    def _share(self, flight: Flight, block: int | None, holders: int) -> Held | None:
        """A storage gets further holders."""
        held = None if block is None else flight.blocks.get(block)
        if held is not None:
            held.holders += holders
        return held

    def _let_go(self, flight: Flight, blocks: Iterable[int]) -> None:
        """A stage lets go of shared blocks."""
        for block in blocks:
            self.ledger.let_go(flight.blocks.pop(block, None))

    # --- playing -----------------------------------------------------------------------------

    def _play(
        self,
        action: Compute,
        flight: Flight,
        tape: Tape,
        handed: frozenset[int],
        without: frozenset[BlockKind],
    ) -> list[int]:
        """Play a tape; gives the shared blocks that the stage has let go of and others hold.

        Args:
            handed: the blocks that the tape makes for others, who take them afterwards.
        """
        scripts = self.job.stages[flight.stage].scripts
        left = [b for b in scripts.ended(tape) if b in handed or self._stays(scripts, flight, b)]
        script = scripts.of(tape, left, without)
        self._mark(str(action), script, flight.stage)
        self.ledger.add(script.net, flight.stage)
        if self._told is not None:
            self._follow(scripts, flight, script)
        else:
            for move in script.shared:
                self._move(scripts, flight, move)
        return left

    def _stays(self, scripts: Scripts, flight: Flight, block: int) -> bool:
        """Whether a storage remains when the stage lets go of it."""
        if block not in flight.blocks:
            return False
        held = flight.blocks[block]
        if held is None or held.holders > 1:
            return True
        # Its end is counted where the ledger has it.
        return (held.bytes, held.category) != (
            scripts.tapes.blocks[block].bytes,
            scripts.category[block],
        )

    def _move(self, scripts: Scripts, flight: Flight, move: Move) -> None:
        """A shared block comes to life, or ends; its bytes are counted with its script."""
        if not move.alive:
            self.ledger.let_go(flight.blocks.pop(move.block, None), counted=False)
            return
        flight.blocks[move.block] = self.ledger.take(
            scripts.tapes.blocks[move.block].bytes,
            scripts.category[move.block],
            scripts.names.get(move.block, ""),
            flight.stage,
            counted=False,
        )

    def _follow(self, scripts: Scripts, flight: Flight, script: Script) -> None:
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

    def _mark(self, action: str, script: Script | None = None, stage: int | None = None) -> None:
        """Take note of the memory at a moment: now, or when a script is at its peak."""
        now = self.ledger.total + (script.peak if script else 0)
        self._highest = max(self._highest, now)
        if now > self._peak.bytes:
            sizes = self.ledger.sizes
            if script is not None:
                sizes = tuple(map(operator.add, sizes, script.at_peak))
            self._peak = Peak(now, action, self._position, sizes)
        if stage is not None:
            own = self.ledger.of_stage[stage] + (script.peak if script else 0)
            self._stage_peaks[stage] = max(self._stage_peaks[stage], own)


def gradient_of(value: str) -> str:
    """What the gradient of a value is called."""
    return f"gradient of {value}"
