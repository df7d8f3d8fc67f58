"""What a process holds of the model: its stages, and their state under the model's own names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from ..spec import PipelineSpec
from .shared import alias_buffers, canonical_first, shared_parameters
from .state import copy_into, named_tensors


class HeldStages:
    """The stages of a process.

    Attributes:
        modules: by the stage's number.
        shared: parameters that several stages own, at least one of them here.
    """

    def __init__(self, spec: PipelineSpec, modules: Mapping[int, nn.Module]) -> None:
        self.spec = spec
        self.modules = modules
        self.shared = shared_parameters(spec, modules)
        alias_buffers(spec, modules)
        self._no_parameter = nn.Parameter(torch.empty(0))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters under the model's own names, each once."""
        hidden = canonical_first(self.shared)
        seen: set[str] = set()
        for index, module in self.modules.items():
            names = self.spec.stages[index].renamed
            for own, parameter in module.named_parameters():
                name = names.get(own, own)
                if id(parameter) not in hidden and name not in seen:
                    seen.add(name)
                    yield name, parameter

    def unshared(self) -> dict[int, tuple[nn.Parameter, ...]]:
        """The parameters of each stage that no other stage owns, by the stage's number."""
        owned = {id(owner) for item in self.shared for owner in item.owners}
        return {
            index: tuple(x for x in module.parameters() if id(x) not in owned)
            for index, module in self.modules.items()
        }

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters, each once, and an empty one besides where none is trained."""
        found = [parameter for _, parameter in self.named_parameters()]
        if not any(parameter.requires_grad for parameter in found):
            found.append(self._no_parameter)
        return iter(found)

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The buffers under the model's own names, each once."""
        seen: set[str] = set()
        for index, module in self.modules.items():
            names = self.spec.stages[index].renamed
            for own, buffer in module.named_buffers():
                name = names.get(own, own)
                if name not in seen:
                    seen.add(name)
                    yield name, buffer

    def state_dict(self) -> dict[str, torch.Tensor]:
        """As the model's own `state_dict` would name it, tied names included."""
        return named_tensors(self.spec, self.modules)

    def load_state_dict(self, state: Mapping[str, torch.Tensor], *, strict: bool) -> None:
        """Copy tensors in.

        Raises:
            UsageError: naming what is missing, unknown, or of another shape; nothing is copied.
        """
        copy_into(self.spec, self.modules, state, strict=strict)
