"""What the command of a package says of the sessions of stages: threads, processors, options."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import onnxruntime

from ...runtime.core.typed import path, shown, whole
from ...runtime.errors import UsageError

_MOST_THREADS = 1024

_FOR_STAGE = re.compile(r"(?:(?P<stage>\d{1,6}):)?(?P<key>[^=:]+)=(?P<value>.*)", re.DOTALL)


def add_session_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--threads", type=_threads, default=(1,), metavar="N", help="of each stage: 1, or 2,1,4"
    )
    command.add_argument(
        "--cpus", type=_cpus, default=(), metavar="C", help="of each stage: 0-3,4-7 (0+2 for two)"
    )
    of_stage = " of all stages, or of one: 0:KEY=VALUE; may be given again"
    for name, what in (
        ("--session-option", "an entry of ONNX Runtime's session config"),
        ("--provider-option", "an option of the provider"),
    ):
        command.add_argument(
            name, type=_entry, action="append", default=[], metavar="K=V", help=what + of_stage
        )
    command.add_argument(
        "--profile", type=path, metavar="FOLDER", help="for ONNX Runtime's traces, one per stage"
    )


def _threads(text: str) -> tuple[int, ...]:
    return tuple(whole(1, _MOST_THREADS)(part) for part in text.split(","))


def _cpus(text: str) -> tuple[frozenset[int], ...]:
    """The processors of each stage; `0-3,4-7` for two stages, `0+2` for two processors of one."""
    number = whole(0, _MOST_CPU)
    found = []
    for part in text.split(","):
        cpus: set[int] = set()
        for piece in part.split("+"):
            first, _, last = piece.partition("-")
            cpus.update(range(number(first), number(last or first) + 1))
        if not cpus:
            raise argparse.ArgumentTypeError(f"{shown(text)} names no processors: 0-3,4-7")
        found.append(frozenset(cpus))
    return tuple(found)


_MOST_CPU = 65535

Entry = tuple[int | None, str, str]
"""A stage, or None for all, a key and a value."""


def _entry(text: str) -> Entry:
    match = _FOR_STAGE.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{shown(text)} is no KEY=VALUE, nor 0:KEY=VALUE")
    stage = None if match["stage"] is None else int(match["stage"])
    return stage, match["key"], match["value"]


def options_of(entries: Sequence[Entry], stages: int) -> list[Mapping[str, str]]:
    """For each stage, what is said of it.

    Raises:
        UsageError: for a stage that there is not.
    """
    for stage, key, _ in entries:
        if stage is not None and stage >= stages:
            raise UsageError(f"{stage}:{key}: the pipeline has {stages} stages, from 0")
    return [
        {key: value for stage, key, value in entries if stage in (None, number)}
        for number in range(stages)
    ]


def configuring(
    entries: Sequence[Entry], profile: Path | None, stages: int
) -> Callable[[int, onnxruntime.SessionOptions], None]:
    """Sets what is said of the session of each stage."""
    said = options_of(entries, stages)
    if profile is not None:
        profile.mkdir(parents=True, exist_ok=True)

    def configure(stage: int, options: onnxruntime.SessionOptions) -> None:
        for key, value in said[stage].items():
            options.add_session_config_entry(key, value)
        if profile is not None:
            options.enable_profiling = True
            options.profile_file_prefix = str(profile / f"stage_{stage}")

    return configure
