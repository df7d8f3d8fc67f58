"""Lower bounds that need no search."""

from __future__ import annotations

from gpipe_compiler.passes.cut_contract import Contracted
from gpipe_compiler.passes.cut_lineup import Lineup
from gpipe_compiler.passes.cut_setting import Objective, Setting
from gpipe_compiler.runtime.spec import ScheduleKind


def simple_bound(graph: Contracted, setting: Setting, lineup: Lineup) -> float:
    """The busiest device or stage, and what fills and drains the line.

    Args:
        lineup: the only order of devices there is, or the ideal one.
    """
    m, stages = setting.microbatches, setting.stages
    seconds = graph.seconds
    kinds = {seat.kind for seat in lineup.devices}
    if kinds != {-1}:
        seconds = seconds[sorted(kinds)]
    forward, backward = seconds[:, 0].min(axis=0), seconds[:, 1].min(axis=0)
    first = (seconds[:, 1] - seconds[:, 2] * setting.splits_backward).min(axis=0)
    own = (1 + float(lineup.again.min())) * forward + backward
    largest, whole = float(own.max(initial=0.0)), float(own.sum())
    if setting.objective is Objective.BOTTLENECK:
        return max(whole / stages, largest)
    device = max(whole / len(lineup.devices), largest)
    way = float(forward.sum() + first.sum())
    if setting.kind in (None, ScheduleKind.GPIPE) and not lineup.shared:
        return way + (m - 1) * device
    bound = max(m * device, way)
    if setting.kind is ScheduleKind.ONE_F_ONE_B and not lineup.shared:
        # For stage s with R after it: step >= total - R + (M-1) own and >= total + R + (M-w) own.
        # Half the sum of both, weighed so that the stages' own times add up to the total.
        warm = [min(stages - s, m) for s in range(stages)]
        repeats = [m - (w + 1) / 2 for w in warm]
        if all(repeats):
            bound = max(bound, way + way / sum(1 / r for r in repeats))
    return bound
