"""The files of a checkpoint: written by torch.distributed.checkpoint, and checked before use.

A checkpoint is a folder:

    .metadata, __0_0.distcp, ...   tensors and values by name, one data file for every rank
    trainer.pt                     the state of schedule and scaler, and random generators
    checkpoint.json                what this is, and the size and checksums of everything else
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any

import torch
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.storage import WriteResult

from .errors import CheckpointError
from .ranks import FAILURES, described

INDEX = "checkpoint.json"
TRAINER = "trainer.pt"
METADATA = ".metadata"
FORMAT = 1

_BLOCK = 4 << 20


@dataclass(frozen=True)
class Index:
    """What checkpoint.json says.

    Attributes:
        number: counts the checkpoints of a folder in the order in which they were written.
        kinds: the classes of what has a state besides the model: optimizer, scheduler, scaler.
        position: the numbers of `Progress` by name.
        aliases: further names of tied parameters to those that hold the tensor.
        files: the size of every other file, in bytes.
        checksums: by data file, (offset, length, CRC-32) of everything in it.
    """

    number: int
    kinds: Mapping[str, str]
    position: Mapping[str, int]
    aliases: Mapping[str, str]
    files: Mapping[str, int]
    checksums: Mapping[str, Sequence[tuple[int, int, int]]] = field(repr=False)

    def write(self, folder: Path) -> None:
        """Write it into the folder, down to the disk."""
        content = {
            "format": FORMAT,
            "torch": str(torch.__version__),
            **dataclasses.asdict(self),
        }
        with (folder / INDEX).open("w", encoding="utf-8") as stream:
            stream.write(json.dumps(content) + "\n")
            sync(stream)

    @classmethod
    def read(cls, folder: Path) -> Index | None:
        """That of a folder; None where torch.distributed.checkpoint alone has written.

        Raises:
            CheckpointError: when it is broken, or of another format.
        """
        path = folder / INDEX
        if not path.exists():
            return None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            version = content["format"]
            if version != FORMAT:
                raise CheckpointError(
                    f"{folder} has format {version}, this package reads format {FORMAT}",
                    hint="read it with the version of the package that wrote it",
                )
            return cls(**{name.name: content[name.name] for name in dataclasses.fields(cls)})
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise CheckpointError(f"{path} is broken: {described(error)}") from error

    def check(self, folder: Path) -> None:
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


class Writer(FileSystemWriter):
    """Writes one file per rank, down to the disk.

    Nothing is copied ahead: torch would wait for the copies from one GPU only, and this process
    may hold stages on several.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, per_thread_copy_ahead=0, sync_files=True, overwrite=True)

    def storage_meta(self) -> StorageMeta:
        """Nothing of the temporary folder, whose name is soon another."""
        return StorageMeta()


class Stored:
    """The tensors and values of a checkpoint, by the keys of torch.distributed.checkpoint.

    Attributes:
        index: None where torch.distributed.checkpoint alone has written.
    """

    def __init__(self, folder: Path, index: Index | None, metadata: Metadata) -> None:
        self.folder = folder
        self.index = index
        self.metadata = metadata

    @classmethod
    def open(cls, folder: Path) -> Stored:
        """Read what it holds, and look whether all of it is there.

        Raises:
            CheckpointError: when it is no checkpoint, or is damaged.
        """
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is no folder of a checkpoint")
        index = Index.read(folder)
        if index is not None:
            index.check(folder)
        elif not (folder / METADATA).is_file():
            raise CheckpointError(
                f"{folder} is no checkpoint: it has no {INDEX} and no {METADATA}",
                hint="name the folder of one checkpoint, such as step_00000100",
            )
        stored = cls(folder, index, _read_metadata(folder / METADATA))
        stored._check_extents()
        return stored

    def _check_extents(self) -> None:
        sizes: dict[str, int] = {}
        for key in self.metadata.state_dict_metadata:
            for info in self._places(key):
                name = info.relative_path
                if name not in sizes:
                    path = self.folder / name
                    if PurePosixPath(name).name != name or not path.is_file():
                        raise CheckpointError(f"{path} is missing")
                    sizes[name] = path.stat().st_size
                if info.offset + info.length > sizes[name]:
                    raise CheckpointError(
                        f"{self.folder / name} is truncated: {sizes[name]} bytes, and {key} ends "
                        f"at {info.offset + info.length}"
                    )

    def _places(self, key: str) -> list[Any]:
        """Where in the files a key lies: file, offset and length of each of its parts."""
        facts = self.metadata.state_dict_metadata[key]
        indices = [MetadataIndex(key)]
        if isinstance(facts, TensorStorageMetadata):
            indices = [MetadataIndex(key, part.offsets) for part in facts.chunks]
        try:
            return [self.metadata.storage_data[index] for index in indices]
        except LookupError:
            raise CheckpointError(
                f"{self.folder / METADATA} does not say where {key} lies"
            ) from None

    def keys(self, prefix: str) -> list[str]:
        """The keys that begin so, without this beginning."""
        found = self.metadata.state_dict_metadata
        return [key.removeprefix(prefix) for key in found if key.startswith(prefix)]

    def tensor_facts(self, key: str) -> tuple[tuple[int, ...], torch.dtype] | None:
        """Sizes and type of a tensor; None for another value."""
        facts = self.metadata.state_dict_metadata[key]
        if not isinstance(facts, TensorStorageMetadata):
            return None
        return tuple(facts.size), facts.properties.dtype

    def read(self, keys: Iterable[str]) -> dict[str, Any]:
        """Tensors, on the CPU, and values.

        Raises:
            CheckpointError: when a file is damaged.
        """
        wanted = dict.fromkeys(keys)
        self._verify(wanted)
        state: dict[str, Any] = {}
        for key in wanted:
            facts = self.tensor_facts(key)
            state[key] = None if facts is None else torch.empty(facts[0], dtype=facts[1])
        planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(state, self.metadata, is_coordinator=True)
        reader = FileSystemReader(self.folder)
        reader.set_up_storage_reader(self.metadata, True)
        plan: LoadPlan = reader.prepare_local_plan(planner.create_local_plan())
        try:
            reader.read_data(planner.finish_plan(plan), planner).wait()
        except FAILURES as error:
            raise CheckpointError(f"{self.folder} is damaged: {described(error)}") from error
        return {key: planner.state_dict[key] for key in wanted}

    def _verify(self, keys: Iterable[str]) -> None:
        """Hold the checksums of what is to be read against the files."""
        if self.index is None:
            return
        known = {
            (name, offset, length): checksum
            for name, parts in self.index.checksums.items()
            for offset, length, checksum in parts
        }
        for key in keys:
            for info in self._places(key):
                path = self.folder / info.relative_path
                place = info.relative_path, info.offset, info.length
                if known.get(place) != _checksum(path, info.offset, info.length):
                    raise CheckpointError(
                        f"{path} is damaged: {key} is not what was written",
                        hint="go back to an earlier checkpoint",
                    )


