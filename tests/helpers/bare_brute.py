"""Every cut of a bare graph into every number of stages allowed, one by one.

All is worked out here but the order in which the devices of a schedule act: the cuts (every
assignment of ops to at most so many stages in which nothing goes backward), the order of the
devices, the step (`step_s`, written from what `simulate/step.py` says a step is), the longest
stage, and the bytes held.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from gpipe_compiler import BareGraph, BareSetting, Objective, ScheduleKind
from gpipe_compiler.cluster import Cluster, Device
from gpipe_compiler.graph_json.file import BareOp
from gpipe_compiler.runtime.schedule.actions import Compute, Orders, Phase
from gpipe_compiler.runtime.schedule.choosing import devices_for, orders_for, placement_for
from gpipe_compiler.runtime.schedule.gpipe import forward_only

MOST_CUTS = 4000
"""Cuts times orders of devices of an example; more take too long one by one."""

SPLIT = (ScheduleKind.ZB_H1, ScheduleKind.ZBV)


@dataclass(frozen=True)
class Times:
    """Seconds of a stage's micro-batch: its compute, and what comes and goes through its port."""

    forward: float
    backward: float
    weight: float
    receive: float
    gradient: float


def step_s(orders: Orders, times: Sequence[Times], split: bool) -> float:
    """When the last thing ends: devices in their own order, ports one micro-batch at a time."""
    device_free = [0.0] * len(orders)
    port_in = [0.0] * len(times)
    port_out = [0.0] * len(times)
    computed: dict[tuple[int, int], float] = {}
    returned: dict[tuple[int, int], float] = {}
    position = [0] * len(orders)
    while True:
        moved = False
        for device, order in enumerate(orders):
            while position[device] < len(order):
                action = order[position[device]]
                stage, m, own = action.stage, action.microbatch, times[action.stage]
                if action.phase is Phase.FORWARD:
                    if stage and (stage - 1, m) not in computed:
                        break
                    came = max(port_in[stage], computed.get((stage - 1, m), 0.0)) + own.receive
                    port_in[stage] = came
                    end = max(device_free[device], came) + own.forward
                    computed[stage, m] = end
                elif action.phase is Phase.BACKWARD:
                    if stage + 1 < len(times) and (stage + 1, m) not in returned:
                        break
                    came = max(device_free[device], returned.get((stage + 1, m), 0.0))
                    end = came + own.backward - (own.weight if split else 0.0)
                    port_out[stage] = max(port_out[stage], end) + own.gradient
                    returned[stage, m] = port_out[stage]
                else:
                    end = device_free[device] + own.weight
                device_free[device] = end
                position[device] += 1
                moved = True
        if all(p == len(order) for p, order in zip(position, orders, strict=True)):
            return max(*device_free, *port_in, *port_out)
        assert moved, "the schedule stands still"


def held(order: Sequence[Compute], saved: Sequence[float], split: bool) -> float:
    """Bytes of micro-batches on a device at its worst moment."""
    now = worst = 0.0
    last = Phase.WEIGHT if split else Phase.BACKWARD
    for action in order:
        if action.phase is Phase.FORWARD:
            now += saved[action.stage]
            worst = max(worst, now)
        elif action.phase is last:
            now -= saved[action.stage]
    return worst


def assignments(graph: BareGraph, stages: int) -> Iterator[tuple[int, ...]]:
    """All of the ops, in the order of the file, to exactly so many stages."""
    place = {op.name: index for index, op in enumerate(graph.ops)}
    order = [place[name] for name in graph.order]
    before: list[list[int]] = [[] for _ in order]
    for one, other in graph.edges:
        before[place[other]].append(place[one])
    chosen = [0] * len(order)

    def further(index: int) -> Iterator[tuple[int, ...]]:
        if index == len(order):
            if len(set(chosen)) == stages:
                yield tuple(chosen)
            return
        op = order[index]
        for stage in range(max((chosen[b] for b in before[op]), default=0), stages):
            chosen[op] = stage
            yield from further(index + 1)
        chosen[op] = 0

    return further(0)


def rows(cluster: Cluster, devices: int) -> Iterator[tuple[int, ...]]:
    """Every choice and order of so many devices in which those of a host stay together."""
    for row in itertools.permutations(range(len(cluster.devices)), devices):
        hosts = [host for host, _ in itertools.groupby(map(cluster.host, row))]
        if len(hosts) == len(set(hosts)):
            yield row


@dataclass(frozen=True)
class Question:
    """A graph, what it is to be planned for, and the devices spelt out."""

    graph: BareGraph
    asked: BareSetting

    @property
    def training(self) -> bool:
        wanted = self.asked.training
        return self.graph.has_backward if wanted is None else wanted

    def machines(self, devices: int) -> Cluster:
        if self.asked.cluster is not None:
            return self.asked.cluster
        memory = self.asked.memory
        return Cluster((Device("any", 1.0, 1.0, memory, 0.0),) * devices, self.asked.link)


