"""Gradients: scaled and clipped over all stages and ranks, given back to inputs, and kept back
until `backward()` of a loss gives them to the parameters."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from ..errors import AgreedError, UsageError
from ..spec import PipelineSpec
from .distributed import Network
from .inputs import BoundCall, passed_to
from .reducer import Reducer
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


_REAL = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
"""The types that a norm may have, by their number."""

_SPARSE = -1.0


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
    peers: Network | None = None,
) -> torch.Tensor:
    """Clip gradients by the norm of all, and give that norm as it was. Every rank calls it.

    Args:
        parameters: those held here, by the model's names.
        contributes: for each state of the model, in the order of summation, which is the same on
            every rank: whether this rank, and no other, contributes its norm.
        world: all ranks, which sum the norms.
        peers: those that hold the other rows of what is divided; None where nothing is.
    """
    gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    norms = _norms({name: local(g) for name, g in gradients.items()}, tuple(contributes), norm_type)
    if peers is not None:
        divided = [is_divided(gradients.get(name)) for name in contributes]
        norms = _of_all_rows(norms, torch.tensor(divided), peers, norm_type)
    own = torch.tensor([float(contributes[name]) for name in contributes], dtype=norms.dtype)
    norms = torch.where(own > 0, norms, 0.0)
    total = _total_norm(norms, tuple(contributes), world, norm_type)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise AgreedError(
            f"the norm of the gradients is {float(total)}, so they cannot be clipped",
            hint="pass error_if_nonfinite=False to scale them by it all the same",
        )
    # On the host until here, and the factor too: it is the same bits on every rank.
    torch.nn.utils.clip_grads_with_norm_(parameters.values(), max_norm, total)
    return total.to(world.device)


def _total_norm(
    norms: torch.Tensor, names: Sequence[str], world: Network, norm_type: float
) -> torch.Tensor:
    values, codes = world.sum(norms, "the norms of the gradients").unbind()
    for place in (codes == _SPARSE).nonzero().flatten().tolist():
        raise AgreedError(
            f"the gradient of {names[place]} is sparse: torch knows no norm of it",
            hint="make the embedding with sparse=False, or do not clip",
        )
    known = codes.nonzero().flatten()
    kinds = [_REAL[int(code) - 1] for code in set(codes[known].tolist())]
    dtype = functools.reduce(torch.promote_types, kinds) if kinds else torch.float32
    total = torch.zeros((), dtype=dtype)
    if world.rank == 0 and kinds:
        total = torch.linalg.vector_norm(values[known].to(dtype).to(world.device), norm_type).cpu()
    return world.sum(total, "the norm of all gradients").cpu()


def _norms(
    gradients: Mapping[str, torch.Tensor], names: Sequence[str], norm_type: float
) -> torch.Tensor:
    """For every name its gradient's norm, and 1 + the number of the norm's type.

    0 and 0 where there is no gradient here.
    """
    places = {name: place for place, name in enumerate(names)}
    table = torch.zeros(2, len(places), dtype=torch.float64)
    groups: dict[tuple[torch.device, torch.dtype], list[tuple[int, torch.Tensor]]] = {}
    for name, gradient in gradients.items():
        if not gradient.numel() or name not in places:
            continue
        place = places[name]
        if gradient.layout is not torch.strided:
            table[1, place] = _SPARSE
            continue
        groups.setdefault((gradient.device, gradient.dtype), []).append((place, gradient))
    for group in groups.values():
        columns = torch.tensor([place for place, _ in group])
        norms = torch.stack(torch._foreach_norm([grad for _, grad in group], norm_type))
        table[0, columns] = norms.to("cpu", torch.float64)
        table[1, columns] = 1.0 + _REAL.index(norms.dtype)
    return table


def _of_all_rows(
    norms: torch.Tensor, divided: torch.Tensor, peers: Network, norm_type: float
) -> torch.Tensor:
    """Norms of which some are of this replica's rows alone, as those of all rows."""
    found = torch.stack(peers.gathered(norms, "the norms of the rows of gradients"))
    values = torch.linalg.vector_norm(found[:, 0], norm_type, dim=0)
    return torch.where(divided, torch.stack([values, found[:, 1].amax(0)]), norms)


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


def refuse_transforms() -> None:
    """UsageError within what the threads and processes of a pipeline know nothing of."""
    if torch.compiler.is_compiling():
        raise UsageError(
            "torch.compile cannot follow a call of a pipeline into its threads and processes",
            hint="Pipeline(compile_blocks=True) compiles the layers of its stages",
        )
    inside = torch._C._functorch.peek_interpreter_stack() is not None
    if inside or torch.autograd.forward_ad._current_level >= 0:
        raise UsageError(
            "a transform of torch.func, or derivatives in forward mode, around a pipeline do not "
            "reach its stages",
            hint="transform the plain model; step gives inputs that require gradients theirs",
        )


# --- hooks of gradients ---------------------------------------------------------------------


def _hooks(parameter: nn.Parameter) -> list[dict[int, Any]]:
    """The tables of a parameter's hooks that hold any."""
    after = parameter._post_accumulate_grad_hooks
    return [hooks for hooks in (parameter._backward_hooks, after) if hooks]


@contextlib.contextmanager
def hooks_once(
    parameters: Sequence[nn.Parameter], reducer: Reducer | None, *, deferred: bool
) -> Iterator[None]:
    """Around a step: hooks of parameters are called for the mini-batch's gradient, and not for that
    of every micro-batch.

    Args:
        deferred: whether they are left to `backward()` of the loss.

    Raises:
        UsageError: where the gradient of the mini-batch is not made in this step.
    """
    hooked = [parameter for parameter in parameters if _hooks(parameter)]
    if hooked and reducer is not None:
        earlier = reducer.left and any(parameter.grad is not None for parameter in hooked)
        if reducer.paused or earlier:
            raise UsageError(
                "hooks of gradients take the mean over replicas, which no_sync() puts off",
                hint="leave out no_sync(), or the hooks",
            )
    tables = [(hooks, dict(hooks)) for parameter in hooked for hooks in _hooks(parameter)]
    before = [parameter.grad for parameter in hooked]
    for parameter in hooked:
        parameter.grad = None
    for hooks, _ in tables:
        hooks.clear()
    made: Sequence[torch.Tensor | None] = ()
    try:
        yield
        made = [parameter.grad for parameter in hooked]
    finally:
        for hooks, held in tables:
            hooks.update(held)
        for parameter, gradient in zip(hooked, before, strict=True):
            parameter.grad = gradient
    for parameter, gradient in zip(hooked, made, strict=True):
        if gradient is not None and not deferred:
            torch.autograd.backward([parameter], [gradient])
        elif gradient is not None:
            parameter.grad = gradient


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
    held = {parameter: gradient for parameter, gradient in made if gradient is not None}
    anchor = torch.zeros((), requires_grad=True)  # where nothing has a gradient
    result: torch.Tensor = _Loss.apply(  # type: ignore[no-untyped-call]  # torch
        anchor, loss, [*held.values()], *held
    )
    return result


class _Loss(torch.autograd.Function):
    """A loss whose gradients are there already: autograd takes them where it takes any others."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        loss: torch.Tensor,
        gradients: list[torch.Tensor],
        *parameters: nn.Parameter,
    ) -> torch.Tensor:
        ctx.held = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *factors: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients, times the gradient of the loss."""
        if ctx.held is None:
            raise UsageError("backward() of a loss of a pipeline can be called once")
        gradients, ctx.held = ctx.held, None
        with torch.no_grad():
            for gradient in gradients:
                gradient.mul_(factors[0].to(gradient.device))
        return None, None, None, *gradients
