"""Files and folders that several may write to: complete or not there, and by one run at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_HELD = (errno.EACCES, errno.EAGAIN)
_LOOK_S = 0.1


class HeldError(Exception):
    """Another process holds a lock; the message says which, as far as it is known."""


def place(path: Path, write: Callable[[Path], object]) -> None:
    """Have a file written beside its place, and moved there when it is complete.

    A link stays a link, to the new file; a file keeps its mode, and a new one has that of the
    umask; a device or a pipe is written to.

    Args:
        write: writes the file that it is named, which may not be there yet.

    Raises:
        OSError: naming the file, when it cannot be written; what was there before is there still.
    """
    try:
        _place(path, write)
    except OSError as error:
        if error.errno is None or isinstance(error, BrokenPipeError):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def _place(path: Path, write: Callable[[Path], object]) -> None:
    real = Path(os.path.realpath(path))
    if real.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if real.exists() and not real.is_file():
        with tempfile.TemporaryDirectory() as scratch:
            write(Path(scratch, "file"))
            with Path(scratch, "file").open("rb") as content, path.open("wb") as stream:
                shutil.copyfileobj(content, stream)
        return
    real.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".partial_", dir=real.parent))
    try:
        made = folder / "file"
        made.touch(real.stat().st_mode & 0o777 if real.exists() else 0o666)
        mode = stat.S_IMODE((real if real.exists() else made).stat().st_mode)
        write(made)
        made.chmod(mode)
        made.replace(real)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def place_text(path: Path, text: str) -> None:
    """Have a text file written as `place` does."""
    place(path, lambda file: file.write_text(text, encoding="utf-8"))


@contextlib.contextmanager
def locked(file: Path, *, wait_s: float = 0.0) -> Iterator[None]:
    """Hold a lock that no other process holds, to the end of the block or of this process.

    The system frees it when its process ends, however that is, and no child inherits it. A file
    system without locks (some NFS) gives it to everybody. The file goes with the lock.

    Args:
        wait_s: for a process that is about to end.

    Raises:
        HeldError: when another process holds it.
        OSError: when the file cannot be made.
    """
    end = time.monotonic() + wait_s
    while (descriptor := _tried(file)) is None:
        if time.monotonic() >= end:
            raise HeldError(_holder(file))
        time.sleep(_LOOK_S)
    try:
        with contextlib.suppress(OSError):  # a full disk is told when there is something to lose
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        with contextlib.suppress(OSError):
            file.unlink()
        os.close(descriptor)


def _tried(file: Path) -> int | None:
    """The descriptor of a file that is locked now; None where it is another's."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Who held it may have removed the file in between.
        taken = file.exists() and os.path.samestat(os.fstat(descriptor), file.stat())
    except OSError as error:
        taken = error.errno not in _HELD
    if not taken:
        os.close(descriptor)
        return None
    return descriptor


def _holder(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip() or "another process"
    except OSError:
        return "another process"
