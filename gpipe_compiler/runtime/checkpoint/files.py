"""The files of a checkpoint, as torch.distributed.checkpoint writes them, checked before use."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from importlib import import_module
from pathlib import PurePosixPath
from typing import IO, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.storage import WriteResult

from ..core.address import Address, Place, reaching
from ..core.ranks import FAILURES, described
from ..errors import CheckpointError, UsageError
from .folder import (
    INDEX,
    METADATA,
    TRAINER,
    Index,
    checksum,
    checksum_of_part,
    is_unfinished,
    sync,
)

_FSSPEC = "torch.distributed.checkpoint._fsspec_filesystem"
"""A name of torch's inside, by which it reads and writes at addresses."""


class RankFileWriter(FileSystemWriter):
    """Writes one file per rank.

    Nothing is copied ahead: torch would wait for the copies from one GPU only, and this process
    may hold stages on several.
    """

    def __init__(self, folder: Place) -> None:
        # An address is not synced: that would be every disk of this machine, and none of its own.
        here = not isinstance(folder, Address)
        super().__init__(str(folder), per_thread_copy_ahead=0, sync_files=here, overwrite=True)
        if isinstance(folder, Address):
            self.fs = _of_torch("FileSystem")()
            self.path = self.fs.init_path(folder.url)

    def storage_meta(self) -> StorageMeta:
        """Nothing of the temporary folder, whose name is soon another."""
        return StorageMeta()


def _of_torch(name: str) -> type:
    """What torch has for addresses; UsageError where this torch has none."""
    try:
        found: type = getattr(import_module(_FSSPEC), name)
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"torch {torch.__version__} has no {_FSSPEC}.{name}, which checkpoints at addresses "
            "are written and read with",
            hint="name a folder where the storage is mounted, or install torch 2.11 or 2.13",
        ) from error
    return found


class Stored:
    """The tensors and values of a checkpoint, by the keys of torch.distributed.checkpoint.

    Attributes:
        written: by `save_checkpoint`, and not by torch.distributed.checkpoint alone.
        index: empty unless so written.
    """

    def __init__(self, folder: Place, index: Index | None, metadata: Metadata) -> None:
        self.folder = folder
        self.written = index is not None
        self.index = index or Index(0, {}, {}, {}, {}, {})
        self.metadata = metadata
        self._recorded = self.index.recorded()

    @classmethod
    def open(cls, folder: Place) -> Stored:
        """Open a checkpoint, and check that all its files are there.

        Raises:
            CheckpointError: when it is no checkpoint, or is damaged.
        """
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is no folder of a checkpoint")
        if is_unfinished(folder):
            raise CheckpointError(
                f"{folder} was not written to its end", hint="go back to an earlier checkpoint"
            )
        index = Index.read(folder)
        if index is not None:
            index.check(folder)
            _verify_whole(folder, index, METADATA)
        elif (folder / TRAINER).exists():
            raise CheckpointError(f"{folder / INDEX} is missing")
        elif not (folder / METADATA).is_file():
            raise CheckpointError(
                f"{folder} is no checkpoint: it has no {INDEX} and no {METADATA}",
                hint="name the folder of one checkpoint, such as step_00000100",
            )
        return cls(folder, index, _read_metadata(folder / METADATA))

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

    def like(self, key: str, device: str = "meta") -> torch.Tensor:
        """A tensor of the sizes and the type of a stored one.

        Raises:
            CheckpointError: when that is another value.
        """
        facts = self.tensor_facts(key)
        if facts is None:
            raise CheckpointError(f"{key} of {self.folder} is no tensor")
        return torch.empty(facts[0], dtype=facts[1], device=device)

    def read(self, keys: Iterable[str]) -> dict[str, Any]:
        """Tensors, on the CPU, and values.

        Raises:
            CheckpointError: when a file is damaged.
        """
        wanted = dict.fromkeys(keys)
        self._verify(wanted)
        state: dict[str, Any] = {
            key: None if self.tensor_facts(key) is None else self.like(key, "cpu") for key in wanted
        }
        planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(state, self.metadata, is_coordinator=True)
        reader = (
            _of_torch("FsspecReader")(self.folder.url)
            if isinstance(self.folder, Address)
            else FileSystemReader(self.folder)
        )
        reader.set_up_storage_reader(self.metadata, True)
        plan: LoadPlan = reader.prepare_local_plan(planner.create_local_plan())
        try:
            with reaching(self.folder):
                reader.read_data(planner.finish_plan(plan), planner).wait()
        except FAILURES as error:
            raise CheckpointError(f"{self.folder} is damaged: {described(error)}") from error
        return {key: planner.state_dict[key] for key in wanted}

    def trainer(self) -> dict[str, Any]:
        """The content of trainer.pt, where it is so written; CheckpointError when it is damaged."""
        if not self.written:
            return {}
        path = self.folder / TRAINER
        _verify_whole(self.folder, self.index, TRAINER)
        try:
            with path.open("rb") as stream:
                content = torch.load(stream, map_location="cpu", weights_only=True)
        except FAILURES as error:
            raise CheckpointError(f"{path} is damaged: {described(error)}") from error
        if not isinstance(content, dict):
            raise CheckpointError(f"{path} is damaged: it holds no dict")
        return content

    def _verify(self, keys: Iterable[str]) -> None:
        """Whether the files are there, and what is to be read has its checksums, where known."""
        files: dict[str, list[tuple[int, int, str]]] = {}
        for key in keys:
            for info in self._places(key):
                files.setdefault(info.relative_path, []).append((info.offset, info.length, key))
        for name, parts in files.items():
            path = self.folder / name
            if PurePosixPath(name).name != name or not path.is_file():
                raise CheckpointError(f"{path} is missing")
            if not self.written:
                continue
            with path.open("rb") as stream:  # once: at an address that takes time
                for offset, length, key in sorted(parts):
                    found = checksum_of_part(stream, offset, length)
                    if self._recorded.get((name, offset, length)) != found:
                        raise _damaged(path, key)


