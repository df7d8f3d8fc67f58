"""Schedules with joint stages: drawn by hand, and executed against the definition."""

from __future__ import annotations

import dataclasses

import pytest
from executed_programs import execute
from hypothesis import given
from hypothesis import strategies as st
from random_pipelines import chain, pipelines

from gpipe_compiler.codegen.schedule import diagram
from gpipe_compiler.runtime.errors import DeadlockError
from gpipe_compiler.runtime.schedule import Joint, forward_only, gpipe, lower, one_f_one_b
from gpipe_compiler.runtime.schedule.actions import (
    Phase,
    format_order,
    parse_order,
)
from gpipe_compiler.runtime.schedule.clock import needs_of
from gpipe_compiler.runtime.schedule.joint import waiting


def drawn(orders, crossings, joint):
    return diagram(orders, needs_of(crossings, Joint.of(joint, orders))).splitlines()


def test_a_joint_stage_is_drawn_as_one_block():
    """It starts when everything has come, and the next stage when it has ended."""
    assert drawn(gpipe((0, 1, 2), 3, {1}), chain(3), {1}) == [
        "device 0 | F0 F1 F2 .  .  .  .  .  .  .  .  .  .  .  .  B2 B1 B0",
        "device 1 | .  .  .  F0 F1 F2 .  .  .  .  .  .  B2 B1 B0",
        "device 2 | .  .  .  .  .  .  F0 F1 F2 B2 B1 B0",
    ]


def test_the_first_and_the_last_stage_can_be_joint():
    """Between them micro-batches overlap as ever."""
    assert drawn(gpipe((0, 1, 2, 3), 2, {0, 3}), chain(4), {0, 3}) == [
        "device 0 | F0 F1 .  .  .  .  .  .  .  .  .  .  B1 B0",
        "device 1 | .  .  F0 F1 .  .  .  .  .  .  B1 B0",
        "device 2 | .  .  .  F0 F1 .  .  .  .  B1 B0",
        "device 3 | .  .  .  .  .  F0 F1 B1 B0",
    ]


@pytest.mark.parametrize(
    ("joint", "expected"),
    [
        (set(), "0F0 1F0 2F0 0F1 1F1 2F1 2B1 1B1 0B1 2B0 1B0 0B0"),
        ({0}, "0F0 0F1 1F0 2F0 1F1 2F1 2B1 1B1 2B0 1B0 0B1 0B0"),
        ({1}, "0F0 0F1 1F0 1F1 2F0 2F1 2B1 2B0 1B1 1B0 0B1 0B0"),
        ({2}, "0F0 1F0 0F1 1F1 2F0 2F1 2B1 2B0 1B1 0B1 1B0 0B0"),
    ],
)
def test_a_device_takes_joint_stages_apart(joint, expected):
    """The stages beside them stay together; forward alone begins in the same way."""
    order = gpipe((0, 0, 0), 2, joint)[0]

    assert format_order(order) == expected
    assert forward_only((0, 0, 0), 2, joint)[0] == order[: len(order) // 2]


def test_what_a_joint_stage_makes_is_sent_after_its_last_action():
    """Values of all micro-batches together, gradients too."""
    placement = (0, 1)
    programs = lower(gpipe(placement, 2), placement, chain(2), joint={0})

    assert list(map(str, programs[0])) == [
        *("0F0", "0F1", "send v0[0] 0>1", "send v0[1] 0>1"),
        *("receive v0'[1] 1>0", "receive v0'[0] 1>0", "0B1", "0B0"),
    ]
    programs = lower(gpipe(placement, 2), placement, chain(2), joint={1})
    assert list(map(str, programs[1])) == [
        *("receive v0[0] 0>1", "receive v0[1] 0>1", "1F0", "1F1", "1B1", "1B0"),
        *("send v0'[1] 1>0", "send v0'[0] 1>0"),
    ]


@st.composite
def joint_pipelines(draw):
    placement, crossings, shared, microbatches = draw(pipelines())
    joint = draw(st.sets(st.sampled_from(range(len(placement)))))
    return placement, crossings, shared, microbatches, joint


@given(joint_pipelines(), st.sampled_from([gpipe, forward_only]))
def test_programs_with_joint_stages_end_with_every_value_in_time(pipeline, generator):
    """Any stages, placement, crossings, micro-batches and joint stages."""
    placement, crossings, shared, microbatches, joint = pipeline
    orders = generator(placement, microbatches, joint)
    programs = lower(orders, placement, crossings, shared, joint)

    taken = execute(programs, placement, crossings, joint)
    phases = [Phase.FORWARD] if generator is forward_only else [Phase.FORWARD, Phase.BACKWARD]
    assert {key: sorted(numbers) for key, numbers in taken.items()} == {
        (stage, phase): list(range(microbatches))
        for stage in range(len(placement))
        for phase in phases
    }


def test_1f1b_does_not_go_with_joint_stages():
    """The first micro-batch would have to come back before the last has gone."""
    with pytest.raises(DeadlockError, match="device 1 waits at 1F0, which needs 0F2"):
        lower(one_f_one_b((0, 1), 3), (0, 1), chain(2), joint={1})


def test_other_stages_on_the_device_cannot_come_between():
    """Micro-batch by micro-batch through both stages would wait for itself."""
    with pytest.raises(DeadlockError, match="device 0 waits at 1F0, which needs 0F1"):
        lower(gpipe((0, 0), 2), (0, 0), chain(2), joint={0})


def test_a_joint_stage_waits_unless_its_backward_follows_its_forward():
    """What is not overtaken by another stage's work need not be recomputed."""
    assert not waiting(parse_order("0F0 0F1 0B1 0B0"), {0})
    assert waiting(parse_order("0F0 0F1 1F0 1F1 1B1 1B0 0B1 0B0"), {0, 1}) == {(0, 0), (0, 1)}
    assert waiting(parse_order("0F0 0F1 1F0 1F1 1B1 1B0 0B1 0B0"), {1}) == {(0, 0), (0, 1)}
    assert waiting(parse_order("0F0 0F1 1F0 1F1 1B1 1B0 0B1 0B0"), {0}) == {
        *((0, 0), (0, 1)),
        (1, 0),
    }


def test_nothing_joint_changes_nothing():
    """No joint stage: the same programs as ever."""
    crossings = [dataclasses.replace(c) for c in chain(3)]
    orders = gpipe((0, 0, 1), 3)

    assert gpipe((0, 0, 1), 3, ()) == orders
    assert lower(orders, (0, 0, 1), crossings, joint=()) == lower(orders, (0, 0, 1), crossings)
