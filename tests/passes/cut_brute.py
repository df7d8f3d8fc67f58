"""The best cut by looking at every assignment of nodes to stages and every order of devices.

Nothing here is the compiler's but the schedules' orders, `simulate` and the counts of
micro-batches that `in_flight` gives, which have tests of their own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from gpipe_compiler.options import Objective
from gpipe_compiler.passes.cut.problem import GRAPH_INPUT, CutProblem
from gpipe_compiler.passes.cut.setting import CutSetting
from gpipe_compiler.runtime.schedule.actions import Phase
from gpipe_compiler.simulate.in_flight import loads
from gpipe_compiler.simulate.step import StageTimes, recomputed, simulate


def assignments(problem: CutProblem, stages: int) -> Iterator[tuple[int, ...]]:
    """Every way to give nodes to stages that the problem allows, no stage empty."""
    size = len(problem.nodes)
    before: list[list[int]] = [[] for _ in range(size)]
    after: list[list[int]] = [[] for _ in range(size)]
    for a, b in problem.edges():
        before[b].append(a)
        after[a].append(b)
    fixed = dict.fromkeys(problem.last, stages - 1)
    chosen: list[int] = []

    def allowed(node: int, stage: int) -> bool:
        if fixed.get(node, stage) != stage:
            return False
        if any(node == n and stage != s for n, s in problem.pinned):
            return False
        earlier = range(node)
        if any(chosen[b] > stage for b in before[node] if b in earlier):
            return False
        if any(chosen[a] < stage for a in after[node] if a in earlier):
            return False
        for group in problem.groups:
            if node in group and any(chosen[n] != stage for n in group if n < node):
                return False
        for pair in problem.apart:
            if node in pair:
                other = pair[0] if pair[1] == node else pair[1]
                if other == node or (other < node and chosen[other] == stage):
                    return False
        return True

    def extended(node: int) -> Iterator[tuple[int, ...]]:
        if node == size:
            if len(set(chosen)) == stages and _beside_last(problem, chosen, stages):
                yield tuple(chosen)
            return
        for stage in range(stages):
            if allowed(node, stage):
                chosen.append(stage)
                yield from extended(node + 1)
                chosen.pop()

    return extended(0)


def _beside_last(problem: CutProblem, stage_of: list[int], stages: int) -> bool:
    """Whether the last stage holds a node that need not lie in it, where it has to."""
    if problem.last_alone or stages == 1 or not problem.last:
        return True
    must = set(problem.last)
    while True:
        grown = must.union(*(g for g in problem.groups if must & set(g)))
        grown |= {b for a, b in problem.edges() if a in grown}
        if grown == must:
            break
        must = grown
    return any(s == stages - 1 and n not in must for n, s in enumerate(stage_of))


def seatings(setting: CutSetting) -> list[tuple[int, ...]]:
    """Every order of as many slots as there are devices in which hosts stay together."""
    devices = max(setting.placement) + 1
    found = {}
    for order in itertools.permutations(range(len(setting.slots)), devices):
        hosts = [setting.slots[s].host for s in order]
        if len([h for h, _ in itertools.groupby(hosts)]) != len(set(hosts)):
            continue
        slots = tuple((*_own(setting, s),) for s in order)
        links = tuple(setting.links[a][b] for a in order for b in order if a != b)
        found.setdefault((slots, links), order)
    return list(found.values())


def _own(setting: CutSetting, slot: int) -> tuple[float, ...]:
    s = setting.slots[slot]
    return s.kind, s.memory, s.update_s_per_byte, s.update_latency_s


class Measure:
    """What cuts come to in one setting, straight from the definitions."""

    def __init__(self, problem: CutProblem, setting: CutSetting) -> None:
        self.problem = problem if setting.kind is not None else problem.forward_only()
        self.setting = setting
        self.asked = setting.recompute or (False,) * setting.stages
        redone = recomputed(setting.orders)
        self.again = [
            asked and any(a.stage == s for a in redone) for s, asked in enumerate(self.asked)
        ]
        self.loads = loads(setting.orders, [s for s, a in enumerate(self.asked) if a])

    def stages(self, stage_of: tuple[int, ...], order: tuple[int, ...]) -> list[StageTimes]:
        problem, setting = self.problem, self.setting
        found = []
        for stage in range(setting.stages):
            place = order[setting.placement[stage]]
            slot = setting.slots[place]
            costs = problem.other_kinds[slot.kind - 1] if slot.kind else problem.nodes
            own = [costs[n] for n, s in enumerate(stage_of) if s == stage]
            forward = sum(n.forward_s for n in own)
            updated = sum(
                k.updated_bytes for k in problem.kept if any(stage_of[u] == stage for u in k.users)
            )
            moved = self.received(stage_of, order, stage)
            found.append(
                StageTimes(
                    forward,
                    sum(n.backward_s for n in own),
                    sum(there for _, there, _ in moved),
                    sum(back for _, _, back in moved),
                    forward if self.again[stage] else 0.0,
                    sum(n.weight_s for n in own),
                    updated * slot.update_s_per_byte + (slot.update_latency_s if updated else 0),
                )
            )
        return found

    def received(
        self, stage_of: tuple[int, ...], order: tuple[int, ...], stage: int
    ) -> list[tuple[int, float, float]]:
        """(source stage, seconds there, seconds back) of every value that a stage receives."""
        found = []
        for value in self.problem.values:
            source = 0 if value.producer == GRAPH_INPUT else stage_of[value.producer]
            if source < stage and any(stage_of[c] == stage for c in value.consumers):
                here, there = (order[self.setting.placement[s]] for s in (source, stage))
                if here != there:
                    link = self.setting.links[here][there]
                    sizes = value.bytes, value.gradient_bytes
                    found.append((source, *(link.seconds(size) for size in sizes)))
                else:
                    found.append((source, 0.0, 0.0))
        return found

    def excess(self, stage_of: tuple[int, ...], order: tuple[int, ...]) -> int:
        """Bytes by which the worst device is too small."""
        problem, setting = self.problem, self.setting
        worst = 0
        for device, slot_number in enumerate(order):
            stages = [s for s, d in enumerate(setting.placement) if d == device]
            total, inputs, saved = 0, [], []
            for stage in stages:
                mine = {n for n, s in enumerate(stage_of) if s == stage}
                kept = [k for k in problem.kept if mine & set(k.users)]
                total += sum(k.bytes for k in kept)
                saved.append(sum(k.microbatch_bytes for k in kept))
                inputs.append(
                    sum(
                        v.bytes
                        for v in problem.values
                        if v.producer not in mine and mine & set(v.consumers)
                    )
                )
            moments = self.loads[device].counts
            peak = max(
                (
                    sum(c[0] * i + c[1] * s for c, i, s in zip(m, inputs, saved, strict=True))
                    for m in moments
                ),
                default=0,
            )
            memory = setting.slots[slot_number].memory
            if math.isfinite(memory):
                worst = max(worst, math.ceil(total + peak - memory))
        return worst

    def bottleneck(
        self, stage_of: tuple[int, ...], order: tuple[int, ...], times: list[StageTimes]
    ) -> float:
        total = [
            t.forward_s + t.backward_s + t.recompute_s + t.receive_s + t.gradient_s for t in times
        ]
        for stage in range(self.setting.stages):
            for source, there, back in self.received(stage_of, order, stage):
                total[source] += there + back
        return max(total)

    def busy(self, times: list[StageTimes]) -> float:
        """Seconds that the busiest device computes at least."""
        m = sum(
            a.stage == 0 and a.phase is Phase.FORWARD
            for order in self.setting.orders
            for a in order
        )
        devices = [0.0] * (max(self.setting.placement) + 1)
        for device, t in zip(self.setting.placement, times, strict=True):
            devices[device] += m * (t.forward_s + t.backward_s)
        return max(devices)

    def objective(
        self, stage_of: tuple[int, ...], order: tuple[int, ...], ceiling: float = math.inf
    ) -> float:
        """Infinite where it is certain to be above the ceiling."""
        times = self.stages(stage_of, order)
        if self.setting.objective is Objective.BOTTLENECK:
            return self.bottleneck(stage_of, order, times)
        if self.busy(times) > ceiling * (1 + 1e-9):
            return math.inf
        return simulate(self.setting.orders, times).step_s


def least(problem: CutProblem, setting: CutSetting) -> tuple[int, float]:
    """(excess, objective) of the best cut; infinite where there is none."""
    measure = Measure(problem, setting)
    best = (10**18, math.inf)
    cuts = list(assignments(measure.problem, setting.stages))
    for order in seatings(setting):
        for stage_of in cuts:
            excess = measure.excess(stage_of, order)
            if excess > best[0]:
                continue
            ceiling = best[1] if excess == best[0] else math.inf
            best = min(best, (excess, measure.objective(stage_of, order, ceiling)))
    return best
