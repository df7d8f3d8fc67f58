"""What the model asks of CUDA where there is none: torch turns its autocast off.

A package that is compiled on such a machine is to have it on where there is one.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.amp.autocast_mode import autocast

from gpipe_compiler.errors import Notice, TraceError
from gpipe_compiler.frontend.locate import calling_line, is_users
from gpipe_compiler.ir import Autocast
from gpipe_compiler.ir.interpret import lacks

_ASKED = "gpipe_compiler_asked"
"""Attribute of a context of autocast: whether it was to be on."""


@contextlib.contextmanager
def autocast_as_asked() -> Iterator[None]:
    """Lets contexts of autocast that are made here remember whether they were to be on."""
    own = autocast.__init__

    def made(
        context: Any,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="CUDA is not available")
            own(context, device_type, dtype, enabled, cache_enabled)
        vars(context)[_ASKED] = bool(enabled)

    with mock.patch.object(autocast, "__init__", made):
        yield


@contextlib.contextmanager
def cuda_missed() -> Iterator[None]:
    """Notes the lines of the model that ask whether there is CUDA, where there is none."""
    own, lines = torch.cuda.is_available, dict[str, None]()

    def is_available() -> bool:
        found = own()
        if not found and is_users(sys._getframe(1).f_code.co_filename):
            lines[str(calling_line())] = None
        return found

    with mock.patch.object(torch.cuda, "is_available", is_available):
        yield
    for line in lines:
        text = f"{line}: the package holds what this comes to here, where there is no CUDA"
        warnings.warn(Notice(text), stacklevel=2)


def asked(context: Any) -> Autocast:
    """What a context of autocast was asked for.

    Raises:
        TraceError: where that cannot be told.
    """
    enabled = bool(vars(context).get(_ASKED, context._enabled))
    if _ASKED not in vars(context) and not enabled and lacks(context.device):
        raise TraceError(
            "whether autocast on CUDA is to be on is not known: torch has turned it off, as there "
            "is no CUDA here, before the compiler saw it",
            location=calling_line(),
            hint="write `with torch.autocast(...):` in forward in place of a decorator, or give "
            "the model's file to gpipe-compile",
        )
    return Autocast(context.device, context.fast_dtype, enabled)
