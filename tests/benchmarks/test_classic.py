"""Cuts that are found are never worse than the classic ones, which are compared with their rules.

What a cut comes to is said by `cut_brute.py`, by its own sums and `simulate`; the rules are those
of the papers: numbers of ops as near to equal as the nodes allow, blocks whose sums differ by at
most the largest node.
"""

from __future__ import annotations

import itertools
import random

from classic import block_ends, classic_cuts, equal_ends
from cut_brute import Measure, assignments, seatings
from hypothesis import given, settings
from hypothesis import strategies as st
from random_problems import random_problem, random_setting

from gpipe_compiler.errors import PlanError
from gpipe_compiler.passes.cut import cut
from gpipe_compiler.passes.cut.contract import contract
from gpipe_compiler.passes.cut.problem import CutProblem, Node, Traffic
from gpipe_compiler.passes.cut.setting import CutSetting

SEEDS = st.integers(0, 2**48)
SIZES = st.sampled_from([4, 7, 12, 20])


def drawn(seed: int, size: int) -> tuple[CutProblem, CutSetting]:
    """Devices of any kinds, memory limits and links among them."""
    draw = random.Random(seed)
    problem = random_problem(draw, size)
    return problem, random_setting(draw, problem)


def classic(problem: CutProblem, setting: CutSetting) -> list[tuple[int, ...]]:
    """Those that leave no stage empty."""
    measured = problem if setting.kind is not None else problem.forward_only()
    found = classic_cuts(contract(measured.check(), setting.stages), setting.stages)
    return [stage_of for stage_of in found if len(set(stage_of)) == setting.stages]


def hold(problem: CutProblem, setting: CutSetting) -> None:
    """No classic cut is better than the one found, on any order of devices."""
    try:
        answer = cut(problem, setting)
    except PlanError:
        assert not classic(problem, setting)
        return
    measure = Measure(problem, setting)
    found = max(answer.excess_bytes), answer.objective_s
    for stage_of, order in itertools.product(classic(problem, setting), seatings(setting)):
        excess = measure.excess(stage_of, order)
        assert found <= (excess, measure.objective(stage_of, order) * (1 + 1e-9))


@settings(max_examples=20, deadline=None)
@given(SEEDS, SIZES)
def test_no_classic_cut_is_better(seed: int, size: int) -> None:
    hold(*drawn(seed, size))


@settings(max_examples=40, deadline=None)
@given(SEEDS, SIZES)
def test_classic_cuts_are_cuts(seed: int, size: int) -> None:
    """They keep to what precedes what, groups, and what must lie in the last stage."""
    problem, setting = drawn(seed, min(size, 7))
    allowed = set(assignments(problem, setting.stages))

    assert set(classic(problem, setting)) <= allowed


@given(st.lists(st.integers(0, 50), min_size=8, max_size=30), st.integers(1, 8))
def test_blocks_differ_by_at_most_the_largest_item(times: list[int], blocks: int) -> None:
    """Of the shifted times, as torchgpipe takes them."""
    ends = block_ends(times, blocks)

    sums = [
        sum(time - min(times) for time in times[a:b]) for a, b in itertools.pairwise([0, *ends])
    ]
    assert ends[-1] == len(times)
    assert max(sums) - min(sums) <= max(times) - min(times) + 1e-6


def test_equal_ends_by_hand() -> None:
    assert equal_ends([1, 1, 1, 1, 1, 1], 3) == [2, 4]
    assert equal_ends([9, 1, 1, 1], 3) == [1, 2]
    assert equal_ends([1, 1, 1, 9], 3) == [2, 3]  # the last stage keeps the long one


def test_a_chain_is_cut_into_equal_work_by_hand() -> None:
    """Sums 6 | 6 where equal counts give 3 | 9."""
    nodes = tuple(Node(f"op{i}", seconds, 0.0) for i, seconds in enumerate([1.0, 2.0, 3.0, 6.0]))
    links = tuple(Traffic(f"v{i}", i, (i + 1,), 1, 1) for i in range(3))
    found = list(classic_cuts(contract(CutProblem(nodes, links), 2), 2))

    assert found[:2] == [(0, 0, 1, 1), (0, 0, 0, 1)]
