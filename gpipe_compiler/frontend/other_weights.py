"""A model with other weights than those that it begins with.

Those that it begins with may hide what it computes: behind a gate of zero, such as a residual
branch or an adapter begins with, anything may happen to the samples of a batch.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from gpipe_compiler.frontend.probing import normal_numbers
from gpipe_compiler.frontend.state import isolated

LARGEST_COPIED = 1 << 30
"""Bytes of parameters up to which a model is copied to be given other weights."""

_SHARE = 0.1
"""How far weights are moved, as a share of their size, and of that at which layers begin."""

_SEED = 20262


def with_other_weights(model: nn.Module) -> nn.Module | None:
    """A copy of a model in which every parameter that is trained has moved a little.

    None where none is trained, the model has no numbers, or too many to be copied.
    """
    parameters = list(model.parameters())
    size = sum(parameter.nbytes for parameter in parameters)
    trained = any(map(_is_trained, parameters))
    if not trained or size > LARGEST_COPIED or any(p.is_meta for p in parameters):
        return None
    copied = isolated(model, share_parameters=False)
    random = torch.Generator().manual_seed(_SEED)
    with torch.no_grad():
        for parameter in filter(_is_trained, copied.parameters()):
            noise = normal_numbers(parameter.shape, torch.float32, random)
            parameter.add_(noise.to(parameter), alpha=_step(parameter))
    return copied


def _is_trained(parameter: nn.Parameter) -> bool:
    return parameter.requires_grad and (parameter.is_floating_point() or parameter.is_complex())


def _step(parameter: torch.Tensor) -> float:
    """How far an entry moves: with a matrix of zeros as with one that has begun at random."""
    entries = parameter.abs()
    norm = torch.linalg.vector_norm(entries, dtype=torch.float64)
    if not norm.isfinite():
        norm = torch.linalg.vector_norm(entries.nan_to_num(0, 0, 0), dtype=torch.float64)
    size = float(norm) / math.sqrt(max(parameter.numel(), 1))
    inputs = parameter[0].numel() if parameter.dim() > 1 and len(parameter) else 1
    return _SHARE * max(size, 1 / math.sqrt(max(inputs, 1)))
