"""Checksums of the files of stages, which are held against them when they are loaded."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

from ...runtime.errors import StageError

CHECKSUMS = "checksums.json"
"""Size and CRC-32 of each file of the stages, by its name."""

_BLOCK = 1 << 24


def write_checksums(folder: Path, stages: list[str]) -> None:
    """Writes those of the files of stages, and of the weights that stand beside them."""
    files = sorted(path for stage in stages for path in folder.glob(f"{stage}*"))
    sums = {path.name: _sum_of(path) for path in files}
    (folder / CHECKSUMS).write_text(f"{json.dumps(sums, indent=2)}\n", encoding="utf-8")


def refuse_damaged(folder: Path, stage: str) -> None:
    """Holds the files of a stage against their checksums, where there are any.

    Raises:
        StageError: naming the file that is another one.
    """
    path = folder / CHECKSUMS
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        sums = {str(name): [int(item) for item in pair] for name, pair in known.items()}
    except FileNotFoundError:
        return
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise _damaged(path) from error
    names = {stage, *(name for name in sums if name.startswith(f"{stage}."))}
    for name in sorted(names):
        file = folder / name
        if not file.is_file() or sums.get(name) != _sum_of(file):
            raise _damaged(file)


def _damaged(file: Path) -> StageError:
    return StageError(
        f"{file} is missing, or is not what was written",
        hint=f"compile once more; to run files that you have changed yourself, delete {CHECKSUMS}",
    )


def _sum_of(path: Path) -> list[int]:
    size, crc = 0, 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return [size, crc]
