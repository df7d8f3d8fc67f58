"""Nodes that no better cut separates, held against all cuts there are of small random graphs."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_compiler.passes.cut.best_case import Ideal
from gpipe_compiler.passes.cut.inseparable import joined
from gpipe_compiler.passes.cut.problem import GRAPH_INPUT

STAGES = 3


def ideal_of(own, moves, *, again=0.0, owner=None, edges=()):
    """Every node by itself; a value's users follow from its producer."""
    pairs = {(made, user) for made, users, _, _ in moves for user in users if made != GRAPH_INPUT}
    return Ideal(
        tuple(forward for forward, _ in own),
        tuple(backward for _, backward in own),
        tuple(range(len(own))) if owner is None else owner,
        tuple(sorted({*pairs, *edges})),
        tuple(moves),
        again,
    )


def shares(ideal, known):
    """The same in shares of what the known cut takes."""
    return Ideal(
        tuple(forward / known for forward in ideal.forward),
        tuple(backward / known for backward in ideal.backward),
        ideal.owner,
        ideal.edges,
        tuple((made, users, a / known, b / known) for made, users, a, b in ideal.moves),
        ideal.again,
    )


def longest(ideal, stage_of):
    """The longest stage by definition; a sender sends to every later stage."""
    taken = [0.0] * STAGES
    for stage, forward, backward in zip(stage_of, ideal.forward, ideal.backward, strict=True):
        taken[stage] += forward * (1 + ideal.again) + backward
    for made, users, there, back in ideal.moves:
        source = 0 if made == GRAPH_INPUT else stage_of[made]
        for stage in {stage_of[user] for user in users} - {source}:
            taken[stage] += there + back
            taken[source] += (there + back) * (made != GRAPH_INPUT)
    return max(taken)


def cuts(ideal):
    """All cuts into at most so many stages, and their longest stages."""
    for stage_of in product(range(STAGES), repeat=len(ideal.forward)):
        if all(stage_of[a] <= stage_of[b] for a, b in ideal.edges) and all(
            stage_of[node] == stage_of[owner] for node, owner in enumerate(ideal.owner)
        ):
            yield stage_of, longest(ideal, stage_of)


@st.composite
def problems(draw):
    size = draw(st.integers(2, 6))
    times = st.integers(0, 6)
    own = [(draw(times), draw(times)) for _ in range(size)]
    moves = []
    for node in range(-1, size - 1):
        users = draw(st.sets(st.integers(node + 1, size - 1), max_size=3))
        if users:
            cost = draw(st.integers(0, 4)), draw(st.integers(0, 4))
            moves.append((GRAPH_INPUT if node < 0 else node, tuple(sorted(users)), *cost))
    edges = draw(st.sets(st.tuples(*[st.integers(0, size - 1)] * 2), max_size=2))
    again = float(draw(st.booleans()))
    return ideal_of(own, moves, again=again, edges=[(a, b) for a, b in edges if a < b])


@settings(max_examples=150, deadline=None)
@given(problems(), st.floats(0, 1), st.booleans())
def test_no_better_cut_separates_what_is_joined(ideal, place, above):
    every = [cut for cut in cuts(ideal) if cut[1] > 0]
    if not every:
        return
    lengths = sorted({length for _, length in every})
    known = lengths[round(place * (len(lengths) - 1))] * (1.01 if above else 1)
    found = joined(shares(ideal, known))
    better = [stage_of for stage_of, length in cuts(ideal) if length < known * (1 - 2e-6)]
    if found is None:
        assert all(len(set(stage_of)) == 1 for stage_of in better)
        return
    for stage_of in better:
        assert all(stage_of[node] == stage_of[owner] for node, owner in enumerate(found.owner))


@settings(max_examples=40, deadline=None)
@given(problems())
def test_what_is_found_holds_as_much_as_what_was_given(ideal):
    """The joined problem has the cuts of the given one that keep together what is joined."""
    found = joined(shares(ideal, 1e9))
    assert found is not None
    again = shares(found, 1e-9)
    for stage_of, length in cuts(again):
        assert abs(longest(ideal, stage_of) - length) <= 1e-6 * length


def test_one_join_leads_to_the_next():
    """Three ops of 4 with values of 3 + 3 between them.

    The middle one alone takes 4 + 6 + 6, with the first or the last 8 + 6. So with 12 known each
    of them lies with it, though alone they take 4 + 6; all together take 12.
    """
    ideal = ideal_of([(4, 0)] * 3, [(0, (1,), 3, 3), (1, (2,), 3, 3)])
    assert joined(shares(ideal, 12)) is None
    better = joined(shares(ideal, 14.1))
    assert better is not None
    assert len(set(better.owner)) == 3


def test_cycles_of_what_shares_a_stage_are_closed():
    """The second op lies between two that are one."""
    ideal = ideal_of([(1, 0)] * 3, [(0, (1,), 1, 0), (1, (0,), 1, 0)], owner=(0, 1, 0))
    found = joined(shares(ideal, 5))
    assert found is not None
    assert set(found.owner) == {0}
    assert found.moves == found.edges == ()
