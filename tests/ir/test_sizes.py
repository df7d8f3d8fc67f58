"""Sizes to try, and how small they may be, by trials of a model that is known."""

from __future__ import annotations

from gpipe_compiler.ir.sizes import least_sizes, other_sizes
from gpipe_compiler.runtime.sizes import Relation, Requirement, Size

NEW, PAST, MASK = (
    Size(name, (name, 1), example) for name, example in (("new", 3), ("past", 7), ("mask", 10))
)
BETWEEN = (
    Requirement(NEW + PAST, Relation.AT_MOST, MASK, ""),
    Requirement(MASK, Relation.AT_MOST, NEW + PAST, ""),
)


def takes(**least):
    """A model that takes at least these sizes, and of those that it is not given the example's."""
    return lambda sizes: all(sizes.get(name, number) >= number for name, number in least.items())


def test_each_and_all_together():
    assert least_sizes((NEW, PAST), (), takes(new=1, past=0)) == {"new": 1, "past": 0}
    assert least_sizes((NEW, PAST), (), takes(new=2, past=0)) == {"past": 0}


def test_none_where_they_do_not_go_together():
    def fits(sizes):
        return takes(new=1, past=0)(sizes) and sizes != {"new": 1, "past": 0}

    assert least_sizes((NEW, PAST), (), fits) == {}


def test_a_size_that_follows_goes_along():
    sizes = (NEW, PAST, MASK)
    found = least_sizes(sizes, BETWEEN, takes(new=1, past=0))
    assert found == {"new": 1, "past": 0, "mask": 1}
    assert least_sizes(sizes, BETWEEN, takes(new=1, past=2)) == {"new": 1}


def test_sizes_equal_in_the_example_are_one():
    other = Size("other", ("other", 1), NEW.example)
    assert least_sizes((NEW, other), (), takes(new=1, other=0)) == {"new": 1, "other": 1}


def test_sizes_to_try_are_near_the_example_and_then_larger():
    tokens, wide = Size("tokens", ("x", 1), 12), Size("wide", ("x", 2), 8)
    even = Requirement(wide % 2, Relation.EQUAL, 0, "")

    near, larger = other_sizes([tokens, wide], [even])

    assert near["tokens"] != 12
    assert larger["tokens"] > 12
    assert larger["wide"] > 8
    assert near["wide"] % 2 == larger["wide"] % 2 == 0
    assert other_sizes([wide], [Requirement(wide, Relation.EQUAL, 8, "")]) == ()
