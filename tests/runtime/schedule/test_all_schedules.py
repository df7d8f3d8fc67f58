"""Every schedule on any placement that it can have, against the definition and its own promises.

The truth is an execution of its own of the lowered programs (`executed_programs`), the promised
bounds on what devices hold, and orders broken on purpose, which are to be refused.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter

import numpy as np
import pytest
from executed_programs import execute
from hypothesis import assume, given
from hypothesis import strategies as st
from random_pipelines import chain, crossing, scheduled

from gpipe_compiler.runtime.errors import ScheduleError
from gpipe_compiler.runtime.schedule import (
    devices_for,
    forward_only,
    lower,
    orders_for,
    placement_for,
    splits_backward,
    zb_h1,
    zbv,
)
from gpipe_compiler.runtime.schedule.actions import (
    Compute,
    Phase,
    Receive,
    Send,
    format_order,
    parse_order,
)
from gpipe_compiler.runtime.schedule.clock import needs_of, timeline
from gpipe_compiler.runtime.spec import ScheduleKind
from gpipe_compiler.simulate.in_flight import loads
from gpipe_compiler.simulate.step import StageTimes, Steps, simulate

TWO_A_DEVICE = (ScheduleKind.INTERLEAVED, ScheduleKind.ZBV)


def phases_of(kind):
    return list(Phase) if splits_backward(kind) else [Phase.FORWARD, Phase.BACKWARD]


@given(scheduled())
def test_programs_end_with_every_action_and_value_in_time(pipeline):
    """Each action exactly once, on its device, for any crossings and shared parameters."""
    kind, placement, crossings, shared, microbatches = pipeline
    orders = orders_for(kind, placement, microbatches)
    for device, order in enumerate(orders):
        assert Counter(order) == Counter(
            Compute(stage, phase, m)
            for stage in range(len(placement))
            if placement[stage] == device
            for phase in phases_of(kind)
            for m in range(microbatches)
        )
    programs = lower(orders, placement, crossings, shared)

    execute(programs, placement, crossings, ())
    for order, program in zip(orders, programs, strict=True):
        assert order == tuple(action for action in program if isinstance(action, Compute))


@given(scheduled())
def test_inference_goes_on_any_placement(pipeline):
    """Forward alone, where the stages are placed for any schedule of training."""
    _, placement, crossings, shared, microbatches = pipeline
    programs = lower(forward_only(placement, microbatches), placement, crossings, shared)

    taken = execute(programs, placement, crossings, ())
    assert {key: sorted(numbers) for key, numbers in taken.items()} == {
        (stage, Phase.FORWARD): list(range(microbatches)) for stage in range(len(placement))
    }


@given(scheduled())
def test_any_two_devices_agree_on_the_order_between_them(pipeline):
    """Channels that deliver in order need no tags, and nothing goes from a device to itself."""
    kind, placement, crossings, shared, microbatches = pipeline
    programs = lower(orders_for(kind, placement, microbatches), placement, crossings, shared)
    between: dict[tuple[int, int], list[list[object]]] = {}
    for device, program in enumerate(programs):
        for action in program:
            if isinstance(action, Send | Receive):
                ends = placement[action.transfer.source], placement[action.transfer.target]
                assert ends[0] != ends[1]
                key = min(ends), max(ends)
                lists = between.setdefault(key, [[], []])
                lists[key.index(device)].append(action.transfer)
    assert all(one == other for one, other in between.values())


@given(scheduled(), st.data())
def test_the_simulation_never_sticks(pipeline, data):
    """Whatever stages take; many pipelines at once agree with each alone."""
    kind, placement, _, _, microbatches = pipeline
    orders = orders_for(kind, placement, microbatches)
    tenths = st.integers(0, 20).map(lambda number: number / 8)
    drawn = st.builds(StageTimes, tenths, tenths, tenths, tenths, tenths, tenths, tenths)
    # What makes the gradients of parameters is a part of the backward.
    each = drawn.map(lambda t: dataclasses.replace(t, backward_s=max(t.backward_s, t.weight_s)))
    rows = [
        data.draw(st.lists(each, min_size=len(placement), max_size=len(placement)))
        for _ in range(2)
    ]

    found = Steps(orders)(np.array([list(map(dataclasses.astuple, row)) for row in rows]))

    assert found.tolist() == pytest.approx([simulate(orders, row).step_s for row in rows])


@given(scheduled())
def test_devices_hold_no_more_than_promised(pipeline):
    """Of each device the micro-batches held at a time, added up over its stages."""
    kind, placement, _, _, m = pipeline
    devices = max(placement) + 1
    v = len(placement) // devices
    group = -(-m // max(1, m // devices))
    for device, load in enumerate(loads(orders_for(kind, placement, m))):
        most = {
            ScheduleKind.GPIPE: v * m,
            ScheduleKind.ONE_F_ONE_B: v * min(m, devices - device),
            ScheduleKind.ZB_H1: v * min(m, devices),
            ScheduleKind.ZBV: 2 * min(m, devices),
            ScheduleKind.INTERLEAVED: (v - 1) * group + 2 * (devices - 1 - device) + 1,
        }[kind]
        assert load.counts[:, :, 1].sum(axis=1).max() <= most


@given(scheduled(), st.data())
def test_any_action_left_out_is_caught(pipeline, data):
    """Or taken twice: its stage's device would wait, or others would wait for it."""
    kind, placement, crossings, _, microbatches = pipeline
    orders = [list(order) for order in orders_for(kind, placement, microbatches)]
    assume(len(placement) > 1 or microbatches > 1)  # otherwise less is another right schedule
    order = orders[data.draw(st.integers(0, len(orders) - 1))]
    place = data.draw(st.integers(0, len(order) - 1))
    if data.draw(st.booleans()):
        order.insert(data.draw(st.integers(0, len(order))), order[place])
    else:
        order.pop(place)

    with pytest.raises(ScheduleError):
        lower(tuple(map(tuple, orders)), placement, crossings)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("0B1 0W1 -> 0W1 0B1", "0W1, which needs 0B1"),
        ("0B1 0W1 -> 0B1", "0W1 is missing"),
        ("0B1 0W1 -> 0B1 0W1 0W1", "device 0 has 0W1 twice"),
        ("0B1 0W1 -> 0B1 0W1 1W1", "stage 1 is on 1"),
    ],
)
def test_second_parts_of_backwards_are_checked(change, message):
    """Each after its first part, once, on the device of its stage."""
    before, after = change.split(" -> ")
    first, second = zb_h1((0, 1), 2)
    text = format_order(first)
    assert before in text

    with pytest.raises(ScheduleError, match=message):
        lower((parse_order(text.replace(before, after)), second), (0, 1), chain(2))


