"""What waits, against schedules worked by hand and against the definition, pair by pair."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe_compiler.runtime.schedule import forward_only, gpipe, one_f_one_b
from gpipe_compiler.runtime.schedule.actions import Compute, Phase, parse_order
from gpipe_compiler.runtime.schedule.joint import waiting


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("0F0 0F1 0F2 0B2 0B1 0B0", {(0, 0), (0, 1)}),
        ("0F0 0B0 0F1 0B1 0F2 0B2", set()),
        ("0F0 0F1 0B0 0F2 0B1 0B2", {(0, 0), (0, 1), (0, 2)}),
        ("0F0 1F0 0F1 1F1 1B1 0B1 1B0 0B0", {(0, 0), (1, 0)}),
        ("0F0 1F0 0F1 1B0 1F1 1B1 0B0 0B1", {(0, 0), (1, 0), (0, 1)}),
        ("0F0 1F0 1B0 0B0", set()),
        ("0F0 0F1", set()),
        ("0F0 0B0 0F1 0B1 0W0 0W1", set()),
        ("0F0 0F1 0B0 0W0 0B1 0W1", {(0, 0), (0, 1)}),
        ("", set()),
    ],
)
def test_orders_worked_by_hand(order, expected):
    """The fifth is an order with an early backward, which other work then surrounds."""
    assert waiting(parse_order(order)) == expected


@pytest.mark.parametrize("microbatches", [1, 2, 5])
@pytest.mark.parametrize("placement", [(0,), (0, 1, 2), (0, 0, 1, 1)])
def test_the_rules_that_are_known(placement, microbatches):
    """GPipe: all but the last micro-batch. 1F1B: nothing on the last device. No backward: none."""
    for order in gpipe(placement, microbatches):
        stages = {action.stage for action in order}
        assert waiting(order) == {(s, m) for s in stages for m in range(microbatches - 1)}
    *earlier, last = one_f_one_b(placement, microbatches)
    assert not waiting(last)
    for order in earlier:
        assert bool(waiting(order)) == (microbatches > 1)
    assert not any(waiting(order) for order in forward_only(placement, microbatches))


@given(st.data())
def test_any_order_against_the_definition(data):
    """Pair by pair: does another micro-batch act between its forward and its backward?"""
    pairs = [(s, m) for s in range(2) for m in range(3)]
    places = data.draw(st.permutations([pair for pair in pairs for _ in Phase]))
    order, left = [], {pair: list(Phase) for pair in pairs}
    for stage, microbatch in places:
        order.append(Compute(stage, left[stage, microbatch].pop(0), microbatch))

    expected = set()
    for stage, microbatch in pairs:
        first = order.index(Compute(stage, Phase.FORWARD, microbatch))
        last = order.index(Compute(stage, Phase.BACKWARD, microbatch))
        if any(action.microbatch != microbatch for action in order[first:last]):
            expected.add((stage, microbatch))
    assert waiting(order) == expected
