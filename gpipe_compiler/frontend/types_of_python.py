"""What stands in the place of `type`, `int` and `float` while a model is traced: fake tensors tell
the types of tensors with numbers, and sizes that are taken for numbers stay free.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import linecache
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from gpipe_compiler.frontend.locate import is_installed_file, is_users
from gpipe_compiler.frontend.noted_sizes import NotedSizes


class _Standing(type):
    """What a type of Python's is, for what stands in its place; a call of it may give a size."""

    own: type

    def __instancecheck__(cls, item: object) -> bool:
        return isinstance(item, cls.own)

    def __subclasscheck__(cls, item: type) -> bool:
        return issubclass(item, cls.own)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.own

    def __hash__(cls) -> int:
        return hash(cls.own)


class _AskedType(_Standing):
    own = type

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and builtins.type(args[0]) is FakeTensor:
            return nn.Parameter if isinstance(args[0], nn.Parameter) else torch.Tensor
        return builtins.type(*args, **kwargs)

    def __getitem__(cls, item: Any) -> Any:
        return builtins.type[item]


class _Type(type, metaclass=_AskedType):
    """In the place of `type`."""


def _number_of(tensor: torch.Tensor, own: Callable[[torch.Tensor], Any]) -> Any:
    """The number that a tensor is taken for; one that is not known where nothing answers."""
    try:
        return own(tensor)
    except GuardOnDataDependentSymNode:
        return tensor.item()


class _AskedFloat(_Standing):
    own = float

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        match args:
            case (torch.SymInt() as size,):
                return size.__sym_float__()  # type: ignore[no-untyped-call]  # of torch
            case (torch.SymFloat(),):
                return args[0]
            case (FakeTensor() as tensor,):
                number = _number_of(tensor, builtins.float)
                return cls(number) if isinstance(number, torch.SymInt) else number
        return builtins.float(*args, **kwargs)


class _Float(float, metaclass=_AskedFloat):
    """In the place of `float`."""


def _int(sizes: NotedSizes) -> type[int]:
    class Asked(_Standing):
        own = int

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            match args:
                case (torch.SymInt(),):
                    return args[0]
                case (torch.SymFloat() as size,):
                    return sizes.whole(size)
                case (FakeTensor() as tensor,):
                    number = _number_of(tensor, builtins.int)
                    return cls(number) if isinstance(number, torch.SymFloat) else number
            return builtins.int(*args, **kwargs)

    class Int(int, metaclass=Asked):
        """In the place of `int`."""

    return Int


@contextlib.contextmanager
def plain_types(modules: Iterable[nn.Module], sizes: NotedSizes | None = None) -> Iterator[None]:
    """Lets what asks for the type of a fake tensor be told that of a tensor with numbers.

    Args:
        modules: whose own code may ask, beside the user's files.
        sizes: of the trace, where `int()` and `float()` of sizes are to leave them free.
    """
    numbers = {"int": _int(sizes), "float": _Float} if sizes is not None else {}
    with _instead({"type": _Type, **numbers}, modules):
        yield


@contextlib.contextmanager
def _instead(names: Mapping[str, object], modules: Iterable[nn.Module]) -> Iterator[None]:
    """Has names of Python's mean something else in code of the user's and of modules."""
    asking = {id(held): held for held in _names_of(modules)}
    added = [
        (held, name)
        for held in asking.values()
        for name in names
        if name not in held and name not in _needed_themselves(held.get("__file__"))
    ]
    try:
        for held, name in added:
            held[name] = names[name]
        yield
    finally:
        for held, name in added:
            del held[name]


@functools.cache
def _needed_themselves(file: str | None) -> frozenset[str]:
    """The types of numbers that functions of a file do more with than call and compare them.

    `dtype=int`, `type(x) is int` and `class Odd(int)` take no other in their place.
    """
    tree = ast.parse("".join(linecache.getlines(file or "")))
    bodies: list[Any] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            bodies += node.body
        elif isinstance(node, ast.Lambda):
            bodies.append(node.body)
    return frozenset(name for part in bodies for name in _not_stood_for(part))


def _not_stood_for(node: ast.AST) -> Iterator[str]:
    """The types of numbers in code but for those that are annotations, called or compared."""
    parts: Iterable[ast.AST | None] = ast.iter_child_nodes(node)
    match node:
        case ast.Name(id="int" | "float" as name):
            yield name
        case ast.Call(func=ast.Name(id="isinstance" | "issubclass")):
            parts = node.args[:1]
        case ast.Call(func=ast.Name(id="map"), args=[ast.Name(), *rest]):
            parts = rest
        case ast.Call(func=ast.Name()):
            parts = (*node.args, *node.keywords)
        case ast.Compare() if not any(isinstance(op, ast.Is | ast.IsNot) for op in node.ops):
            parts = (side for side in parts if not isinstance(side, ast.Name | ast.Tuple))
        case ast.AnnAssign(value=value):
            parts = (value,)
        case ast.arguments():
            parts = (*node.defaults, *node.kw_defaults)
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            parts = (*node.decorator_list, node.args, *node.body)
    for part in filter(None, parts):
        yield from _not_stood_for(part)


def _names_of(modules: Iterable[nn.Module]) -> Iterator[dict[str, Any]]:
    """The global names of the code of modules, and of all that is in no installed library."""
    for cls in {cls for module in modules for cls in type(module).__mro__}:
        for function in vars(cls).values():
            if isinstance(function, types.FunctionType) and is_users(function.__code__.co_filename):
                yield function.__globals__
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and is_users(file) and not is_installed_file(file):
            yield vars(module)
