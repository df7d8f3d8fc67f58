"""Which dimension of each input of an ONNX model is the batch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from gpipe_compiler.errors import UsageError

Dims: TypeAlias = "tuple[int | str, ...] | None"
"""Sizes, and names of those that are open; None where the model leaves out the shape."""

NAMELESS = "?"
"""An open size without a name."""

_BATCH = re.compile(r"(.*[^a-z])?(batch|bsz|n|b)([^a-z].*)?|batch.*", re.IGNORECASE)
"""What exporters call the batch: `batch_size`, `N`."""


def batch_dims(
    declared: Mapping[str, Dims],
    given: Mapping[str, tuple[int, ...]],
    fixed: int | None,
    asked: Mapping[str, int | None],
) -> dict[str, int]:
    """By input, the dimension that is the batch; inputs without one are left out.

    Args:
        given: the sizes that the user gives.
        fixed: the batch size of a model that takes no other.
        asked: what the user says of some inputs; None: it has no batch.

    Raises:
        UsageError: where the user names an input or a dimension that there is not.
    """
    found = (
        {} if fixed is None else {n: 0 for n, dims in declared.items() if dims and dims[0] == fixed}
    )
    if fixed is None:
        named = _named(dims for dims in declared.values() if dims)
        leading = {n: 0 for n, dims in declared.items() if _leads(dims, named, given.get(n))}
        samples = {given[name][0] for name in leading if name in given}
        for name, dims in declared.items():
            at = next((i for i, dim in enumerate(dims or ()) if dim in named), leading.get(name))
            if at is None and dims and len(samples) == 1:  # nameless, and as large as the batch
                sizes = given.get(name, ())
                nameless = (i for i, dim in enumerate(dims) if dim == NAMELESS)
                at = next((i for i in nameless if i < len(sizes) and sizes[i] in samples), None)
            if at is not None:
                found[name] = at
    for name, dim in asked.items():
        if name not in declared:
            raise UsageError(
                f"--batch-dim: the model has no input {name}",
                hint=f"its inputs are {', '.join(declared)}",
            )
        rank = len(declared[name] or given.get(name, ()))
        if dim is not None and dim >= rank:
            raise UsageError(f"--batch-dim {name}={dim}: {name} has {rank} dimensions")
        found.pop(name, None)
        if dim is not None:
            found[name] = dim
    return found


def names_batch(declared: Mapping[str, Dims], asked: Mapping[str, int | None]) -> bool:
    """Whether some input has an open dimension that is called, or said to be, the batch."""
    return any(
        isinstance(dim, str) and (asked.get(name) == at or "batch" in dim.lower())
        for name, dims in declared.items()
        for at, dim in enumerate(dims or ())
    )


def _named(shapes: Iterable[tuple[int | str, ...]]) -> frozenset[str]:
    """The names of sizes that are the batch.

    Those that are called so; else those of first dimensions, but for one that is another dimension
    too, as `length` of [x, length] and [length, 4].
    """
    known = list(shapes)
    every = {dim for dims in known for dim in dims if isinstance(dim, str) and dim != NAMELESS}
    called = frozenset(dim for dim in every if _BATCH.fullmatch(dim))
    if called:
        return called
    first = {dims[0] for dims in known if dims and dims[0] in every}
    later = {dim for dims in known if isinstance(dims[0], str) for dim in dims[1:]}
    return frozenset(str(dim) for dim in (first - later or first))


def _leads(dims: Dims, named: frozenset[str], given: tuple[int, ...] | None) -> bool:
    """Whether the first dimension has no name by which to tell, and is open."""
    if dims is None:
        return bool(given)
    return bool(dims) and dims[0] == NAMELESS and named.isdisjoint(map(str, dims))