def test_shared_gradients_are_summed_after_all_parts():
    """Of the last owner; the other device may have gone on."""
    programs = lower(zb_h1((0, 1), 2), (0, 1), chain(2), {"tied": (0, 1)})

    assert list(map(str, programs[0]))[-3:] == ["0B1", "0W1", "sum tied over 0,1"]
    assert list(map(str, programs[1]))[-3:] == ["1W0", "1W1", "sum tied over 0,1"]


def test_nothing_is_sent_at_the_bottom_of_the_v():
    """Stages 1 and 2 share a device, and a value of stage 0 that stage 3 uses stays where it is."""
    placement = (0, 1, 1, 0)
    programs = lower(zbv(placement, 1), placement, [*chain(4), crossing("skip", 0, (2, 3))])

    sent = [str(action) for program in programs for action in program if isinstance(action, Send)]
    assert sent == [
        *("send v0[0] 0>1", "send skip[0] 0>2", "send v2'[0] 3>2"),
        *("send v2[0] 2>3", "send skip'[0] 2>0", "send v0'[0] 1>0"),
    ]


@pytest.mark.parametrize(
    ("kind", "stages", "devices", "placement"),
    [
        (ScheduleKind.GPIPE, 4, 2, (0, 0, 1, 1)),
        (ScheduleKind.ONE_F_ONE_B, 3, 3, (0, 1, 2)),
        (ScheduleKind.ZB_H1, 4, 2, (0, 0, 1, 1)),
        (ScheduleKind.INTERLEAVED, 6, 2, (0, 1, 0, 1, 0, 1)),
        (ScheduleKind.INTERLEAVED, 2, 1, (0, 0)),
        (ScheduleKind.ZBV, 6, 3, (0, 1, 2, 2, 1, 0)),
    ],
)
def test_where_stages_are_placed(kind, stages, devices, placement):
    """In a row, dealt round, or down and up again."""
    assert placement_for(kind, stages, devices) == placement


