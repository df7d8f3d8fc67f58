"""The module of a stage, with weights that are read, or as in a new model."""

from __future__ import annotations

import torch
from torch import nn

from ..errors import WeightsError
from ..spec import StageSpec
from ..wording import listed
from .replay import replay, seed_of
from .stored_weights import Weights

_SHOWN = 5
"""Names of tensors in a message."""


def build_stage(
    spec: StageSpec, weights: Weights | None, device: torch.device, seed: int
) -> nn.Module:
    """A stage's module on its device, with its weights.

    Without weights, a tensor begins on the device as `spec.initial` says, and so does a buffer that
    the weights do not hold. What that leaves out is initialised by the rule of its module, and a
    parameter of no such module is drawn from normal(0, 0.02); a vector is ones when its name ends
    in `weight`, zeros otherwise. What is drawn depends on `seed` and on names in the model: the
    same for any number of stages.

    Raises:
        WeightsError: when weights are given and do not hold a parameter of the stage, or hold one
            of another shape.
    """
    if weights is None:
        return _initialised(spec, device, seed)
    module = _without_memory(spec)
    parameters = list(module.named_parameters(remove_duplicate=False))
    buffers = list(module.named_buffers(remove_duplicate=False))
    like = {spec.named(own): tensor for own, tensor in (*parameters, *buffers)}
    stored = weights.load(like, device)
    trained = {spec.named(own) for own, _ in parameters}
    _refuse_missing(weights, sorted(trained - stored.keys() - weights.anew))
    left = [name for name in like if name not in stored]
    if all(spec.beginning(name) is not None for name in left):
        with torch.random.fork_rng(devices=_generators(device)):
            stored |= {name: _anew(spec, name, like[name], device, seed) for name in left}
    elif left:
        # Something is computed by the constructor: let it.
        with torch.random.fork_rng(devices=_generators(device)), torch.device(device):
            module = spec.module()
    new: dict[str, torch.Tensor] = {}  # what two modules of a stage share is one tensor again
    for own, parameter in parameters:
        name = spec.named(own)
        if name not in stored:
            continue  # the constructor has made it
        if name not in new:
            new[name] = nn.Parameter(stored[name], requires_grad=parameter.requires_grad)
        put(module, own, new[name])
    for own, _ in buffers:
        if spec.named(own) in stored:
            put(module, own, stored[spec.named(own)])
    return module


def _without_memory(spec: StageSpec) -> nn.Module:
    with torch.device("meta"):
        return spec.module()


def _refuse_missing(weights: Weights, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise WeightsError(
            f"the weights in {weights.directory} do not hold "
            f"{', '.join(names[:_SHOWN]) if more else listed(names)}{more}"
        )


def _anew(
    spec: StageSpec, name: str, like: torch.Tensor, device: torch.device, seed: int
) -> torch.Tensor:
    """A tensor as in a new model."""
    memory = torch.empty_like(like, device=device, requires_grad=False)
    replay(memory, name, spec.beginning(name) or (), seed)
    return memory


def put(module: nn.Module, own: str, tensor: torch.Tensor) -> None:
    """Let a tensor take the place of the module's parameter or buffer of this name."""
    path, _, attribute = own.rpartition(".")
    holder = submodule(module, path)
    if isinstance(tensor, nn.Parameter):
        setattr(holder, attribute, tensor)  # a recurrent module takes note of it, too
    else:
        holder._buffers[attribute] = tensor


def submodule(module: nn.Module, path: str) -> nn.Module:
    """The module at a path, also where a method of the one around it has the same name."""
    for name in path.split(".") if path else ():
        module = module._modules[name]  # type: ignore[assignment]  # there is one
    return module


def _initialised(spec: StageSpec, device: torch.device, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=_generators(device)):
        module = _unfilled(spec, device, seed)
        seen: set[int] = set()
        for own, tensor in (*module.named_parameters(), *module.named_buffers()):
            name = spec.named(own)
            steps = spec.beginning(name)
            if steps is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                replay(tensor, name, steps, seed)
    first_of: dict[str, nn.Parameter] = {}  # what the stage names twice is one tensor
    for own, parameter in list(module.named_parameters(remove_duplicate=False)):
        name = spec.named(own)
        put(module, own, first_of.setdefault(name, parameter))
    return module


def _unfilled(spec: StageSpec, device: torch.device, seed: int) -> nn.Module:
    """The stage on its device; what `spec.initial` leaves out has its first numbers already."""
    module = _without_memory(spec)
    parameters = list(module.named_parameters(remove_duplicate=False))
    buffers = list(module.named_buffers(remove_duplicate=False))
    names = [spec.named(own) for own, _ in (*parameters, *buffers)]
    if all(spec.beginning(name) is not None for name in names):
        # Nothing is computed by the constructor: memory is all that is missing.
        new: dict[int, torch.Tensor] = {}
        for own, tensor in (*parameters, *buffers):
            if id(tensor) not in new:
                memory = torch.empty_like(tensor, device=device, requires_grad=False)
                if isinstance(tensor, nn.Parameter):
                    memory = nn.Parameter(memory, requires_grad=tensor.requires_grad)
                new[id(tensor)] = memory
            put(module, own, new[id(tensor)])
        return module
    with torch.device(device):
        module = spec.module()
    # Children first: a parent such as MultiheadAttention has the last word on their biases.
    for path, holder in reversed(list(module.named_modules())):
        own_names = [
            name
            for name, tensor in (*holder._parameters.items(), *holder._buffers.items())
            if tensor is not None
        ]
        if own_names:
            first = f"{path}.{own_names[0]}" if path else own_names[0]
            torch.manual_seed(seed_of(spec.named(first), seed))
            _reset(holder, path, spec, seed)
    return module


def _reset(holder: nn.Module, path: str, spec: StageSpec, seed: int) -> None:
    for rule in ("reset_parameters", "_reset_parameters"):
        reset = getattr(holder, rule, None)
        if callable(reset):
            reset()
            return
    for own, parameter in holder._parameters.items():
        if parameter is None or not parameter.is_floating_point():
            continue
        name = spec.named(f"{path}.{own}" if path else own)
        torch.manual_seed(seed_of(name, seed))
        with torch.no_grad():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02)
            else:
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)


def _generators(device: torch.device) -> list[int]:
    if device.type != "cuda":
        return []
    return [torch.cuda.current_device() if device.index is None else device.index]
