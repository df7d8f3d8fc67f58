"""How the results of a graph differ from those of its model, and what of that is rounding alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

import torch

from gpipe_compiler.runtime.train.comparison import dense

Results: TypeAlias = Mapping[str, torch.Tensor | None]
"""What a run gave, by readable name."""

GRADIENT = "gradient of "
"""What the names of gradients begin with."""

_EPSILONS = 128
"""Roundings of the largest element that a result may be off: graph and model run the same kernels
in the same order, and only the order in which gradients are summed may differ. A dropped term is
off by a share of the element, which is 10,000 times more."""

_NOISE = 16
"""Roundings of the largest gradient of all that a gradient may consist of and still be zero: a sum
that is zero, as for a bias before a BatchNorm or a softmax, is left with the rounding of
its summands, which are as large as those of other gradients. Such ones are compared again in double
precision, where a small gradient that is no rounding is still there."""


def different(expected: Results, actual: Results) -> Iterator[tuple[str, str]]:
    """Names of what differs, and how, in words."""
    for name in dict.fromkeys((*expected, *actual)):
        if name not in expected or name not in actual:
            yield name, f"{name} is given by the {'graph' if name in actual else 'model'} only"
            continue
        one, other = expected[name], actual[name]
        if one is None or other is None:
            if one is not other:
                yield name, f"{name} is None in the {'model' if one is None else 'graph'} only"
        elif one.layout != other.layout:
            yield name, f"{name} is {other.layout} instead of {one.layout}"
        elif one.shape != other.shape or one.dtype != other.dtype:
            yield (
                name,
                f"{name} is {tuple(other.shape)} {other.dtype} "
                f"instead of {tuple(one.shape)} {one.dtype}",
            )
        elif not one.is_meta and not _equal(dense(one), dense(other)):
            yield name, f"{name} is off by {_distance(dense(one), dense(other)):.3g}"


def is_noise(names: Iterable[str], expected: Results, actual: Results) -> bool:
    """Whether all of these are gradients, in both no larger than the rounding of others."""
    gradients = [tensor for name, tensor in expected.items() if name.startswith(GRADIENT)]
    largest = max(map(_largest, gradients), default=0.0)
    return all(
        tensor is not None
        and name.startswith(GRADIENT)
        and tensor.is_floating_point()
        and _largest(tensor) <= _NOISE * torch.finfo(tensor.dtype).eps * largest
        for name in names
        for tensor in (expected.get(name), actual.get(name))
    )


def _largest(tensor: torch.Tensor | None) -> float:
    if tensor is None or tensor.is_meta or not tensor.numel():
        return 0.0
    return float(dense(tensor).abs().nan_to_num(torch.inf).max())


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bitwise equality, or up to rounding of the largest element."""
    if torch.equal(one, other):
        return True
    if not (one.is_floating_point() or one.is_complex()):
        return False
    largest = one.abs().nan_to_num(0, 0, 0).max().item() if one.numel() else 0.0
    tolerance = _EPSILONS * torch.finfo(one.dtype).eps * largest
    return torch.allclose(other, one, rtol=0, atol=tolerance, equal_nan=True)


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one.double() - other.double()).abs().max().item() if one.numel() else 0.0
