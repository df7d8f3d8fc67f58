"""A pipeline as a module of torch, for what takes models: averages of weights, training loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Self

import torch
from torch import nn

from ..errors import UsageError
from .local_stages import LocalStages
from .loss_weights import LossWeigher


class ModelNames(nn.Module):
    """A module with the parameters and buffers that a process holds, under the model's own names.

    Its submodules hold these and nothing else: layers are in the stages. What is assigned to it is
    a plain attribute, whatever the model calls its parts.
    """

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def hold(self, stages: LocalStages, weigher: LossWeigher) -> None:
        """Take the tensors of these stages for its own, and nothing else that it held before.

        Args:
            weigher: takes over what a loaded state says of its own.
        """

        def load(_: nn.Module, state: Mapping[str, torch.Tensor], prefix: str, *__: object) -> None:
            items = state.items()
            weigher.load({k.removeprefix(prefix): x for k, x in items if k.startswith(prefix)})

        vars(self).update(vars(_tree_of(stages)))
        self.register_load_state_dict_pre_hook(load)  # type: ignore[no-untyped-call]  # torch
        self._no_parameter = nn.Parameter(torch.empty(0))

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The parameters held here, each once: what an optimizer is made of.

        A process whose stages train none gives an empty one besides, for torch's optimizers.
        """
        found = list(super().parameters(recurse))
        if not any(parameter.requires_grad for parameter in found):
            found.append(self._no_parameter)
        return iter(found)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """What `to`, `cuda`, `half` and the like call: refused, unless nothing changes by it."""
        held = [*super().parameters(recurse), *self.buffers(recurse)]
        for device, dtype in dict.fromkeys((tensor.device, tensor.dtype) for tensor in held):
            made = fn(torch.empty(0, device=device, dtype=dtype))
            if (made.device, made.dtype) != (device, dtype):
                raise UsageError(
                    f"weights of a pipeline that are {dtype} on {device} stay so: that is where "
                    "their stage computes",
                    hint="say where and how when it is made: Pipeline(devices=..., precision=...)",
                )
        return self


def _tree_of(stages: LocalStages) -> nn.Module:
    """Modules within modules, as the model's names say, around the tensors of these stages."""
    tree, state = nn.Module(), stages.state_dict()
    held: dict[str, torch.Tensor] = {**stages.parameters(), **stages.buffers()}
    aliases = {alias: held[name] for alias, name in stages.spec.aliases.items() if name in held}
    for name, tensor in (held | aliases).items():
        *path, own = name.split(".")
        holder = tree
        for part in path:
            if part not in dict(holder.named_children()):
                holder.add_module(part, nn.Module())
            holder = holder.get_submodule(part)
        if isinstance(tensor, nn.Parameter):
            holder.register_parameter(own, tensor)
        else:
            holder.register_buffer(own, tensor, persistent=name in state)
    return tree
