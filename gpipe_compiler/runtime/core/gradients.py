"""Gradients: scaled and clipped over all stages and ranks, given back to inputs, and kept back
until `backward()` of a loss gives them to the parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, TypeAlias, cast

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from ..errors import AgreedError, UsageError
from ..spec import PipelineSpec
from .distributed import Network
from .inputs import BoundCall, passed_to
from .shards import is_divided, local


class PipelineScaler(GradScaler):
    """A GradScaler whose decisions are those of all ranks; they all make the same calls.

    Used as torch's own, but for `scale`: the pipeline scales its losses itself.

        pipe.step(inputs, target)
        pipe.scaler.unscale_(optimizer)     # only before clipping
        pipe.clip_grad_norm_(1.0)
        pipe.scaler.step(optimizer)
        pipe.scaler.update()

    Disabled it does nothing but `optimizer.step()`, so the same loop serves every precision. It
    holds no pipeline, whose threads end when it is forgotten.
    """

    def __init__(self, world: Network, *, enabled: bool) -> None:
        super().__init__(world.device.type, enabled=enabled)
        self._world = world
        if self._enabled:
            # torch waits for the first call of `scale`, which nobody makes here.
            self._lazy_init_scale_growth_tracker(world.device)

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        """Every way to a step leads through here, once for each optimizer."""
        found = super()._unscale_grads_(_local(optimizer), inv_scale, found_inf, allow_fp16)
        here = torch.stack(
            [found_inf, *(one.to(found_inf.device) for one in found.values())]
        ).amax()
        anywhere = self._world.sum(here, "whether gradients have overflowed")
        return {found_inf.device: (anywhere > 0).to(found_inf)}


def _local(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer as far as gradients are unscaled, with the rows of them that lie here."""
    if not any(is_divided(p) for group in optimizer.param_groups for p in group["params"]):
        return optimizer
    groups = [{"params": list(map(_rows, group["params"]))} for group in optimizer.param_groups]
    return cast(torch.optim.Optimizer, SimpleNamespace(param_groups=groups))


def _rows(parameter: torch.Tensor) -> torch.Tensor:
    """The rows of a parameter that lie here, with those of its gradient."""
    rows = local(parameter.detach())
    rows.grad = None if parameter.grad is None else local(parameter.grad)
    return rows


def check_weights(modules: Mapping[int, nn.Module]) -> None:
    """Refuse weights whose gradients are in fp16 themselves: they cannot be unscaled.

    Raises:
        UsageError: naming one of them.
    """
    for stage, module in modules.items():
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and parameter.dtype is torch.float16:
                raise UsageError(
                    f"{name} of stage {stage} is fp16 itself, so its gradients are too, and no "
                    "gradient scaler takes those",
                    hint="keep the weights in fp32 under --precision fp16, or train in fp32",
                )


def first_stages(spec: PipelineSpec) -> dict[str, int]:
    """The first stage that holds each state of the model, in the order of the stages."""
    found: dict[str, int] = {}
    for index, stage in enumerate(spec.stages):
        for name in stage.state.values():
            found.setdefault(name, index)
    return found


def clip_gradients(
    parameters: Mapping[str, nn.Parameter],
    contributes: Mapping[str, bool],
    world: Network,
    max_norm: float,
    norm_type: float,
    *,
    error_if_nonfinite: bool,
) -> torch.Tensor:
    """Clip gradients by the norm of all, and give that norm as it was. Every rank calls it.

    Args:
        parameters: those held here, by the model's names.
        contributes: for each state of the model, in the order of summation, which is the same on
            every rank: whether this rank contributes its norm, and no other, unless one that has
            other rows of it.
        world: all ranks.
    """
    gradients = {
        name: p.grad
        for name, p in parameters.items()
        if p.grad is not None and contributes.get(name, False)
    }
    names = {name: place for place, name in enumerate(contributes)}
    found = world.gather_objects(_norms(gradients, names, norm_type), "the norms of the gradients")
    told = _total_norm(found, norm_type, world.device) if world.rank == 0 else None
    total, sparse = world.broadcast_object(told, 0, "the norm of all gradients")
    if sparse is not None:
        raise AgreedError(
            f"the gradient of {list(contributes)[sparse]} is sparse: torch knows no norm of it",
            hint="make the embedding with sparse=False, or do not clip",
        )
    if error_if_nonfinite and not bool(total.isfinite()):
        raise AgreedError(
            f"the norm of the gradients is {float(total)}, so they cannot be clipped",
            hint="pass error_if_nonfinite=False to scale them by it all the same",
        )
    # On the host until here, and the factor too: it is the same bits on every rank.
    torch.nn.utils.clip_grads_with_norm_(parameters.values(), max_norm, total)
    return total.to(world.device)


