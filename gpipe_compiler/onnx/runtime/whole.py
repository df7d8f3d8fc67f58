"""A whole model in one session of ONNX Runtime: what a pipeline is held against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnxruntime

from .devices import DeviceChoice
from .errors import StageError
from .stage import SessionChoice
from .values import array_of, name_of, value_of


class Whole:
    """A model on the processor.

    Raises:
        StageError: when ONNX Runtime refuses the model.
    """

    def __init__(self, model: Path, threads: int = 1, custom_ops: Sequence[Path] = ()) -> None:
        choice = SessionChoice(DeviceChoice("cpu"), threads, custom_ops=tuple(custom_ops))
        try:
            self._session = onnxruntime.InferenceSession(
                str(model), choice.options(), providers=choice.device.providers
            )
        except Exception as error:  # onnxruntime's errors have no common class
            raise StageError(f"ONNX Runtime refuses {model}: {error}") from error

    def __call__(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The outputs, by name; see `values` for types that numpy does not have.

        Raises:
            StageError: when the model fails.
        """
        try:
            return run_session(self._session, arrays)
        except StageError:
            raise
        except Exception as error:  # as above
            raise StageError(f"the whole model fails: {error}") from error


def run_session(
    session: onnxruntime.InferenceSession, arrays: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The outputs of a session, by name; arrays may stand for types that numpy does not have."""
    kinds = {source.name: name_of(source.type) for source in session.get_inputs()}
    given = {name: value_of(array, kinds.get(name, "")) for name, array in arrays.items()}
    names = [output.name for output in session.get_outputs()]
    found = session.run_with_ort_values(names, given)
    return {name: array_of(value) for name, value in zip(names, found, strict=True)}
