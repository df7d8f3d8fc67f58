"""The values of Python's in the example call, which the graph holds."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator

import torch

from gpipe_compiler.errors import ModelError
from gpipe_compiler.frontend.state import isolated
from gpipe_compiler.frontend.structure import with_item
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.frontend.user_code import line_of_forward
from gpipe_compiler.runtime.core.given import as_text, values_of
from gpipe_compiler.runtime.spec import GivenValue


class _Unusable:
    """Stands for a value: whatever is done with it raises."""


def given_values(subject: Subject) -> tuple[GivenValue, ...]:
    """The values in the example call, the defaults of forward's other arguments, and what the loss
    uses of the target beside tensors.

    Raises:
        ModelError: for an object that cannot be told from others of its class.
    """
    call = {"args": tuple(subject.args), "kwargs": dict(subject.kwargs)}
    try:
        passed = [GivenValue(path, text) for path, text in values_of(call)]
    except TypeError as error:
        raise ModelError(
            f"the example inputs hold an object that no later call's can be compared with: {error}",
            location=line_of_forward(subject.model),
            hint="pass what the model uses of it: tensors, numbers, strings",
        ) from error
    return (*passed, *_defaults(subject), *_of_target(subject))


def _defaults(subject: Subject) -> Iterator[GivenValue]:
    """What forward computes with where the example passes nothing, if it is not None."""
    try:
        signature = inspect.signature(subject.model.forward)
        passed = signature.bind(*subject.args, **subject.kwargs).arguments
    except (TypeError, ValueError):
        return
    for name, parameter in signature.parameters.items():
        may_be_named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if name in passed or not may_be_named or parameter.default in (parameter.empty, None):
            continue
        with contextlib.suppress(TypeError):
            yield GivenValue(("kwargs", name), as_text(parameter.default))


def _of_target(subject: Subject) -> Iterator[GivenValue]:
    """The values in the target that the loss uses: one that it does not use may be any."""
    if not subject.training or subject.loss_fn is None:
        return
    held = [(path, text) for path, text in values_of(subject.target) if text != "None"]
    if not held:
        return
    model = isolated(subject.model).train()
    with torch.no_grad(), torch.random.fork_rng(devices=()):
        output = model(*subject.args, **subject.kwargs)
        for path, text in held:
            try:
                subject.loss_fn(output, with_item(subject.target, path, _Unusable()))
            except Exception:  # noqa: BLE001  (whatever the user's code raises, it has used it)
                yield GivenValue(("target", *path), text)
