"""Sizes in terms of the shapes of what a call is given."""

from __future__ import annotations

from gpipe_compiler.ir.forms import LocalSizes
from gpipe_compiler.ir.sizes import BATCH
from gpipe_compiler.runtime.sizes import Operation, Operator, Size

LENGTH = Size("x.1", of=("x", 1), example=6)


def test_samples_in_a_product_go_by_the_size_off_which_they_are_read() -> None:
    """The first size of what a call is given is not as many times the batch in every call."""
    product = Operation(Operator.MULTIPLY, BATCH, LENGTH)
    told = [LocalSizes(base, {LENGTH: (0, 1)}).relative(product) for base in (1.0, 4.0)]

    assert told[0] != told[1]
