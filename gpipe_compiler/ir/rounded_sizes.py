"""Whole numbers that torch computes of sizes by fractions, in integers alone.

The length of `torch.arange(0, tokens, 1.0)` is `ceil(float(tokens) / 1.0)`, which is `tokens`; that
of `math.ceil(tokens / 4)` is `-(-tokens // 4)`. These are equal as long as sizes stay below 2^40:
what is divided is exact, and the nearest fraction of 64 bits to a quotient that is no whole number
is none either.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import sympy
from torch.utils._sympy.functions import (
    CeilToInt,
    FloatTrueDiv,
    FloorDiv,
    FloorToInt,
    IntTrueDiv,
    ToFloat,
)

_ROUNDING = (CeilToInt, FloorToInt)

_MOST = 2**20
"""Of the numerator and the denominator of a constant: with more, sizes are not far from 2^53."""


@contextlib.contextmanager
def whole_quotients() -> Iterator[None]:
    """While it is open, torch rounds no fraction of sizes that is a whole number anyway.

    As fractions they make long conditions of sizes, which torch then reasons about.
    """
    with contextlib.ExitStack() as patched:
        for rounding in _ROUNDING:
            own = functools.partial(_evaluated, rounding.eval)
            patched.enter_context(mock.patch.object(rounding, "eval", own))
        yield


def _evaluated(own: Callable[[Any], Any], fraction: Any) -> Any:
    ratio = _quotient(fraction)
    return ratio if ratio is not None and ratio.is_integer else own(fraction)


def in_integers(expression: Any) -> Any:
    """An expression with what is rounded up or down in it as a quotient of integers."""
    return expression.replace(lambda part: part.func in _ROUNDING, _in_integers)


def _in_integers(rounded: Any) -> Any:
    ratio = _quotient(rounded.args[0])
    if ratio is None:
        return rounded
    above, below = ratio.as_numer_denom()
    if rounded.func is FloorToInt:
        return FloorDiv(above, below)
    return -FloorDiv(sympy.expand(-above), below)


def _quotient(fraction: Any) -> Any:
    """A fraction that is divided once at most, in exact numbers; None where it is another."""
    if fraction.func not in (IntTrueDiv, FloatTrueDiv):
        return _exact(fraction)
    above, below = map(_exact, fraction.args)
    if above is None or below is None or not below.is_number or below == 0:
        return None
    return above / below


def _exact(fraction: Any) -> Any:
    """A fraction that floats of 64 bits hold as it is, as a multiple of a power of two."""
    if fraction.is_Float or fraction.is_Rational:
        number = sympy.Rational(*float(fraction).as_integer_ratio())
        few = max(abs(number.p), number.q) <= _MOST
        return number if few else None
    if fraction.func is ToFloat:
        return _exact(fraction.args[0])
    if fraction.is_Add or fraction.is_Mul:
        parts = [_exact(part) for part in fraction.args]
        known = [part for part in parts if part is not None]
        return fraction.func(*known) if len(known) == len(parts) else None
    if fraction.func in (IntTrueDiv, FloatTrueDiv):
        ratio = _quotient(fraction)
        below = None if ratio is None else ratio.as_numer_denom()[1]
        return ratio if below is not None and below.is_Integer and _is_power(int(below)) else None
    return fraction if fraction.is_integer else None


def _is_power(number: int) -> bool:
    return number & (number - 1) == 0
