"""Where a stage runs: `cpu`, `cuda:0`, or any execution provider by its name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import onnxruntime

from ...runtime.errors import UsageError

_PROVIDERS: Mapping[str, str] = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
    "rocm": "ROCMExecutionProvider",
    "migraphx": "MIGraphXExecutionProvider",
    "openvino": "OpenVINOExecutionProvider",
    "dml": "DmlExecutionProvider",
    "coreml": "CoreMLExecutionProvider",
}

_ON_GPU = ("cuda", "tensorrt", "rocm", "migraphx")


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """A device that stages are to run on.

    Attributes:
        kind: `cpu`, `cuda`, ...; the kind of memory that its values lie in is `cpu` or `cuda`.
        number: among the devices of this kind.
    """

    kind: str
    number: int = 0

    @classmethod
    def parse(cls, text: str) -> DeviceChoice:
        """A device such as `cpu` or `cuda:1`.

        Raises:
            UsageError: when there is none of that kind, or ONNX Runtime here cannot use it.
        """
        kind, _, number = text.strip().partition(":")
        if kind not in _PROVIDERS or (number and not re.fullmatch("[0-9]{1,6}", number)):
            raise UsageError(f"{text!r} is no device: write {', '.join(_PROVIDERS)}, or cuda:1")
        choice = cls(kind, int(number or 0))
        there = onnxruntime.get_available_providers()
        if choice.provider not in there:
            raise UsageError(
                f"ONNX Runtime here has no {choice.provider}, which {text} needs; it has "
                f"{', '.join(there)} (for CUDA: pip install onnxruntime-gpu)"
            )
        return choice

    @property
    def provider(self) -> str:
        """ONNX Runtime's name of what runs there."""
        return _PROVIDERS[self.kind]

    def providers(self, options: Mapping[str, str]) -> list[str | tuple[str, dict[str, str]]]:
        """What a session is made with; the processor runs what the device cannot."""
        if self.kind == "cpu":
            return [(self.provider, dict(options))]
        own = {"device_id": str(self.number), **options}
        return [(self.provider, own), _PROVIDERS["cpu"]]

    @property
    def memory(self) -> tuple[str, int]:
        """The kind and number of the memory that values lie in, as IO binding has it."""
        return ("cuda", self.number) if self.kind in _ON_GPU else ("cpu", 0)

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.number}"


CPU = DeviceChoice("cpu")


def parse_devices(text: str, count: int) -> tuple[DeviceChoice, ...]:
    """The devices of a pipeline, from `cpu,cuda:0`; one stands for all.

    Raises:
        UsageError: when there are neither one nor `count`.
    """
    choices = tuple(DeviceChoice.parse(part) for part in text.split(","))
    if len(choices) not in (1, count):
        raise UsageError(f"--devices names {len(choices)} devices, but the pipeline has {count}")
    return choices if len(choices) == count else choices * count
