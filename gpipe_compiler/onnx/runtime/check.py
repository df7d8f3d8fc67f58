"""The pipeline compared with the whole model, which ONNX Runtime runs in one piece.

Both run the same nodes, but the optimiser of ONNX Runtime sees other neighbours at a cut, and a
convolution of a micro-batch may take another kernel than that of the mini-batch: floats differ in
their last places. An output passes when its largest difference is at most a share of its own
largest entry, or four times what ONNX Runtime's own optimiser moves it by; integers and booleans
pass when they are equal. In a quantised model a difference in
the last place may change what a number is rounded to, so there integers may differ too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from .arrays import leaves, numbers

_ROUNDINGS = 4
"""How many times what the optimiser moves an output by it may differ."""


@dataclass(frozen=True, slots=True)
class Closeness:
    """How close is close enough.

    Attributes:
        tolerance: by how much of its largest entry an output may differ.
        quantised: whether that holds for integers too.
        kinds: of outputs that come as the integers of the same bits, the names of their types.
        rounding: by output, how far rounding in another order moves it.
    """

    tolerance: float = 1e-4
    quantised: bool = False
    kinds: Mapping[str, str] = field(default_factory=dict)
    rounding: Mapping[str, float] = field(default_factory=dict)

    def of(self, output: str) -> float:
        """The tolerance for an output that is no integer."""
        return max(self.tolerance, _ROUNDINGS * self.rounding.get(output, 0.0))

    def with_rounding(
        self, expected: Mapping[str, np.ndarray], otherwise: Mapping[str, np.ndarray]
    ) -> Closeness:
        """The same where two ways of ONNX Runtime to compute the whole model are far apart.

        A number near 0 that is the exponential of a large one differs in more than last places.
        """
        found = compare(expected, otherwise, self)
        rounding = {row.name: row.relative for row in found if np.isfinite(row.relative)}
        return dataclasses.replace(self, rounding=rounding)


@dataclass(frozen=True, slots=True)
class Row:
    """How one output compares.

    Attributes:
        difference: the largest absolute difference.
        relative: as a share of the largest entry of the reference.
        fault: what is wrong; "" where nothing is.
    """

    name: str
    difference: float
    relative: float
    tolerance: float
    fault: str = ""


def compare(
    expected: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray], close: Closeness
) -> list[Row]:
    """A row for every output of the reference, and for everything in one that is no array."""
    wanted, given = leaves(expected), leaves(found)
    return [_row(name, array, given.get(name), close) for name, array in wanted.items()]


def _row(name: str, expected: np.ndarray, found: np.ndarray | None, close: Closeness) -> Row:
    kind = close.kinds.get(name, "")
    expected = numbers(expected, kind)
    found = None if found is None else numbers(found, kind)
    exact = not np.issubdtype(expected.dtype, np.inexact)
    tolerance = 0.0 if exact and not close.quantised else close.of(name)
    if found is None:
        return Row(name, np.inf, np.inf, tolerance, "is missing")
    if found.shape != expected.shape or found.dtype != expected.dtype:
        fault = f"is {found.dtype} {found.shape}, not {expected.dtype} {expected.shape}"
        return Row(name, np.inf, np.inf, tolerance, fault)
    if not np.issubdtype(expected.dtype, np.number):
        same = bool((found == expected).all())
        return Row(name, 0.0 if same else 1.0, 0.0 if same else 1.0, 0.0, "" if same else "differs")
    apart, size = _difference(expected, found)
    relative = apart / size if size else float(apart > 0)
    fault = "" if relative <= tolerance else f"differs by {relative:.2g} of its size"
    return Row(name, apart, relative, tolerance, fault)


def _difference(expected: np.ndarray, found: np.ndarray) -> tuple[float, float]:
    """The largest difference, and the largest entry; where both are NaN or infinite, none."""
    wide = np.complex128 if np.iscomplexobj(expected) else np.float64
    one, other = expected.astype(wide), found.astype(wide)
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    finite = np.where(np.isfinite(one), np.abs(one), 0.0)
    with np.errstate(invalid="ignore"):
        apart = np.where(same, 0.0, np.abs(one - other))
    apart = np.where(np.isnan(apart), np.inf, apart)
    return float(apart.max(initial=0.0)), float(finite.max(initial=0.0))


def format_rows(rows: list[Row]) -> str:
    """A line for every output."""
    lines = []
    for row in rows:
        word = row.fault or ("within tolerance" if row.difference else "equal")
        lines.append(f"{row.name}: largest difference {row.difference:.2g}, {word}")
    return "\n".join(lines)
