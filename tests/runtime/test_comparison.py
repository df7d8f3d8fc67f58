"""When two tensors count as equal."""

from __future__ import annotations

import pytest
import torch

from gpipe_compiler.runtime.comparison import Kind, compare


def passes(kind: Kind, expected: torch.Tensor, actual: torch.Tensor) -> bool:
    (row,) = compare({kind: {"x": actual}}, {kind: {"x": expected}})
    return row.passed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_sums_in_another_order_are_equal_and_a_missing_part_is_not(dtype: torch.dtype) -> None:
    """Eight micro-batches, as GPipe adds them up in reverse, in the type of the gradients."""
    torch.manual_seed(0)
    parts = list(torch.rand(8, 50).add(0.5).to(dtype))

    def added(terms: list[torch.Tensor]) -> torch.Tensor:
        total = torch.zeros(50, dtype=dtype)
        for term in terms:
            total = total + term
        return total

    assert passes(Kind.GRADIENT, added(parts), added(parts[::-1]))
    assert not passes(Kind.GRADIENT, added(parts), added(parts[:-1]))


def test_integers_are_equal_or_not() -> None:
    """The largest of many counts may not be off by one."""
    counts = torch.tensor([1, 1_000_000])

    assert passes(Kind.BUFFER, counts, counts.clone())
    assert not passes(Kind.BUFFER, counts, counts + 1)
