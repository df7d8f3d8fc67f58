"""The cut against every chain of down-sets of small random graphs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_compiler.cluster import Link
from gpipe_compiler.errors import PlanError, UsageError
from gpipe_compiler.passes.cut import StepKind, cut
from gpipe_compiler.passes.cut_problem import GRAPH_INPUT, CutProblem, Node, Traffic
from gpipe_compiler.simulate import StageTimes, simulate


def assignments(problem: CutProblem, stages: int) -> Iterator[tuple[int, ...]]:
    """Every way to give nodes to stages such that edges, groups and pins are respected."""
    edges = list(problem.edges())
    for stage_of in itertools.product(range(stages), repeat=len(problem.nodes)):
        if (
            len(set(stage_of)) == stages
            and all(stage_of[a] <= stage_of[b] for a, b in edges)
            and all(len({stage_of[n] for n in group}) == 1 for group in problem.groups if group)
            and all(stage_of[n] == stages - 1 for n in problem.last)
            and (problem.last_alone or stages == 1 or _beside_last(problem, stage_of, stages))
        ):
            yield stage_of


def _beside_last(problem: CutProblem, stage_of: tuple[int, ...], stages: int) -> bool:
    """Whether the last stage holds a node that does not have to lie in it."""
    pinned = set(problem.last)
    while True:
        grown = pinned.union(*(g for g in problem.groups if pinned & set(g)))
        grown |= {b for a, b in problem.edges() if a in grown}
        if grown == pinned:
            break
        pinned = grown
    return any(s == stages - 1 and n not in pinned for n, s in enumerate(stage_of))


def stage_times(
    problem: CutProblem, stage_of: tuple[int, ...], link: Link, recompute: tuple[bool, ...] = ()
) -> list[StageTimes]:
    """Straight from the definition of the cost model."""
    times = []
    for stage in range(max(stage_of) + 1):
        own = [n for i, n in enumerate(problem.nodes) if stage_of[i] == stage]
        received = [
            v
            for v in problem.values
            if (0 if v.producer == GRAPH_INPUT else stage_of[v.producer]) < stage
            and any(stage_of[c] == stage for c in v.consumers)
        ]
        times.append(
            StageTimes(
                sum(n.forward_s for n in own),
                sum(n.backward_s for n in own),
                sum(link.seconds(v.bytes) for v in received),
                sum(link.seconds(v.gradient_bytes) for v in received),
                sum(n.forward_s for n in own) if recompute and recompute[stage] else 0.0,
            )
        )
    return times


def brute_force(
    problem: CutProblem,
    stages: int,
    step: StepKind,
    m: int,
    link: Link,
    recompute: tuple[bool, ...] = (),
) -> float:
    orders = step.orders(stages, m)
    seen = {tuple(stage_times(problem, s, link, recompute)) for s in assignments(problem, stages)}
    return min((simulate(orders, times).step_s for times in seen), default=math.inf)


@st.composite
def problems(draw: st.DrawFn, costless: bool = False) -> CutProblem:
    size = draw(st.integers(1, 7))
    seconds = st.integers(0 if costless else 1, 9).map(float)
    nodes = tuple(Node(f"op{i}", draw(seconds), draw(seconds)) for i in range(size))
    values = []
    for producer in range(GRAPH_INPUT, size - 1):
        consumers = draw(st.sets(st.integers(producer + 1, size - 1), max_size=3))
        if consumers:
            gradient = 0 if producer == GRAPH_INPUT else draw(st.integers(0, 8))
            values.append(
                Traffic(
                    f"v{producer}",
                    producer,
                    tuple(sorted(consumers)),
                    draw(st.integers(0, 8)),
                    gradient,
                )
            )
    pairs = st.tuples(st.integers(0, size - 1), st.integers(0, size - 1))
    groups = draw(st.lists(pairs, max_size=1))
    last = draw(st.sets(st.integers(size - 1, size - 1), max_size=1))
    precedence = draw(st.lists(pairs.filter(lambda p: p[0] < p[1]), max_size=2))
    return CutProblem(
        nodes,
        tuple(values),
        tuple(precedence),
        tuple(groups),
        frozenset(last),
        last_alone=not last or draw(st.booleans()),
    )


LINKS = st.sampled_from([Link(1e9, 0.0), Link(2.0, 0.0), Link(1.0, 0.5), Link(0.2, 1.0)])


@settings(max_examples=150, deadline=None)
@given(
    problems(),
    st.integers(1, 4),
    st.integers(1, 6),
    st.sampled_from(StepKind),
    LINKS,
    st.sampled_from([(False,) * 4, (True,) * 4, (True, False, True, False), (False, True) * 2]),
)
def test_no_chain_of_down_sets_is_faster(
    problem: CutProblem,
    stages: int,
    microbatches: int,
    step: StepKind,
    link: Link,
    recompute: tuple[bool, ...],
) -> None:
    """The step equals the least over all chains, and the bound does not exceed it."""
    again = recompute[:stages]
    least = brute_force(problem, stages, step, microbatches, link, again)
    if math.isinf(least):
        with pytest.raises(PlanError):
            cut(problem, stages=stages, microbatches=microbatches, step=step, link=link)
        return

    answer = cut(
        problem, stages=stages, microbatches=microbatches, step=step, link=link, recompute=again
    )

    assert answer.step_s == pytest.approx(least, rel=1e-6)
    assert answer.proved
    assert answer.lower_bound_s <= least * (1 + 1e-6)
    assert answer.stage_of in set(assignments(problem, stages))
    times = stage_times(problem, answer.stage_of, link, again)
    assert simulate(step.orders(stages, microbatches), times).step_s == pytest.approx(answer.step_s)


@settings(max_examples=60, deadline=None)
@given(problems(costless=True), st.integers(1, 3), st.sampled_from(StepKind), LINKS)
def test_costless_nodes_lose_nothing_to_at_most_as_many_stages(
    problem: CutProblem, stages: int, step: StepKind, link: Link
) -> None:
    """Merging nodes without cost keeps the best cut over all numbers of stages up to K."""
    least = [brute_force(problem, k, step, 4, link) for k in range(1, stages + 1)]
    if math.isinf(least[-1]):
        return

    found = [
        cut(problem, stages=k, microbatches=4, step=step, link=link).step_s
        for k in range(1, stages + 1)
    ]

    assert min(found) == pytest.approx(min(least), rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(problems(), st.integers(2, 3), st.sampled_from(StepKind), LINKS, st.booleans())
def test_bound_holds_where_not_everything_is_searched(
    problem: CutProblem, stages: int, step: StepKind, link: Link, recompute: bool
) -> None:
    again = (recompute,) * stages
    least = brute_force(problem, stages, step, 6, link, again)
    if math.isinf(least):
        return

    answer = cut(
        problem,
        stages=stages,
        microbatches=6,
        step=step,
        link=link,
        recompute=again,
        most_down_sets=2,
    )

    assert answer.lower_bound_s <= least * (1 + 1e-9)
    assert answer.step_s >= least * (1 - 1e-9)
    assert answer.stage_of in set(assignments(problem, stages))


def test_the_same_problem_gets_the_same_cut() -> None:
    nodes = tuple(Node(f"op{i}", 1.0, 2.0) for i in range(12))
    values = tuple(Traffic(f"v{i}", i, (i + 1,), 4, 4) for i in range(11))
    problem = CutProblem(nodes, values)
    link = Link(100.0, 0.0)

    answers = {
        cut(problem, stages=4, microbatches=4, step=StepKind.GPIPE, link=link) for _ in range(3)
    }

    assert len(answers) == 1
    assert answers.pop().stage_of == (0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3)


def test_what_cannot_be_cut_is_said() -> None:
    link = Link(1.0, 0.0)
    nodes = tuple(Node(f"op{i}", 1.0) for i in range(3))

    with pytest.raises(PlanError, match=r"4 stages are more than the 3 parts .* 3 ops"):
        cut(CutProblem(nodes), stages=4, microbatches=1, step=StepKind.GPIPE, link=link)
    with pytest.raises(UsageError, match="0 stages: at least one is needed"):
        cut(CutProblem(nodes), stages=0, microbatches=1, step=StepKind.GPIPE, link=link)
    with pytest.raises(UsageError, match="0 micro-batches: at least one is needed"):
        cut(CutProblem(nodes), stages=1, microbatches=0, step=StepKind.GPIPE, link=link)
    with pytest.raises(PlanError, match="a cycle, through or before op0"):
        cut(
            CutProblem(nodes, precedence=((0, 1), (1, 0))),
            stages=1,
            microbatches=1,
            step=StepKind.GPIPE,
            link=link,
        )
