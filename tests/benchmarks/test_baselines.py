"""The baselines, and what cuts come to in the benchmarks, against hand-worked figures, enumeration,
the theorem that torchgpipe's partition rests on, and the compiler's cut where all ops are pinned.
"""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
from baselines import Row, balanced, best_in_a_row, memory, score
from classic import block_ends
from hypothesis import given, settings
from hypothesis import strategies as st
from paper_tables import Priced, as_run, ceiling
from published import Recompute
from published import Row as Published
from random_problems import random_problem

from gpipe_compiler.cluster import Link
from gpipe_compiler.options import Objective
from gpipe_compiler.passes.cut import cut
from gpipe_compiler.passes.cut.contract import contract
from gpipe_compiler.passes.cut.orders import topological_orders
from gpipe_compiler.passes.cut.problem import CutProblem, Node, Resident, Traffic
from gpipe_compiler.passes.cut.setting import CutSetting, DeviceSlot
from gpipe_compiler.runtime.spec import ScheduleKind
from gpipe_compiler.simulate.step import StageTimes

LINK = Link(1.0, 0.0)
WEIGHTS = st.lists(st.integers(0, 20), min_size=4, max_size=9)


def chain(seconds: list[float], parameters: list[int]) -> CutProblem:
    """Ops in a row, each with 1 byte for the next; backward takes twice as long as forward."""
    last = len(seconds) - 1
    return CutProblem(
        tuple(Node(f"op{i}", s, 2 * s) for i, s in enumerate(seconds)),
        tuple(Traffic(f"v{i}", i, (i + 1,), 1, 1) for i in range(last)),
        kept=tuple(Resident((i,), 2 * n, 0, n) for i, n in enumerate(parameters) if n),
    )


def places(length: int, parts: int) -> list[tuple[int, ...]]:
    """All ways to cut a row into parts that are not empty."""
    return list(itertools.combinations(range(1, length), parts - 1))


@given(WEIGHTS, st.integers(1, 4))
def test_balanced_is_the_best_of_all_ways(weights: list[int], stages: int) -> None:
    sizes = balanced(weights, stages)

    def heaviest(ends: tuple[int, ...]) -> int:
        whole = (0, *ends, len(weights))
        return max(sum(weights[a:b]) for a, b in itertools.pairwise(whole))

    assert len(sizes) == stages
    assert sum(sizes) == len(weights)
    assert min(sizes) > 0
    ends = tuple(itertools.accumulate(sizes))[:-1]
    assert heaviest(ends) == min(map(heaviest, places(len(weights), stages)))


def test_blocks_move_the_nearest_item_to_the_smallest_block() -> None:
    # 3 + 3 items: sums 6 and 15; scaled by 1/5 after taking 1 off each: 0.6 and 2.4, so one moves.
    assert block_ends([1, 2, 3, 4, 5, 6], 2) == [4, 6]
    assert block_ends([0, 0], 2) == [1, 2]
    assert block_ends([5, 5, 5, 5], 2) == [2, 4]
    # An empty block has no item to give.
    assert block_ends([0, 0, 0, 1, 1], 4) == [1, 2, 4, 5]


@given(st.lists(st.floats(0, 1), min_size=4, max_size=40), st.integers(2, 4))
def test_blocks_differ_by_no_more_than_the_largest_item(times: list[float], blocks: int) -> None:
    ends = block_ends(times, blocks)

    low, spread = min(times), max(times) - min(times)
    scaled = [(time - low) / spread if spread else 0.0 for time in times]
    sums = [sum(scaled[a:b]) for a, b in itertools.pairwise((0, *ends))]
    assert ends == sorted(ends)
    assert ends[-1] == len(times)
    assert max(sums) <= min(sums) + 1 + 1e-12


def test_parameters_ops_and_times_are_shared_out_in_the_models_order() -> None:
    problem = chain([1, 1, 1, 1, 1, 7], [0, 4, 0, 0, 2, 2])
    row = Row(problem, 2)

    # Layers are ops 0-3 with 4 bytes, op 4 with 2 and op 5 with 2.
    assert row.equal_parameters() == (0, 0, 0, 0, 1, 1)
    assert row.equal_ops() == (0, 0, 0, 1, 1, 1)
    assert row.blocks() == (0, 0, 0, 1, 1, 1)
    assert Row(problem, 3).equal_ops() == (0, 0, 1, 1, 2, 2)


def test_fewer_layers_than_stages_are_parted_between_other_ops() -> None:
    stage_of = Row(chain([1, 1, 1, 1], [0, 0, 8, 0]), 3).equal_parameters()

    assert sorted(set(stage_of)) == [0, 1, 2]
    assert list(stage_of) == sorted(stage_of)


