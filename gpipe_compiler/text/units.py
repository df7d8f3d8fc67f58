"""Numbers as people read them."""

from __future__ import annotations

from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from gpipe_compiler.runtime.wording import printable

if TYPE_CHECKING:
    import torch

_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")
_SECONDS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))


_ROUNDED = 1e-9
"""Relative: how far apart two sums of the same times may be."""


def format_bytes(count: float) -> str:
    """Bytes with three figures in the largest unit that leaves at least one: `6.13 MiB`."""
    size, index = float(count), 0
    # 999.5 would print as 1000 or 1e+03.
    while size >= 999.5 and index < len(_BYTES) - 1:
        size, index = size / 1024, index + 1
    return f"{_figures(size)} {_BYTES[index]}"


def format_limit(count: int) -> str:
    """Bytes as `--memory` takes them, rounded up: `6.13MiB`."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{-(-count * 100 // size) / 100:g}{unit}"
    return str(count)


def format_seconds(seconds: float) -> str:
    """Seconds with three figures in the largest unit that leaves at least one: `1.25 ms`."""
    if seconds == 0:
        return "0 s"
    for unit, size in _SECONDS:
        if seconds >= 0.9995 * size:
            return f"{_figures(seconds / size)} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def _figures(number: float) -> str:
    """Three figures, without an exponent or needless zeros."""
    if number >= 99.95:
        return f"{number:,.0f}"
    return f"{number:.3g}"


def format_rate(per_second: float) -> str:
    """A rate with three figures: `0.0061`, `5.3`, `23,162`."""
    return _figures(per_second)


def proof(found_s: float, bound_s: float, *, proved: bool) -> str:
    """What is known of a plan.

    Args:
        found_s: what it takes; `bound_s`: what every plan takes at least.
        proved: whether it was asked for, and found, that none is better.
    """
    if proved:
        return "proved optimal"
    if found_s <= bound_s * (1 + _ROUNDED):
        return "lower bound met"
    return f"gap at most {format_share(found_s / bound_s - 1)}" if bound_s > 0 else "gap not known"


def format_share(share: float) -> str:
    """A share of one as a percentage: `12.5%`."""
    return f"{100 * share:.1f}%"


def format_type(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """A tensor's type: `8x64x56x56 float32`, `scalar int64`."""
    return f"{'x'.join(map(str, shape)) or 'scalar'} {str(dtype).removeprefix('torch.')}"


def format_source(source: str) -> str:
    """A source line `file:line`, its file relative to the current directory if below."""
    file, _, line = source.rpartition(":")
    path, base = Path(file), Path.cwd()
    return printable(f"{path.relative_to(base)}:{line}" if path.is_relative_to(base) else source)


def portable_source(source: str) -> str:
    """A source line `file:line` that means the same on another machine, by no absolute path.

    Its file is relative to the installed packages or the current directory, where it is below one
    of them; else it is the file's own name.
    """
    shown = format_source(source)
    file = PurePath(shown.rpartition(":")[0])
    if not file.is_absolute():
        return shown
    parts = file.parts
    at = [n for n, part in enumerate(parts) if part in ("site-packages", "dist-packages")]
    kept = "/".join(parts[at[-1] + 1 :]) if at else file.name
    return printable(f"{kept}:{source.rpartition(':')[2]}")


def short_path(path: str) -> str:
    """The path of a module for a table: of a long one its last names, at least one."""
    names = printable(path).split(".")
    kept = ".".join(names)
    while len(kept) > 28 and len(names) > 1:
        del names[0]
        kept = f"…{'.'.join(names)}"
    return kept


def short_source(source: str) -> str:
    """A source line for a table: of a file far from here, only its folder and its name."""
    text = format_source(source)
    parts = text.split("/")
    return f"…/{parts[-2]}/{parts[-1]}" if text.startswith("/") and len(parts) > 3 else text
