"""The stages of a process, and their state under the model's own names."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from ..errors import UsageError
from ..spec import PipelineSpec
from .shards import is_divided, local, own_rows

T = TypeVar("T")

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

    def spread(self) -> None:
        """Bring the other owners up to date, which are trained where the canonical one is."""
        for owner in self.owners[1:]:
            owner.requires_grad_(self.canonical.requires_grad)
            bring_up_to_date(owner, self.canonical)

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
            gradient = gradient.to(self.canonical.device)
            total = gradient if total is None else summed(total, gradient)
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
            sparse = self.earlier.is_sparse
            self.canonical.grad = total + self.earlier if sparse else self.earlier.add_(total)
        self.earlier = self.total = None


def summed(gradient: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The sum of two gradients: torch adds sparse ones to dense ones, and not the other way."""
    return other + gradient if gradient.is_sparse else gradient + other


def bring_up_to_date(copy: torch.Tensor, tensor: torch.Tensor) -> None:
    """Let a copy lie where a tensor does, or on another device have its numbers.

    Always: what writes to or assigns `tensor.data` leaves no trace of it.
    """
    if copy.device != tensor.device:
        with torch.no_grad():
            copy.copy_(tensor)
    elif _place(copy) != _place(tensor):
        copy.data = tensor.data


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def owners_of(spec: PipelineSpec) -> dict[str, tuple[int, ...]]:
    """The stages that hold each state of the model that more than one of them holds."""
    owners: dict[str, list[int]] = {}
    for index, stage in enumerate(spec.stages):
        for name in dict.fromkeys(stage.state.values()):
            owners.setdefault(name, []).append(index)
    return {name: tuple(stages) for name, stages in owners.items() if len(stages) > 1}


def trainable_shared(spec: PipelineSpec) -> dict[str, tuple[int, ...]]:
    """The shared parameters that may be trained, with the stages that own them.

    Also those that are frozen so far.
    """
    several = owners_of(spec).items()
    return {name: owners for name, owners in several if name in spec.stages[owners[0]].trainable}


class LocalStages:
    """The stages of a process.

    Attributes:
        shared: parameters that several stages own, at least one of them here.
        frozen: of each stage, the parameters that were not trained as it was compiled.
    """

    def __init__(self, spec: PipelineSpec, modules: Mapping[int, nn.Module]) -> None:
        self.spec = spec
        self.modules = modules
        owners: dict[str, list[nn.Parameter]] = {}
        for name, parameter in self._named(nn.Module.named_parameters):
            owners.setdefault(name, []).append(parameter)
        self.shared = tuple(
            SharedParameter(name, owners[name]) for name in trainable_shared(spec) if name in owners
        )
        self.frozen: dict[int, list[nn.Parameter]] = {}
        for index, module in modules.items():
            stage, trained = spec.stages[index], spec.stages[index].trained
            held = module.named_parameters()
            self.frozen[index] = [x for own, x in held if stage.named(own) not in trained]
        first = {**self.buffers(), **self.parameters()}
        summed = {item.name for item in self.shared}
        several = itertools.chain(
            self._named(nn.Module.named_buffers), self._named(nn.Module.named_parameters)
        )
        self._copies = [
            (tensor, first[name])
            for name, tensor in several
            if tensor is not first[name] and name not in summed
        ]
        self.spread()

    def spread(self) -> None:
        """Before a call: what several stages hold is what its first holder has."""
        for item in self.shared:
            item.spread()
        for copy, tensor in self._copies:
            bring_up_to_date(copy, tensor)

    def unfrozen(self) -> tuple[int, ...]:
        """The stages here with a parameter that is trained, but was not as they were compiled."""
        held = self.frozen.items()
        return tuple(index for index, own in held if any(item.requires_grad for item in own))

    def _named(
        self, held: Callable[[nn.Module], Iterable[tuple[str, T]]]
    ) -> Iterator[tuple[str, T]]:
        """What every stage holds, stage by stage, under the model's own names."""
        for index in sorted(self.modules):
            for own, item in held(self.modules[index]):
                yield self.spec.stages[index].named(own), item

    def _first(self, held: Callable[[nn.Module], Iterable[tuple[str, T]]]) -> dict[str, T]:
        """The same, each name once: of the first stage that has it."""
        found: dict[str, T] = {}
        for name, item in self._named(held):
            found.setdefault(name, item)
        return found

    @property
    def copies(self) -> frozenset[int]:
        """The identities of the parameters that are not the first of their name."""
        return frozenset(id(owner) for item in self.shared for owner in item.owners[1:])

    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters by the model's names, each once."""
        return self._first(nn.Module.named_parameters)

    def unshared(self) -> dict[int, tuple[nn.Parameter, ...]]:
        """The parameters of each stage that no other stage owns, by the stage's number."""
        owned = {id(owner) for item in self.shared for owner in item.owners}
        return {
            index: tuple(x for x in module.parameters() if id(x) not in owned)
            for index, module in self.modules.items()
        }

    def buffers(self) -> dict[str, torch.Tensor]:
        """The buffers by the model's names, each once."""
        return self._first(nn.Module.named_buffers)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by the model's names, each once, module by module."""
        return self._first(_held)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """As the model's own `state_dict` would name it, tied names included."""
        state = self._first(_state_of)
        aliases = self.spec.aliases.items()
        return state | {alias: state[name] for alias, name in aliases if name in state}

    def load_state_dict(
        self, state: Mapping[str, torch.Tensor], *, strict: bool
    ) -> _IncompatibleKeys:
        """Copy tensors in.

        Returns:
            what is missing and what is unknown, where that is accepted.

        Raises:
            UsageError: naming what is missing, unknown, or of another shape; nothing is copied.
        """
        spec = self.spec
        given: dict[str, dict[str, torch.Tensor]] = {}
        # Of several names of a tensor the model's last one counts, in whatever order they come.
        for own in (*(n for n in state if n not in spec.aliases), *spec.aliases):
            if own in state:
                given.setdefault(spec.aliases.get(own, own), {})[own] = state[own]
        missing: dict[str, None] = {}
        problems, copies = [], []
        first: dict[str, torch.Tensor] = {}
        for name, tensor in self._named(_state_of):
            if is_divided(first.setdefault(name, tensor)) and tensor is not first[name]:
                continue  # it lies where the first one is gathered
            if name not in given:
                missing[name] = None
                continue
            for own, source in given[name].items():
                if source.shape != tensor.shape:
                    shapes = tuple(source.shape), tuple(tensor.shape)
                    problems.append(f"{own} has shape {shapes[0]}, not {shapes[1]}")
                else:
                    copies.append((tensor, source))
        known = {name for stage in spec.stages for name in stage.state.values()}
        unknown = [name for name in given if name not in known]
        if strict:
            problems.extend(f"{name} is missing" for name in missing)
            problems.extend(f"{name} is unknown" for name in unknown)
        if problems:
            listing = "; ".join(dict.fromkeys(problems))
            raise UsageError(f"these weights do not fit {spec.name}: {listing}")
        with torch.no_grad():
            for target, source in copies:
                local(target).copy_(own_rows(source, target))
        return _IncompatibleKeys(list(missing), unknown)


def _held(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What modules hold, each module's own parameters before its buffers."""
    for path, part in module.named_modules():
        yield from part.named_parameters(path, recurse=False)
        yield from part.named_buffers(path, recurse=False)


def _state_of(module: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    return module.state_dict().items()
