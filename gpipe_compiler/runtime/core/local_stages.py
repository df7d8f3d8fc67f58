"""The stages of a process, and their state under the model's own names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ..errors import UsageError
from ..spec import PipelineSpec

Exchange = Callable[[str, torch.Tensor], torch.Tensor]
"""Sums a gradient over the other ranks that own the parameter."""


@dataclass(slots=True)
class SharedParameter:
    """A parameter with all its owners in this process, in the order of their stages.

    Every stage has a Parameter of its own, so that the threads of two stages never add to one
    gradient at a time, and gradients are summed in a fixed order. On one device they lie in the
    same memory. The first is the canonical one: it alone is given out, and carries the gradient.
    """

    name: str
    owners: list[nn.Parameter]
    earlier: torch.Tensor | None = None
    total: torch.Tensor | None = field(default=None, repr=False)

    @property
    def canonical(self) -> nn.Parameter:
        """The one that the caller sees."""
        return self.owners[0]

    def alias(self) -> None:
        """Let owners on the same device lie in the same memory; give the others the same value."""
        for owner in self.owners[1:]:
            if owner.device == self.canonical.device:
                owner.data = self.canonical.data
        self.spread()

    def spread(self) -> None:
        """Bring copies on other devices up to date.

        Always: an optimizer that writes to `parameter.data` leaves no trace of it.
        """
        with torch.no_grad():
            for owner in self.owners[1:]:
                if owner.device != self.canonical.device:
                    owner.copy_(self.canonical)

    def begin(self) -> None:
        """Before a step: every owner collects the gradient of this step alone."""
        self.earlier = self.canonical.grad
        self.total = None
        for owner in self.owners:
            owner.grad = None

    def local_sum(self) -> torch.Tensor | None:
        """The gradient of this step summed over the owners here, in the order of stages."""
        total: torch.Tensor | None = None
        for owner in self.owners:
            gradient = owner.grad
            if gradient is None:
                continue
            if total is None:
                total = gradient.to(self.canonical.device)
            else:
                total = total + gradient.to(self.canonical.device)
            owner.grad = None
        return total

    def exchange(self, over_ranks: Exchange) -> None:
        """Sum over the ranks that own the parameter; no gradient where none of them has one."""
        gradient = self.local_sum()
        found = self.canonical.new_tensor([gradient is not None], dtype=torch.float32)
        if not over_ranks(f"{self.name} (whether there is one)", found):
            return
        if gradient is None:
            gradient = torch.zeros_like(self.canonical)
        elif gradient.is_sparse:
            gradient = gradient.to_dense()
        self.total = over_ranks(self.name, gradient)

    def finish(self) -> None:
        """After a step, also after one that failed: the sum joins what was there before."""
        total = self.total if self.total is not None else self.local_sum()
        if total is None:
            self.canonical.grad = self.earlier
        elif self.earlier is None:
            self.canonical.grad = total
        else:
            self.canonical.grad = self.earlier.add_(total)
        self.earlier = self.total = None


def owners_of(spec: PipelineSpec) -> dict[str, tuple[int, ...]]:
    """The stages that hold each state of the model that more than one of them holds."""
    owners: dict[str, list[int]] = {}
    for index, stage in enumerate(spec.stages):
        for name in dict.fromkeys(stage.state.values()):
            owners.setdefault(name, []).append(index)
    return {name: tuple(stages) for name, stages in owners.items() if len(stages) > 1}


def shared_parameters(
    spec: PipelineSpec, modules: Mapping[int, nn.Module]
) -> tuple[SharedParameter, ...]:
    """Those with more than one owner anywhere and at least one here, aliased."""
    found = []
    for name in owners_of(spec):
        owners = [
            parameter
            for index in sorted(modules)
            for own, parameter in modules[index].named_parameters()
            if spec.stages[index].renamed.get(own, own) == name
        ]
        if owners and owners[0].requires_grad:
            shared = SharedParameter(name, owners)
            shared.alias()
            found.append(shared)
    return tuple(found)


def trainable_shared(
    spec: PipelineSpec, kinds: Callable[[int], Mapping[str, bool]]
) -> dict[str, tuple[int, ...]]:
    """The shared states whose gradients are to be summed.

    Args:
        kinds: for a stage, its parameters by own name, with whether they need a gradient.
    """
    result = {}
    cache: dict[int, Mapping[str, bool]] = {}
    for name, stages in owners_of(spec).items():
        first = stages[0]
        if first not in cache:
            cache[first] = kinds(first)
        renamed = spec.stages[first].renamed
        if any(trained and renamed.get(own, own) == name for own, trained in cache[first].items()):
            result[name] = stages
    return result


def alias_buffers(spec: PipelineSpec, modules: Mapping[int, nn.Module]) -> None:
    """Let buffers that several stages of a device hold lie in the same memory."""
    names = owners_of(spec)
    first: dict[tuple[str, torch.device], torch.Tensor] = {}
    for index in sorted(modules):
        for own, buffer in modules[index].named_buffers():
            name = spec.stages[index].renamed.get(own, own)
            if name in names:
                first.setdefault((name, buffer.device), buffer)
                buffer.data = first[name, buffer.device].data


def canonical_first(shared: Sequence[SharedParameter]) -> frozenset[int]:
    """Identities of the owners that are not given out."""
    return frozenset(id(owner) for item in shared for owner in item.owners[1:])


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


class LocalStages:
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
