"""`gpipe-compile model.onnx`: what of the command means something for an ONNX model."""

from __future__ import annotations

import argparse
from pathlib import Path

from gpipe_compiler.errors import UsageError
from gpipe_compiler.onnx import OnnxFile

_MODEL = (
    *(
        "schedule",
        "remat",
        "batchnorm",
        "precision",
        "optimizer",
        "data_parallel",
        "loss",
        "loss_over",
    ),
    *("per_microbatch", "batch_dim", "print_after", "pass_option", "free"),
)
"""Options that say how a package trains, or how a model is traced and transformed."""


def onnx_file(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> OnnxFile:
    """The model that the command names.

    Args:
        parser: that made the arguments; it knows their defaults.

    Raises:
        UsageError: for options that say how to train or to trace.
    """
    given = [
        f"--{name.replace('_', '-')}"
        for name in _MODEL
        if getattr(arguments, name) != parser.get_default(name)
    ]
    if given:
        raise UsageError(
            f"{', '.join(given)}: an ONNX model is neither traced nor trained",
            hint="leave it out, or compile the model.py that it was exported from",
        )
    return OnnxFile(Path(arguments.model), tuple(arguments.input), tuple(arguments.custom_ops))
