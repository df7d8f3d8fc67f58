"""Addresses of storage that is no folder of this machine: `s3://bucket/run`, read by fsspec."""

from __future__ import annotations

import argparse
import contextlib
import errno
import functools
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

from ..errors import UsageError
from ..wording import said
from .ranks import FAILURES
from .typed import path, scheme


class Size(NamedTuple):
    """What is asked of the facts of a file."""

    st_size: int


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """A file or a folder of a file system of fsspec, asked in the words of `pathlib.Path`.

    Every method raises an OSError where the storage cannot be reached.

    Attributes:
        url: without a slash at its end.
    """

    url: str

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> Address:
        return Address(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> Address:
        return Address(self.url.rpartition("/")[0])

    def exists(self) -> bool:
        return bool(self._ask("exists"))

    def is_dir(self) -> bool:
        return bool(self._ask("isdir"))

    def is_file(self) -> bool:
        return bool(self._ask("isfile"))

    def stat(self) -> Size:
        return Size(int(self._ask("size")))

    def iterdir(self) -> list[Address]:
        """What lies in it; nothing where it is not there."""
        with self._storage() as (storage, path):
            try:
                found = storage.ls(path, detail=False)
            except FileNotFoundError:
                return []
        names = {each.rstrip("/").rpartition("/")[2] for each in found if each != path}
        return [self / name for name in sorted(names)]

    def mkdir(self, *, parents: bool, exist_ok: bool) -> None:
        assert parents
        self._ask("makedirs", exist_ok=exist_ok)

    @contextlib.contextmanager
    def open(self, mode: str, encoding: str | None = None) -> Iterator[IO[Any]]:
        words = {"encoding": encoding} if encoding else {}
        with self._storage() as (storage, path), storage.open(path, mode, **words) as stream:
            yield stream

    def read_text(self, encoding: str) -> str:
        with self.open("r", encoding=encoding) as stream:
            return str(stream.read())

    def write_text(self, text: str, encoding: str) -> None:
        """Write a file that is there in full or not at all, if its writer is killed, too."""
        beside = Address(f"{self.url}.partial")
        with beside.open("w", encoding=encoding) as stream:
            stream.write(text)
        with self._storage() as (storage, path), beside._storage() as (_, written):
            storage.mv(written, path)

    def unlink(self) -> None:
        self._ask("rm_file")

    def remove_all(self) -> None:
        """Remove a folder with what is in it."""
        self._ask("rm", recursive=True)

    def _ask(self, method: str, **words: Any) -> Any:
        with self._storage() as (storage, path):
            return getattr(storage, method)(path, **words)

    @contextlib.contextmanager
    def _storage(self) -> Iterator[tuple[Any, str]]:
        """The file system, as it is now, and what this address is called in it."""
        from fsspec.core import url_to_fs

        with reaching(self):
            storage, path = url_to_fs(self.url)
            storage.invalidate_cache()  # of listings, which other processes make untrue
            yield storage, path


Place: TypeAlias = Path | Address


def place_of(text: str | Place) -> Place:
    """A path, or an address where one is written.

    Raises:
        UsageError: when the package that reads such addresses is not installed.
    """
    if not isinstance(text, str):
        return text
    if not scheme(text):
        return Path(text)
    _check_installed(scheme(text), text)
    return Address(text.rstrip("/"))


def place(text: str) -> Place:
    """The type of an option that is a folder, or an address of storage elsewhere."""
    if not scheme(text):
        return path(text)
    try:
        return place_of(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(f"{error.problem}; {error.hint}") from error


@contextlib.contextmanager
def reaching(place: Place) -> Iterator[None]:
    """Errors of the packages behind an address, which are of any class, as an OSError."""
    try:
        yield
    except Exception as error:
        if isinstance(error, FAILURES) or isinstance(place, Path):
            raise
        raise OSError(errno.EIO, said(error), str(place)) from error


@functools.cache
def _check_installed(kind: str, text: str) -> None:
    registry: Any = importlib.import_module("fsspec.registry")  # which torch depends on
    try:
        registry.get_filesystem_class(kind)
    except ValueError as error:
        raise UsageError(
            f"{text}: fsspec knows no addresses {kind}://",
            hint="such as s3://, gs://, abfs:// and file:// are known, and paths",
        ) from error
    except ImportError as error:
        home = registry.known_implementations[kind]["class"].partition(".")[0]
        extra = "http" if kind == "https" else kind
        package = f"'fsspec[{extra}]'" if home == "fsspec" else home
        raise UsageError(
            f"{text} needs a package that is not installed: {said(error)}",
            hint=f"pip install {package}",
        ) from error
