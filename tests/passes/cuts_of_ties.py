"""Prints the cuts of problems full of ties; for processes that compute as other processors do."""

from __future__ import annotations

import itertools
import random

from gpipe_compiler.cluster import Link
from gpipe_compiler.passes.cut import cut
from gpipe_compiler.passes.cut.problem import CutProblem, Node, Resident, Traffic
from gpipe_compiler.passes.cut.setting import CutSetting, DeviceSlot
from gpipe_compiler.runtime.spec import ScheduleKind

KINDS = (None, ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B, ScheduleKind.ZB_H1)
SEEDS = (5, 8, 10, 13)


def tied(seed: int) -> CutProblem:
    """Blocks of two branches of equal ops, whose times are no sums of powers of two."""
    draw = random.Random(seed)
    own = [(draw.randint(1, 9) / 3e5, draw.randint(1, 9) / 7e5) for _ in range(draw.randint(2, 4))]
    nodes, values, kept = [Node("op0", 0.0)], [], []
    for _ in range(draw.choice([2, 3, 4])):
        first = len(nodes) - 1
        ends = []
        for _ in range(2):
            before = first
            for forward, backward in own:
                nodes.append(Node(f"op{len(nodes)}", forward, backward, backward / 3))
                values.append(Traffic("v", before, (len(nodes) - 1,), 64, 64))
                before = len(nodes) - 1
                kept.append(Resident((before,), 256, 64, 256))
            ends.append(before)
        nodes.append(Node(f"op{len(nodes)}", own[0][0]))
        values += [Traffic("v", end, (len(nodes) - 1,), 64, 64) for end in ends]
    return CutProblem(tuple(nodes), tuple(values), kept=tuple(kept))


def cuts() -> list[str]:
    """A line for every cut: its stages, and all digits of its time."""
    lines = []
    for seed, kind, memory in itertools.product(SEEDS, KINDS, (float("inf"), 1.0)):
        setting = CutSetting.equal(kind, 3, 4, Link(1e9, 1e-6), DeviceSlot(memory=memory))
        found = cut(tied(seed), setting, work=2_000_000)
        lines.append(f"{seed} {kind} {memory}: {found.stage_of} {found.step_s!r}")
    return lines


if __name__ == "__main__":
    print("\n".join(cuts()))