def test_what_is_whole_stays_whole_and_the_loss_gets_company() -> None:
    problem = dataclasses.replace(
        chain([1, 1, 1, 1], [1, 1, 1, 1]), groups=((1, 2),), last=frozenset({3}), last_alone=False
    )

    for stage_of in (Row(problem, 2).equal_ops(), Row(problem, 2).blocks()):
        assert stage_of == (0, 1, 1, 1)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(Objective), st.booleans())
def test_best_in_a_row_is_the_best_of_all_cuts_of_these_rows(
    seed: int, objective: Objective, early: bool
) -> None:
    draw = random.Random(seed)
    problem = random_problem(draw, 7)
    kind = ScheduleKind.ONE_F_ONE_B if early else ScheduleKind.GPIPE
    setting = dataclasses.replace(
        CutSetting.equal(kind, 3, 4, Link(100.0, 0.01)), objective=objective
    )
    graph = contract(problem, 3)
    if graph.parts < 3:
        return
    found = []
    for row in topological_orders(graph):
        for ends in places(len(row), 3):
            stage_of = [0] * len(problem.nodes)
            for place, node in enumerate(row):
                for member in graph.members[node]:
                    stage_of[member] = sum(place >= end for end in ends)
            if ends[-1] == len(row) - 1 and graph.last and not graph.last_alone:
                continue
            found.append(score(problem, stage_of, setting).of(objective))

    best = best_in_a_row(problem, setting)

    assert best.objective_s == pytest.approx(min(found), rel=1e-9)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B]))
def test_scores_are_those_of_a_cut_that_has_no_choice(seed: int, kind: ScheduleKind) -> None:
    draw = random.Random(seed)
    problem = random_problem(draw, 8)
    if contract(problem, 3).parts < 3:
        return
    stage_of = Row(problem, 3).equal_ops()
    slot = DeviceSlot(memory=draw.choice([0.0, 50.0]), update_s_per_byte=0.01)
    setting = dataclasses.replace(
        CutSetting.equal(kind, 3, 5, Link(100.0, 0.01), slot),
        recompute=tuple(draw.random() < 0.5 for _ in range(3)),
    )

    pinned = dataclasses.replace(problem, pinned=tuple(enumerate(stage_of)))
    only = cut(pinned, setting)
    known = score(problem, stage_of, setting)

    assert only.stage_of == stage_of
    assert known.step_s == pytest.approx(only.step_s, rel=1e-9)
    assert known.bottleneck_s == pytest.approx(only.bottleneck_s, rel=1e-9)
    for needed, excess in zip(memory(problem, stage_of, setting), only.excess_bytes, strict=True):
        assert max(0.0, needed - slot.memory) == pytest.approx(excess, abs=1)


@pytest.mark.parametrize(
    ("microbatches", "how", "seconds"),
    [
        # Two stages, forward 1 and backward 2. The first one's recomputing is hidden: 1+1 +1+2 +2.
        (1, Recompute.EARLY, 7),
        (1, Recompute.LATE, 8),
        # Early: the last stage is done with 1 at 6 and with 0 at 9, the first one 2 later.
        (2, Recompute.EARLY, 11),
        # Late, and 1 not recomputed: the last stage is done with 1 at 5 and with 0 at 8.
        (2, Recompute.LATE, 11),
    ],
)
def test_steps_of_pipelines_that_recompute_as_published_ones(
    microbatches: int, how: Recompute, seconds: float
) -> None:
    setting = CutSetting.equal(ScheduleKind.GPIPE, 2, microbatches, LINK)
    setting = dataclasses.replace(setting, recompute=(True, True))

    assert as_run(setting, [StageTimes(1, 2), StageTimes(1, 2)], how).step_s == seconds


@given(st.integers(1, 6), st.integers(1, 6))
def test_no_pipeline_of_equal_stages_is_faster_than_the_ceiling(stages: int, micro: int) -> None:
    priced = Priced(chain([1.0] * stages, [1] * stages), tuple(range(stages)))
    setting = dataclasses.replace(
        CutSetting.equal(ScheduleKind.GPIPE, stages, micro, LINK), recompute=(True,) * stages
    )
    alone = stages * 4.0  # a micro-batch on one device: forward twice, and a backward of two
    step = as_run(setting, [StageTimes(1, 2)] * stages, Recompute.EARLY).step_s

    most = ceiling(Published(stages, micro, micro, None, 1.0), priced)

    assert micro * alone / step <= most * (1 + 1e-9)
    # All that is left between them is the last stage's first recomputing.
    assert micro * alone / (step - 1) == pytest.approx(most)
