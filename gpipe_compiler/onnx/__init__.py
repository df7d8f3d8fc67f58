"""ONNX models, and stages for ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class OnnxFile:
    """An ONNX model to be compiled.

    Attributes:
        inputs: shapes of its inputs, or files of arrays, as `--input` takes them.
        custom_ops: libraries of custom operators that it needs.
        batch_dims: by input, the dimension that is the batch, None for none; others are found out.
        state: inputs that are state between calls, each with the output that it becomes.
    """

    path: Path
    inputs: tuple[str, ...] = ()
    custom_ops: tuple[Path, ...] = ()
    batch_dims: Mapping[str, int | None] = field(default_factory=dict)
    state: Mapping[str, str] = field(default_factory=dict)
