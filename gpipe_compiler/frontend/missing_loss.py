"""The refusal of a model that is to be trained and says nowhere on which loss."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterator, Mapping
from types import ModuleType

import torch
from torch import nn

from gpipe_compiler.errors import ModelError, SourceLocation
from gpipe_compiler.frontend.subject import NearlyALoss, Subject
from gpipe_compiler.frontend.user_code import definition

HOOK = "loss_fn"

_WORDS = re.compile(
    "(^|_)(loss|criterion|objective|nll|cross_?entropy)|loss$|Loss|Criterion|CrossEntropy"
)
"""In the names that people give to losses."""

_WAYS_OUT = "or compile with --mode infer; --loss sum-of-squares is there for experiments"


def nearly_a_loss(module: ModuleType) -> NearlyALoss | None:
    """What in a user's file looks most like a misspelt `loss_fn`; None where nothing does."""
    likely = {
        name: item
        for name, item in vars(module).items()
        if _may_be_a_loss(item, module) and _sounds_like_a_loss(name)
    }
    names = difflib.get_close_matches(HOOK, likely, n=1, cutoff=0.0)
    if not names:
        return None
    found = likely[names[0]]
    return NearlyALoss(
        f"{names[0]}()" if inspect.isclass(found) else names[0], _location(found, module)
    )


def _may_be_a_loss(item: object, module: ModuleType) -> bool:
    if inspect.isclass(item):
        return item.__module__ == module.__name__ and not issubclass(item, BaseException)
    return isinstance(item, nn.Module) or inspect.isroutine(item)


def _sounds_like_a_loss(name: str) -> bool:
    close = difflib.get_close_matches(name.lower(), [HOOK], cutoff=0.7)
    return bool(close) or _WORDS.search(name) is not None


def _location(item: object, module: ModuleType) -> SourceLocation | None:
    found = definition(item)
    return found if found is not None and found.file == module.__file__ else None


def no_loss(subject: Subject, output: object) -> ModelError:
    """The error for a model that is to be trained, of a file and an output without a loss.

    Args:
        output: what the model returns; its tensors may be on meta.
    """
    near, hooks = subject.nearly_a_loss, subject.hooks
    file = hooks.file if hooks is not None else None
    where = f"{file.name} has" if file is not None else "there is"
    problem = (
        f"nothing says what to train on: {where} no {HOOK}(output, target), and the model returns "
        "no loss (a dict or dataclass with `loss`)"
    )
    location = SourceLocation(str(file), 1) if file is not None else None
    advice = []
    if near is not None:
        problem += f"; {near.name} is not looked at, as it is not called {HOOK}"
        location = near.location or location
        advice.append(f"write {HOOK} = {near.name}, or call it that")
    scalar = next(_scalars(output, "output"), None)
    if scalar is not None:
        advice.append(f"if {scalar} is the loss: def {HOOK}(output): return {scalar}")
    if not advice:
        advice.append(f"offer {HOOK}(output, target) and example_target()")
    return ModelError(problem, location=location, hint="; ".join((*advice, _WAYS_OUT)))


def _scalars(item: object, text: str) -> Iterator[str]:
    """The numbers that could be a loss in what a model returns, as Python writes the way there."""
    if isinstance(item, torch.Tensor):
        if item.ndim == 0 and item.is_floating_point():
            yield text
    elif isinstance(item, Mapping):
        for key, part in item.items():
            yield from _scalars(part, f"{text}[{key!r}]")
    elif isinstance(item, tuple | list):
        for index, part in enumerate(item):
            yield from _scalars(part, f"{text}[{index}]")
    else:
        for name, part in getattr(item, "__dict__", {}).items():
            if isinstance(part, torch.Tensor):
                yield from _scalars(part, f"{text}.{name}")
