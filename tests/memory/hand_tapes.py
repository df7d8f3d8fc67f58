"""Stages with tapes written by hand, in a chain on devices of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import nn

from gpipe_compiler.memory.job import DeviceJob, StageMemory
from gpipe_compiler.memory.replay import Player
from gpipe_compiler.memory.script import Scripts
from gpipe_compiler.passes.tapes import Block, BlockKind, Event, StageTapes, Tape
from gpipe_compiler.runtime.job import Work
from gpipe_compiler.runtime.schedule import lower
from gpipe_compiler.runtime.schedule.actions import Orders
from gpipe_compiler.runtime.spec import (
    Crossing,
    PipelineSpec,
    Remat,
    ScheduleKind,
    StageSpec,
)
from gpipe_compiler.runtime.wiring import steps_of, wire

VALUE = 8
"""Bytes of what crosses."""
KEPT, TEMPORARY, GRADIENT, WEIGHT_GRADIENT = 1000, 300, 70, 11

X, Y, A, T, GY, GX, G, W, LOSS = range(9)


def chain_tapes(first: bool, last: bool, x: int = VALUE) -> StageTapes:
    """A stage that takes x and makes y (or the loss): it keeps `a`, takes `t` for a while."""
    kinds = {
        X: (x, BlockKind.RECEIVED),
        Y: (VALUE, BlockKind.ACTIVATION),
        A: (KEPT, BlockKind.ACTIVATION),
        T: (TEMPORARY, BlockKind.ACTIVATION),
        GY: (VALUE, BlockKind.RECEIVED),
        GX: (VALUE, BlockKind.GRADIENT),
        G: (GRADIENT, BlockKind.GRADIENT),
        W: (WEIGHT_GRADIENT, BlockKind.PARAMETER_GRADIENT),
    }
    forward = [(T, 1), (A, 1), (T, 0), (Y, 1), (X, 0), (Y, 0)]
    backward = [(G, 1), (A, 0), *([] if first else [(GX, 1)]), (W, 1), (G, 0)]
    ends = [(GY, 0), *([] if first else [(GX, 0)])]
    if last:
        forward = [pair for pair in forward if pair[0] != Y]
        ends = [pair for pair in ends if pair[0] != GY]
    later = [pair for pair in backward if pair[0] != W]
    return StageTapes(
        ops=("op",),
        blocks={n: Block(size, kind, 0, str(size), "uint8") for n, (size, kind) in kinds.items()},
        received={"x": X},
        returned={} if last else {"y": Y},
        arriving={} if last else {"y": GY},
        sent_back={} if first else {"x": GX},
        forward=_tape(forward),
        kept=frozenset({A}),
        forward_again=_tape([*forward, (A, 0)]),
        first_backward=_tape([*backward, *ends]),
        backward=_tape([*later, (W, 1), (W, 0), *ends]),
    )


def _tape(pairs: Sequence[tuple[int, int]]) -> Tape:
    return Tape(tuple(Event(block, bool(alive), 0) for block, alive in pairs))


def players(orders: Orders, microbatches: int, remat: Remat = Remat.NONE) -> list[Player]:
    """Those of a chain of stages, one on every device, that trains."""
    count = len(orders)
    spec = PipelineSpec(
        name="chain",
        stages=tuple(
            StageSpec(nn.Module, (f"v{s}",), () if s == count - 1 else (f"v{s + 1}",))
            for s in range(count)
        ),
        inputs=(),
        crossings=tuple(
            Crossing(f"v{s}", s - 1, (s,), (VALUE,), torch.uint8) for s in range(1, count)
        ),
        outputs=(),
        loss=None,
        schedule=ScheduleKind.GPIPE,
        microbatches=microbatches,
        microbatch_size=1,
    )
    placement = tuple(range(count))
    wiring = wire(spec, placement, Work.TRAIN)
    programs = lower(orders, placement, spec.crossings)
    middle = chain_tapes(first=False, last=False)
    found = []
    for stage, program in enumerate(programs):
        ends = stage == 0, stage == count - 1
        tapes = _named(chain_tapes(*ends) if any(ends) else middle, stage)
        memory = StageMemory(wiring[stage], Scripts(tapes), remat)
        found.append(
            Player(
                DeviceJob(
                    steps=steps_of(program, wiring),
                    stages={stage: memory},
                    inputs=["v0"] if stage == 0 else [],
                    crossing_bytes={f"v{s}": VALUE for s in range(count)},
                    shared_bytes={},
                    row_bytes={},
                    microbatches=microbatches,
                )
            )
        )
    return found


def _named(tapes: StageTapes, stage: int) -> StageTapes:
    names = {"x": f"v{stage}", "y": f"v{stage + 1}"}
    tables = ("received", "returned", "arriving", "sent_back")
    renamed = {
        table: {names[name]: block for name, block in getattr(tapes, table).items()}
        for table in tables
    }
    return dataclasses.replace(tapes, **renamed)
