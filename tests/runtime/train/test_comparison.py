"""Comparisons fail when they should: nothing hides behind a tolerance."""

import math

import pytest
import torch

from gpipe_compiler.runtime.train import check
from gpipe_compiler.runtime.train.comparison import (
    ComparedKind,
    compare,
    flat_tensors,
    pack,
    unpack,
)


def row(actual, expected, kind=ComparedKind.GRADIENT):
    (found,) = compare({kind: {"w": actual}}, {kind: {"w": expected}})
    return found


def test_equal_tensors_pass():
    found = row(torch.ones(3), torch.ones(3))

    assert found.passed
    assert found.largest_difference == 0


def test_a_dropped_term_fails():
    """One of a thousand equal summands is ten times the tolerance."""
    assert not row(torch.full((3,), 0.999), torch.ones(3)).passed


def test_rounding_passes():
    assert row(torch.ones(3) + 2e-6, torch.ones(3)).passed


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_hide_nothing(odd):
    """Another entry of the tensor, or another tensor, is measured as if they were not there."""
    expected = {"odd": torch.tensor([odd, 1.0]), "plain": torch.ones(2)}
    actual = {"odd": torch.tensor([odd, 2.0]), "plain": torch.tensor([1.0, 1.1])}

    (found,) = compare({ComparedKind.OUTPUT: actual}, {ComparedKind.OUTPUT: expected})

    assert {fault.split()[0] for fault in found.faults} == {"odd", "plain"}


def test_a_number_that_only_one_side_lacks_fails():
    assert not row(torch.tensor([math.nan]), torch.tensor([1.0]), ComparedKind.OUTPUT).passed
    assert not row(torch.tensor([1.0]), torch.tensor([math.nan]), ComparedKind.OUTPUT).passed


def test_a_reference_that_is_not_finite_proves_nothing():
    found = row(torch.tensor([math.nan]), torch.tensor([math.nan]))

    assert "not finite in the model itself" in found.faults[0]


def test_zero_reference_admits_no_difference():
    assert row(torch.zeros(2), torch.zeros(2)).passed
    assert not row(torch.full((2,), 1e-30), torch.zeros(2)).passed


def test_integers_are_equal_or_not():
    assert not row(torch.tensor([1000001]), torch.tensor([1000000]), ComparedKind.BUFFER).passed


def test_integers_that_no_float_tells_apart_are_not_equal():
    assert not row(torch.tensor([2**62]), torch.tensor([2**62 + 1]), ComparedKind.OUTPUT).passed


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint64])
def test_types_that_have_few_kernels_are_compared(dtype):
    one, eight = torch.tensor([1, 2]).to(dtype), torch.tensor([8, 2]).to(dtype)
    assert row(one, one, ComparedKind.OUTPUT).passed
    assert not row(one, eight, ComparedKind.BUFFER).passed
    assert row(eight, one, ComparedKind.BUFFER).largest_difference == 7


def test_missing_extra_and_misshapen_tensors_are_faults():
    (found,) = compare(
        {ComparedKind.OUTPUT: {"b": torch.ones(2), "c": torch.ones(1)}},
        {ComparedKind.OUTPUT: {"a": torch.ones(1), "b": torch.ones(3)}},
    )

    assert [fault.split(" ", 1)[1] for fault in found.faults] == [
        "is missing",
        "is not in the reference",
        "has shape (2,), not (3,)",
    ]


def test_reference_files_come_back():
    tensors = {
        ComparedKind.OUTPUT: {"logits": torch.ones(2)},
        ComparedKind.LOSS: {"loss": torch.tensor(1.0)},
    }

    again = unpack(pack(tensors))

    assert again.keys() == tensors.keys()
    assert torch.equal(again[ComparedKind.OUTPUT]["logits"], torch.ones(2))


def test_sparse_gradients_are_held_like_dense_ones():
    whole = torch.tensor([[0.0, 0.0], [1.0, 2.0]])
    reference = unpack(pack({ComparedKind.GRADIENT: {"w": whole.to_sparse()}}))
    (same,) = compare({ComparedKind.GRADIENT: {"w": whole.to_sparse()}}, reference)
    (other,) = compare({ComparedKind.GRADIENT: {"w": 2 * whole.to_sparse()}}, reference)
    assert same.passed
    assert not other.passed


def test_tensors_of_a_nest_are_named_by_the_way_to_them():
    nest = {"logits": torch.ones(1), "states": (torch.ones(2), None, [torch.ones(3)]), "n": 3}

    assert list(flat_tensors(nest)) == ["logits", "states.0", "states.2.0"]
    assert list(flat_tensors(torch.ones(1))) == ["output"]


def test_another_type_with_equal_numbers_is_a_fault():
    """But for the loss, and for 32 bits where torch computes in 16 under autocast."""
    ones = torch.ones(3)
    assert "is of torch.float64, not torch.float32" in row(ones.double(), ones).faults[0]
    assert not row(ones.int(), ones, ComparedKind.OUTPUT).passed
    assert not row(ones, ones.bfloat16(), ComparedKind.OUTPUT).passed
    assert row(ones, ones.bfloat16(), ComparedKind.LOSS).passed
    wide, narrow = {ComparedKind.OUTPUT: {"w": ones}}, {ComparedKind.OUTPUT: {"w": ones.bfloat16()}}
    assert compare(wide, narrow, {})[0].passed
    assert not compare(narrow, wide, {})[0].passed


@pytest.mark.parametrize(("far", "passes"), [(0.004, True), (0.02, False), (0.3, False)])
def test_under_autocast_one_batch_proves_where_gradients_round(far: float, passes: bool):
    """On another, where the model goes another way by its values, roundings may differ.

    A batch of 16 whose parts are weighed by one sample too many or too few is off by 6%.
    """
    bias = {ComparedKind.GRADIENT: {"bias": torch.ones(3)}}
    other = {ComparedKind.GRADIENT: {"bias": torch.full((3,), 1 + far)}}

    def passed(batches):
        found = check._under_autocast([(*pair, {}) for pair in batches], {}, torch.bfloat16)
        return all(each.passed for rows in found for each in rows)

    assert passed([(other, bias), (bias, bias)]) == passes
    assert not passed([(other, bias), (other, bias)])