Norms: TypeAlias = list[tuple[int, float, torch.dtype | None]]
"""Of gradients, by the place of the parameter, with their types; None for one that is sparse."""


def _norms(
    gradients: Mapping[str, torch.Tensor], places: Mapping[str, int], norm_type: float
) -> Norms:
    """Those of the gradients here, of what is divided of the rows here."""
    found: Norms = []
    groups: dict[tuple[torch.device, torch.dtype], dict[int, torch.Tensor]] = {}
    for name, gradient in gradients.items():
        here = local(gradient)
        if here.layout is not torch.strided:
            found.append((places[name], 0.0, None))
        elif here.numel():
            groups.setdefault((here.device, here.dtype), {})[places[name]] = here
    for group in groups.values():
        norms = torch.stack(torch._foreach_norm(list(group.values()), norm_type))
        found += ((place, n, norms.dtype) for place, n in zip(group, norms.tolist(), strict=True))
    return found


def _total_norm(
    found: Sequence[Norms], norm_type: float, device: torch.device
) -> tuple[torch.Tensor, int | None]:
    """The norm of all from those of every rank, or else the place of a sparse gradient."""
    rows: dict[int, list[float]] = {}
    kinds: set[torch.dtype] = set()
    for place, norm, kind in (one for norms in found for one in norms):
        if kind is None:
            return torch.zeros(()), place
        kinds.add(kind)
        rows.setdefault(place, []).append(norm)
    if not kinds:
        return torch.zeros(()), None
    # Of what is divided, each rank has told that of its own rows.
    whole = [
        row[0] if len(row) == 1 else float(torch.tensor(row, dtype=torch.float64).norm(norm_type))
        for _, row in sorted(rows.items())
    ]
    dtype = functools.reduce(torch.promote_types, kinds)
    norms = torch.tensor(whole, dtype=torch.float64).to(device, dtype)
    return torch.linalg.vector_norm(norms, norm_type).cpu(), None


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


# --- a loss whose backward() gives the gradients ------------------------------------------------


def refuse_deferred(scaler: PipelineScaler) -> None:
    """UsageError where gradients are scaled."""
    if scaler.is_enabled():
        raise UsageError(
            "in fp16 gradients are scaled, which backward() of a loss does not tell",
            hint="use step with pipe.scaler, or precision='bf16'",
        )


def deferred(step: Callable[[], torch.Tensor], parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """The loss of a step; what it adds to `.grad` is added by `backward()` of that loss instead.

    Args:
        step: runs it, and gives its loss.
    """
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        loss = step()
        made = [(parameter, parameter.grad) for parameter in parameters]
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
    held = [(parameter, gradient) for parameter, gradient in made if gradient is not None]
    anchor = torch.zeros((), requires_grad=True)
    result: torch.Tensor = _Loss.apply(anchor, loss, held)  # type: ignore[no-untyped-call]  # torch
    return result


class _Loss(torch.autograd.Function):
    """A loss whose gradients are there already."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        loss: torch.Tensor,
        held: list[tuple[nn.Parameter, torch.Tensor]],
    ) -> torch.Tensor:
        ctx.held = held
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *factors: torch.Tensor) -> tuple[None, None, None]:
        """Add the gradients, times the gradient of the loss."""
        if ctx.held is None:
            raise UsageError("backward() of a loss of a pipeline can be called once")
        with torch.no_grad():
            for parameter, gradient in ctx.held:
                gradient.mul_(factors[0].to(gradient.device))
                before = parameter.grad
                parameter.grad = gradient if before is None else before + gradient
        ctx.held = None
        return None, None, None
