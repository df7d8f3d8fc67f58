"""`gpipe-compile model.onnx`: what of the command means something for an ONNX model."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from gpipe_compiler.codegen.package import Progress
from gpipe_compiler.compile import Compiled
from gpipe_compiler.compile_options import CompileOptions
from gpipe_compiler.errors import UsageError
from gpipe_compiler.frontend.subject import Subject

_TRAINING = ("schedule", "remat", "batchnorm", "precision", "optimizer", "data_parallel", "loss")
"""Options that say how a package trains."""

_NEEDED = ("onnx", "onnxruntime")
_NEEDED_TO_EXPORT = (*_NEEDED, "onnxscript")


def is_onnx(model: str) -> bool:
    """Whether MODEL of the command names an ONNX file."""
    return model.lower().endswith(".onnx")


def compile_file(
    arguments: argparse.Namespace,
    parser: argparse.ArgumentParser,
    options: CompileOptions,
    directory: Path | None,
    progress: Progress,
) -> Compiled:
    """What the command asks for.

    Args:
        parser: that made the arguments; it knows their defaults.

    Raises:
        UsageError: for options that say how to train or to trace, and where onnx or onnxruntime is
            not installed.
        GPipeCompilerError: whatever is wrong with the model.
    """
    given = [
        f"--{name.replace('_', '-')}"
        for name in (*_TRAINING, "frontend", "per_microbatch", "batch_dim")
        if getattr(arguments, name) != parser.get_default(name)
    ]
    if given:
        raise UsageError(
            f"{', '.join(given)}: an ONNX model is neither traced nor trained",
            hint="leave it out, or compile the model.py that it was exported from",
        )
    _refuse_missing(arguments.model, _NEEDED)
    # Imported here: both take long to import, and are not needed for anything else.
    from gpipe_compiler.onnx.compile import compile_onnx

    return compile_onnx(
        Path(arguments.model),
        options,
        directory,
        inputs=arguments.input,
        custom_ops=arguments.custom_ops,
        progress=progress,
    )


def compile_model(
    subject: Subject, options: CompileOptions, directory: Path | None, progress: Progress
) -> Compiled:
    """A torch model, for ONNX Runtime.

    Raises:
        UsageError: where onnx, onnxruntime or onnxscript is not installed.
        GPipeCompilerError: whatever is wrong with the model.
    """
    _refuse_missing("--target onnxruntime", _NEEDED_TO_EXPORT)
    # Imported here, as above.
    from gpipe_compiler.onnx.compile_exported import compile_exported

    return compile_exported(subject, options, directory, progress)


def _refuse_missing(what: str, needed: Sequence[str]) -> None:
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"{what} needs {' and '.join(missing)}, which is not installed",
            hint="pip install gpipe-compiler[onnx]",
        )
