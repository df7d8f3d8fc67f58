"""Finds the user's line: the innermost frame that is neither torch's nor this compiler's."""

from __future__ import annotations

import linecache
import re
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

import torch

from gpipe_compiler.errors import SourceLocation

_TORCH = str(Path(torch.__file__).parent) + "/"
_OWN = str(Path(__file__).parent.parent) + "/"
_ENTRY = _OWN + "frontend/entry.py"
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>\S+))?')


def is_users(file: str) -> bool:
    """Whether a file holds model code: not torch, not this compiler, not generated."""
    return not file.startswith((_TORCH, _OWN, "<")) or file == "<stdin>"


def location(file: str, line: int, function: str = "") -> SourceLocation:
    """The location with its line of code."""
    return SourceLocation(file, line, function, linecache.getline(file, line).strip())


def model_frames(stack: Iterable[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """The user's frames of a stack (outermost first) that the traced model runs in.

    What stands outside of `Entry.forward` called the compiler and is no part of the model.
    """
    found: list[traceback.FrameSummary] = []
    for frame in stack:
        if frame.filename == _ENTRY and frame.name == "forward":
            found = []
        elif is_users(frame.filename):
            found.append(frame)
    return found


def calling_line() -> SourceLocation | None:
    """The user's line that is being executed inside the traced model."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _ENTRY:
        if is_users(frame.f_code.co_filename):
            return location(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return None


def line_of(error: BaseException) -> SourceLocation | None:
    """The user's line in which an exception arose."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_users(frame.filename) and frame.lineno is not None:
            return location(frame.filename, frame.lineno, frame.name)
    return None


def line_of_trace(stack_trace: str | None) -> SourceLocation | None:
    """The user's line in a printed stack trace, as torch keeps it with every node."""
    for text in reversed((stack_trace or "").splitlines()):
        match = _FRAME.match(text)
        if match and is_users(match["file"]):
            return location(match["file"], int(match["line"]), match["function"] or "")
    return None