class _Planner(DefaultLoadPlanner):
    """Reads values that hold no code."""

    def load_bytes(self, read_item: ReadItem, value: IO[bytes]) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
}
"""What the metadata of torch.distributed.checkpoint is made of."""


def _member(kind: object, name: str) -> Enum:
    """A member of an enum; of anything else no attribute is read."""
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind[name]
    raise pickle.UnpicklingError(f"{kind!r}.{name} is no part of a checkpoint")


class _Unpickler(pickle.Unpickler):
    """Reads metadata, and nothing that runs code."""

    def find_class(self, module: str, name: str) -> Any:
        """One of the classes of metadata."""
        if name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module in {"pathlib", "pathlib._local"}:  # the name differs between Pythons
            return PurePosixPath
        if (module, name) == ("builtins", "getattr"):  # how Python 3.11.0 to 3.11.3 stores enums
            return _member
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a checkpoint")


def _read_metadata(path: Place) -> Metadata:
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


def _damaged(path: Place, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is damaged: {what} is not what was written",
        hint="go back to an earlier checkpoint",
    )


def _verify_whole(folder: Place, index: Index, name: str) -> None:
    """Hold the checksum of a file against it."""
    size = index.files[name]
    if index.recorded().get((name, 0, size)) != checksum(folder / name):
        raise _damaged(folder / name, "it")


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


def checksums(folder: Place, results: Iterable[WriteResult]) -> list[tuple[int, int, int]]:
    """What a rank has written into its one file: (offset, length, CRC-32) of each part."""
    places = [result.storage_data for result in results]
    (name,) = {info.relative_path for info in places}
    parts = sorted((info.offset, info.length) for info in places)
    with (folder / name).open("rb") as stream:
        return [(*part, checksum_of_part(stream, *part)) for part in parts]


def write_trainer(folder: Place, content: Mapping[str, Any]) -> None:
    """Write trainer.pt, down to the disk.

    Raises:
        CheckpointError: when it holds what could not be read again without running code.
    """
    path = folder / TRAINER
    with path.open("wb") as stream:
        torch.save(dict(content), stream)
        sync(stream)
    try:
        with path.open("rb") as stream:
            torch.load(stream, weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            "the state of the learning-rate schedule, or another one, holds more than numbers and "
            f"names: {described(error)}",
            hint="let its state_dict() give numbers, strings, lists, dicts and tensors",
        ) from error
