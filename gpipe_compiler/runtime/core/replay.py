"""Replays how the code of a model that was built without memory would have filled its tensors.

A tensor's steps are tuples `(op, *arguments)`: in-place methods of the tensor itself, in order,
as `("normal_", 0.0, 0.02)`. `("at", (0,), "zero_")` does a step on a part: integers and (start,
stop) pairs, one a dimension. `("seed", "wte.weight")` draws what that tensor draws. Where a step
names other tensors, `"%2"` is the result of step 2 (`"%2.1"` the second of several) and `"self"`
the tensor itself; such ops are those of torch.ops.aten, `("dtype=", torch.float32)` is a keyword.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..spec import Steps

_SELF = "self"
_OF_INIT = frozenset({"trunc_normal_", "orthogonal_", "sparse_", "dirac_", "eye_"})
"""Steps that torch.nn.init has, and a tensor has not."""


def replay(tensor: torch.Tensor, name: str, steps: Steps, seed: int) -> None:
    """Fill a tensor by its steps.

    What is drawn depends on `seed`, the tensor's name in the model and the kind of device, not on
    which stage or process draws it. The state of the global generators is used up: callers fork.
    """
    torch.manual_seed(seed_of(name, seed))
    results: list[Any] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # an orthogonal matrix is rounded by how many compute it
    try:
        with torch.no_grad():
            for step in steps:
                results.append(_do(tensor, step, results, seed))
    finally:
        torch.set_num_threads(threads)


def seed_of(name: str, seed: int) -> int:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _do(tensor: torch.Tensor, step: Sequence[Any], results: Sequence[Any], seed: int) -> Any:
    op, *arguments = step
    if op == "seed":
        torch.manual_seed(seed_of(arguments[0], seed))
        return None
    if op == "at":
        index, inner, *rest = arguments
        return _op(inner)(_part(tensor, index), *rest)
    if op == "tensor":
        values, dtype = arguments
        return torch.tensor(values, dtype=dtype, device=tensor.device)
    given, options, tensors = [], {}, 0
    for argument in arguments:
        if _is_option(argument):
            options[argument[0][:-1]] = argument[1]
        else:
            value = _value(argument, tensor, results)
            tensors += value is not argument
            given.append(value)
    if tensors:
        return _op(op)(*given, **options)
    if op.endswith("_"):
        return _op(op)(tensor, *given, **options)
    return _op(op)(*given, **options, device=tensor.device)


def _part(tensor: torch.Tensor, index: Sequence[Any]) -> torch.Tensor:
    return tensor[tuple(slice(*item) if isinstance(item, tuple) else item for item in index)]


def _op(name: str) -> Callable[..., Any]:
    home: Any = nn.init if name in _OF_INIT else torch.ops.aten
    return getattr(home, name)  # type: ignore[no-any-return]  # functions of torch


def _is_option(argument: object) -> bool:
    return (
        isinstance(argument, tuple)
        and len(argument) == 2
        and isinstance(argument[0], str)
        and argument[0].endswith("=")
    )


def _value(argument: Any, tensor: torch.Tensor, results: Sequence[Any]) -> Any:
    """An argument with the tensors that it names in their places; itself where it names none."""
    if isinstance(argument, str):
        if argument == _SELF:
            return tensor
        if argument.startswith("%"):
            number, _, item = argument[1:].partition(".")
            result = results[int(number)]
            return result[int(item)] if item else result
    if isinstance(argument, tuple):
        values = tuple(_value(item, tensor, results) for item in argument)
        changed = any(new is not old for new, old in zip(values, argument, strict=True))
        return list(values) if changed else argument
    return argument
