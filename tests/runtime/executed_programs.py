"""Lowered programs executed by the definition, without the code that they are compared with.

A device reads only what has arrived on it or has been made there. A joint stage computes with the
last of its actions, and nothing that it makes can leave before. Sends block until the receiver
arrives.
"""

from __future__ import annotations

from gpipe_compiler.runtime.schedule.actions import Compute, Phase, Receive, Send


def execute(programs, placement, crossings, joint):
    """Runs the programs; returns, for each stage and phase, its micro-batches as they were taken.

    `there[device]` holds (value, micro-batch, gradient of which stage or None).
    """
    there = [set() for _ in programs]
    position = [0] * len(programs)
    left = [
        {(s, p): sum((a.stage, a.phase) == (s, p) for a in program if isinstance(a, Compute))
         for s in range(len(placement)) for p in Phase}
        for program in programs
    ]  # fmt: skip
    taken = {}

    def compute(device, action):
        key = action.stage, action.phase
        left[device][key] -= 1
        taken.setdefault(key, []).append(action.microbatch)
        if action.stage not in joint:
            numbers = [action.microbatch]
        elif left[device][key]:
            return
        else:
            numbers = taken[key]
        before = {Phase.BACKWARD: Phase.FORWARD, Phase.WEIGHT: Phase.BACKWARD}.get(action.phase)
        for m in numbers:
            assert before is None or m in taken[action.stage, before]
            for c in crossings:
                if action.phase is Phase.FORWARD and action.stage in c.targets:
                    assert (c.value, m, None) in there[device]
                if action.phase is Phase.BACKWARD and c.gradient and action.stage == c.source:
                    assert {(c.value, m, placement[t]) for t in c.targets} <= there[device]
        for m in numbers:
            for c in crossings:
                if action.phase is Phase.FORWARD and action.stage == c.source:
                    there[device].add((c.value, m, None))
                if action.phase is Phase.BACKWARD and c.gradient and action.stage in c.targets:
                    there[device].add((c.value, m, f"{device}:{action.stage}"))
                    here = [t for t in c.targets if placement[t] == device]
                    if all((c.value, m, f"{device}:{t}") in there[device] for t in here):
                        there[device].add((c.value, m, device))

    def front(device):
        program = programs[device]
        return program[position[device]] if position[device] < len(program) else None

    moved = True
    while moved:
        moved = False
        for device in range(len(programs)):
            match front(device):
                case Compute() as action:
                    compute(device, action)
                    position[device] += 1
                    moved = True
                case Send(transfer=t):
                    other = placement[t.target]
                    if front(other) == Receive(t):
                        item = (t.value, t.microbatch, device if t.gradient else None)
                        assert item in there[device]
                        there[other].add(item)
                        position[device] += 1
                        position[other] += 1
                        moved = True
                case Receive() | None:
                    pass
                case total:
                    devices = {placement[stage] for stage in total.stages}
                    if all(front(d) == total for d in devices):
                        for stage in total.stages:
                            assert not left[placement[stage]][stage, Phase.BACKWARD]
                            assert not left[placement[stage]][stage, Phase.WEIGHT]
                        for d in devices:
                            position[d] += 1
                        moved = True
    assert position == [len(program) for program in programs]
    return taken
