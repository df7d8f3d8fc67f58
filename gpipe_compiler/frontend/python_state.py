"""Python state that forward changes, such as a counter of calls: a trace holds one value of it.

It stands in attributes of modules and of their classes, in globals and closures of the functions
that forward calls, and in what all these hold: entries of dicts, attributes of objects.
"""

from __future__ import annotations

import contextlib
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias
from unittest import mock

import torch
from torch import nn

from gpipe_compiler.errors import ModelError, TraceError
from gpipe_compiler.frontend.locate import calling_line
from gpipe_compiler.frontend.own_code import is_installed
from gpipe_compiler.frontend.user_code import definition
from gpipe_compiler.ir import Graph


@dataclass(frozen=True, eq=False, slots=True)
class Place:
    """Something that has a value when it is looked at.

    Attributes:
        reader: the function or class of the user's that it belongs to.
    """

    value: object
    reader: object
    put: Callable[[Any], None]


PythonState: TypeAlias = Mapping[str, object]
"""By what it is called: numbers, words, sizes of containers, which tensor and its version."""

_OWN = frozenset(vars(nn.Module()))

_MOST_ENTRIES = 1000
"""Entries of a container that is looked into; larger ones are data."""


def python_state(model: nn.Module, loss_fn: object) -> PythonState:
    """What forward and a loss can read at the moment, the model's parameters and buffers apart."""
    return {name: _seen(place.value) for name, place in places_of(model, loss_fn).items()}


def shared_state(model: nn.Module, loss_fn: object) -> PythonState:
    """The numbers and words among it that copies of the model share, as in a class or a global."""
    places = places_of(model, loss_fn)
    return {
        name: place.value
        for name, place in places.items()
        if isinstance(place.value, int | float | str | None) and not name.startswith("self.")
    }


def _seen(value: object) -> object:
    if isinstance(value, int | float | str | None):
        return value
    if isinstance(value, list | dict | set | deque):
        return type(value), len(value)
    return (id(value), value._version) if isinstance(value, torch.Tensor) else type(value)


def places_of(model: nn.Module, loss_fn: object) -> dict[str, Place]:
    """Where a model and its loss keep such state, by what it is called."""
    found: dict[str, Place] = {}
    seen: set[int] = set()
    classes: dict[type, None] = {}
    modules = dict(model.named_modules(prefix="self"))
    if isinstance(loss_fn, nn.Module):
        modules |= loss_fn.named_modules(prefix="loss_fn")
        for name, buffer in loss_fn.named_buffers(prefix="loss_fn"):
            found[name] = Place(buffer, type(loss_fn).forward, lambda _: None)
    for prefix, module in modules.items():
        classes |= dict.fromkeys(type(module).__mro__)
        for name, value in vars(module).items():
            if name not in _OWN:
                # Of what torch.jit has compiled, torch 2.11 gives no forward.
                reader = getattr(type(module), "forward", type(module))
                place = Place(value, reader, partial(setattr, module, name))
                found |= _within(f"{prefix}.{name}", place, seen)
    own = [cls for cls in classes if _is_users(cls)]
    for cls in own:
        for name, value in vars(cls).items():
            if not name.startswith("__") and not callable(value):
                place = Place(value, vars(cls).get("forward", cls), partial(setattr, cls, name))
                found |= _within(f"{cls.__qualname__}.{name}", place, seen)
    for function in _functions(own, loss_fn):
        for name, place in _names(function):
            found |= _within(name, place, seen)
    return found


def _within(name: str, place: Place, seen: set[int]) -> dict[str, Place]:
    """A place, and the numbers in what it holds, by what they are called.

    Args:
        seen: the ids of objects that were looked into; this one's is added.
    """
    held, found = place.value, {name: place}
    is_object = not isinstance(held, nn.Module) and hasattr(held, "__dict__")
    if type(held) is dict:
        inside, text, put = held, f"{name}[{{!r}}]", held.__setitem__
    elif isinstance(held, types.SimpleNamespace) or (is_object and _is_users(type(held))):
        inside, text, put = vars(held), f"{name}.{{}}", partial(setattr, held)
    else:
        return found
    if id(held) not in seen and len(inside) <= _MOST_ENTRIES:
        seen.add(id(held))
        for key, value in inside.items():
            if isinstance(value, int | float | list | dict):
                found[text.format(key)] = Place(value, place.reader, partial(put, key))
    return found