class TooManyError(Exception):
    """An example that takes too long."""


@dataclass(frozen=True)
class Pipeline:
    """Devices at work.

    Attributes:
        on: the device of each stage.
        row: the number of each device in the cluster.
    """

    machines: Cluster
    on: tuple[int, ...]
    row: tuple[int, ...]
    orders: Orders


def value(q: Question, cut: Sequence[int], pipe: Pipeline, ceiling: float = math.inf) -> float:
    """What is to be short, of one cut; infinite where it does not fit, or is above the ceiling."""
    on, row, orders, machines = pipe.on, pipe.row, pipe.orders, pipe.machines
    stages, training = len(on), q.training
    split = training and q.asked.schedule in SPLIT
    back = training and q.graph.has_backward
    slot = [row[device] for device in on]
    slower = [machines.devices[0].flops / machines.devices[s].flops for s in slot]
    forward, backward, weight, fixed, saved = ([0.0] * stages for _ in range(5))
    for op, s in zip(q.graph.ops, cut, strict=True):
        forward[s] += op.forward_s * slower[s]
        fixed[s] += op.parameter_bytes * (2 if training else 1)
        if training:
            backward[s] += op.backward_s * slower[s]
            weight[s] += op.weight_s * slower[s]
            saved[s] += op.saved_bytes
    for device, order in enumerate(orders):
        room = machines.devices[row[device]].memory
        mine = sum(size for size, d in zip(fixed, on, strict=True) if d == device)
        if mine + held(order, saved, split) > room:
            return math.inf
    receive, gradient, ports = ([0.0] * stages for _ in range(3))
    place = {op.name: index for index, op in enumerate(q.graph.ops)}
    for index, op in enumerate(q.graph.ops):
        users = {cut[place[b]] for a, b in q.graph.edges if a == op.name} - {cut[index]}
        for user in users:
            if slot[user] != slot[cut[index]] and op.output_bytes:
                link = machines.between(slot[user], slot[cut[index]])
                seconds = link.latency_s + op.output_bytes / link.bandwidth
                receive[user] += seconds
                gradient[user] += seconds * back
                ports[user] += seconds * (1 + back)
                ports[cut[index]] += seconds * (1 + back)
    if q.asked.objective is Objective.BOTTLENECK:
        return max(f + b + p for f, b, p in zip(forward, backward, ports, strict=True))
    busy = [0.0] * len(orders)
    for s, device in enumerate(on):
        busy[device] += q.asked.microbatches * (forward[s] + backward[s])
    if max(busy) > ceiling:
        return math.inf
    times = list(map(Times, forward, backward, weight, receive, gradient))
    return step_s(orders, times, split)


def least(q: Question) -> float:
    """The best over every number of stages; infinite where nothing fits or can be placed."""
    best, seen = math.inf, 0
    for stages in range(1, min(q.asked.stages, len(q.graph.ops)) + 1):
        kind = q.asked.schedule
        try:
            devices = devices_for(kind, stages) if q.training else stages
            machines = q.machines(devices)
            devices = min(devices, len(machines.devices))
            on = placement_for(kind if q.training else ScheduleKind.GPIPE, stages, devices)
            orders = (
                orders_for(kind, on, q.asked.microbatches)
                if q.training
                else forward_only(on, q.asked.microbatches)
            )
        except ValueError:
            continue
        order = (
            [tuple(range(devices))] if q.asked.cluster is None else list(rows(machines, devices))
        )
        for cut in assignments(q.graph, stages):
            for row in order:
                seen += 1
                if seen > MOST_CUTS:
                    raise TooManyError
                best = min(best, value(q, cut, Pipeline(machines, on, row, orders), best))
    return best


WHOLE = st.integers(0, 9)


@st.composite
def graphs(draw: st.DrawFn, most: int) -> BareGraph:
    """Chains and wider graphs, ops in any order."""
    size = draw(st.integers(1, most))
    names = draw(st.permutations([f"op{i}" for i in range(size)]))
    backward = draw(st.sampled_from((True, True, True, False)))
    parts = draw(st.booleans())  # whether a part of a backward can wait
    ops = []
    for index in range(size):
        back = draw(WHOLE) if backward else 0
        ops.append(
            BareOp(
                f"op{index}",
                draw(WHOLE),
                back,
                draw(st.sampled_from((0, 1, 2.5, 8))),
                draw(WHOLE),
                draw(st.sampled_from((0, 0, 1, 5))),
                draw(st.integers(0, back if parts else 0)),
            )
        )
    edges = set()
    thick = draw(st.sampled_from((1, 2, 3)))
    for index, name in enumerate(names[1:], 1):
        for _ in range(draw(st.integers(size > 7, thick))):
            near = draw(st.integers(max(0, index - 3), index - 1))
            edges.add((names[near], name))
    return BareGraph(tuple(ops), tuple(sorted(edges)))
