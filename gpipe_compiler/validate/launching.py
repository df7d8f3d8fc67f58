"""Runs what was written in a process of its own, where this compiler cannot be imported.

A new process imports torch again, which takes over a second. One that was forked before the
compiler and the user's file were loaded is as clean, and has torch already.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import signal
import site
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gpipe_compiler.no_gc import importing

_ISOLATED = """
import runpy, sys
sys.modules["gpipe_compiler"] = None
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""

_OWN = "gpipe_compiler"


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended: its exit code, and what it wrote to stderr."""

    code: int
    errors: str


class Launch(Protocol):
    """Runs a script with its arguments where this compiler cannot be imported.

    Args:
        threads: intra-op threads of the process.
    """

    def __call__(self, words: Sequence[str], *, threads: int) -> Ended: ...


def fresh(words: Sequence[str], *, threads: int) -> Ended:
    """In a new process."""
    environment = _environment()
    environment["OMP_NUM_THREADS"] = str(threads)
    # Its threads are more than the cores: waiting in a loop takes them from those that compute.
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    ended = subprocess.run(
        [sys.executable, "-P", "-c", _ISOLATED, *words],
        check=False,
        env=environment,
        capture_output=True,
        text=True,
    )
    return Ended(ended.returncode, ended.stderr)


@contextlib.contextmanager
def spare() -> Iterator[Launch]:
    """A process that was forked here and waits for one script; more are run in new ones.

    What is forked has imported torch and not used it: threads do not outlive a fork, nor does what
    a GPU was given. So there is none where torch was imported before.
    """
    if sys.platform != "linux" or "torch" in sys.modules or threading.active_count() > 1:
        yield fresh
        return
    with importing():
        # Backwards import a part of it, and all of it what is constructed on the meta device.
        importlib.import_module("torch._dynamo")
    waiting = _Spare()
    try:
        yield waiting.run
    finally:
        waiting.end()


class _Spare:
    """The one who holds a forked process; it ends with this object, or with this process."""

    def __init__(self) -> None:
        asked, self._asking = os.pipe()
        self._process = os.fork()
        if not self._process:
            os.close(self._asking)
            _serve(asked)
        os.close(asked)

    def run(self, words: Sequence[str], *, threads: int) -> Ended:
        """The first script in the forked process, further ones in new processes."""
        if not self._process:
            return fresh(words, threads=threads)
        with tempfile.NamedTemporaryFile("r", encoding="utf-8", errors="replace") as errors:
            asked = _Asked(list(words), threads, _environment(), str(Path.cwd()), errors.name)
            text = json.dumps([getattr(asked, name) for name in _Asked.__slots__])
            try:
                with os.fdopen(self._asking, "w", encoding="utf-8") as pipe:
                    print(text, file=pipe)
                _, status = os.waitpid(self._process, 0)
            except BrokenPipeError:  # it was killed as it waited
                self._kill()
                return fresh(words, threads=threads)
            except BaseException:
                self._kill()
                raise
            self._process = 0
            return Ended(os.waitstatus_to_exitcode(status), errors.read())

    def end(self) -> None:
        """Ends a process that was given nothing to do."""
        if self._process:
            os.close(self._asking)
            self._kill()

    def _kill(self) -> None:
        """Without waiting for it to read: what the user's file forks holds the pipe open."""
        process, self._process = self._process, 0
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A script and its arguments, how to run it, and the file that stderr goes to."""

    words: list[str]
    threads: int
    environment: Mapping[str, str]
    folder: str
    errors: str


def _serve(asking: int) -> None:
    """Runs what is asked for, and does not return."""
    code = 1
    try:
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as in the background
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        with os.fdopen(asking, encoding="utf-8") as pipe:
            text = pipe.readline()
        code = _obey(_Asked(*json.loads(text))) if text else 0
    except BaseException:  # noqa: BLE001  # nobody else could report it
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(code)


def _obey(asked: _Asked) -> int:
    """The exit code of a script, in a process that is like a new one but for what torch imports."""
    import torch

    null = os.open(os.devnull, os.O_RDWR)
    errors = os.open(asked.errors, os.O_WRONLY)
    for place, file in enumerate((null, null, errors)):
        os.dup2(file, place)
    sys.stdin, sys.stdout, sys.stderr = (
        open(place, mode, encoding="utf-8", closefd=False)  # noqa: SIM115  # to the end
        for place, mode in enumerate("rww")
    )
    sys.path[:] = _clean_path()
    os.environ.clear()
    os.environ.update(asked.environment)
    os.chdir(asked.folder)
    for name in [name for name in sys.modules if name.partition(".")[0] == _OWN]:
        del sys.modules[name]
    sys.modules[_OWN] = None  # type: ignore[assignment]  # so that importing it raises
    sys.argv = asked.words
    torch.set_num_threads(asked.threads)
    try:
        runpy.run_path(asked.words[0], run_name="__main__")
    except SystemExit as ended:
        if isinstance(ended.code, int | None):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    return 0


def _clean_path() -> list[str]:
    """Where `python -P` without PYTHONPATH looks for modules."""
    added = {"", str(Path.cwd()), str(Path(sys.argv[0]).resolve().parent)}
    added.update(os.environ.get("PYTHONPATH", "").split(os.pathsep))
    kept = {*site.getsitepackages(), site.getusersitepackages()}
    return [folder for folder in sys.path if folder not in added or folder in kept]


def _environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
