"""What the user's functions call the tensors that they are given."""

from __future__ import annotations

import dis
import functools
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

import torch

from gpipe_compiler.frontend.locate import frames_running, is_users


def given_here(users: Sequence[str]) -> Iterator[tuple[int | str, str, torch.Tensor]]:
    """The tensors that the functions around are given, each with its name and whose it is.

    A function is told by its name, the `forward` of a module by the number of words in its path.
    `x?` is a parameter that may have been given another value since.

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
        yield from ((scope, own, tensor) for own, tensor in _given(frame))


def _given(frame: FrameType) -> Iterator[tuple[str, torch.Tensor]]:
    code, held = frame.f_code, frame.f_locals
    bound = _bound_again(code)
    named = code.co_argcount + code.co_kwonlyargcount
    for name in code.co_varnames[:named]:
        sure = frame.f_lasti < bound.get(name, sys.maxsize)
        yield from _tensors(name if sure else f"{name}?", held.get(name))
    if code.co_flags & inspect.CO_VARKEYWORDS:
        others = held.get(code.co_varnames[named + bool(code.co_flags & inspect.CO_VARARGS)])
        for key, item in others.items() if isinstance(others, dict) else ():
            yield from _tensors(key, item)


@functools.cache
def _bound_again(code: CodeType) -> Mapping[str, int]:
    """Where in its bytecode a function first gives its names other values."""
    stores = (step for step in dis.get_instructions(code) if step.opname.startswith("STORE_"))
    found: dict[str, int] = {}
    for step in stores:
        for name in step.argval if isinstance(step.argval, tuple) else (step.argval,):
            found.setdefault(name, step.offset)
    return found


def _tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in an argument: `x` itself, or `x[0]` and `x[1]` of a list."""
    match value:
        case torch.Tensor():
            yield name, value
        case tuple() | list():
            for place, item in enumerate(value):
                yield from _tensors(f"{name}[{place}]", item)
        case dict():
            for key, item in value.items():
                yield from _tensors(f"{name}[{key}]", item)
