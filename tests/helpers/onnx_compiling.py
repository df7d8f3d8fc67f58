"""Compiles models for ONNX Runtime, from files and from torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from gpipe_compiler.compile import Compiled, CompileOptions
from gpipe_compiler.compile import compile as compile_model
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.onnx import OnnxFile


def compile_onnx(
    path: Path,
    options: CompileOptions,
    directory: Path | None,
    *,
    inputs: Sequence[str] = (),
    custom_ops: Sequence[Path] = (),
) -> Compiled:
    """The package of an ONNX file."""
    file = OnnxFile(path, tuple(inputs), tuple(custom_ops))
    return compile_model(file, dataclasses.replace(options, target="onnx"), directory)


def compile_exported(subject: Subject, options: CompileOptions, directory: Path | None) -> Compiled:
    """The package of a torch model, its stages exported."""
    return compile_model(subject, dataclasses.replace(options, target="onnxruntime"), directory)
