"""The example call of a model: from `example_inputs()` or from `--input`, checked and on meta; and
the values of Python's in it, which a graph holds.
"""

from __future__ import annotations

import contextlib
import inspect
import keyword
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from gpipe_compiler.errors import ModelError, SourceLocation, UsageError
from gpipe_compiler.frontend.state import isolated
from gpipe_compiler.frontend.structure import with_item
from gpipe_compiler.frontend.subject import SizeNames, Subject
from gpipe_compiler.frontend.user_code import line_of_forward
from gpipe_compiler.runtime.core.nest import as_text, leaves_of, tensors_of, values_of
from gpipe_compiler.runtime.spec import GivenValue

Call: TypeAlias = tuple[tuple[object, ...], dict[str, object]]
"""Positional and keyword arguments of one call."""

_SPEC = re.compile(r"(?:(?P<name>\w+)=)?(?P<sizes>\d+(?:x\d+)*)(?::(?P<dtype>\w+))?")
_WORD = r"(?:[A-Z][A-Z0-9_]*|\d+)"
_NAMES = re.compile(rf"(?P<name>\w+)=(?P<sizes>{_WORD}(?:x{_WORD})*)(?::(?P<dtype>\w+))?")
_FORMS = "a tensor, a tuple of positional arguments, a dict of keyword arguments, or (args, kwargs)"


def size_names(specs: Sequence[str]) -> tuple[list[str], dict[str, SizeNames]]:
    """The `--input` arguments that are tensors, and those that name sizes of the example's.

    `input_ids=BATCHxTOKENS:int64` names the sizes `batch` and `tokens`; a number names nothing.

    Raises:
        UsageError: for a name that no variable of Python's can have.
    """
    tensors: list[str] = []
    names: dict[str, SizeNames] = {}
    for spec in specs:
        match = _NAMES.fullmatch(spec)
        if match is None or not any(letter.isupper() for letter in match["sizes"]):
            tensors.append(spec)
        else:
            words = tuple(word.lower() for word in match["sizes"].split("x"))
            for word in filter(keyword.iskeyword, words):
                raise UsageError(
                    f"--input {spec}: {word} is a word of Python's own",
                    hint="call the size something else",
                )
            names[match["name"]] = SizeNames(spec, words, match["dtype"])
    return tensors, names


def parse_inputs(specs: Sequence[str]) -> Call:
    """Random tensors for `--input` arguments, positional ones in order, `NAME=...` by name.

    Floating point tensors are normally distributed; integers and booleans are 0 or 1, which is in
    range for any embedding with two entries and any index.

    Raises:
        UsageError: when one is not of the form `[NAME=]SIZExSIZE...[:DTYPE]`, or is empty.
    """
    args: list[object] = []
    kwargs: dict[str, object] = {}
    for spec in specs:
        match = _SPEC.fullmatch(spec)
        if match is None:
            raise UsageError(
                f"--input {spec!r} gives no shape",
                hint="write sizes and a dtype: 32x3x224x224:float32, or mask=32x128:bool",
            )
        tensor = _random_tensor(spec, match["sizes"], match["dtype"] or "float32")
        name = match["name"]
        if name is None:
            args.append(tensor)
        elif name in kwargs:
            raise UsageError(f"--input names {name!r} twice")
        else:
            kwargs[name] = tensor
    return tuple(args), kwargs


