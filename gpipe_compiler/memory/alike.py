"""Tells devices whose plays come to the same, so that one of them is played for all."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Hashable, Sequence

from gpipe_compiler.memory.job import DeviceJob, Played
from gpipe_compiler.memory.peak_tracker import counted
from gpipe_compiler.memory.simulator import MemorySimulator
from gpipe_compiler.runtime.schedule.actions import Compute, Phase, Receive, Send

_STAGE = re.compile(r"^(\d+)(?=[FBW]\d)")


def play_all(jobs: Sequence[DeviceJob]) -> list[Played]:
    """Every device's program played, alike ones once."""
    # Devices that begin otherwise are not alike, and that is seen sooner: under 1F1B each does.
    begins = [_beginning(job) for job in jobs]
    often = Counter(begins)
    known: dict[Hashable, tuple[DeviceJob, Played]] = {}
    found = []
    for job, begin in zip(jobs, begins, strict=True):
        if often[begin] == 1:
            found.append(MemorySimulator(job).play())
            continue
        key = begin, _likeness(job)
        if key not in known:
            known[key] = job, MemorySimulator(job).play()
        found.append(_renamed(*known[key], job))
    return found


def _beginning(job: DeviceJob) -> Hashable:
    """Equal for devices that are alike: how many steps, and how many before the first backward."""
    first = (
        place
        for place, step in enumerate(job.steps)
        if isinstance(step.action, Compute) and step.action.phase is not Phase.FORWARD
    )
    return len(job.steps), next(first, None)


def _likeness(job: DeviceJob) -> Hashable:
    """Equal for devices that do the same with values of the same sizes, whatever these are called.

    Stages and values are told by when they first come up.
    """
    places: dict[object, int] = {}

    def place(name: object) -> int:
        return places.setdefault(name, len(places))

    steps: list[Hashable] = []
    for step in job.steps:
        action = step.action
        drops = tuple((place(name), m) for name, m in step.drops)
        match action:
            case Compute():
                what: Hashable = place(action.stage), action.phase, action.microbatch, step.waits
            case Send(transfer=t) | Receive(transfer=t):
                ends = place(t.source), place(t.target)
                sort = isinstance(action, Send), t.gradient
                what = sort, place(t.value), t.microbatch, ends
            case _:
                what = place(action.parameter), job.shared_bytes.get(action.parameter)
        steps.append((what, drops))
    stages = []
    for index, stage in job.stages.items():
        tapes, wiring = stage.scripts.tapes, stage.wiring
        needs = tuple(
            (place(n.value), n.gradient, n.sender is None, tapes.received.get(n.value),
             tapes.sent_back.get(n.value))
            for n in wiring.needs
        )  # fmt: skip
        made = tuple(
            (place(name), tapes.returned.get(name), name in job.results)
            for name in wiring.spec.outputs
        )
        returned = tuple(
            (place(name), tapes.arriving.get(name),
             tuple((place(part.stage), part.remote) for part in parts))
            for name, parts in wiring.returned
        )  # fmt: skip
        tape = id(tapes.blocks), id(tapes.forward), tapes.kept
        joint = wiring.joint
        dims = None if joint is None else tuple(joint.get(need.value) for need in wiring.needs)
        kind = stage.remat, stage.trains, wiring.split, dims
        stages.append((place(index), needs, made, returned, tape, kind, job.row_bytes.get(index)))
    sizes = tuple(job.crossing_bytes.get(name) for name in places if isinstance(name, str))
    return tuple(steps), tuple(stages), sizes, job.microbatches


def _renamed(job: DeviceJob, played: Played, other: DeviceJob) -> Played:
    """What was played for one device, in the words of another that is alike."""
    if job is other:
        return played
    stages = dict(zip(job.stages, other.stages, strict=True))

    def action(text: str) -> str:
        return _STAGE.sub(lambda match: str(stages[int(match[1])]), text)

    return dataclasses.replace(
        played,
        action=action(played.action),
        points=dataclasses.replace(played.points, actions=counted(other.steps)),
        stage_peaks={stages[stage]: peak for stage, peak in played.stage_peaks.items()},
    )
