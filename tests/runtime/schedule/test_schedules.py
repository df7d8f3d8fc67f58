"""The generators draw the diagrams of their docstrings; lowered programs end for any crossings."""

from __future__ import annotations

import inspect
import re

import pytest
from executed_programs import execute
from hypothesis import given
from hypothesis import strategies as st
from random_pipelines import chain, crossing, pipelines

from gpipe_compiler.codegen.schedule import diagram
from gpipe_compiler.runtime.errors import DeadlockError, ScheduleError
from gpipe_compiler.runtime.schedule import (
    forward_only,
    gpipe,
    interleaved,
    lower,
    one_f_one_b,
    zb_h1,
    zbv,
)
from gpipe_compiler.runtime.schedule.actions import (
    Compute,
    Phase,
    Receive,
    Send,
    SharedSum,
    Transfer,
    parse_order,
)
from gpipe_compiler.runtime.schedule.choosing import SCHEDULES, Schedule
from gpipe_compiler.runtime.schedule.clock import needs_of

GENERATORS = [gpipe, one_f_one_b, zb_h1, forward_only]


@pytest.mark.parametrize(
    "schedule", [*SCHEDULES.values(), Schedule(forward_only)], ids=lambda s: s.order.__name__
)
def test_the_docstring_shows_the_schedule(schedule):
    """What the documentation draws is what the generator makes."""
    lines = inspect.cleandoc(schedule.order.__doc__).splitlines()
    drawn = [line.strip() for line in lines if "|" in line]
    devices, microbatches = len(drawn), len(set(re.findall(r"F\d+", drawn[0])))
    placement = schedule.place(devices * schedule.stages_a_device[0], devices)

    assert devices > 1
    assert "\n".join(drawn) == diagram(
        schedule.order(placement, microbatches), needs_of(chain(len(placement)))
    )


def test_1f1b_with_fewer_microbatches_than_stages():
    """A short mini-batch only shortens the warm-up."""
    assert one_f_one_b((0, 1, 2, 3), 2) == tuple(
        parse_order(text)
        for text in (
            "0F0 0F1 0B0 0B1",
            "1F0 1F1 1B0 1B1",
            "2F0 2F1 2B0 2B1",
            "3F0 3B0 3F1 3B1",
        )
    )


def test_several_stages_on_a_device_run_one_after_another():
    """A device takes a micro-batch through all its stages at a time."""
    assert gpipe((0, 0, 1), 2)[0] == parse_order("0F0 1F0 0F1 1F1 1B1 0B1 1B0 0B0")
    assert one_f_one_b((0, 0, 1), 3)[0] == parse_order(
        "0F0 1F0 0F1 1F1 1B0 0B0 0F2 1F2 1B1 0B1 1B2 0B2"
    )


def test_1f1b_holds_few_microbatches():
    """Device i of D never holds more than D - i micro-batches."""
    for device, order in enumerate(one_f_one_b((0, 1, 2, 3), 9)):
        held = peak = 0
        for action in order:
            held += 1 if action.phase is Phase.FORWARD else -1
            peak = max(peak, held)
        assert peak == 4 - device


@pytest.mark.parametrize(
    ("generator", "placement", "message"),
    [
        *((generator, (), "at least one stage") for generator in GENERATORS),
        *((generator, (0, 2), "devices count up from 0") for generator in GENERATORS),
        *((generator, (1, 0), "consecutive") for generator in (gpipe, one_f_one_b, zb_h1)),
        *((generator, (0, 1, 0), "consecutive") for generator in (gpipe, one_f_one_b, zb_h1)),
        (interleaved, (0, 1), "at least two to each"),
        (interleaved, (0, 1, 1, 0), "deals stages round"),
        (interleaved, (0, 1, 0), "deals stages round"),
        (zbv, (0, 1, 0, 1), "two stages a device"),
        (zbv, (0, 1), "two stages a device"),
    ],
)
def test_senseless_placements_are_refused(generator, placement, message):
    """Every schedule says where it wants its stages."""
    with pytest.raises(ValueError, match=message):
        generator(placement, 2)


@pytest.mark.parametrize("generator", GENERATORS)
def test_no_microbatches_are_refused(generator):
    """There is nothing to schedule."""
    with pytest.raises(ValueError, match="at least one"):
        generator((0, 1), 0)


@given(pipelines(), st.sampled_from(GENERATORS))
def test_lowered_schedules_end_with_every_value_in_time(pipeline, generator):
    """No placement, crossing or micro-batch count leads to a hang or a missing value."""
    placement, crossings, shared, microbatches = pipeline
    orders = generator(placement, microbatches)

    programs = lower(orders, placement, crossings, shared)

    execute(programs, placement, crossings, ())
    for order, program in zip(orders, programs, strict=True):
        assert order == tuple(action for action in program if isinstance(action, Compute))


@given(pipelines(), st.sampled_from([gpipe, one_f_one_b]))
def test_any_two_devices_agree_on_the_order_between_them(pipeline, generator):
    """Channels that deliver in order (NCCL, gloo) need no tags, either way or both ways at once."""
    placement, crossings, shared, microbatches = pipeline
    programs = lower(generator(placement, microbatches), placement, crossings, shared)

    def between(device: int, other: int) -> list[Transfer]:
        transfers = [a.transfer for a in programs[device] if isinstance(a, Send | Receive)]
        ends = {device, other}
        return [t for t in transfers if {placement[t.source], placement[t.target]} == ends]

    for device in range(len(programs)):
        for other in range(device):
            assert between(device, other) == between(other, device)


def test_a_value_goes_once_to_each_device():
    """Two users on one device share what arrives, and send one gradient back."""
    placement = (0, 1, 1)
    programs = lower(gpipe(placement, 1), placement, [crossing("v", 0, (1, 2))])

    assert list(map(str, programs[0])) == ["0F0", "send v[0] 0>1", "receive v'[0] 1>0", "0B0"]
    assert list(map(str, programs[1])) == [
        "receive v[0] 0>1",
        "1F0",
        "2F0",
        "2B0",
        "1B0",
        "send v'[0] 1>0",
    ]


def test_shared_parameters_are_summed_after_the_last_backward():
    """Every owner takes part; stages on one device need no sum."""
    placement = (0, 1, 1)
    programs = lower(
        one_f_one_b(placement, 2), placement, chain(3), {"a": (0, 2), "b": (1, 2), "c": (0, 1)}
    )

    assert programs[0][-2:] == (SharedSum("a", (0, 2)), SharedSum("c", (0, 1)))
    assert programs[1][-2:] == (SharedSum("a", (0, 2)), SharedSum("c", (0, 1)))


@pytest.mark.parametrize(
    ("orders", "message"),
    [
        (("0F0", ""), "1F0 is missing"),
        (("0F0 0F0", "1F0"), "device 0 has 0F0 twice"),
        (("0F0 1F0", ""), "device 0 has 1F0, but stage 1 is on 1"),
        (("0F0 0F1", "1F0"), "1F1 is missing"),
        (("0F0 0B0", "1F0"), "1B0 is missing"),
    ],
)
def test_wrong_orders_are_caught(orders, message):
    """Whatever is missing, doubled or misplaced is named."""
    with pytest.raises(ScheduleError, match=message):
        lower(tuple(map(parse_order, orders)), (0, 1), chain(2))


def test_orders_that_contradict_the_data_are_refused():
    """A backward before the forwards it depends on can never start."""
    orders = (parse_order("0B0 0F0"), parse_order("1F0 1B0"))

    with pytest.raises(DeadlockError, match="device 0 waits at 0B0, which needs 0F0"):
        lower(orders, (0, 1), chain(2))