def _functions(classes: Sequence[type], *others: object) -> Iterator[types.FunctionType]:
    """The functions of these classes, others, and those of the user's that they call by their
    names."""
    pending = [*others, *(item for cls in classes for item in vars(cls).values())]
    known: set[int] = set()
    while pending:
        item = pending.pop()
        if not isinstance(item, types.FunctionType) or id(item) in known or not _is_users(item):
            continue
        known.add(id(item))
        yield item
        pending.extend(place.value for _, place in _names(item))


def _names(function: types.FunctionType) -> Iterator[tuple[str, Place]]:
    """The globals and the variables around it that a function reads."""
    names = function.__globals__
    for name in function.__code__.co_names:
        if name in names and not isinstance(names[name], types.ModuleType | type):
            put = partial(names.__setitem__, name)
            yield f"{function.__module__}.{name}", Place(names[name], function, put)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # it has no value yet
            put = partial(setattr, cell, "cell_contents")
            yield f"{name} of {function.__qualname__}", Place(cell.cell_contents, function, put)


def _is_users(item: Any) -> bool:
    """Whether a class or function stands in the user's own files, and in no installed package."""
    return not is_installed(item.__module__ or "")


def changed(before: PythonState, after: PythonState) -> list[str]:
    """What is not as it was."""
    return [key for key, value in after.items() if value != before.get(key)]


@contextlib.contextmanager
def hooks_kept(model: nn.Module) -> Iterator[None]:
    """Refuses a model whose hooks are others after its calls: a later call computes something else.

    Handles in closures of hooks are the model's own also where a copy of it is called.
    """
    before = _hooks(model)
    yield
    after = _hooks(model)
    for place in before.keys() ^ after.keys():
        path, kind, _ = place
        hook = before.get(place, after.get(place))
        what = "removed" if place in before else "added"
        raise ModelError(
            f"a hook of {path or 'the model'} ({kind.strip('_')}) is {what} when the model is "
            "called: a later call computes something else than the first",
            location=definition(hook),
            hint="call the model once in build_model(), so that only what stays is compiled; or "
            "keep the hook, and have it read a buffer",
        )


def _hooks(model: nn.Module) -> dict[tuple[str, str, int], object]:
    """The hooks of all modules, by module, kind and number."""
    return {
        (path, kind, number): hook
        for path, module in model.named_modules()
        for kind, hooks in vars(module).items()
        if kind.endswith("_hooks") and isinstance(hooks, dict)  # a list of handles is the user's
        for number, hook in hooks.items()
    }


@contextlib.contextmanager
def no_new_parameters() -> Iterator[None]:
    """Refuses a model whose forward makes parameters, in place of others that it had."""
    register = nn.Module.register_parameter

    def watched(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if name in module._parameters and parameter is not module._parameters[name]:
            raise ModelError(
                f"forward assigns another tensor to the parameter {name} of a "
                f"{type(module).__name__}, which no stage and no optimizer would follow",
                location=calling_line(),
                hint="write into it instead, under torch.no_grad(): "
                f"self.{name}.copy_(...) or .lerp_(...)",
            )
        register(module, name, parameter)

    with mock.patch.object(nn.Module, "register_parameter", watched):
        yield


def buffer_assigned(graph: Graph, name: str, difference: str, *, resized: bool) -> TraceError:
    """The error that the graph differs from the model in a buffer that forward assigns to.

    Args:
        resized: whether to a tensor of another shape.
    """
    users = [op.source for op in graph.ops if name in op.states(graph.modules)]
    hint = (
        "write into it instead, with copy_ or another operation in place, and take a clone of "
        "what is read afterwards"
    )
    if resized:
        hint = (
            "call the model once in build_model(), after which it is assigned no more where it "
            "goes with the size of the inputs alone; or compute it in every call, and keep it in "
            "no buffer"
        )
    return TraceError(
        f"forward assigns another tensor to the buffer {name} of which it has other "
        f"uses: the graph writes into it, and differs from the model ({difference})",
        location=users[-1] if users else None,
        hint=hint,
    )
