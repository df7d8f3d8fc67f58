"""The state of a pipeline under the model's own names."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ..errors import UsageError
from ..spec import PipelineSpec


def named_tensors(spec: PipelineSpec, modules: Mapping[int, nn.Module]) -> dict[str, torch.Tensor]:
    """What `state_dict()` of the model would hold of these stages, tied names included."""
    state: dict[str, torch.Tensor] = {}
    for index, module in modules.items():
        names = spec.stages[index].renamed
        for own, tensor in module.state_dict().items():
            state.setdefault(names.get(own, own), tensor)
    for alias, name in spec.aliases.items():
        if name in state:
            state[alias] = state[name]
    return state


def copy_into(
    spec: PipelineSpec,
    modules: Mapping[int, nn.Module],
    state: Mapping[str, torch.Tensor],
    *,
    strict: bool,
) -> None:
    """Copy tensors into the stages that hold them.

    Raises:
        UsageError: naming what is missing, unknown, or of another shape; nothing is copied then.
    """
    canonical = {spec.aliases.get(name, name): tensor for name, tensor in state.items()}
    problems = []
    copies = []
    for index, module in modules.items():
        names = spec.stages[index].renamed
        for own, tensor in module.state_dict().items():
            name = names.get(own, own)
            if name not in canonical:
                problems.append(f"{name} is missing")
            elif canonical[name].shape != tensor.shape:
                problems.append(
                    f"{name} has shape {tuple(canonical[name].shape)}, not {tuple(tensor.shape)}"
                )
            else:
                copies.append((tensor, canonical[name]))
    known = {name for stage in spec.stages for name in stage.state.values()}
    problems.extend(f"{name} is unknown" for name in canonical if name not in known)
    wrong = problems if strict else [text for text in problems if "shape" in text]
    if wrong:
        listing = "; ".join(dict.fromkeys(wrong))
        raise UsageError(f"these weights do not fit {spec.name}: {listing}")
    with torch.no_grad():
        for target, source in copies:
            target.copy_(source)
