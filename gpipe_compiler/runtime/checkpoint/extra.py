"""States of objects of the user's, such as averages of the weights, in a checkpoint.

Tensors are written by every rank that has them, under `state.<object>.<name>`, one that several
have by the first of these; what is no tensor is rank 0's, and lies in `trainer.pt`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from ..core.shards import divided_as, is_divided
from ..errors import CheckpointError
from ..wording import some
from .files import Stored
from .progress import Stateful

States: TypeAlias = Mapping[str, Stateful]
"""The user's objects by name."""

KEY = "state"
"""Before the names of their tensors."""

TRAINER_KEY = "states"
"""In `trainer.pt`, the rest of each state."""


def tensors_in(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """The tensors of a state, in dicts as they lie in it; those in lists are none of them."""
    found: dict[Any, Any] = {}
    for key, item in state.items():
        if isinstance(item, torch.Tensor):
            found[key] = item
        elif isinstance(item, Mapping) and (inner := tensors_in(item)):
            found[key] = inner
    return found


def rest_of(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """A state without these tensors, in plain dicts."""
    return {
        key: rest_of(item) if isinstance(item, Mapping) else item
        for key, item in state.items()
        if not isinstance(item, torch.Tensor)
    }


def kinds_of(states: States) -> dict[str, str]:
    """The class of each object, by what its tensors are under."""
    return {f"{KEY}.{name}": type(item).__name__ for name, item in states.items()}


def read_states(
    stored: Stored, trainer: Mapping[str, Any], states: States
) -> tuple[list[tuple[Stateful, dict[str, Any]]], frozenset[str]]:
    """What each object is to take over on this rank, and the keys of tensors that are read for it.

    Raises:
        CheckpointError: when the checkpoint holds no such object, or not a tensor that it has.
    """
    found, taken = [], set[str]()
    rests, kinds = trainer.get(TRAINER_KEY, {}), stored.index.kinds
    for name, part in states.items():
        kind = kinds.get(f"{KEY}.{name}")
        if kind is None:
            raise CheckpointError(
                f"the checkpoint holds no state of {name}",
                hint="load it without that to let it begin anew",
            )
        if kind != type(part).__name__:
            raise CheckpointError(f"its {name} is {kind}, this one is {type(part).__name__}")
        now = part.state_dict()
        paths = {f"{KEY}.{name}.{'.'.join(map(str, p))}": p for p in _paths(now)}
        known = {f"{KEY}.{name}.{key}" for key in stored.keys(f"{KEY}.{name}.")}
        if missing := sorted(paths.keys() - known):
            raise CheckpointError(f"{stored.folder} does not hold {some(missing)}")
        taken |= paths.keys()
        found.append((part, _joined(rests[name], paths, _divided(stored.read(paths), paths, now))))
    return found, frozenset(taken)


def check_taken(keys: frozenset[str], states: frozenset[str], taken: frozenset[str]) -> None:
    """Whether every tensor of these objects is taken over by a rank.

    Raises:
        CheckpointError: naming one that no rank has.
    """
    own = {key for key in keys if any(key.startswith(f"{KEY}.{name}.") for name in states)}
    if left := sorted(own - taken):
        raise CheckpointError(
            f"the checkpoint holds {some(left)}, which is not there to be taken over",
            hint="an object takes over the tensors that its state_dict() has already",
        )


def whole_states(stored: Stored, trainer: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The states of all objects, each in one piece.

    A number that a tensor lies under directly, in a dict, is a word here.
    """
    found = {}
    for name, rest in trainer.get(TRAINER_KEY, {}).items():
        keys = [f"{KEY}.{name}.{key}" for key in stored.keys(f"{KEY}.{name}.")]
        way = stored.metadata.planner_data or {}
        paths = {key: tuple(way[key][2:]) for key in keys}
        found[name] = _joined(rest, paths, stored.read(keys))
    return found


def _paths(state: Mapping[Any, Any]) -> Iterator[tuple[Any, ...]]:
    for key, item in tensors_in(state).items():
        if isinstance(item, torch.Tensor):
            yield (key,)
        else:
            yield from ((key, *path) for path in _paths(item))


def _divided(
    tensors: Mapping[str, Any], paths: Mapping[str, Sequence[Any]], now: Mapping[Any, Any]
) -> dict[str, Any]:
    """Tensors that were read, of which some are to be divided among replicas as they are now."""
    found = dict(tensors)
    for key, path in paths.items():
        like: Any = now
        for step in path:
            like = like[step]
        if is_divided(like) and like.shape == tensors[key].shape:
            found[key] = divided_as(tensors[key], like)
    return found


def _joined(
    rest: Mapping[Any, Any], paths: Mapping[str, Sequence[Any]], tensors: Mapping[str, Any]
) -> dict[Any, Any]:
    whole = rest_of(rest)  # dicts of its own
    for key, (*way, last) in paths.items():
        inner = whole
        for part in way:
            known = next((key for key in inner if str(key) == str(part)), part)
            inner = inner.setdefault(known, {})
        inner[last] = tensors[key]
    return whole
