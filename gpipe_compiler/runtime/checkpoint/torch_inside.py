"""Names of torch's inside that checkpoints use, and what is said where torch has them no more."""

from __future__ import annotations

from importlib import import_module

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from ..core.address import Address
from ..errors import UsageError

_FSSPEC = "torch.distributed.checkpoint._fsspec_filesystem"


def address_reader(address: Address) -> FileSystemReader:
    """Torch's reader of a checkpoint at an address; UsageError where this torch has none."""
    reader: FileSystemReader = _of_torch("FsspecReader")(address.url)
    return reader


def hand_to_address(writer: FileSystemWriter, address: Address) -> None:
    """Let a writer write to an address by torch's own file system for these.

    Raises:
        UsageError: where this torch has none.
    """
    writer.fs = _of_torch("FileSystem")()
    writer.path = writer.fs.init_path(address.url)


def _of_torch(name: str) -> type:
    try:
        found: type = getattr(import_module(_FSSPEC), name)
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"torch {torch.__version__} has no {_FSSPEC}.{name}, which checkpoints at addresses "
            "are written and read with",
            hint="name a folder where the storage is mounted, or install torch 2.11 or 2.13",
        ) from error
    return found
