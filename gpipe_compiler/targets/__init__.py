"""The output formats: how the stages of a plan are written, run and validated in each."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpipe_compiler.errors import UsageError

if TYPE_CHECKING:
    from gpipe_compiler.targets.target import OpenTarget


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """An output format that has not been imported yet.

    Attributes:
        module: the module of this package whose `open_target` is an `OpenTarget`.
        needs: packages that have to be installed besides the dependencies of this one.
        suffix: of the model files that are compiled to this format, and to no other; "" for a
            format of torch models.
    """

    module: str
    needs: tuple[str, ...] = ()
    suffix: str = ""


TARGETS: Mapping[str, OutputFormat] = {
    "torch": OutputFormat("targets.torch_stages"),
    "onnxruntime": OutputFormat("onnx.exported", ("onnx", "onnxruntime", "onnxscript")),
    "onnx": OutputFormat("onnx.from_file", ("onnx", "onnxruntime"), suffix=".onnx"),
}
"""By name, as `--target` takes it where the format is one of torch models."""


def of_file(model: str) -> str | None:
    """The name of the format that a model file is compiled to; None for a torch model."""
    named = ((name, known.suffix) for name, known in TARGETS.items() if known.suffix)
    return next((name for name, suffix in named if model.lower().endswith(suffix)), None)


def load(name: str) -> OpenTarget:
    """What opens a model for the format of this name.

    Raises:
        UsageError: where there is no such format, or a package that it needs is not installed.
    """
    if name not in TARGETS:
        raise UsageError(f"there is no target {name}", hint=f"choose {', '.join(TARGETS)}")
    known = TARGETS[name]
    missing = [need for need in known.needs if importlib.util.find_spec(need) is None]
    if missing:
        what = f"an {known.suffix} file" if known.suffix else f"--target {name}"
        raise UsageError(
            f"{what} needs {' and '.join(missing)}, which is not installed",
            hint="pip install gpipe-compiler[onnx]",
        )
    opener: OpenTarget = importlib.import_module(f"gpipe_compiler.{known.module}").open_target
    return opener
