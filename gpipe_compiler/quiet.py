"""Silences the logs of torch about failures that this compiler explains itself."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

_LOGGERS = ("torch.fx", "torch.export", "torch._export", "torch._subclasses.fake_tensor")


@contextlib.contextmanager
def quiet(*further: str) -> Iterator[None]:
    """Without torch's warnings, and without its logs of tracing and of runs on fake tensors.

    Args:
        further: loggers of which nothing is to be heard either.
    """
    loggers = [logging.getLogger(name) for name in (*_LOGGERS, *further)]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for logger in loggers:
                logger.setLevel(logging.CRITICAL)
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
