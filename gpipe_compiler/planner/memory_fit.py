"""Candidates whose traced memory fits their devices, and not only the analytic estimate.

The search for cuts counts what autograd keeps (`in_flight`). What a device truly takes may be more
(temporaries, boundary values) or less (its gradients are not there yet when most activations are).
So the limits that the search keeps to are moved by the difference, and the cut is made again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from gpipe_compiler.cluster import Device
from gpipe_compiler.options import AnyOptimizer, RematChoice
from gpipe_compiler.passes.cut.device_order import slot_orders
from gpipe_compiler.passes.memory_trace import MemoryTraces
from gpipe_compiler.plan import Plan, Prediction, Stage
from gpipe_compiler.plan.memory_curve import DeviceMemory
from gpipe_compiler.planner.candidates import CandidateBuilder
from gpipe_compiler.planner.memory.devices import device_memories
from gpipe_compiler.planner.memory.layout import Layout
from gpipe_compiler.planner.predict import Candidate, shared

_ROUNDS = 3
"""Times that a cut is made again with other limits."""

_WORTH_A_CUT = 0.01
"""The share of a device's memory by which limits must move for a fitting cut to be made again."""


@dataclass(frozen=True)
class Exact:
    """A candidate with the memory of its devices.

    Attributes:
        over: bytes that its devices take more than they have, together.
    """

    candidate: Candidate
    memory: tuple[DeviceMemory, ...]
    over: float

    @property
    def merit(self) -> tuple[float, float, int]:
        """The less the better: how far from fitting, its step, how many stages recompute."""
        return self.over, self.candidate.prediction.step_s, sum(self.candidate.recomputing)


def choose_exactly(builder: CandidateBuilder) -> Exact:
    """The candidate with the shortest step that was found to fit, and the memory of its devices; or
    one that opens fewer modules and is nearly as good (`CandidateBuilder.inside`).

    Where none fits, that which is the nearest to it.

    Raises:
        ModelError: naming an op that cannot run.
    """
    choice = builder.remat
    first = _exact(builder, builder.choose(choice))
    limits = [slot.memory for slot in builder.setting.slots]
    if not first.over and _moved(builder, first, limits) is None:
        return first
    if first.candidate.prediction.anywhere_s is None:
        return _chosen(builder, first)[0]
    anywhere = builder.anywhere()
    start = _exact(anywhere, anywhere.choose(choice), first)
    best, limits = _chosen(anywhere, start)
    closed = _exact(builder, _limited(builder, limits).closed(best.candidate, choice), first, best)
    best_s = best.candidate.prediction.objective_s
    good = [
        exact
        for exact in (first, closed)
        if exact.over <= best.over
        and exact.candidate.prediction.objective_s <= best_s * (1 + builder.inside)
    ]
    taken = min(good, key=lambda exact: exact.merit, default=best)
    prediction = dataclasses.replace(taken.candidate.prediction, anywhere_s=best_s)
    return dataclasses.replace(
        taken, candidate=dataclasses.replace(taken.candidate, prediction=prediction)
    )


def _chosen(builder: CandidateBuilder, first: Exact) -> tuple[Exact, list[float]]:
    """The same, among cuts of one kind; and the limits under which the last was made."""
    best = latest = first
    choice = builder.remat
    limits = [slot.memory for slot in builder.setting.slots]
    for _ in range(_ROUNDS):
        moved = _moved(builder, latest, limits)
        if moved is None:
            break
        limits = moved
        candidate = _limited(builder, limits).choose(choice, best.candidate)
        if candidate.stages == latest.candidate.stages:
            break
        latest = _exact(builder, candidate.bounded_by(first.candidate))
        best = min(best, latest, key=lambda exact: exact.merit)
    if best.over > 0 and choice is RematChoice.AUTO:
        # Limits that were moved in vain must not miss what the plainest choices fit, nor what
        # needs the least.
        least = _limited(builder, [0.0] * len(limits))
        plain = [builder.choose(RematChoice.FULL), builder.choose(RematChoice.NONE)]
        for candidate in (*plain, least.choose(choice, best.candidate), *least.leanest()):
            usual = _exact(builder, candidate.bounded_by(first.candidate))
            best = min(best, usual, key=lambda exact: exact.merit)
    return best, limits


def with_memory(
    prediction: Prediction,
    memory: Sequence[DeviceMemory],
    stages: int,
    devices: Sequence[Device],
) -> Prediction:
    """A prediction with the memory that the devices truly take."""
    peaks = [0] * stages
    for device in memory:
        for stage, peak in zip(device.stages, device.stage_peaks, strict=True):
            peaks[stage] = peak
    return dataclasses.replace(
        prediction,
        peak_bytes=tuple(peaks),
        device_bytes=tuple(
            device.needed(taken(held, device)) for held, device in zip(memory, devices, strict=True)
        ),
        memory=tuple(device.shortened() for device in memory),
    )


