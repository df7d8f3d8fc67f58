"""The cut against every assignment of the nodes of small graphs, on every order of devices.

What the best cut is, `cut_brute.py` says: by its own enumeration, `simulate` and sums over the
problem. Some figures are worked by hand.
"""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
from cut_brute import Measure, assignments, least
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_problems import random_constraints, random_problem, random_setting

from gpipe_compiler.cluster import Link
from gpipe_compiler.errors import PlanError, UsageError
from gpipe_compiler.options import Objective
from gpipe_compiler.passes.cut import Cut, cut, ground
from gpipe_compiler.passes.cut import choose as cut_module
from gpipe_compiler.passes.cut.problem import CutProblem, Node, Resident, Seconds, Traffic
from gpipe_compiler.passes.cut.setting import CutSetting, DeviceSlot
from gpipe_compiler.runtime.spec import ScheduleKind

SEEDS = st.integers(0, 2**48)
FAST = Link(100.0, 0.0)


def drawn(seed: int, most: int, *, alike: bool = False) -> tuple[CutProblem, CutSetting]:
    draw = random.Random(seed)
    problem = random_problem(draw, draw.randint(1, most))
    setting = random_setting(draw, problem, alike=alike)
    return random_constraints(draw, problem, setting.stages), setting


def hold(problem: CutProblem, setting: CutSetting, answer: Cut) -> None:
    """What the answer says of itself is so."""
    measure = Measure(problem, setting)
    assert answer.stage_of in set(assignments(measure.problem, setting.stages))
    assert max(answer.excess_bytes) == measure.excess(answer.stage_of, answer.slots)
    value = measure.objective(answer.stage_of, answer.slots)
    assert answer.objective_s == pytest.approx(value, rel=1e-9)
    times = measure.stages(answer.stage_of, answer.slots)
    bottleneck = measure.bottleneck(answer.stage_of, answer.slots, times)
    assert answer.bottleneck_s == pytest.approx(bottleneck, rel=1e-9)
    assert isinstance(answer.proved, bool)  # numpy's own cannot be written into a plan


def hold_best(problem: CutProblem, setting: CutSetting) -> None:
    excess, value = least(problem, setting)
    if math.isinf(value):
        for prove in (False, True):
            with pytest.raises(PlanError):
                cut(problem, setting, prove=prove)
        return

    quick = cut(problem, setting)
    assert (max(quick.excess_bytes), quick.objective_s) >= (excess, value * (1 - 1e-9))
    assert quick.lower_bound_s <= value * (1 + 1e-9)
    assert not quick.proved
    hold(problem, setting, quick)

    answer = cut(problem, setting, prove=True)

    assert max(answer.excess_bytes) == excess
    assert answer.objective_s == pytest.approx(value, rel=1e-9)
    assert answer.proved
    assert answer.lower_bound_s <= value * (1 + 1e-9)
    hold(problem, setting, answer)


@settings(max_examples=150, deadline=None)
@given(SEEDS)
def test_no_cut_is_better(seed: int) -> None:
    hold_best(*drawn(seed, 6))


@pytest.mark.slow
@settings(max_examples=4000, deadline=None)
@given(SEEDS)
def test_no_cut_of_larger_graphs_is_better(seed: int) -> None:
    hold_best(*drawn(seed, 8))


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(SEEDS)
def test_no_cut_of_twelve_ops_is_better(seed: int) -> None:
    """On equal devices, as brute force does not get through their orders besides."""
    hold_best(*drawn(seed, 12, alike=True))


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(SEEDS)
def test_graphs_of_twelve_ops_are_solved_to_proof(seed: int) -> None:
    problem, setting = drawn(seed, 12)
    try:
        answer = cut(problem, setting, prove=True)
    except PlanError:
        return

    assert answer.proved


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(SEEDS, st.booleans())
def test_bound_holds_where_not_everything_is_searched(
    monkeypatch: pytest.MonkeyPatch, seed: int, prove: bool
) -> None:
    """As graphs with very many down-sets are searched."""
    monkeypatch.setattr(ground, "most_places", lambda _: 2)
    monkeypatch.setattr(cut_module, "MOST_DOWN_SETS", 2)
    problem, setting = drawn(seed, 6)
    excess, value = least(problem, setting)
    if math.isinf(value):
        return
    try:
        answer = cut(problem, setting, prove=prove)
    except PlanError:
        assert problem.pinned or problem.apart  # which no cut along an order of nodes may satisfy
        return

    hold(problem, setting, answer)
    found = max(answer.excess_bytes), answer.objective_s
    assert found >= (excess, value * (1 - 1e-9))
    assert excess or answer.lower_bound_s <= value * (1 + 1e-9)
    assert not answer.proved or found <= (excess, value * (1 + 1e-9))


