"""Random problems and settings for the cut: every part of both, small enough for brute force."""

from __future__ import annotations

import math
import random
from dataclasses import replace

from gpipe_compiler.cluster import NO_LINK, Link
from gpipe_compiler.errors import PlanError
from gpipe_compiler.options import Objective
from gpipe_compiler.passes.cut.problem import CutProblem, Node, Resident, Seconds, Traffic
from gpipe_compiler.passes.cut.setting import CutSetting, DeviceSlot
from gpipe_compiler.runtime.spec import ScheduleKind

LINKS = (Link(1e9, 0.0), Link(2.0, 0.0), Link(1.0, 0.5), Link(0.2, 1.0))
PAIRED = (ScheduleKind.INTERLEAVED, ScheduleKind.ZBV)
KINDS = (None, *ScheduleKind)


def random_problem(draw: random.Random, size: int) -> CutProblem:
    """So many ops; some of them cost nothing in every other problem."""
    least = draw.randint(0, 1)
    nodes = tuple(Node(f"op{i}", *_seconds(draw, least)) for i in range(size))
    kept = []
    for _ in range(draw.choice([0, 1, size])):
        users = draw.sample(range(size), min(size, draw.choice([1, 1, 2, 3])))
        sizes = (draw.choice([0, draw.randint(1, 9)]) for _ in range(3))
        kept.append(Resident(tuple(sorted(users)), *sizes))
    last = frozenset([size - 1]) if draw.random() < 0.4 else frozenset()
    edges = (
        tuple(sorted(draw.choices(range(size), k=2))) for _ in range(draw.choice([0, 1, size]))
    )
    groups = [tuple(draw.sample(range(size), 2))] if size > 1 and draw.random() < 0.2 else []
    return CutProblem(
        nodes,
        tuple(_values(draw, size)),
        tuple((a, b) for a, b in edges if a != b),
        tuple(groups),
        last,
        last_alone=not last or draw.random() < 0.5,
        kept=tuple(kept),
        other_kinds=tuple(
            tuple(Seconds(*_seconds(draw, least)) for _ in range(size))
            for _ in range(draw.choice([0, 0, 1]))
        ),
    )


def _seconds(draw: random.Random, least: int) -> tuple[float, float, float]:
    backward = draw.randint(least, 9)
    return float(draw.randint(least, 9)), float(backward), float(draw.randint(0, backward))


def _values(draw: random.Random, size: int) -> list[Traffic]:
    found = []
    density = 3 * draw.random() / size
    for producer in range(-1, size - 1):
        users = [n for n in range(producer + 1, size) if draw.random() < density]
        if not users and draw.random() < 0.5:
            users = [draw.randint(producer + 1, size - 1)]
        if users:
            back = 0 if producer < 0 else draw.randint(0, 8)
            found.append(Traffic(f"v{producer}", producer, tuple(users), draw.randint(0, 8), back))
    return found


def random_constraints(draw: random.Random, problem: CutProblem, stages: int) -> CutProblem:
    """Pins and pairs apart, in two of five problems; they may contradict each other."""
    size = len(problem.nodes)
    if size < 2 or draw.random() < 0.6:
        return problem
    return replace(
        problem,
        pinned=tuple(
            (draw.randrange(size), draw.randrange(stages)) for _ in range(draw.choice([0, 1, 2]))
        ),
        apart=tuple(tuple(draw.sample(range(size), 2)) for _ in range(draw.choice([0, 1, 2]))),
    )


def random_setting(draw: random.Random, problem: CutProblem, *, alike: bool = False) -> CutSetting:
    """Any schedule and objective, up to four stages.

    Args:
        alike: whether all devices and links are equal, so that there is one order of them.
    """
    while True:
        kind = draw.choice(KINDS)
        stages = draw.choice([2, 4]) if kind in PAIRED else draw.randint(1, 4)
        pairs = kind in PAIRED or (kind is not ScheduleKind.ZB_H1 and draw.random() < 0.15)
        devices = stages // 2 if pairs and stages % 2 == 0 else stages
        microbatches = draw.choice([1, 2, 3, 4, 6])
        recompute = ()
        if kind is not None and draw.random() < 0.5:
            recompute = tuple(draw.random() < 0.5 for _ in range(stages))
        slots, links = _machines(draw, problem, microbatches, devices, alike=alike)
        objective = draw.choice([Objective.STEP, Objective.STEP, Objective.BOTTLENECK])
        setting = CutSetting(
            kind, stages, microbatches, slots, links, devices, recompute, objective
        )
        try:
            assert setting.orders
        except PlanError:
            continue
        return setting


def _machines(
    draw: random.Random, problem: CutProblem, microbatches: int, devices: int, *, alike: bool
) -> tuple[tuple[DeviceSlot, ...], tuple[tuple[Link, ...], ...]]:
    whole = sum(k.bytes + microbatches * k.microbatch_bytes for k in problem.kept)
    limited = draw.random() < 0.6

    def slot() -> DeviceSlot:
        most = draw.choice((1, 1, 8)) * max(1, whole)
        memory = draw.randint(0, most) if limited else math.inf
        kind = draw.randint(0, len(problem.other_kinds))
        return DeviceSlot(kind, memory, 0, draw.choice([0, 0.5, 2.0]), draw.choice([0, 1.0]))

    alike = alike or draw.random() < 0.4
    count = devices + (not alike and draw.random() < 0.25)
    one = slot()
    slots = [one if alike else slot() for _ in range(count)]
    hosts = [0]
    for _ in range(count - 1):
        hosts.append(hosts[-1] + (not alike and draw.random() < 0.3))
    near, far = draw.choice(LINKS), draw.choice(LINKS)
    mixed = not alike and draw.random() < 0.3
    links = [[NO_LINK] * count for _ in range(count)]
    for a in range(count):
        for b in range(a):
            link = near if hosts[a] == hosts[b] else far
            links[a][b] = links[b][a] = draw.choice(LINKS) if mixed else link
    placed = tuple(replace(s, host=host) for s, host in zip(slots, hosts, strict=True))
    return placed, tuple(map(tuple, links))
