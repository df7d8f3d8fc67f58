"""The time of a step of devices that slow each other down.

Processor cores share memory, caches and, as threads of one process, the interpreter's lock. So a
stage takes longer while other devices compute than while they wait: by how much is measured
(`runtime/train/stage_clock.py`), and how often it happens follows from the schedule.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from gpipe_compiler.runtime.schedule.actions import Compute, Orders, Phase
from gpipe_compiler.simulate.step import Lane, Simulation, Span, StageTimes, simulate, split_stages

ROUNDS = 60
"""How often the times of all actions are worked out anew, at most."""

SETTLED = 1e-4
"""A change of a step that is none."""


def simulate_sharing(
    orders: Orders,
    alone: Sequence[StageTimes],
    together: Sequence[StageTimes],
    joint: Collection[int] = (),
) -> Simulation:
    """As `simulate`, where how fast a device works depends on how many others do.

    With none of the others at work an action takes the time in `alone`, with all of them that in
    `together`, and with some of them, or for some of the time, what lies between: in every moment
    it gets on at the mean of both speeds, weighed by the share of the other devices at work. Times
    of transfers are those in `together`.

    The times of the actions are the solution of a fixed point, approached step by step.

    Raises:
        PlanError: when some device would wait for ever.
    """
    pace: dict[tuple[Compute, bool], float] = {}
    found = simulate(orders, together, joint)
    split = split_stages(orders)
    for _ in range(ROUNDS if len(orders) > 1 else 0):
        for span, share in _shares(found, len(orders)):
            stage, key = span.action.stage, (span.action, span.recompute)
            slow, fast = (_seconds(times[stage], span, split) for times in (together, alone))
            # At speeds 1/fast and 1/slow, in units of 1/slow.
            speed = share + (1.0 - share) * slow / fast if fast > 0 else 1.0
            pace[key] = (pace.get(key, 1.0) + 1.0 / speed) / 2
        before, found = found.step_s, simulate(orders, together, joint, pace)
        if abs(found.step_s - before) <= SETTLED * found.step_s:
            break
    return found


def _seconds(times: StageTimes, span: Span, split: Collection[int]) -> float:
    """What an action takes by the times of its stage."""
    if span.recompute:
        return times.recompute_s
    match span.action.phase:
        case Phase.FORWARD:
            return times.forward_s
        case Phase.WEIGHT:
            return times.weight_s
    return times.backward_s - (times.weight_s if span.action.stage in split else 0.0)


def _shares(found: Simulation, devices: int) -> list[tuple[Span, float]]:
    """Every action that takes time, with the share of the other devices at work, on average."""
    spans = [s for s in found.timeline if s.lane is Lane.DEVICE and s.end_s > s.start_s]
    starts, ends = np.array([(s.start_s, s.end_s) for s in spans]).reshape(-1, 2).T
    others = -(ends - starts)
    for device in range(devices):
        own = [s for s in spans if s.device == device]
        times = np.array([time for s in own for time in (s.start_s, s.end_s)])
        worked = np.cumsum([length for s in own for length in (0.0, s.end_s - s.start_s)])
        if own:
            # A device's spans do not overlap; between them it has worked for no longer.
            times[1:-1:2] = np.minimum(times[1:-1:2], times[2::2])
            others += np.interp(ends, times, worked) - np.interp(starts, times, worked)
    shares = np.clip(others / ((ends - starts) * (devices - 1)), 0.0, 1.0)
    return list(zip(spans, shares.tolist(), strict=True))
