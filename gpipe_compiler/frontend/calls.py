"""How a call of torch that was recorded is written: as a person writes it.

A function of torch has several names, and its arguments several places: `a + b`, `a.add(b)` and
`torch.add(a, other=b)` are one program. They stand in a graph as `a + b`, so that what reads the
graph has to know one of them.
"""

from __future__ import annotations

import inspect
import operator
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from gpipe_compiler.frontend.nests import has_tensors, numbered


@dataclass(frozen=True, slots=True)
class Written:
    """A call as it is written: of a function, or of the tensor method of that name."""

    target: Callable[..., Any] | str
    args: Sequence[Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


_OPERATORS: Mapping[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "matmul", "pow", "neg")},
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{name: getattr(operator, name) for name in ("lshift", "rshift", "truediv", "floordiv")},
    **dict.fromkeys(("div", "true_divide"), operator.truediv),
    **dict.fromkeys(("mod", "remainder"), operator.mod),
    **dict.fromkeys(("and", "bitwise_and"), operator.and_),
    **dict.fromkeys(("or", "bitwise_or"), operator.or_),
    **dict.fromkeys(("xor", "bitwise_xor"), operator.xor),
    **dict.fromkeys(("invert", "bitwise_not"), operator.invert),
    "floor_divide": operator.floordiv,
}
"""What operators of Python stand for functions, and for the methods that Python calls."""

_IN_PLACE: Mapping[str, str] = {
    **{f"i{name}": f"{name}_" for name in ("add", "sub", "mul", "div", "pow")},
    **{f"i{name}": f"bitwise_{name}_" for name in ("and", "or", "xor")},
    "itruediv": "div_",
    "ifloordiv": "floor_divide_",
    "imod": "remainder_",
}

_SYNONYMS: Mapping[str, str] = {
    **dict.fromkeys(("concat", "concatenate"), "cat"),
    "absolute": "abs",
    "clip": "clamp",
    "negative": "neg",
    "fix": "trunc",
    "ger": "outer",
    "subtract": "sub",
    "multiply": "mul",
    "divide": "div",
    "moveaxis": "movedim",
    **dict.fromkeys(("swapaxes", "swapdims"), "transpose"),
    "greater": "gt",
    "greater_equal": "ge",
    "less": "lt",
    "less_equal": "le",
    "not_equal": "ne",
    "row_stack": "vstack",
    **{f"arc{name}": f"a{name}" for name in ("cos", "sin", "tan", "cosh", "sinh", "tanh")},
}
"""Functions of torch that are others under another name."""

_METHODS = frozenset(
    {
        *("view", "reshape", "transpose", "permute", "contiguous", "flatten", "unflatten"),
        *("expand", "expand_as", "repeat", "squeeze", "unsqueeze", "t", "clone", "detach"),
        *("type_as", "masked_fill", "masked_scatter", "mean", "sum", "prod", "std", "var", "amax"),
        *("amin", "max", "min", "argmax", "argmin", "all", "any", "cumsum", "chunk", "split"),
        *("unbind", "tril", "triu", "view_as", "reshape_as", "size", "new_zeros", "new_ones"),
        *("new_empty", "new_full", "index_select", "gather", "scatter"),
        *("scatter_add", "index_add", "index_fill", "index_copy", "narrow", "movedim"),
        *("roll", "repeat_interleave", "diagonal", "unfold", "select", "logsumexp"),
        *("topk", "sort", "argsort", "item", "numel", "clamp", "clamp_min", "clamp_max"),
        *("resolve_conj", "adjoint", "to"),
    }
)
"""Functions that read better as methods."""

_SPREAD = frozenset({"view", "reshape", "permute", "expand", "repeat"})
"""Methods that take a list of sizes or dimensions as separate arguments."""

_IN_C = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)

_WHOLE = int | torch.SymInt

_USUAL = {"layout": torch.strided, "pin_memory": False}


