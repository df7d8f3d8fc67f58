"""Compares the tensors of a pipeline with those of a reference, kind by kind.

In fp32 only the order of sums and the choice of kernels may differ: the examples come to between
1e-7 and 1e-5 of a tensor's size. A tensor passes when its largest difference is at most `RELATIVE`
of its own largest entry plus `FLOOR` of the largest entry of its kind (for gradients that are zero
but for rounding), or within `REROUNDED` times what rounding alone was measured to move it
(`validate/rounding.py`). A dropped term is far outside: a micro-batch of M costs 1/M of a gradient.
Tensors of 16 bits pass within `ROUNDINGS` of their own units (6% for bfloat16), which still detects
a missing micro-batch of eight. Under autocast fp32 tensors are as close as without, but for what
the plain model sums in 16 bits and the pipeline in fp32 or in another order: gradients of a
parameter of several stages, all of them with exact BatchNorm, and outputs that are means or sums
over the batch. A gradient that is close on one batch proves where the stages round; on another it
may differ by one unit of 16 bits, as torch may sum before it rounds there (biases of T5 without a
mask).
Integers and booleans must be equal, and types the same; that of the loss apart, and but for what
torch computes in 16 bits under autocast and the pipeline in 32 (see docs/exactness.md).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from ..core.nest import Path, tensors_of
from ..core.weights import apart

RELATIVE = 1e-4
FLOOR = 1e-6
ROUNDINGS = 8
REROUNDED = 4

ROUNDING = "rounding/"
"""What stands in a reference file before a tensor's name, for how far rounding alone moves it."""


class ComparedKind(Enum):
    """What is compared; the value is the prefix of its tensors in a reference file."""

    OUTPUT = "output"
    LOSS = "loss"
    GRADIENT = "gradient"
    BUFFER = "buffer"
    WEIGHT = "weight"


Tensors = Mapping[ComparedKind, Mapping[str, torch.Tensor]]
"""For every kind, its tensors by name."""


@dataclass(frozen=True, slots=True)
class Row:
    """How one kind of tensor compares.

    Attributes:
        relative: the largest difference as a share of what its tensor was measured by.
        tolerance: what `relative` may be at most, for the coarsest type among the tensors.
        worst: the name of the tensor with the largest `relative`.
        faults: what is wrong beyond tolerance: missing, other shape, too far off.
    """

    what: str
    compared: int
    largest_difference: float
    relative: float
    tolerance: float
    worst: str
    faults: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.faults


def compare(
    actual: Tensors,
    expected: Tensors,
    coarse: Mapping[ComparedKind, Mapping[str, float]] | None = None,
    rounding: Mapping[ComparedKind, Mapping[str, float]] | None = None,
) -> tuple[Row, ...]:
    """A row for every kind of tensor in the reference.

    Args:
        coarse: under autocast, how far off tensors may be that are rounded in other places, as a
            share of what they are measured by, where that is more than their own type allows; None
            without autocast.
        rounding: how far rounding alone moves entries of the reference, where that was measured.
    """
    actual, expected = _all_dense(actual), _all_dense(expected)
    sizes = {
        kind: {name: _magnitude(tensor) for name, tensor in group.items()}
        for kind, group in expected.items()
    }
    return tuple(
        _row(
            kind,
            actual.get(kind, {}),
            expected[kind],
            _scales(kind, expected[kind], sizes, (rounding or {}).get(kind, {})),
            (coarse or {}).get(kind, {}),
            may_widen=coarse is not None,
        )
        for kind in ComparedKind
        if expected.get(kind)
    )


def close_names(kind: ComparedKind, actual: Tensors, expected: Tensors) -> frozenset[str]:
    one, other = _all_dense(actual).get(kind, {}), _all_dense(expected)
    sizes = {
        group: {name: _magnitude(tensor) for name, tensor in tensors.items()}
        for group, tensors in other.items()
        if group in (kind, ComparedKind.GRADIENT)
    }
    known = other.get(kind, {})
    scales = _scales(kind, known, sizes, {}) if known else {}
    return frozenset(
        name
        for name in known.keys() & one.keys()
        if one[name].shape == known[name].shape
        and _share(distance(one[name], known[name]), scales[name]) <= tolerance(known[name].dtype)
    )


