"""Source names of the functions of a graph, found by identity in torch's public namespaces."""

from __future__ import annotations

import builtins
import math
import operator
import sys
from collections.abc import Callable, Mapping
from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._library.custom_ops import OPDEFS
from torch.utils.checkpoint import checkpoint

from gpipe_compiler.codegen.imports import Imports
from gpipe_compiler.codegen.layout import Binding
from gpipe_compiler.frontend.own_code import is_installed, written_operator
from gpipe_compiler.frontend.own_statements import TORCHS_NAMESPACES, UnwritableError
from gpipe_compiler.ir import Call, FunctionCall, MethodCall, Ref
from gpipe_compiler.ir.branches import require
from gpipe_compiler.ir.own_functions import OwnFunction, WrittenClass
from gpipe_compiler.runtime.core.packed import PACKED

BINARY: Mapping[Callable[..., Any], tuple[str, Binding]] = {
    operator.add: ("+", Binding.SUM),
    operator.sub: ("-", Binding.SUM),
    operator.mul: ("*", Binding.PRODUCT),
    operator.truediv: ("/", Binding.PRODUCT),
    operator.floordiv: ("//", Binding.PRODUCT),
    operator.mod: ("%", Binding.PRODUCT),
    operator.matmul: ("@", Binding.PRODUCT),
    operator.pow: ("**", Binding.POWER),
    operator.and_: ("&", Binding.AND),
    operator.or_: ("|", Binding.OR),
    operator.xor: ("^", Binding.XOR),
    operator.lshift: ("<<", Binding.SHIFT),
    operator.rshift: (">>", Binding.SHIFT),
    operator.eq: ("==", Binding.COMPARISON),
    operator.ne: ("!=", Binding.COMPARISON),
    operator.lt: ("<", Binding.COMPARISON),
    operator.le: ("<=", Binding.COMPARISON),
    operator.gt: (">", Binding.COMPARISON),
    operator.ge: (">=", Binding.COMPARISON),
    operator.is_: ("is", Binding.COMPARISON),
    operator.is_not: ("is not", Binding.COMPARISON),
}

UNARY: Mapping[Callable[..., Any], tuple[str, Binding]] = {
    operator.neg: ("-", Binding.UNARY),
    operator.pos: ("+", Binding.UNARY),
    operator.invert: ("~", Binding.UNARY),
    operator.not_: ("not ", Binding.NOT),
}

PLAIN_OF_AUGMENTED: Mapping[Callable[..., Any], Callable[..., Any]] = {
    getattr(operator, f"i{name.__name__.strip('_')}"): name
    for name in BINARY
    if hasattr(operator, f"i{name.__name__.strip('_')}")
}
"""`operator.iadd` to `operator.add`: what `x += y` means for a number."""

AUGMENTED: Mapping[Callable[..., Any], str] = {
    augmented: f"{BINARY[plain][0]}=" for augmented, plain in PLAIN_OF_AUGMENTED.items()
}
"""Writes in place where the left operand is a tensor."""

SIGNS: Mapping[str, str] = {"add_": "+=", "sub_": "-=", "mul_": "*=", "div_": "/="}
"""Methods of tensors that such a statement calls."""

UNTYPED = frozenset({"split", "unflatten", "norm", "unique", "stft"})
"""Methods without types, which torch has as functions too."""


@cache
def _known() -> dict[int, tuple[object, str]]:
    """Public callables by identity, with their spelling by the first namespace that has one."""
    namespaces: list[tuple[str, ModuleType | type]] = [
        ("F", F),
        ("nn", nn),
        ("torch", torch),
        ("torch.special", torch.special),
        ("torch.fft", torch.fft),
        ("torch.linalg", torch.linalg),
        ("torch.sparse", torch.sparse),
        ("torch.nested", torch.nested),
        ("torch.nn.init", torch.nn.init),
        ("torch.nn.utils.rnn", torch.nn.utils.rnn),
        ("math", math),
        ("operator", operator),
        ("", builtins),
        ("torch.Tensor", torch.Tensor),
    ]
    table: dict[int, tuple[object, str]] = {}
    for prefix, namespace in namespaces:
        for name in sorted(dir(namespace), key=lambda name: (name.startswith("_"), name)):
            value = getattr(namespace, name, None)
            if not callable(value) or isinstance(value, ModuleType) or name.startswith("__"):
                continue
            own = getattr(value, "__name__", name)
            if prefix == "F" and (own != name or not _of_functional(value)):
                continue
            table.setdefault(id(value), (value, f"{prefix}.{name}" if prefix else name))
    return table


def _of_functional(value: object) -> bool:
    """Whether an attribute of torch.nn.functional belongs there, and is not merely used there."""
    module = getattr(value, "__module__", None) or ""
    return module in ("torch.nn.functional", "torch._C._nn", "torch") and not isinstance(
        value, type
    )


