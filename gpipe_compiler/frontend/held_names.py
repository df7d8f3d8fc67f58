"""What the user's functions call the tensors that they compute with."""

from __future__ import annotations

import dataclasses
import dis
import functools
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from gpipe_compiler.frontend.locate import frames_running, is_users
from gpipe_compiler.ir.ops import Bound


class HeldName(NamedTuple):
    """A tensor that a function holds; the other attributes are those of `ir.ops.SeenName`."""

    scope: int | str
    name: str
    path: tuple[int | str, ...]
    bound: Bound
    tensor: torch.Tensor


def names_here(users: Sequence[str]) -> Iterator[HeldName]:
    """The tensors that the functions around hold, the innermost function first.

    Args:
        users: the paths of the user's modules whose `forward`s run, the outermost first.
    """
    running = frames_running(sys._getframe(1))
    frames = [frame for frame in running if is_users(frame.f_code.co_filename)]
    if sum(frame.f_code.co_name == "forward" for frame in frames) != len(users):
        return
    paths = iter(reversed(users))
    for frame in frames:
        name = frame.f_code.co_name
        scope = next(paths).count(".") + 1 if name == "forward" else name
        for own, path, bound, tensor in _held(frame):
            yield HeldName(scope, own, path, bound, tensor)


_Path = tuple[int | str, ...]


def _held(frame: FrameType) -> Iterator[tuple[str, _Path, Bound, torch.Tensor]]:
    code, held = frame.f_code, frame.f_locals
    again = _bound_again(code)
    count = code.co_argcount + code.co_kwonlyargcount
    parameters, own = code.co_varnames[:count], code.co_varnames[count:]
    for name in parameters:
        bound = Bound.PARAMETER if frame.f_lasti < again.get(name, sys.maxsize) else Bound.PERHAPS
        yield from ((name, path, bound, tensor) for path, tensor in _tensors(held.get(name)))
    if code.co_flags & inspect.CO_VARKEYWORDS:
        by_keyword = held.get(own[bool(code.co_flags & inspect.CO_VARARGS)], {})
        for name, value in by_keyword.items():
            yield from ((name, path, Bound.PARAMETER, tensor) for path, tensor in _tensors(value))
    for name in dict.fromkeys((*own, *code.co_cellvars, *code.co_freevars)):
        value = held.get(name)
        if name not in parameters and isinstance(value, torch.Tensor):
            yield name, (), Bound.STATEMENT, value


@functools.cache
def _bound_again(code: CodeType) -> Mapping[str, int]:
    """Where in its bytecode a function first gives its names other values."""
    found: dict[str, int] = {}
    for step in dis.get_instructions(code):
        if step.opname.startswith("STORE_"):
            for name in step.argval if isinstance(step.argval, tuple) else (step.argval,):
                found.setdefault(name, step.offset)
    return found


_MANY = 100
"""Items of a list that is data: nothing is called by its place among so many."""


def _tensors(
    value: Any, path: _Path = (), around: tuple[int, ...] = ()
) -> Iterator[tuple[_Path, torch.Tensor]]:
    """The tensors in an argument, each with where in it it is.

    Args:
        around: the `id`s of what the value stands in, where it may stand again.
    """
    items: Any = ()
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        items = dict.items(value)
    elif isinstance(value, tuple):
        items = zip(getattr(type(value), "_fields", range(len(value))), value, strict=False)
    elif isinstance(value, list):
        items = enumerate(value)
    elif dataclasses.is_dataclass(value) and hasattr(value, "__dict__"):
        items = vars(value).items()
    if id(value) in around or (isinstance(value, dict | tuple | list) and len(value) > _MANY):
        return
    for key, item in items:
        yield from _tensors(item, (*path, key), (*around, id(value)))
