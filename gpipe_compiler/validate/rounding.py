"""How far rounding alone moves what the plain model computes: its results with other last bits.

A gradient may be zero but for rounding, such as that of a bias before a BatchNorm, or the small
difference of large numbers. What rounding leaves of it differs between two right ways to compute
it, by more than a share of its own size. So the model runs again with every weight moved by its
last bit: what that changes in a result, nobody can hold a package to.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from gpipe_compiler.frontend.comparable_runs import LARGEST_COPIED
from gpipe_compiler.frontend.state import isolated
from gpipe_compiler.runtime.train.comparison import ComparedKind, Tensors, distance

_RUNS = 4
"""Models with other last bits; of what they change the most is taken."""

_SEED = 411


def rounding_of(
    model: nn.Module, expected: Tensors, results: Callable[[nn.Module], Tensors]
) -> dict[ComparedKind, dict[str, float]]:
    """For every tensor, by how much its entries change with the last bits of the weights.

    Nothing is found of a model that is too large to be copied, or whose weights are of 16 bits.

    Args:
        expected: the results of the model as it is.
        results: those of a model on the same batch.
    """
    if sum(parameter.nbytes for parameter in model.parameters()) > LARGEST_COPIED:
        return {}
    found: dict[ComparedKind, dict[str, float]] = {}
    random = torch.Generator().manual_seed(_SEED)
    for _ in range(_RUNS):
        moved = results(_with_other_bits(model, random))
        for kind, group in expected.items():
            largest = found.setdefault(kind, {})
            for name, tensor in group.items():
                if name in moved.get(kind, {}):
                    change = distance(moved[kind][name], tensor)
                    largest[name] = max(largest.get(name, 0.0), change)
    return found


@torch.no_grad()
def _with_other_bits(model: nn.Module, random: torch.Generator) -> nn.Module:
    """A copy of a model with every weight of 32 or 64 bits moved by its last one, up or down."""
    copied = isolated(model, share_parameters=False)
    for parameter in copied.parameters():
        if parameter.dtype in (torch.float32, torch.float64):
            signs = torch.randint(0, 2, parameter.shape, generator=random).to(parameter) * 2 - 1
            parameter.mul_(1 + signs * torch.finfo(parameter.dtype).eps)
    return copied
