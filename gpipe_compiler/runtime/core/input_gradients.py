"""Gradients of what the caller passes, where he wants them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..spec import PipelineSpec
from .inputs import BoundCall, passed_to


def wanted_of(spec: PipelineSpec, bound: BoundCall) -> frozenset[str]:
    """The inputs that are passed as tensors which require gradients."""
    passed = [item for call in bound.calls for item in passed_to(spec, *call).items()]
    return frozenset(name for name, tensor in passed if tensor.requires_grad)


def give_back(
    spec: PipelineSpec,
    bound: BoundCall,
    groups: Sequence[Sequence[int]],
    gradients: Mapping[tuple[str, int], torch.Tensor | None],
    replicas: int,
) -> None:
    """Adds the gradients of inputs to them, as a backward of the plain model does.

    Args:
        groups: the micro-batches of each call that was passed.
        gradients: of the micro-batches of each input; None is zeros.
        replicas: those of parameters are averaged over them, of inputs each has its own.
    """
    roots, found = [], []
    for call, whole, group in zip(bound.calls, bound.wholes, groups, strict=True):
        passed = passed_to(spec, *call)
        for source in spec.inputs:
            pieces = [gradients.get((source.name, m)) for m in group]
            if all(piece is None for piece in pieces) or not passed[source.name].requires_grad:
                continue
            total, start = torch.zeros_like(whole[source.name]), 0
            for m, piece in zip(group, pieces, strict=True):
                if piece is not None:
                    source.part(total, start, bound.samples[m]).add_(piece.to(total.device))
                start += bound.samples[m]
            roots.append(passed[source.name])
            found.append(total / replicas)
    if roots:
        torch.autograd.backward(roots, found)
