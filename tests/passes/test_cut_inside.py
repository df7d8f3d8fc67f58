"""Which of the cuts that are nearly as good as the best is taken: by the modules that it opens."""

from __future__ import annotations

import random

import pytest
from cut_brute import Measure, assignments, seatings
from hypothesis import given, settings
from hypothesis import strategies as st
from random_problems import random_constraints, random_problem, random_setting

from gpipe_compiler.cluster import Link
from gpipe_compiler.errors import PlanError
from gpipe_compiler.passes.cut import cut
from gpipe_compiler.passes.cut.inside import cut_inside, module_calls, openness

FAST = Link(1e6, 0.0)


def random_paths(draw: random.Random, size: int, prefix: str = "") -> list[str]:
    """The modules of so many nodes in a row: some of this module itself, others further inside."""
    paths: list[str] = []
    while len(paths) < size:
        count = draw.randint(1, size - len(paths))
        inside = f"{prefix}.{len(paths)}".strip(".")
        if count > 1 and prefix.count(".") < 2 and draw.random() < 0.7:
            paths += random_paths(draw, count, inside)
        else:
            paths += [prefix] * count
    return paths


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**48), st.sampled_from([0.0, 0.03, 0.2, 1.0]))
def test_no_cut_that_is_good_enough_opens_less(seed: int, share: float) -> None:
    draw = random.Random(seed)
    problem = random_problem(draw, draw.randint(1, 7))
    setting = random_setting(draw, problem)
    problem = random_constraints(draw, problem, setting.stages)
    modules = module_calls(random_paths(draw, len(problem.nodes)))
    try:
        best = cut(problem, setting)
    except PlanError:
        return

    found = cut_inside(problem, setting, modules, best, share)

    assert max(found.excess_bytes) <= max(best.excess_bytes)
    assert found.objective_s <= best.objective_s * (1 + share) * (1 + 1e-9)
    measure = Measure(problem, setting)
    assert found.objective_s == pytest.approx(measure.objective(found.stage_of, found.slots))
    if share == 0:
        assert found == best
        return
    orders = seatings(setting)
    opened = openness(modules, found.stage_of)
    for stage_of in assignments(measure.problem, setting.stages):
        if openness(modules, stage_of) < opened:
            assert not any(
                measure.excess(stage_of, order) <= max(best.excess_bytes)
                and measure.objective(stage_of, order) <= best.objective_s * (1 + share)
                for order in orders
            )