def _random_tensor(spec: str, sizes: str, dtype_name: str) -> torch.Tensor:
    shape = tuple(int(size) for size in sizes.split("x"))
    dtype = getattr(torch, dtype_name, None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError(
            f"--input {spec!r}: torch has no dtype {dtype_name!r}",
            hint="such as float32, bfloat16, int64 or bool",
        )
    if 0 in shape:
        raise UsageError(f"--input {spec!r} is an empty batch", hint="every size is at least 1")
    try:
        if dtype.is_floating_point or dtype.is_complex:
            # randn does not draw every dtype (float8), so the draw is in one that it does.
            drawn = torch.randn(shape, dtype=torch.complex64 if dtype.is_complex else torch.float32)
            return drawn.to(dtype)
        return torch.randint(0, 2, shape).to(dtype)
    except (RuntimeError, TypeError) as error:  # too large, or of a dtype without ops
        reason = str(error).partition("\n")[0]
        raise UsageError(f"--input {spec!r}: torch cannot make it: {reason}") from error


def normal_form(given: object, location: SourceLocation | None) -> Call:
    """What `example_inputs()` returns, as one call.

    Raises:
        ModelError: when it is of no legal form, holds no tensor, or an empty one.
    """
    match given:
        case torch.Tensor():
            call: Call = (given,), {}
        case (tuple() as args, Mapping() as kwargs):
            call = args, _keywords(kwargs, location)
        case tuple():
            call = given, {}
        case Mapping():
            call = (), _keywords(given, location)
        case _:
            as_one = "(it,) where forward takes it as one argument"
            raise ModelError(
                f"example_inputs() returns {_a(given)}, not {_FORMS}",
                location=location,
                hint=f"return tuple(...) of it, or {as_one}"
                if isinstance(given, list)
                else f"return {_FORMS}; {as_one}",
            )
    check_tensors(call, "example_inputs()", location)
    return call


def _keywords(given: Mapping[object, object], location: SourceLocation | None) -> dict[str, object]:
    keywords: dict[str, object] = {}
    for key, item in given.items():
        if not isinstance(key, str):
            raise ModelError(
                f"example_inputs() returns a dict with the key {key!r}, which names no argument",
                location=location,
                hint="keys are the names of the arguments of forward",
            )
        keywords[key] = item
    return keywords


def _a(thing: object) -> str:
    if thing is None:
        return "None"
    name = type(thing).__name__
    return f"an {name}" if name[0].lower() in "aeiou" else f"a {name}"


def tensors(nest: object) -> list[torch.Tensor]:
    """The tensors in nested tuples, lists and dicts, in order."""
    return [tensor for _, tensor in tensors_of(nest)]


def check_tensors(nest: object, what: str, location: SourceLocation | None) -> None:
    """Refuses an example without tensors, with an empty one, or with arrays in place of them."""
    found = False
    for keys, leaf in leaves_of(nest):
        path = "".join(f"[{key!r}]" for key in keys)
        if isinstance(leaf, torch.Tensor):
            found = True
            if leaf.is_nested:
                raise ModelError(
                    f"{what} holds a nested tensor, which no graph holds",
                    location=location,
                    hint="pad its rows to one length, and pass a mask beside them",
                )
            if leaf.numel() == 0:
                raise ModelError(
                    f"{what} is an empty batch: a tensor of shape {tuple(leaf.shape)}",
                    location=location,
                    hint="give at least one sample, better as many as a mini-batch will have",
                )
        elif type(leaf).__module__ == "numpy" and hasattr(leaf, "dtype"):
            raise ModelError(
                f"{what} holds a NumPy array at {path}, not a tensor",
                location=location,
                hint="wrap it in torch.from_numpy(...)",
            )
        elif not callable(leaf) and _hides_tensors(leaf):
            raise ModelError(
                f"{what} holds tensors inside of {_a(leaf)} at {path}: of other batches a package "
                "would not see them",
                location=location,
                hint="pass them in a tuple, a dict or a dataclass, and make the object in forward",
            )
    if not found:
        raise ModelError(
            f"{what} holds no tensor",
            location=location,
            hint="a pipeline splits tensors into samples, so there has to be one",
        )


def _hides_tensors(leaf: object, depth: int = 2) -> bool:
    """Whether an object holds tensors, or other objects that do, as a cache of windows does."""
    held = getattr(leaf, "__dict__", {})
    if tensors(held):
        return True
    others = (item for _, item in leaves_of(held) if not callable(item))
    return depth > 0 and any(_hides_tensors(item, depth - 1) for item in others)


def check_call(model: nn.Module, call: Call, what: str) -> None:
    """Refuses a call that does not fit the signature of the model's forward."""
    args, kwargs = call
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):
        return  # not written in Python: only the call itself can tell
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        names = ", ".join(signature.parameters)
        raise ModelError(
            f"{what} does not fit {type(model).__name__}.forward({names}): {error}",
            location=line_of_forward(model),
            hint="a tuple gives positional arguments, a dict keyword arguments",
        ) from error


