"""Which arguments of a call people pass by keyword: flags, and numbers after weights."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from gpipe_compiler.ir import Argument, ByMode, Call, FunctionCall, MethodCall, Ref, StateRef
from gpipe_compiler.ir.arguments import leaves
from gpipe_compiler.ir.ops import called

_DIMENSIONS = frozenset({"dim", "dims"})
_OF_ONE_DIMENSION = frozenset({"softmax", "log_softmax"})
_UNKNOWN = inspect.Parameter.empty
_MISREAD = frozenset({"reduction"})
"""Parameters of operators for which torch's Python puts in another default than the schema has:
`torch.ctc_loss` without a reduction does not reduce."""


@dataclass(frozen=True, slots=True)
class _Parameter:
    """A parameter of a function of torch.

    Attributes:
        default: `_UNKNOWN` where it has to be given.
        flag: whether it is a bool, where that is known.
        text: whether it is a string, which nothing else stands for.
        width: of a list of numbers that one number stands for, how many; 0 for anything else.
        named: whether it is passed by keyword alone.
    """

    name: str
    default: object
    flag: bool | None = None
    text: bool = False
    width: int = 0
    named: bool = False


Signature = Sequence[_Parameter]


def by_keyword(
    own: str,
    function: Callable[..., Any] | None,
    args: Sequence[Argument],
    kwargs: Mapping[str, Argument],
) -> tuple[list[Argument], dict[str, Argument]]:
    """The arguments of a call: those by position, and those by keyword.

    Args:
        own: the name of the function or method.
        function: None for a method, whose receiver is the first argument.
    """
    given, named = list(args), dict(kwargs)
    signatures = [one for one in _signatures(own, function) if _takes(one, given, named)]
    if not signatures:
        return given, named
    operands = [place for place, item in enumerate(given) if not _is_constant(item)]
    first = operands[-1] + 1 if operands else 0
    many = function is not None and len(given) > first + 2
    found: dict[str, Argument] = {}
    for place in reversed(range(max(first, 1), len(given))):
        options = [one[place] for one in signatures]
        key, *others = {option.name for option in options}
        if others or not _is_wanted(own, given, first, options, many=many):
            break
        found[key] = given.pop()
    named = {**dict(reversed(found.items())), **named}
    named = {key: item for key, item in named.items() if not _is_usual(key, item, signatures)}
    widths: dict[str, int] = {}
    for option in itertools.chain.from_iterable(signatures):
        widths[option.name] = max(widths.get(option.name, 0), option.width)
    for place, item in enumerate(given):
        given[place] = _narrowed(item, min(one[place].width for one in signatures))
    return given, {key: _narrowed(item, widths.get(key, 0)) for key, item in named.items()}


def number_of(call: Call, number: int) -> str:
    """What a function or method of torch calls a constant that it is given: `padding`.

    "" where that is not told, or says nothing, as `other` does.

    Args:
        number: its place among the leaves of the arguments.
    """
    if not isinstance(call, FunctionCall | MethodCall):
        return ""
    function = call.function if isinstance(call, FunctionCall) else None
    signatures = _signatures(called(call), function)
    given = (one for one in signatures if _takes(one, call.args, call.kwargs))
    ends = [*itertools.accumulate(len([*leaves(item)]) for item in call.args)]
    place = next((place for place, end in enumerate(ends) if number < end), None)
    names = {one[place].name for one in given} if place is not None else set()
    return names.pop() if len(names) == 1 and not names & _UNTELLING else ""


_UNTELLING = frozenset({"self", "input", "other", "size", "shape", "a", "b", "x", "y"})


def _is_usual(key: str, item: Argument, signatures: Sequence[Signature]) -> bool:
    """Whether an argument is what a function takes without it."""
    if key == "_stacklevel":  # which tells the line of a warning
        return True
    named = [option for one in signatures for option in one if option.name == key]
    return key not in _MISREAD and all(_same(option.default, item) for option in named)


def _is_wanted(
    own: str, given: Sequence[Argument], first: int, options: Sequence[_Parameter], *, many: bool
) -> bool:
    """Whether people name an argument, the last one by position.

    Args:
        first: the place of the first one after all tensors.
        many: whether more than two numbers stand there.
    """
    *_, item = given
    place = len(given) - 1
    if isinstance(item, str) or _is_flag(item):
        return True
    if all(option.name in _DIMENSIONS for option in options):
        return place > 1 or isinstance(given[0], list | tuple) or own in _OF_ONE_DIMENSION
    optional = all(option.default is not _UNKNOWN for option in options)
    return optional and (first > 1 or (many and place > first))


def _is_constant(item: Argument) -> bool:
    return not any(isinstance(leaf, Ref | StateRef) for leaf in leaves(item))


def _same(default: object, item: Argument) -> bool:
    return type(default) is type(item) and default == item


def _narrowed(item: Argument, width: int) -> Argument:
    """One number for a list of equal ones."""
    if not width or not isinstance(item, list | tuple) or len(item) != width:
        return item
    return item[0] if all(_same(item[0], other) for other in item) else item


def _takes(signature: Signature, args: Sequence[Argument], kwargs: Mapping[str, Argument]) -> bool:
    """Whether arguments may be meant for a signature."""
    by_position = [item for item in signature if not item.named]
    if len(args) > len(by_position) or not kwargs.keys() <= {item.name for item in signature}:
        return False
    return all(
        (parameter.flag is None or parameter.flag is _is_flag(item))
        and (isinstance(item, str) or not parameter.text)
        for parameter, item in zip(by_position, args, strict=False)
        if not isinstance(item, Ref | StateRef)
    )


def _is_flag(item: Argument) -> bool:
    return isinstance(item, bool) or (isinstance(item, ByMode) and isinstance(item.train, bool))


def _signatures(own: str, function: Callable[..., Any] | None) -> list[Signature]:
    """Those that a function or method may be called with; [] where none is known."""
    if function is not None and inspect.isfunction(function):
        found = _of_python(function)
        if found is not None:
            return [found]
    return _of_operator(own)


@cache
def _of_python(function: Callable[..., Any]) -> Signature | None:
    """The signature of a function that Python knows; None where it takes anything."""
    parameters = list(inspect.signature(function).parameters.values())
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    if any(item.kind not in plain for item in parameters):
        return None
    return [_Parameter(item.name, item.default, named=item.kind is plain[1]) for item in parameters]


@cache
def _of_operator(own: str) -> list[Signature]:
    """The signatures of torch's operators of a name, but those for lists and for given memory."""
    found: list[Signature] = []
    for schema in torch._C._jit_get_schemas_for_operator(f"aten::{own}"):
        arguments = schema.arguments
        if any(item.is_out for item in arguments) or "Tensor" not in str(arguments[0].type):
            continue
        found.append(
            [
                _Parameter(
                    item.name,
                    item.default_value if item.has_default_value() else _UNKNOWN,
                    str(item.type) == "bool",
                    str(item.type) == "str",
                    getattr(item, "N", None) or 0,  # not in torch's stubs
                    item.kwarg_only,
                )
                for item in arguments
            ]
        )
    return found
