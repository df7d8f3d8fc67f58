"""Lower bounds that need no search."""

from __future__ import annotations

import numpy as np

from gpipe_compiler.options import Objective
from gpipe_compiler.passes.cut.contract import Contracted
from gpipe_compiler.passes.cut.device_order import DeviceOrder
from gpipe_compiler.passes.cut.setting import CutSetting
from gpipe_compiler.passes.cut.space import Floats
from gpipe_compiler.runtime.spec import ScheduleKind


def simple_bound(graph: Contracted, setting: CutSetting, device_order: DeviceOrder) -> float:
    """The busiest device or stage, and what fills and drains the line.

    Args:
        device_order: the only order of devices there is, or the ideal one.
    """
    m, stages = setting.microbatches, setting.stages
    seconds = graph.seconds
    kinds = {slot.kind for slot in device_order.devices}
    if kinds != {-1}:
        seconds = seconds[sorted(kinds)]
    forward, backward = seconds[:, 0].min(axis=0), seconds[:, 1].min(axis=0)
    first = (seconds[:, 1] - seconds[:, 2] * setting.splits_backward).min(axis=0)
    own = (1 + float(device_order.again.min())) * forward + backward
    largest, whole = float(own.max(initial=0.0)), float(own.sum())
    if setting.objective is Objective.BOTTLENECK:
        return max(whole / stages, largest)
    device = max(whole / len(device_order.devices), largest)
    # Where some stages compute again: what the others save is a share of their own time.
    twice = float((2 * forward + backward).sum()) if device_order.again.any() else 0.0
    spared = (device_order.again == 0) * _forward_share(forward, backward)
    device = max(device, twice / (len(device_order.devices) + float(spared.sum())))
    way = float(forward.sum() + first.sum())
    if setting.kind in (None, ScheduleKind.GPIPE) and not device_order.shared:
        return way + (m - 1) * device
    # A stage begins when all before it have forwarded, and after its end they still go backward.
    plain = forward + first
    again = float(device_order.again.min()) * forward
    node = plain + (m - 1) * (plain + again) + ways_before(graph, plain)
    bound = max(m * device, way, float(node.max(initial=0.0)))
    if setting.kind is ScheduleKind.ONE_F_ONE_B and not device_order.shared:
        # For stage s with R after it: step >= total - R + (M-1) own and >= total + R + (M-w) own.
        # Half the sum of both, weighed so that the stages' own times add up to the total.
        warm = [min(stages - s, m) for s in range(stages)]
        repeats = [m - (w + 1) / 2 for w in warm]
        if all(repeats):
            bound = max(bound, way + way / sum(1 / r for r in repeats))
        if m > stages:
            # The same with what is computed again, which both take m - (w + 1) / 2 times too.
            shares = sum((1 + share) / r for share, r in zip(spared.tolist(), repeats, strict=True))
            bound = max(bound, way + twice / shares)
    return bound


def _forward_share(forward: Floats, backward: Floats) -> float:
    """The most that the forward of a stage is of its forward and backward."""
    both = forward + backward
    return float((forward[both > 0] / both[both > 0]).max(initial=0.0))


def ways_before(graph: Contracted, seconds: Floats) -> Floats:
    """For every node, seconds that all which must come before it takes at least.

    It is all that comes before where nothing can stand beside the node, else a longest path.
    """
    needed = np.zeros(graph.size, dtype=np.bool_)
    needed[-1:] = True  # nodes that the last one does not need may stand beside any
    for node in range(graph.size - 1, -1, -1):
        if needed[node]:
            needed[list(graph.before[node])] = True
    found = np.zeros(graph.size)
    whole, open_ends = 0.0, 0
    followed = np.zeros(graph.size, dtype=np.bool_)
    for node, before in enumerate(graph.before):
        if before:
            found[node] = max(found[source] + seconds[source] for source in before)
        if not needed[node]:
            continue
        sources = list(before)
        open_ends += 1 - int((~followed[sources]).sum())
        followed[sources] = True
        if open_ends == 1:
            found[node] = whole
        whole += float(seconds[node])
    return found
