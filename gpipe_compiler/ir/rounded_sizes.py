"""Whole numbers that torch computes of sizes by fractions, in integers alone.

The length of `torch.arange(0, tokens, 1.0)` is `ceil(float(tokens) / 1.0)`, which is `tokens`; that
of `torch.ones(math.ceil(tokens / 4))` is `(tokens + 3) // 4`. These are equal for sizes below 2^40:
both numbers of the division are exact, and its result is a whole number only where the quotient is.

torch adds and multiplies constants before anyone sees them: `tokens + 0.1 - 0.1` is `tokens` to it,
and to Python, for some numbers, a little less. So products of products are left as they are, and so
is all that is rounded once fractions have been added.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import sympy
from torch import SymFloat
from torch.fx.experimental.sym_node import SymNode
from torch.utils._sympy.functions import (
    CeilToInt,
    FloatTrueDiv,
    FloorDiv,
    FloorToInt,
    IntTrueDiv,
    ToFloat,
    TruncToInt,
)

_MOST = 2**10
"""Of the numerator and the denominator of what is divided by."""

_SUMS = ("__add__", "__radd__", "__sub__", "__rsub__")
_PRODUCTS = ("__mul__", "__rmul__")


@contextlib.contextmanager
def rounded_in_integers() -> Iterator[None]:
    """While it is open, torch writes a quotient that it rounds up or down as one of integers.

    As fractions they have no form in terms of sizes, and make long conditions, which torch then
    reasons about.
    """
    added: list[None] = []
    products: dict[int, Any] = {}
    node: Any = SymNode  # which gets its methods when torch is imported
    changes = (
        (node, "_ceil", _rounding(node._ceil, added, products, up=True)),
        (node, "_floor", _rounding(node._floor, added, products, up=False)),
        *((SymFloat, name, _noting(getattr(SymFloat, name), added)) for name in _SUMS),
        *((SymFloat, name, _twice(getattr(SymFloat, name), products)) for name in _PRODUCTS),
    )
    with contextlib.ExitStack() as patched:
        for owner, name, method in changes:
            patched.enter_context(mock.patch.object(owner, name, method))
        yield


def is_in_integers(size: Any) -> bool:
    """Whether a whole number of torch's is known without fractions."""
    return not size.node.expr.has(FloorToInt, CeilToInt, TruncToInt)


def _noting(own: Callable[[Any, Any], Any], added: list[None]) -> Callable[[Any, Any], Any]:
    """A sum, which is noted where an operand is a fraction."""

    def add(one: Any, other: Any) -> Any:
        numbers = (
            sympy.sympify(getattr(getattr(x, "node", None), "expr", x)) for x in (one, other)
        )
        if any(_whole(number) is None for number in numbers):
            added.append(None)
        return own(one, other)

    return add


def _twice(own: Callable[[Any, Any], Any], products: dict[int, Any]) -> Callable[[Any, Any], Any]:
    """A product, which is noted, by the identity of its node, where a factor is a fraction."""

    def multiply(one: Any, other: Any) -> Any:
        made = own(one, other)
        if one.node.expr.func is not ToFloat and isinstance(made, SymFloat):
            products[id(made.node)] = made.node
        return made

    return multiply


def _rounding(
    own: Callable[[Any], Any], added: list[None], products: dict[int, Any], *, up: bool
) -> Callable[[Any], Any]:
    """A fraction rounded up or down.

    Args:
        products: nodes of those that are left as they are.
    """

    def rounded(node: Any) -> Any:
        left = added or id(node) in products
        made, ratio = own(node), None if left else _quotient(node.expr)
        if ratio is not None:
            above, below = ratio.as_numer_denom()
            above = sympy.expand(above + below - 1 if up else above)
            made._expr = above if below == 1 else FloorDiv(above, below)
        return made

    return rounded


def _quotient(fraction: Any) -> Any:
    """An integer divided by a constant, or multiplied with a fraction; None for anything else."""
    if fraction.is_Mul and len(fraction.args) == 2:
        below, above = fraction.args
        power = -1
    elif fraction.func in (IntTrueDiv, FloatTrueDiv):
        above, below = fraction.args
        power = 1
    else:
        return None
    above = _whole(above)
    if above is None or not (below.is_Float or below.is_Rational) or below == 0:
        return None
    divisor = sympy.Rational(*float(below).as_integer_ratio()) ** power
    return above / divisor if max(abs(divisor.p), divisor.q) <= _MOST else None


def _whole(number: Any) -> Any:
    """A number that is a whole one in floats, in terms of integers; None for any other."""
    if number.is_Add:
        terms = [*map(_whole, number.args)]
        return None if None in terms else sympy.Add(*terms)
    if number.is_Mul and number.args[0] == -1:
        rest = _whole(sympy.Mul(*number.args[1:]))
        return None if rest is None else -rest
    if number.is_Float and number == int(number):
        return sympy.Integer(int(number))
    inside = number.args[0] if number.func is ToFloat else number
    return inside if inside.is_integer else None
