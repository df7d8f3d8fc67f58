"""A micro-batch on its way through the stages, and as bytes between processes."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnxruntime import OrtValue

from ...runtime.errors import PipelineError, StageError
from .arrays import array_of, foreign_name, value_of
from .stage import Turn, Values


class StoppedError(PipelineError):
    """Nothing of the call is wanted any more."""


@dataclass(eq=False)
class Microbatch:
    """A micro-batch on its way.

    Attributes:
        number: in its call.
        values: what later stages take.
        outputs: those of the pipeline that are made.
        turn: of the session that its call is of.
        key: of its own; rank 0 knows by it what comes back.
        ended: sessions of which stages need hold nothing any more.
        idle: whether there is nothing to run: it only says that rank 0 is there.
        stopped: set where nothing of its call is wanted any more.
        error: what a stage has raised; then later ones do nothing.
    """

    number: int
    values: Values
    outputs: Values
    turn: Turn | None = None
    key: int = -1
    ended: tuple[int, ...] = ()
    idle: bool = False
    stopped: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        self.error = error
        self.values.clear()
        self.outputs.clear()


def packed(given: Microbatch) -> tuple[bytes, list[np.ndarray]]:
    """A micro-batch as bytes, and the arrays that go with it."""
    arrays: list[np.ndarray] = []
    kinds = {n: _packed(v, arrays) for n, v in {**given.values, **given.outputs}.items()}
    error = None if given.error is None else str(given.error)
    facts = (given.number, given.turn, given.key, given.ended, given.idle, error)
    return pickle.dumps((facts, kinds, [*given.values], [*given.outputs])), arrays


def _packed(value: Any, arrays: list[np.ndarray]) -> Any:
    array = array_of(value)
    if not isinstance(array, np.ndarray) or array.dtype == object:
        return array  # strings, sequences, optionals: as Python has them
    arrays.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    foreign = foreign_name(value) if isinstance(value, OrtValue) else ""
    return _Tensor(array.dtype.str, array.shape, foreign)


@dataclass(frozen=True, slots=True)
class _Tensor:
    """What is known of a tensor whose numbers come apart from it."""

    dtype: str
    shape: tuple[int, ...]
    foreign: str


def unpacked(data: bytes, fill: Callable[[np.ndarray], None]) -> Microbatch:
    """A micro-batch from its bytes, of a rank of the same run.

    Args:
        fill: called with the bytes of every array in turn, to put the numbers in.
    """
    facts, kinds, values, outputs = pickle.loads(data)
    number, turn, key, ended, idle, error = facts
    found = {name: _unpacked(kind, fill) for name, kind in kinds.items()}
    held = {name: _value(found[name], kinds[name]) for name in values}
    # Outputs stay arrays: that of a value would not outlive the array that the value looks into.
    made = {name: found[name] for name in outputs}
    given = Microbatch(number, held, made, turn, key, ended, idle)
    given.error = None if error is None else StageError(error)
    return given


def _unpacked(kind: Any, fill: Callable[[np.ndarray], None]) -> Any:
    if not isinstance(kind, _Tensor):
        return kind
    array = np.empty(kind.shape, np.dtype(kind.dtype))
    fill(array.reshape(-1).view(np.uint8))
    return array


def _value(thing: Any, kind: Any) -> Any:
    return value_of(thing, kind.foreign) if isinstance(kind, _Tensor) else thing
