"""Quantities with units, as people write them: `450GB/s`, `400Gb/s`, `10us`, `80GiB`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from types import MappingProxyType

from gpipe_compiler.runtime.core.typed import shown

_NUMBER = re.compile(r"(\d+\.?\d*(?:[eE][+-]?\d+)?)\s*([a-zA-Zµμ/]*)")
_DECIMAL: Mapping[str, float] = MappingProxyType(
    {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
)
_BINARY: Mapping[str, float] = MappingProxyType(
    {f"{prefix}i": 1024.0**power for power, prefix in enumerate("KMGT", start=1)}
)


@dataclass(frozen=True, slots=True)
class Quantity:
    """What is measured, and in which units it may be written.

    Attributes:
        name: with its article.
        units: with their sizes; the empty one is that of a bare number.
        above: whether it has to be more than the least.
        most: that sums and quotients of it stay finite with.
    """

    name: str
    example: str
    units: Mapping[str, float]
    least: float = 0.0
    above: bool = True
    most: float = 1e18

    def read(self, written: object) -> float:
        """The number that somebody wrote, as text with a unit or as a number.

        Raises:
            ValueError: saying what it is not, and how to write it.
        """
        value = self._value(written)
        if value is None or value < self.least or (self.above and value == self.least):
            raise ValueError(f"{_shown(written)} is no {self.name}: write {self.example}")
        return value

    def _value(self, written: object) -> float | None:
        if isinstance(written, bool):
            return None
        if isinstance(written, int | float):
            return float(written) if abs(written) <= self.most else None
        match = _NUMBER.fullmatch(written.strip()) if isinstance(written, str) else None
        if match is None or match[2] not in self.units:
            return None
        # In decimal, so that 5us is the same number as 5e-6.
        try:
            value = float(Decimal(match[1]) * Decimal(repr(self.units[match[2]])))
        except ArithmeticError:  # an exponent that Decimal does not have
            return None
        return value if value <= self.most else None


def _shown(written: object) -> str:
    return shown(written) if isinstance(written, str) else f"{written!r:.40}"


def _per_second(unit: str, size: float, prefixes: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}{unit}/s": factor * size for prefix, factor in prefixes.items()}


BANDWIDTH = Quantity(
    "bandwidth",
    "bytes/s, such as 12.5G, 450GB/s, 400Gb/s",
    MappingProxyType(
        {
            **_DECIMAL,
            **_per_second("B", 1.0, {**_DECIMAL, **_BINARY}),
            **_per_second("b", 1 / 8, {**_DECIMAL, **_BINARY}),
            **_per_second("bit", 1 / 8, {**_DECIMAL, **_BINARY}),
        }
    ),
    least=1.0,
    above=False,
)
"""Bytes a second; with a small b, bits."""

TIME = Quantity(
    "time",
    "seconds, such as 2e-5, 20us",
    MappingProxyType(
        {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9}
    ),
    above=False,
    most=1e6,
)

SIZE = Quantity(
    "size",
    "bytes, such as 16GiB, 8e9",
    MappingProxyType(
        {
            "": 1.0,
            "B": 1.0,
            **{f"{prefix}B": size for prefix, size in {**_DECIMAL, **_BINARY}.items()},
        }
    ),
    least=1.0,
    above=False,
)

SPEED = Quantity(
    "speed",
    "FLOP/s, such as 66.9TFLOP/s",
    MappingProxyType(
        {
            **_DECIMAL,
            **_per_second("FLOP", 1.0, _DECIMAL),
            **{f"{prefix}FLOPS": size for prefix, size in _DECIMAL.items()},
        }
    ),
)


def rate_text(bytes_per_second: float) -> str:
    """A bandwidth with three figures: `450 GB/s`, `1.25 MB/s`."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if bytes_per_second >= 0.9995 * size:
            return f"{bytes_per_second / size:.3g} {prefix}B/s"
    return f"{bytes_per_second:.3g} B/s"