def layout_of(plan: Plan, optimizer: AnyOptimizer) -> Layout:
    """That of a plan with its graph."""
    assert plan.graph is not None
    return Layout(
        stages=plan.stages,
        crossings=plan.crossings,
        orders=plan.orders,
        placement=plan.placement or tuple(range(len(plan.stages))),
        joint=plan.joint,
        shared=dict(shared(plan.graph, plan.stages)),
        microbatches=plan.microbatches,
        replicas=plan.replicas,
        sharding=plan.sharding,
        optimizer=optimizer,
        device=plan.devices[0],
    )


def remeasured(
    plan: Plan, optimizer: AnyOptimizer, memory_traces: MemoryTraces | None = None
) -> Plan:
    """A plan whose memory was the analytic estimate, with what its devices truly take.

    Args:
        memory_traces: of that, for stages that have been traced before.
    """
    assert plan.graph is not None
    memory = device_memories(plan.graph, layout_of(plan, optimizer), memory_traces)
    prediction = with_memory(plan.prediction, memory, len(plan.stages), plan.devices)
    return dataclasses.replace(plan, prediction=prediction)


def _exact(builder: CandidateBuilder, candidate: Candidate, *known: Exact) -> Exact:
    """A candidate with the memory of its devices, which one of those known may have as well."""
    for other in known:
        if other.candidate.runs_as(candidate):
            return dataclasses.replace(other, candidate=candidate)
    facts, setting = builder.facts_of(candidate), builder.setting
    stages: tuple[Stage, ...] = candidate.stages
    layout = Layout(
        stages=stages,
        crossings=candidate.table.crossings,
        orders=candidate.orders,
        placement=setting.placement,
        joint=candidate.joint,
        shared=dict(shared(facts.graph, stages)),
        microbatches=setting.microbatches,
        replicas=builder.policy.data_parallel,
        sharding=builder.policy.sharding_planned,
        optimizer=builder.policy.counted_optimizer,
        device=builder.cluster.devices[candidate.found.slots[0]],
    )
    memory = device_memories(facts.graph, layout, facts.memory_traces(on_host=layout.on_host))
    over = sum(
        max(0.0, taken(held, builder.cluster.devices[slot]) - setting.slots[slot].memory)
        for held, slot in zip(memory, candidate.found.slots, strict=True)
    )
    return Exact(candidate, memory, over)


def taken(held: DeviceMemory, device: Device) -> int:
    """Bytes that count in the memory of a device: a GPU's are those that are reserved of it, a
    process has those of kernels besides."""
    return held.reserved if device.kept_free and held.reserved else held.peak


def _moved(builder: CandidateBuilder, exact: Exact, limits: Sequence[float]) -> list[float] | None:
    """Limits under which the quick model counts what fits exactly; None where these will do."""
    moved = list(limits)
    # Else nothing was found that fits with more room.
    worth = exact.over > 0 and _fits_quickly(exact.candidate, limits)
    recomputes = any(exact.candidate.recomputing)
    pairs = zip(exact.memory, exact.candidate.prediction.device_bytes, strict=True)
    for (held, quick), slot in zip(pairs, exact.candidate.found.slots, strict=True):
        memory = builder.setting.slots[slot].memory
        moved[slot] = max(0.0, memory + quick - taken(held, builder.cluster.devices[slot]))
        worth |= recomputes and moved[slot] - limits[slot] > _WORTH_A_CUT * memory
    return moved if worth else None


def _fits_quickly(candidate: Candidate, limits: Sequence[float]) -> bool:
    """Whether the devices hold what the quick model counts."""
    pairs = zip(candidate.prediction.device_bytes, candidate.found.slots, strict=True)
    return all(quick <= limits[slot] for quick, slot in pairs)


def _limited(builder: CandidateBuilder, limits: Sequence[float]) -> CandidateBuilder:
    """The same on devices that hold so much.

    A limit is moved for the stages that a device has. So devices that are alike do not change
    places for it.
    """
    slots = tuple(
        dataclasses.replace(slot, memory=limit)
        for slot, limit in zip(builder.setting.slots, limits, strict=True)
    )
    orders, _ = slot_orders(builder.setting)
    alike = orders == (tuple(range(len(orders[0]))),)
    setting = dataclasses.replace(builder.setting, slots=slots, slots_in_order=alike)
    return dataclasses.replace(builder, setting=setting)
