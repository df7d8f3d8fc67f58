"""What goes wrong in a package: what, where, and what to do about it."""

from __future__ import annotations


class PipelineError(Exception):
    """The root of the hierarchy."""

    exit_code = 1


class UsageError(PipelineError):
    """The command line, or an argument of the API, makes no sense."""

    exit_code = 2


class StageError(PipelineError):
    """ONNX Runtime refuses a stage, or fails in it."""
