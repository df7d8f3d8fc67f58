"""What there is to say of the stages that a bare graph is cut into."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from gpipe_compiler.graph_json.file import BareGraph
from gpipe_compiler.options.choices import Objective
from gpipe_compiler.passes.cut import Cut
from gpipe_compiler.passes.cut.problem import CutProblem, Traffic
from gpipe_compiler.passes.cut.setting import Setting
from gpipe_compiler.simulate.in_flight import loads


@dataclass(frozen=True, slots=True)
class BareStage:
    """One stage of a bare plan; seconds and bytes of one micro-batch.

    Attributes:
        ops: names, in an order in which they can run.
        device: its number in the cluster.
        transfer_s: of all that it receives and sends, forward and backward, one after another.
        receive_bytes, send_bytes: forward; a value is sent once to each later stage that uses it.
        gradient_bytes: that come back for what it has sent, and that it sends back.
    """

    ops: tuple[str, ...]
    device: int
    forward_s: float
    backward_s: float
    transfer_s: float
    receive_bytes: float
    send_bytes: float
    gradient_bytes: float
    parameter_bytes: float
    saved_bytes: float

    @property
    def total_s(self) -> float:
        """What `Objective.BOTTLENECK` counts."""
        return self.forward_s + self.backward_s + self.transfer_s


@dataclass(frozen=True)
class Found:
    """A cut of a bare graph into a certain number of stages.

    Attributes:
        problem: of the graph, in full.
    """

    problem: CutProblem
    setting: Setting
    found: Cut

    @property
    def rank(self) -> tuple[int, float]:
        """By how much memory is exceeded, and what was to be short; less is better."""
        return max(self.found.excess_bytes, default=0), self.value_s

    @property
    def value_s(self) -> float:
        """What was to be short."""
        if self.setting.objective is Objective.STEP:
            return self.found.step_s
        return max(self.totals)

    @cached_property
    def moves(self) -> tuple[tuple[Traffic, int, int], ...]:
        """Every value with a stage that makes it and a later one that uses it."""
        stage_of = self.found.stage_of
        return tuple(
            (value, stage_of[value.producer], target)
            for value in self.problem.values
            for target in sorted({stage_of[user] for user in value.consumers})
            if target != stage_of[value.producer]
        )

    @cached_property
    def transfer_s(self) -> tuple[float, ...]:
        """For every stage, of all that it receives and sends, one after another."""
        seconds = [0.0] * self.setting.stages
        for value, source, target in self.moves:
            link = self.setting.links[self.seat(source)][self.seat(target)]
            taken = link.seconds(value.bytes) + link.seconds(value.gradient_bytes)
            seconds[source] += taken
            seconds[target] += taken
        return tuple(seconds)

    @property
    def totals(self) -> tuple[float, ...]:
        """For every stage, what `Objective.BOTTLENECK` counts."""
        return tuple(
            times.forward_s + times.backward_s + transfer
            for times, transfer in zip(self.found.times, self.transfer_s, strict=True)
        )

    def seat(self, stage: int) -> int:
        """The number in the setting of the device that a stage runs on."""
        return self.found.seats[self.setting.placement[stage]]

    def figures(self, graph: BareGraph) -> tuple[BareStage, ...]:
        """What there is to say of every stage."""
        return tuple(self._figures(graph, stage) for stage in range(self.setting.stages))

    def _figures(self, graph: BareGraph, stage: int) -> BareStage:
        ops = [op for op, its in zip(graph.ops, self.found.stage_of, strict=True) if its == stage]
        names = {op.name for op in ops}
        times = self.found.times[stage]
        received = [value for value, _, target in self.moves if target == stage]
        sent = [value for value, source, _ in self.moves if source == stage]
        return BareStage(
            tuple(name for name in graph.order if name in names),
            self.seat(stage),
            times.forward_s,
            times.backward_s,
            self.transfer_s[stage],
            sum(value.bytes for value in received),
            sum(value.bytes for value in sent),
            sum(value.gradient_bytes for value in (*sent, *received)),
            sum(op.parameter_bytes for op in ops),
            sum(op.saved_bytes for op in ops) if self.setting.kind else 0,
        )

    def device_bytes(self) -> tuple[int, ...]:
        """For every device, memory at its peak."""
        stage_of = self.found.stage_of
        state = [0] * self.setting.stages
        saved = [0] * self.setting.stages
        for kept in self.problem.kept:
            for stage in {stage_of[user] for user in kept.users}:
                state[stage] += kept.bytes
                saved[stage] += kept.microbatch_bytes
        taken = [0.0] * self.setting.stages
        for value, _, target in self.moves:
            taken[target] += value.bytes
        return tuple(
            sum(state[stage] for stage in load.stages)
            + round(
                load.peak(
                    [taken[stage] for stage in load.stages], [saved[stage] for stage in load.stages]
                )
            )
            for load in loads(self.setting.orders)
        )
