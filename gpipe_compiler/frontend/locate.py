"""Finds the user's line: the innermost frame that is not torch's, Python's or this compiler's."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import linecache
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType

import torch

from gpipe_compiler.errors import SourceLocation

_TORCH = str(Path(torch.__file__).parent) + "/"
_OWN = str(Path(__file__).parent.parent) + "/"
_LIBRARY = sysconfig.get_path("stdlib") + "/"
_INSTALLED = (_LIBRARY + "site-packages/", _LIBRARY + "dist-packages/")
_ENTRY = _OWN + "frontend/entry.py"
_DEPENDENCIES = re.compile(
    r"/(?:site|dist)-packages/(?:_distutils_hack|cuda|filelock|flatbuffers|fsspec|functorch|google|"
    r"grandalf|jinja2|markdown_it|markupsafe|mdurl|ml_dtypes|mpmath|networkx|numpy|nvidia|onnx|"
    r"onnx_ir|onnxruntime|onnxscript|packaging|pkg_resources|pygments|rich|safetensors|setuptools|"
    r"sympy|torchgen|triton|typing_extensions)(?:/|\.)"
)
"""Files of the libraries that torch and this compiler call by themselves."""


@functools.cache
def is_users(file: str) -> bool:
    """Whether a file holds model code, be it a library's.

    It does not where it is torch's, Python's, this compiler's, of a library that these call by
    themselves, or generated.
    """
    if file.startswith(_LIBRARY) and not file.startswith(_INSTALLED):
        return False
    others = file.startswith((_TORCH, _OWN, "<")) or _DEPENDENCIES.search(file) is not None
    return not others or file == "<stdin>"


def is_installed_file(file: str) -> bool:
    """Whether a file stands among the installed packages of a Python."""
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def is_own(file: str) -> bool:
    """Whether a file is this compiler's."""
    return file.startswith(_OWN)


def asking_frame(frame: FrameType, *, beyond_torch: bool = False) -> FrameType:
    """The innermost frame that is not this compiler's, from one on; or that is a user's."""

    def passed(file: str) -> bool:
        return is_own(file) or (beyond_torch and not is_users(file))

    while passed(frame.f_code.co_filename) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def location(
    file: str, line: int, function: str = "", callers: tuple[SourceLocation, ...] = ()
) -> SourceLocation:
    """The location with its line of code."""
    return SourceLocation(file, line, function, linecache.getline(file, line).strip(), callers)


_Frame = tuple[str, int, str]
"""File, line and function."""


def _innermost(frames: Iterable[_Frame]) -> SourceLocation | None:
    """The first of some frames, which called each other inside out."""
    return next((_located(found) for found in _by_forwards(frames)), None)


def _by_forwards(frames: Iterable[_Frame]) -> Iterator[list[_Frame]]:
    """The user's among some frames, which called each other inside out, up to each `forward`."""
    found: list[_Frame] = []
    for frame in frames:
        if is_users(frame[0]):
            found.append(frame)
            if frame[2] == "forward":
                yield found
                found = []
    if found:
        yield found


def _located(frames: Sequence[_Frame]) -> SourceLocation:
    callers: tuple[SourceLocation, ...] = ()
    for frame in reversed(frames[1:]):
        callers = (*callers, location(*frame))
    return location(*frames[0], callers)


_HERE = str(Path(__file__).parent)


def calling_line() -> SourceLocation | None:
    """The user's line that is being executed inside the traced model."""
    return _innermost(frames_of_model(sys._getframe(1)))


def line_around(part: str) -> SourceLocation | None:
    """The user's line that called what runs in files of torch's, by a part of their paths."""
    frames = list(frames_of_model(sys._getframe(1)))
    inside = (number for number, (file, _, _) in enumerate(frames, 1) if part in file)
    return _innermost(frames[max(inside, default=0) :])


_BETWEEN = (
    "/functools.py",
    "torch/library.py",
    "torch/__init__.py",
    "torch/fx/experimental/",
    "torch/utils/_sympy/",
    "torch/_logging/",
)
"""Where torch registers an operator, and where it answers what is asked of a size that is free."""


def is_asked_by_user() -> bool:
    """Whether the user's own line asks torch for what it does, and no function that it calls."""
    files = (file for file, _, _ in frames_of_model(sys._getframe(1)))
    outside = (file for file in files if not any(part in file for part in (*_BETWEEN, _HERE)))
    asking = next(outside, None)
    return asking is not None and is_users(asking)


def is_in_layer() -> bool:
    """Whether what runs is inside of a module of torch.nn."""
    files = (file for file, _, _ in frames_of_model(sys._getframe(1)))
    own = itertools.takewhile(lambda file: not is_users(file), files)
    return any("torch/nn/modules/" in file and not file.endswith("/module.py") for file in own)


def chooses_kernel() -> bool:
    """Whether torch asks to choose the kernel of a convolution, whose result lies in memory so."""
    frames = frames_of_model(sys._getframe(1))
    return any(name == "conv" and "/_subclasses/fake_impls" in file for file, _, name in frames)


def frames_running(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames that run in the traced model, the innermost first."""
    while frame is not None and frame.f_code.co_filename != _ENTRY:
        yield frame
        frame = frame.f_back


def frames_of_model(frame: FrameType | None) -> Iterator[tuple[str, int, str]]:
    """The same as file, line and function each."""
    for own in frames_running(frame):
        yield own.f_code.co_filename, own.f_lineno, own.f_code.co_name


def line_of(error: BaseException, *, in_program: bool = False) -> SourceLocation | None:
    """The user's line in which an exception arose.

    Args:
        in_program: rather the line of a file that is no installed library's.
    """
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename)]
    if in_program:
        frames = [f for f in frames if not is_installed_file(f.filename)] or frames
    if not frames:
        return None
    return location(frames[-1].filename, frames[-1].lineno or 1, frames[-1].name)


def source_here(users: Sequence[str]) -> SourceLocation | None:
    """The user's line that is being executed inside the traced model, and how it was reached.

    Args:
        users: the paths of the user's modules whose `forward`s run, the outermost first.
    """
    groups = list(_by_forwards(frames_of_model(sys._getframe(1))))
    if not groups:
        return None
    source = _located(groups[0])
    if len(groups) > 1 and groups[-1][-1][2] != "forward":
        groups.pop()  # decorators around the model's own
    if len(users) != len(groups):
        return source
    lines = [_located(_of_one_file(frames)) for frames in groups[:0:-1]]
    calls = zip((path.count(".") + 1 for path in users[1:]), lines, strict=True)
    return dataclasses.replace(source, calls=tuple(calls))


def _of_one_file(frames: Sequence[_Frame]) -> list[_Frame]:
    """Those in the file of the outermost, which a `forward` is; decorators around it are not."""
    _, alike = next(itertools.groupby(frames[::-1], lambda frame: frame[0]))
    return [*alike][::-1]