class _Planner(DefaultLoadPlanner):
    """Reads values that hold no code."""

    def load_bytes(self, read_item: ReadItem, value: IO[bytes]) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


class _Unpickler(pickle.Unpickler):
    """Reads the metadata of torch.distributed.checkpoint, and nothing that runs code."""

    _METADATA = frozenset(
        {
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        """The classes that metadata is made of."""
        found: Any = None
        if module == "torch.distributed.checkpoint.metadata" and name in self._METADATA:
            found = super().find_class(module, name)
        elif (module, name) in {
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            ("torch.serialization", "_get_layout"),
            ("torch", "Size"),
            ("collections", "OrderedDict"),
        }:
            found = super().find_class(module, name)
        elif module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            found = getattr(torch, name)
        elif module.startswith("pathlib"):
            found = PurePosixPath
        if found is None:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a checkpoint")
        return found


def _read_metadata(path: Path) -> Metadata:
    try:
        with path.open("rb") as stream:
            metadata = _Unpickler(stream).load()
    except (*FAILURES, ImportError, ArithmeticError) as error:
        raise CheckpointError(f"{path} is damaged: {described(error)}") from error
    if not isinstance(metadata, Metadata) or not all(
        isinstance(table, dict) for table in (metadata.state_dict_metadata, metadata.storage_data)
    ):
        raise CheckpointError(f"{path} is no metadata of torch.distributed.checkpoint")
    kinds = (TensorStorageMetadata, BytesStorageMetadata)
    if not all(isinstance(facts, kinds) for facts in metadata.state_dict_metadata.values()):
        raise CheckpointError(f"{path} is no metadata of torch.distributed.checkpoint")
    return metadata


def with_aliases(
    metadata: Metadata, results: Sequence[WriteResult], aliases: Mapping[str, str]
) -> tuple[Metadata, list[WriteResult]]:
    """Let further keys of tied tensors lead to the one place where each is stored.

    Args:
        aliases: keys, to the keys under which the tensors are stored.
    """
    facts = dict(metadata.state_dict_metadata)
    paths = dict(metadata.planner_data)
    found = list(results)
    for alias, key in aliases.items():
        if key not in facts:
            continue
        facts[alias] = facts[key]
        root, _, name = alias.partition(".")
        paths[alias] = (root, name)
        found.extend(
            dataclasses.replace(result, index=dataclasses.replace(result.index, fqn=alias))
            for result in results
            if result.index.fqn == key
        )
    return dataclasses.replace(metadata, state_dict_metadata=facts, planner_data=paths), found


def checksums(folder: Path, results: Iterable[WriteResult]) -> list[tuple[int, int, int]]:
    """What a rank has written into its one file: (offset, length, CRC-32) of each part."""
    found = []
    for result in results:
        info = result.storage_data
        crc = _checksum(folder / info.relative_path, info.offset, info.length)
        found.append((info.offset, info.length, crc))
    return found


def _checksum(path: Path, offset: int = 0, length: int | None = None) -> int:
    crc = 0
    left = path.stat().st_size if length is None else length
    with path.open("rb") as stream:
        stream.seek(offset)
        while left > 0:
            block = stream.read(min(left, _BLOCK))
            if not block:
                break
            crc = zlib.crc32(block, crc)
            left -= len(block)
    return crc


def write_trainer(folder: Path, content: Mapping[str, Any]) -> None:
    """Write trainer.pt, down to the disk.

    Raises:
        CheckpointError: when it holds what could not be read again without running code.
    """
    path = folder / TRAINER
    with path.open("wb") as stream:
        torch.save(dict(content), stream)
        sync(stream)
    try:
        torch.load(path, weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            "the state of the learning-rate schedule holds more than numbers and names: "
            f"{described(error)}",
            hint="let its state_dict() give numbers, strings, lists, dicts and tensors",
        ) from error


def read_trainer(folder: Path) -> dict[str, Any]:
    """What trainer.pt holds.

    Raises:
        CheckpointError: when it is damaged.
    """
    try:
        content = torch.load(folder / TRAINER, map_location="cpu", weights_only=True)
    except FAILURES as error:
        raise CheckpointError(f"{folder / TRAINER} is damaged: {described(error)}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{folder / TRAINER} is damaged: it holds no dict")
    return content


def sync(stream: IO[Any]) -> None:
    """Down to the disk with what was written."""
    stream.flush()
    os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Down to the disk with the names in a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
