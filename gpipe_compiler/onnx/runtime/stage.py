"""Sessions of ONNX Runtime: one of each stage, and one of the whole model to compare them with."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from onnxruntime import GraphOptimizationLevel, OrtValue

from ...runtime.errors import StageError
from .arrays import array_of, name_of, value_of
from .devices import CPU, DeviceChoice
from .spec import OnnxStageSpec

_SILENT = 4
"""The level of ONNX Runtime's log at which it says nothing: what is wrong is raised."""

Values = dict[str, Any]
"""Values of one micro-batch, by name: those of ONNX Runtime, and outputs that are no tensors."""


@dataclass(frozen=True, slots=True)
class SessionChoice:
    """How the sessions of a device are made.

    Attributes:
        threads: of one op.
        custom_ops: libraries of custom operators to load.
    """

    device: DeviceChoice = CPU
    threads: int = 1
    custom_ops: tuple[Path, ...] = ()

    def options(self) -> onnxruntime.SessionOptions:
        """What a session is made with."""
        options = onnxruntime.SessionOptions()
        if self.device.kind == "cpu":  # other providers log why they are not available
            options.log_severity_level = _SILENT
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        # Threads do not wait in a loop for the next op: that is slow where stages share cores.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        for library in self.custom_ops:
            options.register_custom_ops_library(str(library))
        return options


class OnnxStage:
    """The model of one stage, loaded.

    Args:
        configure: called with the number of the stage and the options of its session.

    Raises:
        StageError: when a file of it is damaged, or ONNX Runtime refuses the model.
    """

    def __init__(
        self,
        index: int,
        spec: OnnxStageSpec,
        folder: Path,
        choice: SessionChoice,
        configure: Callable[[int, onnxruntime.SessionOptions], object] | None = None,
    ) -> None:
        self.index = index
        self.spec = spec
        self._memory = choice.device.memory
        refuse_damaged(folder, spec.file)
        try:
            options = choice.options()
            if configure is not None:
                configure(index, options)
            self._session = onnxruntime.InferenceSession(
                str(folder / spec.file), options, providers=choice.device.providers
            )
        except Exception as error:  # onnxruntime's errors have no common class
            custom = "is not a registered function" in str(error)
            raise StageError(
                f"ONNX Runtime refuses stage {index} ({spec.file}): {error}"
                f"{'; name the library that has it with --custom-ops' if custom else ''}"
            ) from error
        provider = choice.device.provider
        if provider not in self._session.get_providers():
            raise StageError(
                f"ONNX Runtime cannot load {provider}, which stage {index} is to run on; it has "
                "said why above"
            )

    def run(self, microbatch: int, received: Mapping[str, OrtValue]) -> Values:
        """The outputs of one micro-batch, which stay in the memory of the stage's device.

        Raises:
            StageError: naming stage and micro-batch.
        """
        if not self.spec.outputs:  # all that the caller wants is made elsewhere
            return {}
        binding = self._session.io_binding()
        for name in self.spec.inputs:
            binding.bind_ortvalue_input(name, received[name])
        for name in self.spec.outputs:
            binding.bind_output(name, *self._memory)
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:  # as above
            reason = str(error).strip()
            raise StageError(
                f"stage {self.index} fails on micro-batch {microbatch}: {reason}"
            ) from error
        found = binding.get_outputs()
        if not all(value.is_tensor() for value in found):  # of others there are Python's own alone
            copies = zip(found, binding.copy_outputs_to_cpu(), strict=True)
            found = [value if value.is_tensor() else copy for value, copy in copies]
        return dict(zip(self.spec.outputs, found, strict=True))


class Whole:
    """A model on the processor.

    Args:
        optimised: whether ONNX Runtime fuses nodes, so that it rounds in another order.

    Raises:
        StageError: when ONNX Runtime refuses the model.
    """

    def __init__(
        self,
        model: Path,
        threads: int = 1,
        custom_ops: Sequence[Path] = (),
        *,
        optimised: bool = True,
    ) -> None:
        choice = SessionChoice(threads=threads, custom_ops=tuple(custom_ops))
        try:
            options = choice.options()
            if not optimised:
                options.graph_optimization_level = GraphOptimizationLevel.ORT_DISABLE_ALL
            self._session = onnxruntime.InferenceSession(
                str(model), options, providers=choice.device.providers
            )
        except Exception as error:  # onnxruntime's errors have no common class
            raise StageError(f"ONNX Runtime refuses {model}: {error}") from error

    def __call__(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The outputs, by name; those of types that numpy does not have as integers.

        Raises:
            StageError: when the model fails.
        """
        try:
            return run_session(self._session, arrays)
        except StageError:
            raise
        except Exception as error:  # as above
            raise StageError(f"the whole model fails: {error}") from error


def values_of(session: onnxruntime.InferenceSession, arrays: Mapping[str, np.ndarray]) -> Values:
    """The inputs of a session, of the types that it takes."""
    kinds = {source.name: name_of(source.type) for source in session.get_inputs()}
    return {name: value_of(array, kinds.get(name, "")) for name, array in arrays.items()}


def run_session(
    session: onnxruntime.InferenceSession, arrays: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The outputs of a session, by name; arrays may stand for types that numpy does not have."""
    names = [output.name for output in session.get_outputs()]
    if not all(output.type.startswith("tensor(") for output in session.get_outputs()):
        return dict(zip(names, session.run(names, dict(arrays)), strict=True))
    found = session.run_with_ort_values(names, values_of(session, arrays))
    return {name: array_of(value) for name, value in zip(names, found, strict=True)}


# --- checksums of the files of stages, held against them when they are loaded --------------------


CHECKSUMS = "checksums.json"
"""Size and CRC-32 of each file of the stages, by its name."""

_BLOCK = 1 << 24


def write_checksums(folder: Path, stages: list[str]) -> None:
    """Writes those of the files of stages, and of the weights that stand beside them."""
    files = sorted(path for stage in stages for path in folder.glob(f"{stage}*"))
    sums = {path.name: _sum_of(path) for path in files}
    (folder / CHECKSUMS).write_text(f"{json.dumps(sums, indent=2)}\n", encoding="utf-8")


def refuse_damaged(folder: Path, stage: str) -> None:
    """Holds the files of a stage against their checksums, where there are any.

    Raises:
        StageError: naming the file that is another one.
    """
    path = folder / CHECKSUMS
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        sums = {str(name): [int(item) for item in pair] for name, pair in known.items()}
    except FileNotFoundError:
        return
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise _damaged(path) from error
    names = {stage, *(name for name in sums if name.startswith(f"{stage}."))}
    for name in sorted(names):
        file = folder / name
        if not file.is_file() or sums.get(name) != _sum_of(file):
            raise _damaged(file)


def _damaged(file: Path) -> StageError:
    return StageError(
        f"{file} is missing, or is not what was written",
        hint=f"compile once more; to run files that you have changed yourself, delete {CHECKSUMS}",
    )


def _sum_of(path: Path) -> list[int]:
    size, crc = 0, 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return [size, crc]
