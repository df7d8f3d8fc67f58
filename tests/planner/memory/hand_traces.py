"""Stages with traces written by hand, in a chain on devices of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import nn

from gpipe_compiler.passes.allocation_trace import (
    AllocationTrace,
    BlockKind,
    StageTraces,
    StorageEvent,
    StorageLife,
)
from gpipe_compiler.planner.memory.job import DeviceJob, StageMemory
from gpipe_compiler.planner.memory.simulator import MemorySimulator
from gpipe_compiler.planner.memory.storages import ActionDeltas
from gpipe_compiler.runtime.core.request import RunRequest
from gpipe_compiler.runtime.core.wiring import steps_of, wire
from gpipe_compiler.runtime.schedule import lower
from gpipe_compiler.runtime.schedule.actions import Orders, Phase
from gpipe_compiler.runtime.spec import (
    Crossing,
    PipelineSpec,
    Remat,
    ScheduleKind,
    StageSpec,
)

VALUE = 8
"""Bytes of what crosses."""
KEPT, TEMPORARY, GRADIENT, WEIGHT_GRADIENT = 1000, 300, 70, 11

X, Y, A, T, GY, GX, G, W, LOSS = range(9)


def chain_traces(first: bool, last: bool, x: int = VALUE, *, split: bool = False) -> StageTraces:
    """A stage that takes x and makes y (or the loss): it keeps `a`, takes `t` for a while.

    Args:
        split: whether the gradient of its parameter is made in an action of its own.
    """
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
    weight = [(W, 1)]
    backward = later if split else backward
    return StageTraces(
        ops=("op",),
        blocks={
            n: StorageLife(size, kind, 0, str(size), "uint8") for n, (size, kind) in kinds.items()
        },
        received={"x": X},
        returned={} if last else {"y": Y},
        arriving={} if last else {"y": GY},
        sent_back={} if first else {"x": GX},
        forward=_tape(forward),
        kept=frozenset({A}),
        first_backward=_tape([*backward, *ends]),
        backward=_tape([*later, *([] if split else [(W, 1), (W, 0)]), *ends]),
        first_weight=_tape(weight) if split else None,
        weight=_tape([*weight, (W, 0)]) if split else None,
    )


def _tape(pairs: Sequence[tuple[int, int]]) -> AllocationTrace:
    return tuple(StorageEvent(block, bool(alive), 0) for block, alive in pairs)


def players(
    orders: Orders,
    microbatches: int,
    remat: Remat = Remat.NONE,
    placement: Sequence[int] | None = None,
) -> list[MemorySimulator]:
    """Those of a chain of stages that trains.

    Args:
        placement: the device of each stage; one on every device by default.
    """
    placement = range(len(orders)) if placement is None else placement
    count = len(placement)
    split = {action.stage for order in orders for action in order if action.phase is Phase.WEIGHT}
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
    wiring = wire(spec, placement, RunRequest.TRAIN, (), split)
    programs = lower(orders, placement, spec.crossings)
    middle = chain_traces(first=False, last=False, split=bool(split))
    stages = []
    for stage in range(count):
        ends = stage == 0, stage == count - 1
        traces = _named(chain_traces(*ends, split=bool(split)) if any(ends) else middle, stage)
        stages.append(StageMemory(wiring[stage], ActionDeltas(traces), remat))
    return [
        MemorySimulator(
            DeviceJob(
                steps=steps_of(program, wiring),
                stages={s: stages[s] for s in range(count) if placement[s] == device},
                crossing_bytes={f"v{s}": VALUE for s in range(count)},
                shared_bytes={},
                row_bytes={},
                microbatches=microbatches,
            )
        )
        for device, program in enumerate(programs)
    ]


def _named(traces: StageTraces, stage: int) -> StageTraces:
    names = {"x": f"v{stage}", "y": f"v{stage + 1}"}
    tables = ("received", "returned", "arriving", "sent_back")
    renamed = {
        table: {names[name]: block for name, block in getattr(traces, table).items()}
        for table in tables
    }
    return dataclasses.replace(traces, **renamed)
