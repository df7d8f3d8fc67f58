"""Batches pass after pass, and going to a place in them.

Held against the plain `for` loop over the same passes, whose items are numbered by hand.
"""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_compiler.runtime.checkpoint.progress import Progress
from gpipe_compiler.runtime.errors import PipelineError, UsageError
from gpipe_compiler.runtime.train.data import Batches, Source, pair

PASSES = st.lists(st.integers(1, 5), min_size=1, max_size=4)


def numbered(sizes):
    """Pass p gives (p, 0), (p, 1), ... as pairs; there are as many passes as sizes."""
    passes = iter(range(len(sizes)))

    def begin():
        number = next(passes)
        return [(number, item) for item in range(sizes[number])]

    return Source("data", begin)


def shuffled():
    """A pass in an order that all generators have a say in, drawn while it goes on."""

    def begin():
        order = torch.randperm(6).tolist()
        for item in order:
            yield item, random.random() + torch.rand(1).item()

    return Source("data", begin)


def taken(batches):
    return [(batch.inputs, batch.target) for batch in batches]


@settings(max_examples=50, deadline=None)
@given(PASSES, st.integers(1, 4))
def test_every_batch_once_and_no_group_over_the_end_of_a_pass(sizes, count):
    batches = Batches(numbered(sizes))

    for number, size in enumerate(sizes):
        whole = [(number, item) for item in range(size)]
        groups = [whole[start : start + count] for start in range(0, size, count)]
        for group in [*groups, []]:
            assert taken(batches.take(count)) == group
        assert (batches.passes, batches.taken) == (number + 1, 0)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 20), st.integers(1, 3), st.integers(0, 5))
def test_going_to_a_place_is_going_on(before, count, noise):
    """From any place in any pass, also within one; the generators are then as they were."""
    torch.manual_seed(before)
    random.seed(before)
    first = Batches(shuffled())
    for _ in range(before):
        first.take(count)
    torch.rand(noise)  # the user's optimizer may draw, too
    place = first.place(Progress(step=3))
    expected = [taken(first.take(count)) for _ in range(8)]
    drawn = torch.rand(3)

    torch.rand(17)
    random.random()
    second = Batches(shuffled())
    torch.rand(5)
    second.go_to(place)

    assert place.step == 3
    assert [taken(second.take(count)) for _ in range(8)] == expected
    assert torch.equal(torch.rand(3), drawn)


class Counting:
    """Data that knows where it is; running through it again would be noticed."""

    def __init__(self, log):
        self.log = log
        self.at = 0

    def __iter__(self):
        while self.at < 5:
            self.at += 1
            self.log.append(self.at)
            yield self.at, None

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def test_the_order_of_a_pass_is_that_of_when_it_began():
    """Not of when the data was opened: the user's optimizer may have drawn in between."""
    torch.manual_seed(5)
    first = Batches(shuffled())
    torch.rand(4)
    first.take(2)
    place = first.place(Progress(step=1))
    expected = taken(first.take(4))

    second = Batches(shuffled())
    second.go_to(place)

    assert taken(second.take(4)) == expected


def test_data_that_knows_its_place_is_not_run_through():
    log: list[int] = []
    source = Source("data", lambda: Counting(log))
    first = Batches(source)
    first.take(3)
    place = first.place(Progress())
    log.clear()

    second = Batches(source)
    second.go_to(place)

    assert taken(second.take(9)) == [(4, None), (5, None)]
    assert log == [4, 5]
    assert second.take(1) == []


def test_the_length_of_a_pass():
    assert Batches(numbered([4])).length() == 4
    assert Batches(shuffled()).length() is None


def test_one_batch_for_ever():
    batches = Batches(Source.repeated("x", "y"))
    batches.go_to(Progress(batch=1000))
    assert taken(batches.take(2)) == [("x", "y")] * 2
    assert batches.taken == 1002


def failing():
    yield 1, 2
    raise KeyError("lost")


@pytest.mark.parametrize(
    ("begin", "message"),
    [
        (list, "data gives no batches"),
        (failing, "data failed at batch 2 of pass 1: KeyError: 'lost'"),
        (lambda: 1 / 0, "data failed at batch 1 of pass 1: ZeroDivisionError: division by zero"),
        (lambda: None, "data failed at batch 1 of pass 1: TypeError: 'NoneType' object is not"),
    ],
)
def test_faults_of_the_users_data(begin, message):
    with pytest.raises(PipelineError) as caught:
        Batches(Source("data", begin)).take(2)
    assert caught.value.problem.startswith(message)


@pytest.mark.parametrize(
    ("item", "what"), [(1, "a int"), ((1, 2, 3), "a tuple of 3"), ([], "a list of 0")]
)
def test_what_is_no_pair(item, what):
    with pytest.raises(UsageError) as caught:
        pair(item, "batch 7")
    assert caught.value.problem == f"batch 7: {what} is no pair"


def test_data_that_has_become_shorter():
    batches = Batches(numbered([3]))
    with pytest.raises(PipelineError) as caught:
        batches.go_to(Progress(batch=5))
    assert caught.value.problem == (
        "data gives 3 batches in pass 1, 5 have been trained on: the data is not that of the "
        "checkpoint"
    )
