"""ONNX models, and stages for ONNX Runtime."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class OnnxFile:
    """An ONNX model to be compiled.

    Attributes:
        inputs: shapes of its inputs, as `--input` takes them.
        custom_ops: libraries of custom operators that it needs.
    """

    path: Path
    inputs: tuple[str, ...] = ()
    custom_ops: tuple[Path, ...] = ()
