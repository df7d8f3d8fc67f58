"""The state of an optimizer by the names of parameters, as torch.distributed.checkpoint has it.

That is `{"state": {name: {"exp_avg": ...}}, "param_groups": [{"params": [name, ...], "lr": ...}]}`.
A process of a pipeline has an optimizer over its own parameters alone; group k of one process and
group k of another are parts of one group, if their hyper-parameters are equal.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from ..core.shards import divided_as, is_divided
from ..errors import CheckpointError
from ..wording import some
from .files import Stored

Groups: TypeAlias = list[dict[str, Any]]
Slots: TypeAlias = dict[str, dict[str, Any]]

LIVE_FLAGS = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""How an optimizer computes, not what: these stay as they are in the process."""

_OWN = frozenset({"params", "param_names"})

_DECOUPLED = "decoupled_weight_decay"  # what makes Adam into AdamW


class Naming:
    """The names of an optimizer's parameters.

    Args:
        parameters: all that are known, by name.
        nameless: parameters that may be among those of the optimizer and have no state.
    """

    def __init__(
        self, parameters: Iterable[tuple[str, nn.Parameter]], nameless: Iterable[nn.Parameter] = ()
    ) -> None:
        self.parameters = dict(parameters)
        self.names = {id(parameter): name for name, parameter in self.parameters.items()}
        self.nameless = {id(parameter) for parameter in nameless} - self.names.keys()

    def of_group(self, group: Mapping[str, Any]) -> list[str]:
        """The names of a group's parameters, without the nameless.

        Raises:
            CheckpointError: for a parameter that is not known.
        """
        found = []
        for parameter in group["params"]:
            if id(parameter) in self.nameless:
                continue
            if id(parameter) not in self.names:
                raise CheckpointError(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is none "
                    "of the pipeline's",
                    hint="make the optimizer of pipe.parameters()",
                )
            found.append(self.names[id(parameter)])
        return found


def named_groups(optimizer: torch.optim.Optimizer, naming: Naming) -> Groups:
    """The groups of an optimizer, with names for parameters.

    Raises:
        CheckpointError: for a hyper-parameter that is more than numbers and words.
    """
    found = []
    for group in optimizer.param_groups:
        for key, value in _hypers(group).items():
            if not _plain(value):
                raise CheckpointError(
                    f"{key} of {type(optimizer).__name__} cannot be stored: it is a "
                    f"{type(value).__name__}"
                )
        found.append({**_hypers(group), "params": naming.of_group(group)})
    return found


def named_states(optimizer: torch.optim.Optimizer, naming: Naming) -> Slots:
    """The state of every parameter that has one.

    Raises:
        CheckpointError: for an optimizer whose state is more than tensors and numbers.
    """
    found: Slots = {}
    for parameter, state in optimizer.state.items():
        name = naming.names.get(id(parameter))
        if name is None or not state:
            continue
        for key, value in state.items():
            if not _plain(value):
                raise CheckpointError(
                    f"the state of {type(optimizer).__name__} cannot be stored: {key} of {name} is "
                    f"a {type(value).__name__}"
                )
        found[name] = dict(state)
    return found


def merged(groups_by_rank: Sequence[Groups]) -> Groups:
    joined: Groups = []
    for groups in groups_by_rank:
        free = list(joined)
        for number, group in enumerate(groups):
            near = [other for other in joined[number : number + 1] if any(other is x for x in free)]
            partner = next((other for other in (*near, *free) if _alike(other, group)), None)
            if partner is None:
                joined.append({**group, "params": list(group["params"])})
                continue
            free = [other for other in free if other is not partner]
            known = set(partner["params"])
            partner["params"].extend(name for name in group["params"] if name not in known)
    return joined


def state_for(
    optimizer: torch.optim.Optimizer, naming: Naming, groups: Groups, states: Slots
) -> dict[str, Any]:
    """What `optimizer.load_state_dict` takes, from groups and states by name.

    Raises:
        CheckpointError: when they are those of an optimizer of other parameters, or in other
            groups.
    """
    owner = {name: group for group in groups for name in group["params"]}
    result: dict[str, Any] = {"state": {}, "param_groups": []}
    count = 0
    for number, group in enumerate(optimizer.param_groups):
        names = naming.of_group(group)
        missing = [name for name in names if name not in owner]
        if missing:
            raise CheckpointError(
                f"the checkpoint's optimizer does not train {some(missing)}, this one does"
            )
        sources = list({id(owner[name]): owner[name] for name in names}.values())
        saved = _one_of(sources or groups[number : number + 1] or groups[:1], number)
        kept = {key: value for key, value in group.items() if key not in _OWN}
        numbers = range(count, count + len(group["params"]))
        for index, parameter in zip(numbers, group["params"], strict=True):
            name = naming.names.get(id(parameter))
            if name in states:
                slots = states[name].items()
                result["state"][index] = {key: _laid(value, parameter) for key, value in slots}
        count += len(group["params"])
        result["param_groups"].append({**kept, **saved, "params": list(numbers)})
    return result