def spell(function: object, imports: Imports) -> str | None:
    """How a function or class is written, imports noted; None where it has no public name."""
    own = own_code_of(function)
    if own is not None:
        written, name = own
        if not name.startswith("torch.ops."):
            return f"{imports.own(written.module)}.{name}"
        imports.module("torch")
        imports.library(written.module, name.split(".")[2])
        return name
    if isinstance(function, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return _spell_operator(function, imports)
    if function is require:
        imports.name(".runtime.core.required", "require")
        return "require"
    if isinstance(function, type) and function in PACKED.values():
        imports.name(".runtime.core.packed", function.__name__)
        return function.__name__
    if function is checkpoint:
        imports.name("torch.utils.checkpoint", "checkpoint")
        return "checkpoint"
    value, text = _known().get(id(function), (None, ""))
    if value is not function:
        return _spell_by_module(function, imports)
    origin = text.rpartition(".")[0]
    if origin == "F":
        imports.module("torch.nn.functional as F")
    elif origin == "nn":
        imports.name("torch", "nn")
    elif origin:
        imports.module(origin.partition(".")[0])  # attributes of torch come with torch
    return text


def _spell_by_module(function: object, imports: Imports) -> str | None:
    """A function deep inside torch, where its module and name lead back to it."""
    module = getattr(function, "__module__", None) or ""
    name = getattr(function, "__qualname__", "") or ""
    if module.split(".")[0] != "torch" or not name.isidentifier():
        return None
    if getattr(sys.modules.get(module), name, None) is not function:
        return None
    imports.module(module)
    return f"{module}.{name}"


def _spell_operator(
    function: torch._ops.OpOverload | torch._ops.OpOverloadPacket, imports: Imports
) -> str | None:
    """`torch.ops.aten.relu.default`, and the import of whatever registers the operator."""
    qualified = (
        function._schema.name
        if isinstance(function, torch._ops.OpOverload)
        else function._qualified_op_name
    )
    namespace = qualified.split("::")[0]
    library = _library(qualified)
    imports.module("torch")
    if library and library != "torch":
        imports.library(library, namespace)
    return f"torch.ops.{function}" if "." in str(function) else None


def own_code_of(function: object) -> tuple[WrittenClass, str] | None:
    """Where a function or operator of the user's files stands in a package, and how it is called.

    None for any other.

    Raises:
        UnwritableError: where it cannot stand there.
    """
    if isinstance(function, OwnFunction):
        return function.written, function.spelling
    if not isinstance(function, torch._ops.OpOverload) or function.namespace in TORCHS_NAMESPACES:
        return None
    return written_operator(function)


def _library(qualified: str) -> str:
    """The module to import for an operator: "" for torch's own.

    Raises:
        UnwritableError: where none is known.
    """
    namespace = qualified.split("::")[0]
    if namespace in TORCHS_NAMESPACES:
        return ""
    definition = OPDEFS.get(qualified)
    module = namespace if definition is None else definition._init_fn.__module__
    if not _importable(module) or not is_installed(module):
        raise UnwritableError(
            f"no installed module and no statement at the top level of a file defines {qualified}: "
            "define it there, by torch.library.custom_op or torch.library.define"
        )
    return module


def _importable(module: str) -> bool:
    """Whether `import module` would find what is loaded now."""
    loaded = sys.modules.get(module)
    spec = getattr(loaded, "__spec__", None)
    return spec is not None and spec.origin is not None and module != "__main__"


def is_in_place(made: Call) -> bool:
    """`x += y`, or a method that ends in one underscore and returns its receiver."""
    match made:
        case FunctionCall(function=function, args=(_, _)):
            return function in AUGMENTED and not made.kwargs
        case MethodCall(method=method):
            return method.endswith("_") and not method.endswith("__")
        case _:
            return False


def changed_by(made: Call) -> str | None:
    """The value that a call writes to in place, of a local variable."""
    match made:
        case FunctionCall(args=(Ref(name=value), *_)) | MethodCall(args=(Ref(name=value), *_)):
            return value if is_in_place(made) else None
        case _:
            return None


def sign_of(made: Call) -> str:
    """The sign of an assignment that changes its target, `+=`; "" for methods without one."""
    match made:
        case FunctionCall(function=function):
            return AUGMENTED.get(function, "")
        case MethodCall(method=method, args=(Ref(), _)) if not made.kwargs:
            return SIGNS.get(method, "")
        case _:
            return ""


def chains(made: Call) -> bool:
    """Whether it writes in place and has a result for the next call: `x.exp_()`."""
    return isinstance(made, MethodCall) and is_in_place(made) and not sign_of(made)