def chain(size: int, **more: object) -> CutProblem:
    nodes = tuple(Node(f"op{i}", 1.0, 2.0, 1.0) for i in range(size))
    values = tuple(Traffic(f"v{i}", i, (i + 1,), 4, 4) for i in range(size - 1))
    return dataclasses.replace(CutProblem(nodes, values), **more)


def test_the_same_problem_gets_the_same_cut() -> None:
    setting = CutSetting.equal(ScheduleKind.GPIPE, 4, 4, FAST)

    answers = {cut(chain(12), setting) for _ in range(3)}

    assert len(answers) == 1
    assert answers.pop().stage_of == (0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3)


def test_the_faster_device_takes_the_larger_stage() -> None:
    """Three ops of 3 s, or of 1.5 s on the fast kind: 2 on it and 1 on the slow one take 3 s."""
    kinds = (tuple(Seconds(0.5, 1.0) for _ in range(3)),)
    setting = CutSetting.equal(ScheduleKind.GPIPE, 2, 4, FAST)
    slots = (DeviceSlot(0), DeviceSlot(1))

    answer = cut(chain(3, other_kinds=kinds), dataclasses.replace(setting, slots=slots), prove=True)

    per_slot = [answer.stage_of.count(stage) for stage in range(2)]
    assert dict(zip(answer.slots, per_slot, strict=True)) == {0: 1, 1: 2}
    assert answer.proved


def test_the_bottleneck_counts_all_transfers_of_a_stage() -> None:
    """A stage of two ops computes 6 s; 4 bytes at 100 bytes/s take 0.04 s, there and back."""
    setting = CutSetting.equal(ScheduleKind.GPIPE, 3, 4, FAST)
    setting = dataclasses.replace(setting, objective=Objective.BOTTLENECK)

    answer = cut(chain(6), setting, prove=True)

    assert answer.bottleneck_s == pytest.approx(6 + 4 * 0.04)
    assert answer.proved


def test_what_nothing_fits_is_exceeded_by_the_least() -> None:
    """10 bytes an op, 15 on each of two devices: 5 too many on both, whichever way 4 ops go."""
    kept = tuple(Resident((n,), 10) for n in range(4))
    setting = CutSetting.equal(ScheduleKind.GPIPE, 2, 4, FAST, DeviceSlot(memory=15))

    answer = cut(chain(4, kept=kept), setting, prove=True)

    assert answer.excess_bytes == (5, 5)
    assert not answer.fits


def test_what_cannot_be_cut_is_said() -> None:
    def asked(problem: CutProblem, stages: int, microbatches: int = 1) -> Cut:
        return cut(problem, CutSetting.equal(ScheduleKind.GPIPE, stages, microbatches, FAST))

    with pytest.raises(PlanError, match=r"4 stages are more than the 3 parts .* 3 ops"):
        asked(chain(3), 4)
    with pytest.raises(UsageError, match="0 stages: at least one is needed"):
        asked(chain(3), 0)
    with pytest.raises(UsageError, match="0 micro-batches: at least one is needed"):
        asked(chain(3), 1, 0)
    with pytest.raises(PlanError, match="a cycle, through or before op0"):
        asked(chain(3, precedence=((1, 0),)), 1)


@pytest.mark.parametrize(
    ("constraints", "said"),
    [
        ({"pinned": ((0, 5),)}, "op0 is pinned to stage 5, but there are 2 stages"),
        (
            {"pinned": ((0, 1), (1, 0))},
            "op1 is pinned to stage 0: .* in stage 1 or later, by op0 is pinned to stage 1",
        ),
        ({"pinned": ((0, 0), (0, 1))}, "op0 is pinned to stage 0 and op0 is pinned to stage 1"),
        ({"groups": ((0, 2),), "apart": ((0, 1),)}, "op0 and op1 must lie in different stages"),
        (
            {"groups": ((0, 1), (1, 2)), "precedence": (), "apart": ((0, 2),)},
            "op0 and op2 must lie in different stages: op0 and op2 cannot be cut apart",
        ),
        ({"pinned": ((2, 0),), "last": frozenset([2])}, "op2 is .* by the loss being made last"),
        ({"apart": ((0, 1), (1, 2))}, "op2 would lie in stage 2, but there are 2 stages"),
    ],
)
def test_contradictions_name_the_ops(constraints: dict[str, object], said: str) -> None:
    setting = CutSetting.equal(ScheduleKind.GPIPE, 2, 2, FAST)

    with pytest.raises(PlanError, match=said):
        cut(chain(3, **constraints), setting)