@pytest.mark.parametrize(
    ("kind", "stages", "devices", "message"),
    [
        (ScheduleKind.GPIPE, 5, 2, "5 stages do not go on 2 devices, 4 or 6 would"),
        (ScheduleKind.ZB_H1, 1, 2, "1 stages do not go on 2 devices, 2 would"),
        (ScheduleKind.INTERLEAVED, 7, 3, "multiple of the devices.* 6 or 9 would"),
        (ScheduleKind.INTERLEAVED, 4, 4, "twice as many or more.* 8 would"),
        (ScheduleKind.ZBV, 6, 2, "two stages a device.* 4 would"),
        (ScheduleKind.GPIPE, 0, 1, "at least one of each"),
        (ScheduleKind.GPIPE, 1, 0, "at least one of each"),
    ],
)
def test_stages_that_do_not_fit_are_refused(kind, stages, devices, message):
    """And the message names numbers that would."""
    with pytest.raises(ValueError, match=message):
        placement_for(kind, stages, devices)


@pytest.mark.parametrize("kind", list(ScheduleKind))
def test_the_devices_that_a_schedule_needs(kind):
    """One a stage, or one for two; and what it names can be placed."""
    stages = 6
    expected = 3 if kind in TWO_A_DEVICE else 6

    assert devices_for(kind, stages) == expected
    assert len(placement_for(kind, stages, expected)) == stages
    with pytest.raises(ValueError, match=r"at least one|cannot be dealt so, 8 can"):
        devices_for(kind, 7 if kind in TWO_A_DEVICE else 0)


@pytest.mark.parametrize("kind", [kind for kind in ScheduleKind if kind is not ScheduleKind.GPIPE])
def test_joint_stages_go_with_gpipe_alone(kind):
    """The first micro-batch would have to come back before the last has gone."""
    placement = placement_for(kind, 4, 2)
    with pytest.raises(ValueError, match="gpipe can"):
        orders_for(kind, placement, 2, joint=[1])


@given(scheduled())
def test_the_clock_keeps_to_orders_needs_and_times(pipeline):
    """Nothing starts before its device is free and what it needs has ended, nor any later."""
    kind, placement, crossings, _, microbatches = pipeline
    orders = orders_for(kind, placement, microbatches)
    needs = needs_of(crossings)
    timed = list(timeline(orders, needs, forward=2, backward=5, weight=3))

    ends = {item.action: item.end for item in timed}
    seconds = {Phase.FORWARD: 2, Phase.BACKWARD: 2 if splits_backward(kind) else 5, Phase.WEIGHT: 3}
    assert [item.start for item in timed] == sorted(item.start for item in timed)
    for device, order in enumerate(orders):
        row = [item for item in timed if item.device == device]
        assert tuple(item.action for item in row) == order
        for before, item in itertools.pairwise([None, *row]):
            due = [0.0 if before is None else before.end]
            due += [ends[need] for need in needs.of(item.action)]
            assert item.start == max(due)
            assert item.end - item.start == seconds[item.action.phase]


@given(scheduled())
def test_orders_print_and_parse(pipeline):
    """What an emitted package holds."""
    kind, placement, _, _, microbatches = pipeline
    for order in orders_for(kind, placement, microbatches):
        assert parse_order(format_order(order)) == order
