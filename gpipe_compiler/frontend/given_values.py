"""The values of Python's in the example call, which the graph holds."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch

from gpipe_compiler.errors import ModelError
from gpipe_compiler.frontend.state import isolated
from gpipe_compiler.frontend.structure import with_item
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.frontend.user_code import line_of_forward
from gpipe_compiler.runtime.core.given import as_text, values_of
from gpipe_compiler.runtime.spec import GivenValue


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
