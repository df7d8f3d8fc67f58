"""A folder of checkpoints: which there are, which is the newest, and how one takes its place.

A checkpoint is a folder in it, `step_00000042`:

    .metadata, __0_0.distcp, ...   tensors and values by name, one data file for every rank
    trainer.pt                     the state of schedule and scaler, and random generators
    checkpoint.json                what this is, and the size and checksums of everything else

It is written under another name, and renamed when all of it is on the disk: a folder of that name
is complete, whenever the process is killed.

An address has no renaming that is done at once: there a checkpoint is written in its place, beside
a file `unfinished`, and checkpoint.json comes last. A folder with the first of these files and
without the second is none, and goes with the next checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

import torch

from ..core.address import Address, Place, place_of
from ..core.ranks import described
from ..errors import CheckpointError

INDEX = "checkpoint.json"
TRAINER = "trainer.pt"
METADATA = ".metadata"
UNFINISHED = "unfinished"
FORMAT = 1

_BLOCK = 4 << 20
_NAME = re.compile(r"step_\d{8,}(_\d+)?")
_REST = re.compile(r"\.step_\d{8,}(_\d+)?\.(partial|removed)")


@dataclass(frozen=True)
class Index:
    """What checkpoint.json says.

    Attributes:
        number: counts the checkpoints of a folder in the order in which they were written.
        kinds: the classes of what has a state besides the model: optimizer, scheduler, scaler.
        counts: the numbers of `Progress` by name.
        aliases: further names of tied parameters to those that hold the tensor.
        files: the size of every other file, in bytes.
        checksums: by data file, (offset, length, CRC-32) of everything in it.
    """

    number: int
    kinds: Mapping[str, str]
    counts: Mapping[str, int]
    aliases: Mapping[str, str]
    files: Mapping[str, int]
    checksums: Mapping[str, Sequence[tuple[int, int, int]]] = field(repr=False)

    def write(self, folder: Place) -> None:
        """Write it into the folder, down to the disk."""
        content = {"format": FORMAT, "torch": str(torch.__version__), **dataclasses.asdict(self)}
        content["crc"] = _crc(content)
        if isinstance(folder, Address):
            (folder / INDEX).write_text(json.dumps(content) + "\n", encoding="utf-8")
            return
        with (folder / INDEX).open("w", encoding="utf-8") as stream:
            stream.write(json.dumps(content) + "\n")
            sync(stream)

    @classmethod
    def read(cls, folder: Place) -> Index | None:
        """That of a folder; None where torch.distributed.checkpoint alone has written.

        Raises:
            CheckpointError: when it is broken, or of another format.
        """
        path = folder / INDEX
        if not path.exists():
            return None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            version, crc = content["format"], content.pop("crc")
            known = {name.name: content[name.name] for name in dataclasses.fields(cls)}
        except (
            OSError,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            RecursionError,
        ) as error:
            raise CheckpointError(f"{path} is broken: {described(error)}") from error
        if crc != _crc(content):
            raise CheckpointError(f"{path} is broken: it is not what was written")
        if version != FORMAT:
            raise CheckpointError(
                f"{folder} has format {version}, this package reads format {FORMAT}",
                hint="read it with the version of the package that wrote it",
            )
        return cls(**known)

    def check(self, folder: Place) -> None:
        """Whether every file is there in full.

        Raises:
            CheckpointError: naming the file that is not.
        """
        for name, size in self.files.items():
            path = folder / name
            if not path.is_file():
                raise CheckpointError(f"{path} is missing")
            if path.stat().st_size != size:
                raise CheckpointError(
                    f"{path} is truncated: {path.stat().st_size} bytes of {size}"
                    if path.stat().st_size < size
                    else f"{path} has {path.stat().st_size} bytes, written were {size}"
                )

    def recorded(self) -> dict[tuple[str, int, int], int]:
        return {
            (name, offset, length): crc
            for name, parts in self.checksums.items()
            for offset, length, crc in parts
        }


def entries(directory: Place) -> list[tuple[Index, Place]]:
    """The checkpoints of a folder whose index can be read, the oldest first."""
    found: list[tuple[Index, Place]] = []
    for path in _named(directory):
        try:
            index = Index.read(path)
        except CheckpointError:
            continue
        if index is not None:
            found.append((index, path))
    return sorted(found, key=lambda entry: entry[0].number)


def latest(directory: Place | str) -> Place | None:
    """The newest complete checkpoint of a folder; None where there is none.

    Raises:
        CheckpointError: when there are checkpoints, and not one of them is complete.
    """
    problems = []
    complete: list[tuple[int, str, Place]] = []
    for path in _named(place_of(directory)):
        if is_unfinished(path):
            continue
        try:
            index = Index.read(path)
            if index is None:
                raise CheckpointError(f"{path / INDEX} is missing")
            index.check(path)
        except CheckpointError as error:
            problems.append(error.problem)
        else:
            complete.append((index.number, path.name, path))
    if complete:
        for problem in problems:
            warnings.warn(f"a checkpoint is passed over: {problem}", stacklevel=2)
        return max(complete)[2]
    if problems:
        raise CheckpointError(
            f"no checkpoint in {directory} is complete: " + "; ".join(problems),
            hint="remove them to start anew",
        )
    return None


def make_temporary(directory: Place, step: int) -> Place:
    """A new folder to write a checkpoint into, of a name that no other has had there; removes what
    killed runs left behind."""
    directory.mkdir(parents=True, exist_ok=True)
    there: list[Place] = [*directory.iterdir()]
    for path in there:
        if isinstance(path, Address):
            if _NAME.fullmatch(path.name) and path.is_dir() and is_unfinished(path):
                _remove(path)
        elif _REST.fullmatch(path.name):
            shutil.rmtree(path)
    taken, first = {path.name for path in there}, f"step_{step:08d}"
    names = (first if serial == 1 else f"{first}_{serial}" for serial in itertools.count(1))
    name = next(free for free in names if free not in taken)
    folder = directory / (name if isinstance(directory, Address) else f".{name}.partial")
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(folder, Address):
        _mark(folder)
    return folder


def is_unfinished(path: Place) -> bool:
    """Whether a run was killed as it wrote or removed this, or does so now; false of every path."""
    if not isinstance(path, Address) or (path / INDEX).exists():
        return False
    names = [file.name for file in path.iterdir()]
    return not names or UNFINISHED in names


def _mark(folder: Address) -> None:
    with (folder / UNFINISHED).open("wb"):
        pass


def _remove(folder: Address) -> None:
    """Remove a checkpoint, which is none from the first moment on."""
    _mark(folder)
    files = {path.name: path for path in folder.iterdir()}
    mark = files.pop(UNFINISHED)  # the last to go
    if INDEX in files:
        files.pop(INDEX).unlink()
    for path in (*files.values(), mark):
        path.unlink()
    with contextlib.suppress(FileNotFoundError):  # object storages have no empty folders
        folder.remove_all()


def commit(temporary: Place) -> Place:
    if isinstance(temporary, Address):
        (temporary / UNFINISHED).unlink()
        return temporary
    final = temporary.with_name(temporary.name.removeprefix(".").removesuffix(".partial"))
    sync_path(temporary)
    temporary.rename(final)
    sync_path(final.parent)
    return final


def prune(directory: Place, keep: int | None) -> None:
    """Remove the oldest checkpoints beyond `keep`; warns of one that cannot be removed."""
    found = entries(directory)
    if keep is None:
        return
    for _, path in found[: max(0, len(found) - keep)]:
        try:
            if isinstance(path, Address):
                _remove(path)
                continue
            removed = path.with_name(f".{path.name}.removed")
            path.rename(removed)
            shutil.rmtree(removed)
        except OSError as error:
            warnings.warn(f"an old checkpoint cannot be removed: {described(error)}", stacklevel=2)


def discard(temporary: Place) -> None:
    if isinstance(temporary, Address):
        with contextlib.suppress(OSError):
            _remove(temporary)
        return
    shutil.rmtree(temporary, ignore_errors=True)


def _named(directory: Place) -> list[Place]:
    if not directory.is_dir():
        return []
    return [path for path in directory.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]


def _crc(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def checksum(path: Place) -> int:
    """The CRC-32 of a file."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        return checksum_of_part(stream, 0, size)


def checksum_of_part(stream: IO[bytes], offset: int, length: int) -> int:
    """The CRC-32 of a part of a file that is open."""
    crc = 0
    stream.seek(offset)
    while length > 0 and (block := stream.read(min(length, _BLOCK))):
        crc = zlib.crc32(block, crc)
        length -= len(block)
    return crc


def sync(stream: IO[Any]) -> None:
    """Down to the disk with what was written."""
    stream.flush()
    with contextlib.suppress(io.UnsupportedOperation, AttributeError):  # at an address
        os.fsync(stream.fileno())


def sync_path(path: Place) -> None:
    """Down to the disk with a file that was written, or with the names in a folder."""
    if isinstance(path, Address):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
