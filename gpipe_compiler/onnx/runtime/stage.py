"""One stage: a session of ONNX Runtime, whose inputs and outputs stay where they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import onnxruntime
from onnxruntime import OrtValue

from .devices import DeviceChoice
from .errors import StageError
from .spec import StageSpec

_SILENT = 4
"""The level of ONNX Runtime's log at which it says nothing: what is wrong is raised."""

Values = dict[str, OrtValue]
"""Values of one micro-batch, by name."""


@dataclass(frozen=True, slots=True)
class SessionChoice:
    """How the sessions of a device are made.

    Attributes:
        threads: of one op; 0 lets ONNX Runtime choose.
        spinning: whether threads wait in a loop for the next op, which is fast on cores of their
            own and slow where stages share them.
        custom_ops: libraries of custom operators to load.
    """

    device: DeviceChoice
    threads: int = 0
    spinning: bool = False
    custom_ops: tuple[Path, ...] = ()

    def options(self) -> onnxruntime.SessionOptions:
        """What a session is made with."""
        options = onnxruntime.SessionOptions()
        if self.device.kind == "cpu":  # other providers tell in the log why they are not there
            options.log_severity_level = _SILENT
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        spin = "1" if self.spinning else "0"
        options.add_session_config_entry("session.intra_op.allow_spinning", spin)
        for library in self.custom_ops:
            options.register_custom_ops_library(str(library))
        return options


class Stage:
    """The model of one stage, loaded.

    Raises:
        StageError: when ONNX Runtime refuses the model.
    """

    def __init__(self, index: int, spec: StageSpec, folder: Path, choice: SessionChoice) -> None:
        self.index = index
        self.spec = spec
        self._memory = choice.device.memory
        try:
            self._session = onnxruntime.InferenceSession(
                str(folder / spec.file), choice.options(), providers=choice.device.providers
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
            told = str(error).strip()
            raise StageError(
                f"stage {self.index} fails on micro-batch {microbatch}: {told}"
            ) from error
        return dict(zip(self.spec.outputs, binding.get_outputs(), strict=True))
