"""Evaluates a cut: seconds, bytes and steps, straight from the problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gpipe_compiler.options import Objective
from gpipe_compiler.passes.cut.device_order import DeviceOrder
from gpipe_compiler.passes.cut.problem import GRAPH_INPUT, CutProblem, Seconds
from gpipe_compiler.passes.cut.setting import CutSetting
from gpipe_compiler.passes.cut.space import (
    BACKWARD,
    FORWARD,
    GRADIENT,
    RECEIVE,
    SEND,
    UPDATE,
    WEIGHT,
    Floats,
)
from gpipe_compiler.simulate.in_flight import Load, loads
from gpipe_compiler.simulate.step import StageTimes, Steps, recomputed


@dataclass(frozen=True, slots=True)
class CutScore:
    """What is known of one cut on one order of devices.

    Attributes:
        excess: for every device of the pipeline, bytes by which it is too small.
    """

    stage_of: tuple[int, ...]
    slots: tuple[int, ...]
    times: tuple[StageTimes, ...]
    excess: tuple[int, ...]
    step_s: float
    bottleneck_s: float

    def rank(self, objective: Objective) -> tuple[float, float]:
        """The smaller, the better."""
        value = self.step_s if objective is Objective.STEP else self.bottleneck_s
        return max(self.excess), value


@dataclass(frozen=True)
class Timing:
    """What follows from a schedule and from which stages recompute, whatever the stages take.

    Attributes:
        repeats: for every stage, how many micro-batches it computes again.
        held: what every device holds of micro-batches; nothing where memory does not matter.
        steps: seconds of a step from those of its stages.
    """

    repeats: tuple[int, ...]
    held: tuple[Load, ...]
    steps: Steps

    @classmethod
    def of(cls, setting: CutSetting, steps: Steps | None = None) -> Timing:
        """That of a setting.

        Args:
            steps: of its schedule, where they are known.
        """
        asked = setting.recompute or (False,) * setting.stages
        repeats = [0] * setting.stages
        for action in recomputed(setting.orders) if any(asked) else ():
            repeats[action.stage] += asked[action.stage]
        again = [stage for stage, asks in enumerate(asked) if asks]
        held = loads(setting.orders, again) if setting.limited else ()
        return cls(tuple(repeats), held, steps or Steps(setting.orders))

    @property
    def again(self) -> Floats:
        """For every stage, 1 where it computes anything again, else 0."""
        return np.array([float(count > 0) for count in self.repeats])


class CutEvaluator:
    """Judges cuts of one problem in one setting."""

    def __init__(self, problem: CutProblem, setting: CutSetting, timing: Timing) -> None:
        self.problem = problem
        self.setting = setting
        self.objective = setting.objective
        self.split = setting.splits_backward
        self.again = timing.again
        self.steps = timing.steps
        nodes = tuple(Seconds(n.forward_s, n.backward_s, n.weight_s) for n in problem.nodes)
        self._kinds = (nodes, *problem.other_kinds)

    def allows(self, stage_of: Sequence[int]) -> bool:
        """Whether the problem allows such a cut into all the stages, none of them empty."""
        problem, last = self.problem, self.setting.stages - 1
        must, beside = set(problem.last), False
        for before, after in problem.edges():
            if stage_of[before] > stage_of[after]:
                return False
        for node, stage in enumerate(stage_of):
            beside |= stage == last and node not in must
        return (
            set(stage_of) == set(range(last + 1))
            and all(len({stage_of[node] for node in group}) < 2 for group in problem.groups)
            and all(stage_of[node] == last for node in must)
            and (problem.last_alone or beside or not must or not last)
            and all(stage_of[node] == stage for node, stage in problem.pinned)
            and all(stage_of[one] != stage_of[other] for one, other in problem.apart)
        )

    def evaluate(self, device_order: DeviceOrder, stage_of: Sequence[int]) -> CutScore:
        stages = device_order.stages
        seconds = [[0.0, 0.0, 0.0] for _ in range(stages)]
        kinds = [
            self._kinds[device_order.devices[device].kind] for device in device_order.placement
        ]
        for node, stage in enumerate(stage_of):
            cost, total = kinds[stage][node], seconds[stage]
            total[0] += cost.forward_s
            total[1] += cost.backward_s
            total[2] += cost.weight_s
        receive, gradient, sends = ([0.0] * stages for _ in range(3))
        taken = [0.0] * stages
        for value in self.problem.values:
            given = value.producer == GRAPH_INPUT
            source = 0 if given else stage_of[value.producer]
            for target in {stage_of[consumer] for consumer in value.consumers}:
                if target != source or given:
                    taken[target] += value.bytes
                if target == source:
                    continue
                link = device_order.between(source, target)
                there, back = link.seconds(value.bytes), link.seconds(value.gradient_bytes)
                receive[target] += there
                gradient[target] += back
                sends[source] += there + back
        held = self._held(device_order, stage_of, taken)
        times = []
        for stage, (forward, backward, weight) in enumerate(seconds):
            slot = device_order.devices[device_order.placement[stage]]
            updated = held[1][stage]
            update = updated * slot.update_s_per_byte + bool(updated) * slot.update_latency_s
            times.append(
                StageTimes(
                    forward,
                    backward,
                    receive[stage],
                    gradient[stage],
                    forward * float(self.again[stage]),
                    weight,
                    update,
                )
            )
        return CutScore(
            tuple(stage_of),
            device_order.slots,
            tuple(times),
            held[0],
            float(self.steps(_columns(times))[0]),
            max(
                t.forward_s + t.backward_s + t.recompute_s + t.receive_s + t.gradient_s + sent
                for t, sent in zip(times, sends, strict=True)
            ),
        )

    def _held(
        self, device_order: DeviceOrder, stage_of: Sequence[int], taken: Sequence[float]
    ) -> tuple[tuple[int, ...], list[float]]:
        """The excess of every device, and what every stage updates."""
        stages = device_order.stages
        state, saved, updated = ([0.0] * stages for _ in range(3))
        for kept in self.problem.kept:
            for stage in {stage_of[user] for user in kept.users}:
                state[stage] += kept.bytes
                saved[stage] += kept.microbatch_bytes
                updated[stage] += kept.updated_bytes
        excess = [0] * len(device_order.devices)
        if device_order.limited:
            for device, (load, slot) in enumerate(
                zip(device_order.loads, device_order.devices, strict=True)
            ):
                peak = load.peak([taken[s] for s in load.stages], [saved[s] for s in load.stages])
                over = sum(state[s] for s in load.stages) + peak - slot.memory
                excess[device] = max(0, int(np.ceil(over))) if np.isfinite(over) else 0
        return tuple(excess), updated

    def score(
        self, device_order: DeviceOrder, times: Floats, held: Floats
    ) -> tuple[Floats, Floats]:
        """The largest excess of a device, and the objective, of many pipelines.

        Args:
            times: shape (pipelines, 7, stages), as in `Row`; `held` likewise, (pipelines, 3,
                stages).
        """
        again = times[:, FORWARD] * self.again
        if self.objective is Objective.STEP:
            rows = (FORWARD, BACKWARD, RECEIVE, GRADIENT)
            columns = [times[:, row] for row in rows]
            columns += [again, times[:, WEIGHT], times[:, UPDATE]]
            value = self.steps(np.stack(columns, axis=2))
        else:
            parts = [FORWARD, BACKWARD, RECEIVE, GRADIENT, SEND]
            value = (times[:, parts].sum(axis=1) + again).max(axis=1)
        return excess_of(device_order, held), value


def excess_of(device_order: DeviceOrder, held: Floats, stages: int | None = None) -> Floats:
    """The largest excess of a device, of many pipelines, at least 0.

    Args:
        held: shape (pipelines, 3, stages), as in `Row`.
        stages: how many there are so far; those after them hold nothing yet.
    """
    worst = np.zeros(len(held))
    if not device_order.limited:
        return worst
    for load, memory in zip(device_order.loads, device_order.memory, strict=True):
        known = [i for i, stage in enumerate(load.stages) if stages is None or stage < stages]
        if not known:
            continue
        own = held[:, :, [load.stages[i] for i in known]]
        counts = load.counts[:, known]
        peak = np.einsum("msk,nks->nm", counts.astype(float), own[:, 1:]).max(axis=1, initial=0.0)
        np.maximum(worst, own[:, 0].sum(axis=1) + peak - memory, out=worst)
    return worst


def _columns(times: Sequence[StageTimes]) -> Floats:
    names = StageTimes.__dataclass_fields__
    return np.array([[[getattr(t, name) for name in names] for t in times]])
