"""What fits a device: the search against a list, Transformer-L against its published numbers of
parameters."""

from __future__ import annotations

import fitting_memory
import pytest
from fitting_memory import Fit, amoebanet, largest, most_parameters, pinned, planned, transformer
from hypothesis import given
from hypothesis import strategies as st

from gpipe_compiler.options import RematChoice
from gpipe_compiler.runtime.spec import ScheduleKind


@given(
    st.lists(st.integers(1, 10**10), max_size=12),
    st.integers(1, 10**10),
    st.none() | st.integers(1, 10**10),
)
def test_the_largest_that_fits(sizes: list[int], memory: int, near: int | None) -> None:
    sizes.sort()
    tried = []

    def fit(size: int) -> Fit:
        tried.append(size)
        scaled = size * fitting_memory.MEMORY // memory
        return Fit(str(size), size, (scaled,))

    found, beyond = largest(sizes, fit, near or 0)
    fitting = [size for size in sizes if size * fitting_memory.MEMORY // memory <= 8 * 10**9]
    assert (found.parameters if found else None) == (fitting[-1] if fitting else None)
    left = sizes[len(fitting) :]
    assert (beyond.parameters if beyond else None) == (left[0] if left else None)
    assert len(set(tried)) == len(tried) or len(set(sizes)) < len(sizes)
    if near is None:
        assert len(tried) <= len(sizes).bit_length()


def test_a_near_guess_takes_few_tries() -> None:
    tried = []

    def fit(size: int) -> Fit:
        tried.append(size)
        return Fit(str(size), size, (size * fitting_memory.MEMORY // 78,))

    found, beyond = largest(range(1, 105), fit, 80)
    assert (found.parameters, beyond.parameters) == (78, 79)
    assert tried == [80, 79, 77, 78]
    tried.clear()
    assert largest(range(1, 105), fit, 76)[0].parameters == 78
    assert tried == [76, 77, 79, 78]


@pytest.mark.parametrize(("layers", "millions"), [(3, 282.2), (13, 785.8), (103, 5318.0)])
def test_transformers_are_those_published(layers: int, millions: float) -> None:
    assert transformer(layers, 1).parameters / 1e6 == pytest.approx(millions, abs=0.1)


def test_most_parameters() -> None:
    # 12 bytes of each: of GPipe's networks those of 542 and 1,050 million need 6.5 and 12.7 GB.
    assert amoebanet(18, 544, 1).parameters < most_parameters(1)
    assert most_parameters(1) < amoebanet(36, 544, 1).parameters < most_parameters(2)


def test_a_balance_pins_every_part() -> None:
    assert pinned((2, 1)).pins == (("0", 0), ("1", 0), ("2", 1))
    assert pinned(()).pins == ()


def test_a_plan_tells_its_memory() -> None:
    model = transformer(2, 4)
    fit = planned(model, 2, microbatches=4, schedule=ScheduleKind.GPIPE, remat=RematChoice.FULL)
    assert len(fit.bytes) == 2
    assert fit.fits
    assert fit.activations == sum(fit.bytes) - 12 * model.parameters > 0
