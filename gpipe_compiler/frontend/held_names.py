"""What the user's functions call the tensors that they compute with."""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple, cast

import torch

from gpipe_compiler.frontend.locate import frames_running, is_users
from gpipe_compiler.ir.contents import prefixes
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
        scope = len([*prefixes(next(paths))]) if name == "forward" else name
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
        by_keyword = held.get(own[bool(code.co_flags & inspect.CO_VARARGS)])
        for path, tensor in _tensors(by_keyword) if type(by_keyword) is dict else ():
            yield str(path[0]), path[1:], Bound.PARAMETER, tensor
    for name in dict.fromkeys((*own, *code.co_cellvars, *code.co_freevars)):
        value = held.get(name)
        if name not in parameters and issubclass(type(value), torch.Tensor):
            yield name, (), Bound.STATEMENT, cast(torch.Tensor, value)


@functools.cache
def _bound_again(code: CodeType) -> Mapping[str, int]:
    """Where in its bytecode a function first gives its names other values."""
    found: dict[str, int] = {}
    for step in dis.get_instructions(code):
        if step.opname.startswith(("STORE_FAST", "STORE_DEREF")):
            for name in step.argval if isinstance(step.argval, tuple) else (step.argval,):
                found.setdefault(name, step.offset)
    return found


_MANY = 200
"""Items of an argument that is data: nothing is called by its place among so many."""


def _tensors(value: object) -> Iterator[tuple[_Path, torch.Tensor]]:
    """The tensors in an argument, each with where in it it is.

    It is the user's, whose own methods are not called; what stands in it twice is looked into once.
    """
    pending: list[tuple[_Path, object]] = [((), value)]
    seen: set[int] = set()
    left = _MANY
    while pending:
        path, item = pending.pop()
        if issubclass(type(item), torch.Tensor):
            yield path, cast(torch.Tensor, item)
        elif id(item) not in seen:
            seen.add(id(item))
            items = _items(item)
            left -= len(items)
            if left < 0:
                return
            pending.extend(((*path, key), inner) for key, inner in reversed(items))


def _items(value: object) -> list[tuple[Any, object]]:
    """What stands in a container, by key or place; nothing for any other object, or a large one."""
    kind: Any = type(value)
    if issubclass(kind, dict):
        found: Any = dict.items(cast(Any, value))
    elif issubclass(kind, tuple):
        fields = kind.__dict__.get("_fields")
        keys = fields if isinstance(fields, tuple) else itertools.count()
        found = zip(keys, tuple.__iter__(cast(Any, value)), strict=False)
    elif issubclass(kind, list):
        found = enumerate(list.__iter__(cast(Any, value)))
    elif "__dataclass_fields__" in kind.__dict__:
        found = object.__getattribute__(value, "__dict__").items() if _has_dict(kind) else ()
    else:
        return []
    return [*itertools.islice(found, _MANY + 1)]


def _has_dict(kind: type) -> bool:
    return bool(kind.__dictoffset__)