def written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Any) -> Written:
    """The call of a function of torch, as a person writes it."""
    if getattr(func, "__module__", "") == "torch._tensor":  # operators are wrapped in Python
        func = inspect.unwrap(func)
    name = getattr(func, "__name__", "")
    if isinstance(func, torch._ops.OpOverloadPacket):
        return Written(_overload(func, args, kwargs) or func, args, kwargs)
    if func is torch.ops.aten.bincount.default:
        return Written(torch.bincount, args, kwargs)
    if isinstance(func, torch._ops.OpOverload):
        return Written(func, args, kwargs)
    if name.startswith("__") and name.endswith("__"):
        return _operator(name, args, kwargs)
    if name in ("to", "type", "as_tensor", "asarray") and _is_cast(args, kwargs, made):
        return _cast(args[0], kwargs, made)
    kwargs = _with_devices(func, args, kwargs, made)
    if isinstance(func, _IN_C):
        return _in_c(func, name, args, kwargs)
    is_method = vars(torch.Tensor).get(name) is func or (
        name in _METHODS and getattr(func, "__module__", "") != F.__name__
    )
    if is_method and args and isinstance(args[0], torch.Tensor):
        return Written(name, args, kwargs)
    return _in_python(func, args, kwargs)


def _operator(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Written:
    """A method that Python calls for an operator."""
    bare = name.strip("_")
    if bare == "getitem":
        return Written(operator.getitem, (args[0], _brackets(args[1])))
    if bare == "setitem":
        return Written(operator.setitem, (args[0], _brackets(args[1]), args[2]))
    if bare in _IN_PLACE:
        return Written(_IN_PLACE[bare], args, kwargs)
    if bare in _OPERATORS:
        return Written(_OPERATORS[bare], args, kwargs)
    if bare[:1] == "r" and bare[1:] in _OPERATORS:
        return Written(_OPERATORS[bare[1:]], args[::-1], kwargs)
    return Written(name, args, kwargs)


def _brackets(index: Any) -> Any:
    """What stands in brackets, without whole dimensions at the end; `[:]` for all of a tensor."""
    entries = [_plain(entry) for entry in (index if isinstance(index, tuple) else (index,))]
    if not any(entry is ... for entry in entries):
        while len(entries) > 1 and _is_whole(entries[-1]):
            entries.pop()
    return entries[0] if len(entries) == 1 else tuple(entries)


def _plain(entry: Any) -> Any:
    """A slice without a start or a step that it has anyway."""
    if not isinstance(entry, slice):
        return entry
    step = None if type(entry.step) is int and entry.step == 1 else entry.step
    from_first = type(entry.start) is int and entry.start == 0
    return slice(None if from_first else entry.start, entry.stop, step)


def _is_whole(entry: Any) -> bool:
    return isinstance(entry, slice) and entry == slice(None)


def sized(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The arguments of a function, with numbers for the sizes that are tensors of known numbers."""

    def plain(item: Any) -> Any:
        sizes = isinstance(item, list | tuple) and any(isinstance(part, _WHOLE) for part in item)
        return numbered(item) if sizes else item

    others = [numbered(item) if name in _SPREAD else plain(item) for item in args[1:]]
    return (*args[:1], *others), {key: plain(item) for key, item in kwargs.items()}


def is_all_of(call: Written) -> bool:
    """Whether a call reads a tensor as it is, as `x[:]` does."""
    return call.target is operator.getitem and _is_whole(call.args[1])


# --- types and devices ----------------------------------------------------------------------------


def _is_cast(args: Sequence[Any], kwargs: Mapping[str, Any], made: Any) -> bool:
    others = (*args[1:], *kwargs.values())
    return (
        bool(args)
        and isinstance(args[0], torch.Tensor)
        and isinstance(made, torch.Tensor)
        and not any(isinstance(item, torch.Tensor) for item in others)
    )


def _cast(tensor: torch.Tensor, kwargs: Mapping[str, Any], made: torch.Tensor) -> Written:
    """`x.to(dtype)`; with a device where it is another one."""
    kept = {key: item for key, item in kwargs.items() if key in ("copy", "memory_format")}
    if made.device != tensor.device:
        kept["device"] = made.device
    return Written("to", (tensor, made.dtype), kept)


def _with_devices(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Any
) -> Mapping[str, Any]:
    """The keyword arguments, with the device of what a function makes of nothing."""
    makes = not has_tensors((args, kwargs)) and takes_device(func)
    if isinstance(made, torch.Tensor) and ("device" in kwargs or makes):
        return {**kwargs, "device": made.device}
    return kwargs


@cache
def takes_device(func: Any) -> bool:
    """Whether a function may be told where to make a tensor; `torch.div(7, 2)` may not."""
    packet = getattr(torch.ops.aten, getattr(func, "__name__", ""), None)
    if not isinstance(func, _IN_C) or not isinstance(packet, torch._ops.OpOverloadPacket):
        return True
    schemas = (getattr(packet, name)._schema for name in packet.overloads())  # type: ignore[no-untyped-call]  # of torch
    return any(argument.name == "device" for schema in schemas for argument in schema.arguments)


# --- functions written in C: by the schemas of their operators ------------------------------------


def _in_c(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Written:
    if name.removesuffix("_") in _SYNONYMS:
        name = _SYNONYMS[name.removesuffix("_")] + "_" * name.endswith("_")
        func = getattr(torch if isinstance(func, types.BuiltinFunctionType) else torch.Tensor, name)
    args = [_listed(item) for item in args]
    kwargs = {key: _listed(item) for key, item in kwargs.items()}
    if name == "where":
        args += [kwargs.pop(key) for key in ("condition", "input", "other") if key in kwargs]
    elif not args and "input" in kwargs:
        args = [kwargs.pop("input")]
    packet = getattr(torch.ops.aten, name, None)
    if isinstance(packet, torch._ops.OpOverloadPacket):
        if name == "where" and not isinstance(func, types.BuiltinFunctionType):
            args[:2] = args[1::-1]  # the method's own tensor is the function's second
        for given in _spellings(packet, args):
            overload = _overload(packet, given, kwargs)
            if overload is not None:
                args, kwargs = _in_order(overload, given, kwargs)
                break
    if name in _OPERATORS and len(args) <= 2 and not kwargs and has_tensors(args):
        return Written(_OPERATORS[name], args)
    takes_self = bool(args) and isinstance(args[0], torch.Tensor) and hasattr(torch.Tensor, name)
    if takes_self and "out" not in kwargs and (name in _METHODS or name.endswith("_")):
        return Written(name, _spread(name, args), kwargs)
    if not isinstance(func, types.BuiltinFunctionType):
        plain = getattr(torch, name, None)
        if not isinstance(plain, types.BuiltinFunctionType):
            return Written(name, args, kwargs)
        func = plain
    return Written(func, args, kwargs)


def _listed(item: Any) -> Any:
    return list(item) if type(item) in (tuple, torch.Size) else item


def _spread(name: str, args: Sequence[Any]) -> Sequence[Any]:
    if name in _SPREAD and len(args) > 1 and isinstance(args[1], list):
        return args[0], *args[1], *args[2:]
    return args


def _spellings(packet: Any, args: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """The arguments; as they are where a number stands for a list of one; and where all numbers at
    the end make a list."""
    yield args
    for name in packet.overloads():
        wanted = getattr(packet, name)._schema.arguments
        alone = [
            [item] if isinstance(item, _WHOLE) and "List[" in str(argument.type) else item
            for item, argument in zip(args, wanted, strict=False)
        ]
        yield [*alone, *args[len(alone) :]]
    first = len(args)
    while first and isinstance(args[first - 1], _WHOLE):
        first -= 1
    if first < len(args):
        yield [*args[:first], list(args[first:])]


def _overload(
    packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> torch._ops.OpOverload | None:
    # Of free sizes torch 2.11 asks what they are here.
    args, kwargs = _alike(tuple(args)), {key: _alike(item) for key, item in kwargs.items()}
    try:
        name = torch._C._jit_resolve_packet(packet._qualified_op_name, *args, **kwargs)
    except RuntimeError:
        return None
    return getattr(packet, name or "default", None)


def _alike(item: Any) -> Any:
    """Arguments of the same types, numbers in place of those that may vary."""
    match item:
        case tuple() | list():
            return type(item)(map(_alike, item)) if type(item) in (tuple, list) else item
        case torch.SymInt():
            return 2
        case torch.SymFloat():
            return 2.0
    return item


def _in_order(
    overload: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments by position where they can be, without those that repeat a default at the end.

    The list of a single dimension becomes the dimension. Convolutions keep all: layers are often
    alike but for their strides or dilations.
    """
    positional: list[Any] = []
    last, named = 0, dict(kwargs)
    convolves = {"stride", "groups"}.issubset(item.name for item in overload._schema.arguments)
    for index, argument in enumerate(overload._schema.arguments):
        default = argument.default_value if argument.has_default_value() else _MISSING
        if argument.kwarg_only:
            if argument.name in named and _repeats(
                named[argument.name], _USUAL.get(argument.name, default)
            ):
                del named[argument.name]
            continue
        value = args[index] if index < len(args) else named.pop(argument.name, default)
        if argument.name == "dim" and isinstance(value, list) and len(value) == 1:
            (value,) = value
        positional.append(value)
        if convolves or not _repeats(value, default):
            last = len(positional)
    return positional[:last], named


_MISSING = object()


def _repeats(value: Any, default: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return False
    return type(value) is type(default) and bool(value == default)


# --- functions written in Python ------------------------------------------------------------------

_ALWAYS = ("training", "use_input_stats", "dropout_p", "p")
"""Options that the mode may decide: both modes pass them."""

_INDICES: Mapping[Any, Callable[..., Any]] = {
    getattr(F, f"{name}_with_indices"): getattr(F, name)
    for name in (
        *(f"{kind}max_pool{n}d" for kind in ("", "adaptive_") for n in (1, 2, 3)),
        *(f"fractional_max_pool{n}d" for n in (2, 3)),
    )
}


@cache
def _parameters(func: Any) -> tuple[inspect.Parameter, ...] | None:
    """Of a function that takes each by its name or place; None for any other."""
    # What F.max_pool2d takes, a function of any arguments stands for.
    func = getattr(F, f"_{func.__name__}", func) if inspect.isfunction(func) else func
    try:
        found = tuple(inspect.signature(func).parameters.values())
    except (TypeError, ValueError):
        return None
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return found if all(item.kind in plain for item in found) else None


def _in_python(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Written:
    """What has a default, and is no tensor, by its name; nothing that only repeats a default."""
    if func in _INDICES:
        func, kwargs = _INDICES[func], {**kwargs, "return_indices": True}
    parameters = _parameters(func)
    if parameters is None:
        return Written(func, args, kwargs)
    values = {**dict(zip((item.name for item in parameters), args, strict=False)), **kwargs}
    positional: list[Any] = []
    for item in parameters:
        required = item.default is item.empty
        is_tensor = isinstance(values.get(item.name), torch.Tensor)
        if item.name not in values or item.kind is item.KEYWORD_ONLY:
            break
        if not required and not is_tensor:
            break
        positional.append(values.pop(item.name))
    defaults = {item.name: item.default for item in parameters}
    named = {
        key: value
        for key, value in values.items()
        if key in _ALWAYS or not _repeats(value, defaults.get(key))
    }
    if "dropout" in func.__name__ and {"p", "training"} <= defaults.keys():
        named = {"p": defaults["p"], "training": defaults["training"], **named}
    return Written(func, positional, named)