def stored_groups(stored: Stored, aliases: Mapping[str, str]) -> Groups:
    """The parameter groups of a checkpoint, with the first names of tied parameters.

    Raises:
        CheckpointError: when it holds something else in their place.
    """
    prefix = "optimizer.param_groups."
    values = stored.read(prefix + key for key in stored.keys(prefix))
    groups: dict[int, dict[str, Any]] = {}
    for key, value in values.items():
        number, _, hyper = key.removeprefix(prefix).partition(".")
        if not number.isdecimal() or not hyper:
            raise CheckpointError(
                f"{stored.folder} holds {key}, which is no group of an optimizer",
                hint="store the optimizer as get_optimizer_state_dict() of torch gives it",
            )
        groups.setdefault(int(number), {"params": []})[hyper] = value
    ordered = [groups[number] for number in sorted(groups)]
    for group in ordered:
        group["params"] = [aliases.get(name, name) for name in group["params"]]
    return ordered


def stored_states(stored: Stored, aliases: Mapping[str, str], names: Collection[str]) -> Slots:
    """The states of these parameters in a checkpoint."""
    prefix = "optimizer.state."
    places: dict[str, tuple[str, str]] = {}
    for key in stored.keys(prefix):
        name, _, slot = key.rpartition(".")
        name = aliases.get(name, name)
        if name in names:
            places[prefix + key] = name, slot
    states: Slots = {}
    for key, value in stored.read(places).items():
        name, slot = places[key]
        states.setdefault(name, {})[slot] = value
    return states


def check_kind(optimizer: torch.optim.Optimizer, groups: Groups, kind: str | None) -> None:
    """Refuse the state of another kind of optimizer.

    Args:
        kind: the class of the one that was stored, where known.

    Raises:
        CheckpointError: saying how they differ.
    """
    live = type(optimizer).__name__
    if not groups:
        raise CheckpointError(
            "the checkpoint holds no state of an optimizer",
            hint="load it without an optimizer to take over the weights alone",
        )
    if kind is not None:
        if kind != live:
            raise CheckpointError(f"the checkpoint's optimizer is {kind}, this one is {live}")
        return
    for name in sorted(optimizer.defaults.keys() - LIVE_FLAGS - _OWN):
        if any(name not in group for group in groups):
            raise CheckpointError(
                f"the checkpoint's optimizer is of another kind than {live}: it has no {name}"
            )
    if any(group.get(_DECOUPLED) != optimizer.defaults.get(_DECOUPLED) for group in groups):
        raise CheckpointError(
            f"the checkpoint's optimizer is of another kind than {live}: {_DECOUPLED} differs"
        )


def _one_of(sources: Groups, number: int) -> dict[str, Any]:
    """The hyper-parameters of several groups, which are to be the same."""
    for source in sources[1:]:
        if not _alike(source, sources[0]):
            raise CheckpointError(
                f"group {number} of the optimizer holds {sources[0]['params'][0]} and "
                f"{source['params'][0]}, which have different hyper-parameters in the checkpoint",
                hint="form the groups as the run that wrote it",
            )
    return {key: value for key, value in _hypers(sources[0]).items() if key not in LIVE_FLAGS}


def _laid(value: object, parameter: nn.Parameter) -> object:
    """A tensor of the parameter's shape, lying in memory as it does: fused steps want that."""
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return value
    if is_divided(parameter):
        return divided_as(value, parameter)
    if value.stride() == parameter.stride():
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def _plain(value: object) -> bool:
    """Whether a value is stored as one item, and read again without running code."""
    if isinstance(value, tuple | list):
        return all(_plain(part) and not isinstance(part, torch.Tensor) for part in value)
    return isinstance(value, torch.Tensor | int | float | str | None)


def _hypers(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _OWN}


def _alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    first, second = _hypers(one), _hypers(other)
    return first.keys() == second.keys() and all(
        _same(value, second[key]) for key, value in first.items() if key not in LIVE_FLAGS
    )


def _same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return bool(torch.as_tensor(one).cpu().equal(torch.as_tensor(other).cpu()))
    return one == other
