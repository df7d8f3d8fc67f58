"""Sizes that vary, what is computed from them, and what must hold of them."""

import itertools

import pytest

from gpipe_compiler.runtime.schedule.actions import Crossing
from gpipe_compiler.runtime.sizes import (
    Expression,
    Relation,
    Requirement,
    Size,
    example_shape,
    larger,
    shape_at,
    sizes_in,
    smaller,
)

A = Size("input_ids.1", of=("input_ids", 1), example=64)
B = Size("image.2", of=("image", 2), example=7)


def expressions() -> list[Expression]:
    """Every operator over every pair of an operator's results, a size and numbers."""
    inner = [A + B, A - B, A * B, A // 3, A % 5, smaller(A, B), larger(A, 9), A, 2, -3]
    pairs = itertools.product(inner, repeat=2)
    made = [
        item
        for left, right in pairs
        for item in (
            *(left + right, left - right, left * right),
            *(left // (right * right + 1), (1 + left) % (right * right + 1)),
            *(smaller(left, right), larger(left, right)),
        )
    ]
    return [item for item in made if isinstance(item, Expression)]


@pytest.mark.parametrize("sizes", [{"input_ids.1": 48, "image.2": 11}])
def test_printed_as_python_an_expression_is_read_as_the_same(sizes: dict[str, int]) -> None:
    variables = {"input_ids.1": "tokens", "image.2": "height"}
    plain = {"tokens": 48, "height": 11, "smaller": min, "larger": max}
    rebuilt = {"tokens": A, "height": B, "smaller": smaller, "larger": larger}

    for item in expressions():
        source = item.python(variables)
        assert eval(source, plain) == item.at(sizes), source  # the printed form
        read = eval(source, rebuilt)
        assert read.at(sizes) == item.at(sizes)
        assert read.python(variables) == source


def test_an_expression_is_a_value() -> None:
    assert A * 2 + 1 == A * 2 + 1
    assert len({A * 2, A * 2, 2 * A}) == 2
    assert str((A + 1) * 2) == "(input_ids.1 + 1) * 2"
    assert set(sizes_in((3, A * B))) == {A, B}


def test_a_shape_is_that_of_the_sizes_and_samples() -> None:
    crossing = Crossing("h", 0, (1,), (4 * A, A // 2, 8), None)  # type: ignore[arg-type]  # no dtype needed

    assert crossing.shape_for(3, 4, {"input_ids.1": 10}) == (30, 5, 8)
    assert crossing.example_shape == (256, 32, 8)
    assert shape_at((1, B), {"image.2": 5}) == (1, 5)
    assert example_shape((1, 2)) == (1, 2)


@pytest.mark.parametrize(
    ("relation", "right", "holds"),
    [
        (Relation.EQUAL, 48, True),
        (Relation.EQUAL, 47, False),
        (Relation.UNEQUAL, 48, False),
        (Relation.LESS, 48, False),
        (Relation.LESS, A + 1, True),
        (Relation.AT_MOST, 48, True),
        (Relation.DIVISIBLE, 16, True),
        (Relation.DIVISIBLE, 32, False),
        (Relation.DIVISIBLE, 0, False),
    ],
)
def test_a_requirement_holds_or_not(relation: Relation, right: int, holds: bool) -> None:
    requirement = Requirement(A, relation, right, "model.py:3")

    assert requirement.holds({"input_ids.1": 48}) is holds


def test_a_requirement_reads_as_a_condition() -> None:
    assert str(Requirement(A, Relation.DIVISIBLE, 8, "")) == "input_ids.1 divisible by 8"
