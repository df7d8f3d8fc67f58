"""Calls of a pipeline that follow one another, with state that each hands to the next."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from ...runtime.errors import UsageError
from .arrays import array_of, value_of
from .batches import batch_size
from .stage import Values

if TYPE_CHECKING:
    from .pipeline import OnnxPipeline


class Session:
    """One conversation, or one stream of sound: what a call gives as state, the next one takes.

        talk = pipe.session({"past": zeros})
        for tokens in ...:
            outputs = talk({"tokens": tokens})   # without the state

    State stays where ONNX Runtime has made it, and is not copied. Each call is one micro-batch and
    waits for the one before; calls of several sessions follow one another through the stages.

    Args:
        state: what the first call takes. A later call that is given some takes that in place of
            what is held.

    Raises:
        UsageError: for state that the model does not have, or was not compiled with.
    """

    def __init__(self, pipe: OnnxPipeline, state: Mapping[str, np.ndarray]) -> None:
        self._pipe = pipe
        self._next = dict(pipe.spec.state)
        if not self._next:
            raise UsageError(f"{pipe.spec.name} has no state: compile it with --state PAST=PRESENT")
        unknown = sorted(state.keys() - self._next.keys())
        if unknown:
            raise UsageError(f"{', '.join(unknown)} is no state: that is {', '.join(self._next)}")
        self._held: Values = {}
        self._first = dict(state)
        self._lock = threading.Lock()

    def __call__(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The outputs of a call but for the state.

        Raises:
            UsageError: for inputs that do not fit, and state that the first call misses.
            StageError: when a stage fails; the state is then what it was.
        """
        spec = self._pipe.spec
        with self._lock:
            arrays = {**self._first, **inputs}
            batch_size(spec, arrays, self._held)
            kinds = {source.name: source.dtype for source in spec.inputs}
            given = {n: value_of(np.asarray(a, order="C"), kinds[n]) for n, a in arrays.items()}
            found = self._pipe.one({**self._held, **given})
            self._held = {past: found[present] for past, present in self._next.items()}
            self._first = {}
        kept = self._next.values()
        return {name: array_of(value) for name, value in found.items() if name not in kept}
