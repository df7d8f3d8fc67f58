"""Plans of random models for random devices, compared with every cut that the model allows.

What may lie where is the cut problem's and `assignments`' (tests/passes/cut_brute.py, which has
tests of its own), as are the seconds and bytes of a stage; the step of each cut is worked out here
(`step_s`, from what `simulate/step.py` says), and so is the memory of a device.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from random_models import REGIONS, RUN, Recipe, Step, recipes
from random_packages import Layout, subject_of, traced

from gpipe_compiler.cluster import Cluster, Device, Link
from gpipe_compiler.errors import ModelError, PlanError, UsageError
from gpipe_compiler.options import Constraints, Policy, RematChoice
from gpipe_compiler.passes.cut.problem import CutProblem
from gpipe_compiler.passes.cut.setting import CutSetting
from gpipe_compiler.plan import Plan
from gpipe_compiler.planner.constrain import constrain
from gpipe_compiler.planner.cut_problem import CutFacts, problem_of
from gpipe_compiler.planner.planner import Planner
from gpipe_compiler.planner.planning import setting_for
from gpipe_compiler.planner.stage_table import stage_of_cut, tabulate, with_asked
from gpipe_compiler.runtime.schedule.actions import Compute, Orders, Phase
from gpipe_compiler.runtime.spec import OptimizerKind, Remat, ScheduleKind
from gpipe_compiler.simulate.step import StageTimes, recomputed

sys.path.insert(0, str(Path(__file__).parents[1] / "passes"))

import cut_brute

KINDS = [kind for kind in sorted(RUN) if kind not in REGIONS and kind not in ("tied", "shared")]

MOST_CUTS = 600


def step_s(
    orders: Orders, times: Sequence[StageTimes], split: bool, again: frozenset[Compute]
) -> float:
    """When the last thing ends, updates included."""
    free = [0.0] * len(orders)
    port_in, port_out = [0.0] * len(times), [0.0] * len(times)
    computed: dict[tuple[int, int], float] = {}
    returned: dict[tuple[int, int], float] = {}
    waiting = [list(order) for order in orders]
    while any(waiting):
        for device, order in enumerate(waiting):
            if not order:
                continue
            action = order[0]
            stage, m, own = action.stage, action.microbatch, times[action.stage]
            if action.phase is Phase.FORWARD:
                if stage and (stage - 1, m) not in computed:
                    continue
                there = computed.get((stage - 1, m), 0.0)
                port_in[stage] = max(port_in[stage], there) + own.receive_s
                free[device] = max(free[device], port_in[stage]) + own.forward_s
                computed[stage, m] = free[device]
            elif action.phase is Phase.BACKWARD:
                if stage + 1 < len(times) and (stage + 1, m) not in returned:
                    continue
                if action in again:
                    free[device] += own.recompute_s
                seconds = own.backward_s - (own.weight_s if split else 0.0)
                free[device] = max(free[device], returned.get((stage + 1, m), 0.0)) + seconds
                port_out[stage] = max(port_out[stage], free[device]) + own.gradient_s
                returned[stage, m] = port_out[stage]
            else:
                free[device] += own.weight_s
            order.pop(0)
    for device, order in enumerate(orders):
        free[device] += sum(times[stage].update_s for stage in {a.stage for a in order})
    return max(*free, *port_in, *port_out)


@dataclass(frozen=True)
class Asked:
    """What a model is planned for."""

    stages: int
    microbatches: int
    policy: Policy
    cluster: Cluster
    tightness: float | None
    constrained: int = 0


@st.composite
def clusters(draw: st.DrawFn, replicas: int) -> Cluster:
    """Devices of up to two kinds on up to two hosts; without an end, or just so many."""
    rates = st.sampled_from((1e6, 1e7, 1e9))
    kinds = [
        Device(f"kind{n}", draw(rates), draw(rates), 10**9, draw(st.sampled_from((0.0, 1e-5))))
        for n in range(2)
    ]
    link = Link(draw(rates), draw(st.sampled_from((0.0, 1e-5))))
    if draw(st.booleans()):
        return Cluster.of(kinds[0], link)
    count = draw(st.integers(1, 4)) * replicas
    if replicas > 1:  # every replica alike
        return Cluster((kinds[0],) * count, link)
    devices = tuple(kinds[draw(st.integers(0, 1))] for _ in range(count))
    split = draw(st.integers(0, count - 1))
    hosts = tuple(int(n >= split) for n in range(count)) if split else ()
    pairs = list(itertools.combinations(range(count), 2))
    special = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=2)) if pairs else []
    return Cluster(
        devices,
        link,
        Link(draw(rates), 1e-4) if hosts else None,
        hosts,
        tuple((a, b, Link(draw(rates), 1e-6)) for a, b in special),
    )


@st.composite
def askings(draw: st.DrawFn) -> Asked:
    replicas = draw(st.sampled_from((1, 1, 1, 2)))
    policy = Policy(
        schedule=draw(st.sampled_from(ScheduleKind)),
        remat=draw(st.sampled_from(RematChoice)),
        data_parallel=replicas,
        optimizer=draw(st.sampled_from(OptimizerKind)),
        prove=True,
    )
    stages = draw(st.integers(1, 4))
    if policy.schedule in (ScheduleKind.INTERLEAVED, ScheduleKind.ZBV):
        stages += stages % 2
    return Asked(
        stages,
        draw(st.sampled_from((1, 2, 3, 6))),
        policy,
        draw(clusters(replicas)),
        draw(st.sampled_from((None, None, 0.6, 0.9, 1.0, 1.2))),
        draw(st.integers(0, 7)),
    )


def constraints_for(planner: Planner, bits: int, stages: int) -> Constraints:
    """A pin, a pair of ops kept together, a split, as the bits say; names of the graph's own."""
    names = [op.name for op in planner.graph.ops]
    if bits == 1:
        return Constraints(pins=((names[len(names) // 2], stages // 2),))
    if bits == 2:
        return Constraints(split_at=(names[len(names) // 2],))
    if bits == 3:
        return Constraints(pins=((names[0], 0), (names[-1], -1)))
    if bits == 4:
        modules = [op.module for op in planner.graph.ops if op.module]
        return Constraints(together=tuple(modules[:1]))
    return Constraints()


def check_plan(plan: Plan, asked: Asked) -> None:
    """That it goes to JSON and back, and says nothing that contradicts itself."""
    text = plan.to_json()  # in which sizes that are free are the example's
    assert Plan.from_json(text).to_json() == text
    devices = len(plan.orders)
    assert len(plan.placement) == len(plan.stages) == asked.stages
    assert set(plan.placement) == set(range(devices))
    assert len(set(plan.slots)) == devices == len(plan.prediction.device_bytes)
    cluster = plan.cluster
    hosts = [host for host, _ in itertools.groupby(cluster.host(slot) for slot in plan.slots)]
    assert len(hosts) == len(set(hosts))
    for device, order in enumerate(plan.orders):
        assert {plan.placement[action.stage] for action in order} == {device}
    graph = plan.graph
    assert graph is not None
    stage_of = {op: stage.index for stage in plan.stages for op in stage.ops}
    copies = {op for stage in plan.stages for op in stage.duplicates}
    for op in graph.ops:
        assert op.name in stage_of or op.name in copies
        for value in op.inputs:
            maker = graph.producer.get(value)
            if maker and maker.name in stage_of and op.name in stage_of:
                own = plan.stages[stage_of[op.name]]
                # What only asks for a type or a size is worked out again wherever it is read.
                copied = {maker.name, op.name} & set(own.duplicates)
                assert stage_of[maker.name] <= own.index or copied
    split = plan.schedule in (ScheduleKind.ZB_H1, ScheduleKind.ZBV)
    for device, order in enumerate(plan.orders):
        peak, fixed = _held(plan, order, split), 0
        fixed = sum(s.state_bytes for s in plan.stages if plan.placement[s.index] == device)
        assert plan.prediction.device_bytes[device] == fixed + peak
    for pin, stage in plan.constraints.pins:
        assert stage_of.get(pin, stage % asked.stages) == stage % asked.stages
    for module in plan.constraints.together:
        lying = {
            stage_of[op.name] for op in graph.ops if op.module == module and op.name in stage_of
        }
        assert len(lying) <= 1
    for name in plan.constraints.split_at:
        op = graph.op_of[name]
        makers = {graph.producer[v].name for v in op.inputs if v in graph.producer} - copies
        own = stage_of.get(name)
        assert own is None or all(stage_of.get(maker, -1) < own for maker in makers)


def _held(plan: Plan, order: Sequence[Compute], split: bool) -> int:
    """Bytes of micro-batches at the worst moment of a device."""
    waits = recomputed((order,))
    held = dict.fromkeys(range(len(plan.stages)), 0)
    worst = 0
    ends = Phase.WEIGHT if split else Phase.BACKWARD
    for action in order:
        stage = plan.stages[action.stage]
        back = action._replace(phase=Phase.BACKWARD)
        # Segments run again in every backward; a whole stage only where others came between.
        segmented = stage.remat is Remat.SEGMENTS
        again = segmented or (stage.remat is Remat.FULL and back in waits)
        kept = stage.segments_kept_bytes if segmented else stage.input_bytes
        besides = stage.segments_again_bytes if segmented else stage.saved_bytes
        if action.phase is Phase.FORWARD:
            held[stage.index] += kept if again else stage.saved_bytes
        elif action.phase is Phase.BACKWARD and again:
            held[stage.index] += besides
        worst = max(worst, sum(held.values()))
        if action.phase is ends:
            held[stage.index] -= kept + besides if again else stage.saved_bytes
    return worst


def hold(recipe: Recipe, asked: Asked) -> str:
    """Plans a model, and compares the plan with all others."""
    subject = subject_of(recipe, Layout(1, 12 * asked.policy.data_parallel, size=1))
    planner = Planner(traced(subject), asked.cluster)
    policy = asked.policy
    free = dataclasses.replace(policy, remat=RematChoice.NONE)
    try:
        choice = planner.choose(asked.stages, asked.microbatches, free)
        roomy = planner.plan(choice, free, exact_memory=False)
    except (PlanError, UsageError) as error:
        return f"refused: {str(error)[:30]}"
    constraints = constraints_for(planner, asked.constrained, asked.stages)
    cluster = asked.cluster
    if asked.tightness is not None:
        memory = max(1, int(max(roomy.prediction.device_bytes) * asked.tightness))
        cluster = cluster.with_memory(memory)
    planner = Planner(planner.graph, cluster, constraints=constraints)
    choice = planner.choose(asked.stages, asked.microbatches, policy)
    prepared = planner.prepare(asked.microbatches, policy)
    problem = problem_of(prepared.facts, prepared.costs[1:], policy.counted_optimizer)
    setting = setting_for(cluster, choice, policy, training=True)
    try:
        problem = constrain(problem, prepared.facts, constraints, asked.stages)
        plan = planner.plan(choice, policy, exact_memory=False)
    except (UsageError, PlanError) as error:
        refusal = error
    else:
        check_plan(plan, asked)
        return _compare(plan, asked, prepared.facts, problem, setting)
    found = next(cut_brute.assignments(problem, asked.stages), None)
    if constraints == Constraints() or not isinstance(refusal, UsageError):
        assert found is None, f"refused, but there is the cut {found}: {refusal}"
    return "no such cut"


def _told(facts: CutFacts, problem: CutProblem, cut: tuple[int, ...], stages: int) -> CutProblem:
    """The problem with all that the stages of a cut are given."""
    pairs = zip(problem.nodes, cut, strict=True)
    table = tabulate(facts, {node.name: stage for node, stage in pairs}, stages)
    return with_asked(facts, problem, table)


def _compare(
    plan: Plan, asked: Asked, facts: CutFacts, problem: CutProblem, setting: CutSetting
) -> str:
    room = [setting.slots[slot].memory for slot in plan.slots]
    fits = all(size <= most for size, most in zip(plan.prediction.device_bytes, room, strict=True))
    assert fits == plan.fits
    assert fits or not (plan.prediction.proved or plan.prediction.lower_bound_s)
    cuts = list(itertools.islice(cut_brute.assignments(problem, asked.stages), MOST_CUTS + 1))
    rows = cut_brute.seatings(setting)
    if len(cuts) * len(rows) > MOST_CUTS:
        return "too many cuts"
    full = asked.policy.remat is RematChoice.FULL
    manners = [(full,) * asked.stages]
    if asked.policy.remat is RematChoice.AUTO:
        manners = [(False,) * asked.stages, (True,) * asked.stages]
    best = math.inf
    split = plan.schedule in (ScheduleKind.ZB_H1, ScheduleKind.ZBV)
    told = [_told(facts, problem, cut, asked.stages) for cut in cuts]
    for manner, (cut, whole) in itertools.product(manners, zip(cuts, told, strict=True)):
        measure = cut_brute.Measure(whole, dataclasses.replace(setting, recompute=manner))
        again = recomputed(setting.orders)
        for row in rows:
            if measure.excess(cut, row) <= 0:
                times = measure.stages(cut, row)
                best = min(best, step_s(setting.orders, times, split, again))
    if best < math.inf:
        assert fits, f"a plan fits, but not the one that was made: {plan.prediction}"
        assert plan.prediction.lower_bound_s <= best * (1 + 1e-9)
    graph = plan.graph
    assert graph is not None
    users = Counter(name for op in graph.ops for name in op.states(graph.modules))
    if any(count > 1 and graph.state[name].requires_grad for name, count in users.items()):
        return "gradients may be summed after the step, which the brute force does not know"
    if any(whole is not problem for whole in told):
        return "what some stages are given for the number of samples alone, no search sees"
    if fits:
        mine = plan.prediction.step_s
        if asked.policy.remat is not RematChoice.AUTO:
            assert mine >= best * (1 - 1e-9)
            assert mine <= best * (1 + 1e-9), f"{mine} is not the least, {best}"
            assert plan.prediction.proved
        else:
            assert mine <= best * (1 + 1e-9), f"auto: {mine} is more than {best}"
    return "held" if fits else "nothing fits"


def accept(recipe: Recipe, asked: Asked) -> str:
    """Holds a drawn example; a model that does not run by itself is no example."""
    try:
        return hold(recipe, asked)
    except ModelError as error:
        assume("the model raises" not in error.problem)
        raise


IN_SEGMENTS = Asked(
    1,
    1,
    Policy(schedule=ScheduleKind.GPIPE, remat=RematChoice.AUTO),
    Cluster.of(Device("flat", 1e6, 1e6, 10**9, 0.0), Link(1e6, 0.0)),
    tightness=0.6,
)
"""What two layers are planned for with one segment of both: of the inputs of the layers and of the
loss, 192 bytes each, the one in the middle is made again when the loss needs its own no more."""


@settings(max_examples=3, deadline=None)
@example(Recipe((Step("linear"), Step("linear"))), IN_SEGMENTS)
@given(recipes(KINDS, 4), askings())
def test_plans_for_random_devices(recipe: Recipe, asked: Asked) -> None:
    accept(recipe, asked)


FROM_SHAPES = Recipe(
    (
        *(Step("linear"), Step("drop_path", 1, 0, 1), Step("drop_path", 1, 2, 2)),
        *(Step("drop_path", 1, 2, 1), Step("drop_path", 1, 2, 2), Step("linear")),
    ),
    "input",
    "tokens",
    "none",
)
"""What draws random numbers for each sample, without anything that tells how many there are."""
UNREAD = Recipe((Step("linear"), Step("unused_state"), Step("linear")))
"""A buffer and a parameter that no op reads."""
WRITTEN = Recipe(
    (
        *(Step("linear"), Step("running", 1), Step("zeros"), Step("write_alone")),
        *(Step("causal", 1, 2, 1), Step("write_alone"), Step("causal", 1, 1, 1), Step("linear")),
    ),
    "tuple",
    "masked",
)
"""Writes into what every stage can make for itself, of what it cannot."""
LIMITLESS = Cluster.of(Device("flat", 1e6, 1e6, 10**9, 0.0), Link(1e6, 0.0))


@settings(max_examples=4, deadline=None)
@example(FROM_SHAPES)
@example(UNREAD)
@example(WRITTEN)
@given(recipes([kind for kind in sorted(RUN) if kind not in REGIONS], 5))
def test_problem_and_plan_count_alike(recipe: Recipe) -> None:
    """What the search counts of a stage in memory is what its plan counts."""
    try:
        graph = traced(subject_of(recipe, Layout(1, 12, size=1)))
        facts = Planner(graph, LIMITLESS).prepare(3, Policy()).facts
    except (ModelError, PlanError):
        return
    problem = problem_of(facts)
    nothing = StageTimes(0.0, 0.0)
    for stages in (1, 2, 3):
        for cut in itertools.islice(cut_brute.assignments(problem, stages), 0, 400, 7):
            pairs = zip(problem.nodes, cut, strict=True)
            table = tabulate(facts, {node.name: stage for node, stage in pairs}, stages)
            whole = with_asked(facts, problem, table)
            for number in range(stages):
                stage = stage_of_cut(facts, table, number, nothing, True, OptimizerKind.SGD)
                mine = {node for node, own in enumerate(cut) if own == number}
                kept = [resident for resident in problem.kept if mine & set(resident.users)]
                received = [v for v in whole.values if v.producer not in mine]
                given_bytes = sum(v.bytes for v in received if mine & set(v.consumers))
                saved = sum(resident.microbatch_bytes for resident in kept) if graph.loss else 0
                assert stage.state_bytes == sum(resident.bytes for resident in kept)
                assert (stage.input_bytes, stage.saved_bytes) == (given_bytes, saved)


AT_THE_LIMIT = Asked(
    4,
    2,
    Policy(schedule=ScheduleKind.INTERLEAVED, remat=RematChoice.FULL, prove=True),
    Cluster((Device("flat", 1e6, 1e6, 10**9, 0.0),) * 2, Link(1e6, 0.0)),
    tightness=1.0,
)


@pytest.mark.parametrize("tightness", [0.3, 0.6, 1.0])
def test_stages_that_are_given_the_number_of_samples(tightness: float) -> None:
    hold(FROM_SHAPES, dataclasses.replace(AT_THE_LIMIT, tightness=tightness))


@pytest.mark.slow
@pytest.mark.timeout(3600)  # hundreds of examples
@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(recipes(KINDS, 6), askings())
def test_many_plans_for_random_devices(recipe: Recipe, asked: Asked) -> None:
    accept(recipe, asked)
