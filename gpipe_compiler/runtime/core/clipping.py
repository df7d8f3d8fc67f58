"""Clipping gradients by their norm over all stages, as torch.nn.utils.clip_grad_norm_ does.

Torch takes the norm of the gradients' norms. The norm of each gradient is told by one rank: the one
that holds the first stage with the parameter, in the first replica. So a tied parameter counts
once, and the norms come together in the order of stages whatever rank holds them. The total is
computed on one rank: on another kind of processor it could differ in its last bit, and the copies
of a tied parameter would drift apart.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from ..errors import AgreedError
from ..spec import PipelineSpec
from .distributed import DTYPES
from .scaler import OverRanks, alone

_SPARSE = -1.0


def parameter_names(spec: PipelineSpec) -> tuple[str, ...]:
    """The model's names of all state, each once, in the order of the stages that hold it."""
    return tuple(dict.fromkeys(name for stage in spec.stages for name in stage.state.values()))


def told_here(spec: PipelineSpec, stages: Iterable[int]) -> frozenset[str]:
    """The names of state that none of the stages before these holds."""
    first: dict[str, int] = {}
    for index, stage in enumerate(spec.stages):
        for name in stage.state.values():
            first.setdefault(name, index)
    held = frozenset(stages)
    return frozenset(name for name, index in first.items() if index in held)


class NormClipping:
    """Clips the gradients that are held here by the norm of all.

    Args:
        names: what every rank knows: the state of the model, in the order of summation.
        told: the names whose norms this rank tells; no other rank tells them.
        first: whether this rank computes the total.
        device: where the total goes.
    """

    def __init__(
        self,
        names: Sequence[str],
        told: frozenset[str],
        device: torch.device,
        *,
        first: bool = True,
        over_ranks: OverRanks = alone,
    ) -> None:
        self.places = {name: place for place, name in enumerate(names)}
        self.told = told
        self.device = device
        self.first = first
        self.over_ranks = over_ranks

    def __call__(
        self,
        parameters: Mapping[str, nn.Parameter],
        max_norm: float,
        norm_type: float,
        *,
        error_if_nonfinite: bool,
    ) -> torch.Tensor:
        """Clip, and give the total norm before that. Every rank calls it.

        Args:
            parameters: those held here, by the model's names.

        Raises:
            AgreedError: on every rank alike: when a gradient is sparse, or when the norm is not
                finite and that is an error.
        """
        total = self._total(parameters, norm_type)
        if error_if_nonfinite and not bool(total.isfinite()):
            raise AgreedError(
                f"the norm of the gradients is {float(total)}, so they cannot be clipped",
                hint="pass error_if_nonfinite=False to scale them by it all the same",
            )
        # On the host until here, and the factor too: it is the same bits on every rank.
        torch.nn.utils.clip_grads_with_norm_(parameters.values(), max_norm, total)
        return total.to(self.device)

    def _total(self, parameters: Mapping[str, nn.Parameter], norm_type: float) -> torch.Tensor:
        table = self.over_ranks(self._norms(parameters, norm_type), "the norms of the gradients")
        values, codes = table.unbind()
        names = tuple(self.places)
        for place in (codes == _SPARSE).nonzero().flatten().tolist():
            raise AgreedError(
                f"the gradient of {names[place]} is sparse: torch knows no norm of it",
                hint="make the embedding with sparse=False, or do not clip",
            )
        known = codes.nonzero().flatten()
        kinds = [DTYPES[int(code) - 1] for code in set(codes[known].tolist())]
        dtype = functools.reduce(torch.promote_types, kinds) if kinds else torch.float32
        total = torch.zeros((), dtype=dtype)
        if self.first and kinds:
            norms = values[known].to(dtype).to(self.device)
            total = torch.linalg.vector_norm(norms, norm_type).cpu()
        return self.over_ranks(total, "the norm of all gradients").cpu()

    def _norms(self, parameters: Mapping[str, nn.Parameter], norm_type: float) -> torch.Tensor:
        """For every name its gradient's norm, and 1 + the number of the norm's type.

        0 and 0 where there is no gradient, or another rank tells it.
        """
        table = torch.zeros(2, len(self.places), dtype=torch.float64)
        groups: dict[tuple[torch.device, torch.dtype], list[tuple[int, torch.Tensor]]] = {}
        for name, parameter in parameters.items():
            gradient = parameter.grad
            if gradient is None or not gradient.numel() or name not in self.told:
                continue
            place = self.places[name]
            if gradient.layout is not torch.strided:
                table[1, place] = _SPARSE
                continue
            groups.setdefault((gradient.device, gradient.dtype), []).append((place, gradient))
        for group in groups.values():
            places = torch.tensor([place for place, _ in group])
            norms = torch.stack(torch._foreach_norm([grad for _, grad in group], norm_type))
            table[0, places] = norms.to("cpu", torch.float64)
            table[1, places] = 1.0 + DTYPES.index(norms.dtype)
        return table