def check_batch(call: Call, target: object, origin: str, location: SourceLocation | None) -> None:
    """Refuses a target that has clearly another number of samples than the inputs.

    Raises:
        ModelError: when all inputs agree on dimension 0, all targets agree on theirs, and the one
            is not a multiple of the other (a target may be flattened over time steps), and no
            dimension of a target is as large as one of an input.
    """
    sizes = {tensor.shape[0] for tensor in tensors(call) if tensor.ndim}
    target_sizes = {tensor.shape[0] for tensor in tensors(target) if tensor.ndim}
    if len(sizes) != 1 or len(target_sizes) != 1:
        return
    samples, targets = sizes.pop(), target_sizes.pop()
    possible = {size for tensor in tensors(call) for size in tensor.shape}
    if targets % samples and not any(possible & {*tensor.shape} for tensor in tensors(target)):
        raise ModelError(
            f"{origin} has {targets} targets, but the example has {samples} samples",
            location=location,
            hint="give both the same batch size, or add example_target() to match"
            + samples_in_a_list(call),
        )


def samples_in_a_list(call: object) -> str:
    """A further hint for whoever gives the samples of a batch as a list, as detection models ask
    for; "" for a call without a list of several things."""
    match call:
        case tuple() | dict():
            items = call.values() if isinstance(call, dict) else call
            return next(filter(None, map(samples_in_a_list, items)), "")
        case list() if len(call) > 1:
            return (
                f"; if the {len(call)} things in the list are the samples, pad them to one size, "
                "stack them into a tensor, and pass their sizes as another: a batch is a dimension "
                "of tensors"
            )
        case _:
            return ""


class _Unusable:
    """Stands for a value: whatever is done with it raises, and so does what any object can do."""

    def _used(self, *_: object) -> Any:
        raise TypeError("this value is used")

    __eq__ = __ne__ = __hash__ = __bool__ = __str__ = __repr__ = __format__ = _used
    __class__ = property(_used)  # which isinstance() asks for


def given_values(subject: Subject) -> tuple[GivenValue, ...]:
    """The values in the example call, the defaults of forward's other arguments, and what the loss
    uses of the target beside tensors.

    Raises:
        ModelError: for an object that cannot be told from others of its class.
    """
    call = {"args": tuple(subject.args), "kwargs": dict(subject.kwargs)}
    passed = (
        GivenValue(path, _told(subject, "the example inputs hold", item))
        for path, item in values_of(call)
    )
    return (*passed, *_defaults(subject), *_of_target(subject))


def _told(subject: Subject, where: str, item: object) -> str:
    try:
        return as_text(item)
    except TypeError as error:
        raise ModelError(
            f"{where} an object that no later call's can be compared with: {error}",
            location=line_of_forward(subject.model),
            hint="pass what the model uses of it: tensors, numbers, strings",
        ) from error


def _defaults(subject: Subject) -> Iterator[GivenValue]:
    """What forward computes with where the example passes nothing, if it is not None."""
    try:
        signature = inspect.signature(subject.model.forward)
        passed = signature.bind(*subject.args, **subject.kwargs).arguments
    except (TypeError, ValueError):
        return
    for name, parameter in signature.parameters.items():
        may_be_named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        default = parameter.default
        if name in passed or not may_be_named or default is parameter.empty or default is None:
            continue
        with contextlib.suppress(TypeError):
            yield GivenValue(("kwargs", name), as_text(default))


def _of_target(subject: Subject) -> Iterator[GivenValue]:
    """The values in the target that the loss uses: one that it does not use may be any."""
    if not subject.training or subject.loss_fn is None:
        return
    plain = [(path, item) for path, item in values_of(subject.target) if item is not None]
    if not plain:
        return
    model = isolated(subject.model).train()
    with torch.no_grad(), torch.random.fork_rng(devices=()):
        own = subject.with_example(torch.clone)
        output = model(*own.args, **own.kwargs)
        for path, item in plain:
            try:
                subject.loss_fn(output, with_item(own.target, path, _Unusable()))
            except Exception:  # noqa: BLE001  (whatever the user's code raises, it has used it)
                yield GivenValue(("target", *path), _told(subject, "the target holds", item))