def worst_of(batches: Sequence[tuple[Row, ...]]) -> tuple[Row, ...]:
    """For every kind one row, that of the batch on which it compares worst, with all faults.

    Args:
        batches: the rows of each batch; faults of all but the first say which one they are of.
    """
    by_kind: dict[str, list[Row]] = {}
    for number, rows in enumerate(batches, 1):
        for row in rows:
            faults = tuple(f"on batch {number}: {f}" if number > 1 else f for f in row.faults)
            by_kind.setdefault(row.what, []).append(dataclasses.replace(row, faults=faults))
    return tuple(
        dataclasses.replace(
            max(rows, key=lambda row: row.relative / row.tolerance),
            largest_difference=max(row.largest_difference for row in rows),
            faults=tuple(fault for row in rows for fault in row.faults),
        )
        for rows in by_kind.values()
    )


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, zeros and all: gradients of embeddings may be sparse."""
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _all_dense(tensors: Tensors) -> Tensors:
    return {
        kind: {name: dense(tensor) for name, tensor in group.items()}
        for kind, group in tensors.items()
    }


def flat_tensors(structure: object) -> dict[str, torch.Tensor]:
    """The tensors in a nest of tuples, lists, dicts and dataclasses, named by the way to them.

    Such as `logits`, `0.1`.

    A structure that is itself a tensor is named `output`.
    """
    found = tensors_of(structure, objects=True)
    return {path_name(path): tensor for path, tensor in found}


def path_name(path: Path) -> str:
    """The name of what the way through a nest leads to."""
    return ".".join(map(str, path)) or "output"


def pack(tensors: Tensors) -> dict[str, torch.Tensor]:
    """The tensors under the names that a reference file gives them, no two in the same memory."""
    return apart(
        {
            f"{kind.value}/{name}": tensor
            for kind, group in _all_dense(tensors).items()
            for name, tensor in group.items()
        }
    )


def unpack(packed: Mapping[str, torch.Tensor]) -> Tensors:
    """The inverse of `pack`, of the tensors in a reference file; others are left out."""
    kinds = {kind.value: kind for kind in ComparedKind}
    tensors: dict[ComparedKind, dict[str, torch.Tensor]] = {}
    for key, tensor in packed.items():
        prefix, _, name = key.partition("/")
        if prefix in kinds:
            tensors.setdefault(kinds[prefix], {})[name] = tensor
    return tensors


def rounding_in(packed: Mapping[str, torch.Tensor]) -> Mapping[ComparedKind, Mapping[str, float]]:
    """How far rounding alone moves entries of the tensors in a reference file, where measured."""
    moved = {k.removeprefix(ROUNDING): t for k, t in packed.items() if k.startswith(ROUNDING)}
    return {
        kind: {name: float(tensor) for name, tensor in group.items()}
        for kind, group in unpack(moved).items()
    }


def _scales(
    kind: ComparedKind,
    expected: Mapping[str, torch.Tensor],
    sizes: Mapping[ComparedKind, Mapping[str, float]],
    rounding: Mapping[str, float],
) -> dict[str, float]:
    """What each tensor's difference is measured by.

    A weight after the step is measured by its gradient, since the step moved it by that (learning
    rate 1), so that an update gone missing is not hidden by the weight's own size; rounding of the
    weight itself is allowed for.

    Args:
        sizes: the largest entry of every expected tensor.
        rounding: how far rounding alone moves entries of each, where that was measured.
    """
    measured_by = (
        sizes.get(ComparedKind.GRADIENT, {}) if kind is ComparedKind.WEIGHT else sizes[kind]
    )
    floor = FLOOR / RELATIVE * max(measured_by.values(), default=0.0)
    scales = {}
    for name, tensor in expected.items():
        scales[name] = measured_by.get(name, 0.0) + floor
        if kind is ComparedKind.WEIGHT:
            bits = 4 * max(_eps(tensor.dtype), _eps(torch.float32))
            scales[name] += bits / tolerance(tensor.dtype) * sizes[kind][name]
        uncertain = REROUNDED * rounding.get(name, 0.0) / tolerance(tensor.dtype)
        scales[name] = max(scales[name], uncertain)
    return scales


def tolerance(dtype: torch.dtype) -> float:
    """How far off a tensor of this type may be, as a share of what it is measured by."""
    return max(RELATIVE, ROUNDINGS * _eps(dtype))


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0


def _magnitude(tensor: torch.Tensor) -> float:
    """The largest absolute entry, those that are not finite apart: they have to be equal."""
    if tensor.dtype == torch.bool:  # has no absolute value
        return float(tensor.any())
    largest = _largest(tensor)
    if math.isfinite(largest):
        return largest
    finite = tensor.detach()[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def is_finite(tensor: torch.Tensor) -> bool:
    if tensor.is_complex():
        return bool(tensor.isfinite().all())
    return tensor.dtype == torch.bool or math.isfinite(_largest(tensor))


def _largest(tensor: torch.Tensor) -> float:
    """The largest absolute entry of numbers; inf or nan where one of them is not finite."""
    if not tensor.numel():
        return 0.0
    if tensor.is_complex():
        return float(tensor.detach().abs().max())
    if not tensor.is_floating_point():  # some types have no kernel for it
        tensor = tensor.double()
    least, most = map(float, torch.aminmax(tensor.detach()))  # both nan where any entry is
    return max(-least, most)


def _row(
    kind: ComparedKind,
    actual: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    scales: Mapping[str, float],
    coarse: Mapping[str, float],
    *,
    may_widen: bool,
) -> Row:
    allowed = {
        name: max(tolerance(tensor.dtype), coarse.get(name, 0.0))
        for name, tensor in expected.items()
    }
    faults = [*_mismatches(actual, expected), *_not_finite(kind, expected)]
    largest, relative, worst = 0.0, 0.0, ""
    for name in expected.keys() & actual.keys():
        if actual[name].shape != expected[name].shape:
            continue
        if kind is not ComparedKind.LOSS and _retyped(actual[name], expected[name], may_widen):
            faults.append(f"{name} is of {actual[name].dtype}, not {expected[name].dtype}")
        difference = distance(actual[name], expected[name])
        share = _share(difference, scales[name])
        largest = max(largest, difference)
        if share >= relative:
            relative, worst = share, name
        dtype = expected[name].dtype
        exact = not (dtype.is_floating_point or dtype.is_complex)
        if not share <= (0.0 if exact else allowed[name]):
            faults.append(f"{name} differs by {difference:.3g}, {share:.3g} of its size")
    most = max(allowed.values(), default=RELATIVE)
    return Row(kind.value, len(expected), largest, relative, most, worst, tuple(faults))


def _share(difference: float, scale: float) -> float:
    if not difference:
        return 0.0
    return difference / scale if scale else float("inf")


def _not_finite(kind: ComparedKind, expected: Mapping[str, torch.Tensor]) -> Iterable[str]:
    """A loss or a gradient that is not finite in the reference proves nothing."""
    if kind in (ComparedKind.LOSS, ComparedKind.GRADIENT):
        for name, tensor in expected.items():
            if not is_finite(tensor):
                yield f"{name} is not finite in the model itself, so there is nothing to hold to"


def _mismatches(
    actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> Iterable[str]:
    for name in sorted(expected.keys() - actual.keys()):
        yield f"{name} is missing"
    for name in sorted(actual.keys() - expected.keys()):
        yield f"{name} is not in the reference"
    for name in sorted(expected.keys() & actual.keys()):
        if actual[name].shape != expected[name].shape:
            yield f"{name} has shape {tuple(actual[name].shape)}, not {tuple(expected[name].shape)}"


def _retyped(actual: torch.Tensor, expected: torch.Tensor, may_widen: bool) -> bool:
    """Whether a tensor is of another type, 32 bits instead of 16 apart where that may be."""
    widened = expected.dtype.itemsize == 2 and actual.dtype is torch.float32
    fractions = expected.is_floating_point() and widened
    return actual.dtype != expected.dtype and not (may_widen and fractions)


def distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest absolute difference; infinite where one is not finite and the other differs."""
    left, right = actual.detach().cpu(), expected.detach().cpu()
    if left.dtype == right.dtype and torch.equal(left, right):
        return 0.0
    whole = not (left.is_floating_point() or left.is_complex()) and left.dtype == right.dtype
    if left.dtype == right.dtype == torch.float32:
        largest = _largest(left - right)
        if math.isfinite(largest):
            return largest
    wide = torch.complex128 if left.is_complex() else torch.float64
    left, right = left.to(wide), right.to(wide)
    same = (left == right) | (left.isnan() & right.isnan())
    difference = torch.where(same, torch.zeros_like(left.abs()), (left - right).abs())
    largest = float(difference.nan_to_num(nan=torch.inf, posinf=torch.inf).max())
    return max(largest, 1.0) if whole else largest  # beyond 2**53 it rounds to 0
