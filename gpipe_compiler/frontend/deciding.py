"""Where a model decides in Python by what it draws, as LayerDrop does: found, and answered."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from gpipe_compiler.errors import SourceLocation
from gpipe_compiler.frontend.locate import calling_line
from gpipe_compiler.ir.arguments import tensors_in
from gpipe_compiler.runtime.core.random import may_draw

QUESTIONS = ("__bool__", "__int__", "__float__", "__index__", "item", "tolist")
"""Methods of a tensor that give Python its values; what they come to is no matter of types."""

_LARGEST = 1 << 12
"""Elements of a tensor by which Python may decide; larger ones are not followed."""


class DrawnNumber:
    """In place of a number that is read from a draw: all that can be done is to compare it.

    Comparisons are asked of the tensor, so that what decides is a tensor in every run.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __lt__(self, other: Any) -> bool:
        return bool(self._tensor < other)

    def __le__(self, other: Any) -> bool:
        return bool(self._tensor <= other)

    def __gt__(self, other: Any) -> bool:
        return bool(self._tensor > other)

    def __ge__(self, other: Any) -> bool:
        return bool(self._tensor >= other)


class Decisions(TorchFunctionMode):
    """Answers Python where it asks what follows from draws of torch, and from no input.

    Attributes:
        line: the first that asks.
        others: the first that is given numbers to compute with, so that no answer tells all.
        calls: how many of torch's functions were called.
    """

    def __init__(self, answer: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self.line: SourceLocation | None = None
        self.others: SourceLocation | None = None
        self.calls = 0
        self._answer = answer
        self._known: dict[int, tuple[torch.Tensor, bool]] = {}

    def follows(self, tensors: Collection[torch.Tensor]) -> bool:
        """Whether tensors follow from draws and constants alone, one of them from a draw."""
        known = [self._known.get(id(tensor)) for tensor in tensors]
        return None not in known and any(item is not None and item[1] for item in known)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one function of torch, or answers in its place."""
        given = list(tensors_in((args, kwargs or {})))
        drawn = self.follows(given)
        asked = getattr(func, "__name__", "")  # others stand in its place while a model is traced
        if drawn and asked in QUESTIONS:
            self.line = self.line or calling_line()
            if asked == "__bool__":
                return self._answer(args[0])
            if asked == "item":
                return DrawnNumber(args[0])
            self.others = self.others or calling_line()
        self.calls += 1
        made = func(*args, **(kwargs or {}))
        own = all(id(tensor) in self._known for tensor in given)
        if own and isinstance(made, torch.Tensor) and _is_small(made):
            self._known[id(made)] = made, drawn or may_draw(func)
        return made


def _is_small(tensor: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunction():
        return all(isinstance(size, int) for size in tensor.shape) and tensor.numel() <= _LARGEST


def is_decision(tensor: torch.Tensor) -> bool:
    """Whether somebody answers for a tensor what Python asks of it."""
    modes: list[Any] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]  # of torch
    return any(isinstance(mode, Decisions) and mode.follows([tensor]) for mode in modes)


@contextlib.contextmanager
def deciding(
    keeps: bool | None,
    left_out: Collection[int],
    note: Callable[[torch.Tensor], None] | None,
) -> Iterator[None]:
    """Lets every layer run, but for some that are left out.

    Args:
        keeps: what Python is told for a layer to run; None to let it decide by itself.
        left_out: the decisions by which, all the same, a layer is left out.
        note: is given what each decision asks.
    """
    if keeps is None:
        yield
        return
    numbers = itertools.count()

    def answer(asked: torch.Tensor) -> bool:
        if note is not None:
            note(asked)
        return keeps is (next(numbers) not in left_out)

    with Decisions(answer):
        yield
