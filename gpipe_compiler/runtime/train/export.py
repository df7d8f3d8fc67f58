"""`run.py export`: a checkpoint as one file of weights, or as a folder of Hugging Face's."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import safetensors
import torch

from .. import checkpoint
from ..checkpoint.files import Stored
from ..core.address import Place
from ..core.stored_weights import ADAPTER_FILE, HUGGING_FACE_INDEX
from ..core.weights import by_file, write_file
from ..errors import CheckpointError, UsageError
from ..spec import PipelineSpec
from ..wording import some
from .process import say

HUGGING_FACE = "huggingface"
"""The folder of a package with the files that lie beside weights: configurations, tokenizers."""

NAMES = "names.json"
"""In it: by the keys of the files of weights, the names of tensors."""

_FORMAT = {"format": "pt"}
"""What Hugging Face's libraries look for in the metadata of a file."""

SHARD_BYTES = 5 << 30


def export(
    spec: PipelineSpec,
    path: Place,
    output: Path,
    *,
    directory: Path,
    hugging_face: bool,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the weights of a checkpoint; of a folder of checkpoints, of the newest.

    Args:
        directory: the package.
        shard_bytes: of a file of a folder, at most, unless one tensor is larger.

    Raises:
        UsageError: when the package was not compiled from a folder of Hugging Face's, or the output
            is there already.
        CheckpointError: when the checkpoint is damaged, or the output cannot be written.
    """
    newest = checkpoint.latest(path) or path
    if hugging_face:
        _export_folder(spec, newest, output, directory / HUGGING_FACE, shard_bytes)
    else:
        checkpoint.export(newest, output)
    say(f"weights of {newest} written to {output}")


def _export_folder(
    spec: PipelineSpec,
    path: Place,
    output: Path,
    beside: Path,
    shard_bytes: int,
) -> None:
    if not (beside / NAMES).is_file():
        raise UsageError(
            f"{beside / NAMES} is missing: {spec.name} was not compiled from a folder of Hugging "
            "Face's, so what its files are to be called is not known",
            hint="compile the folder, or export one file: --output FILE.safetensors",
        )
    if output.exists():
        raise UsageError(f"{output} exists", hint="name another folder")
    content = json.loads((beside / NAMES).read_text(encoding="utf-8"))
    stored, names = Stored.open(path), content["names"]
    like = _tensors(stored, names)

    def read(key: str) -> torch.Tensor:
        (tensor,) = stored.read([f"model.{names[key]}"]).values()
        return tensor  # type: ignore[no-any-return]  # as `_tensors` has seen

    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
        try:
            _write_files(like, read, scratch, shard_bytes, adapter=content["adapter"])
            for file in beside.iterdir():
                if file.name != NAMES:
                    shutil.copyfile(file, scratch / file.name)
            umask = os.umask(0)
            os.umask(umask)
            scratch.chmod(0o777 & ~umask)
            scratch.rename(output)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(f"cannot write {output}: {error.strerror or error}") from error
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"cannot write {output}: {error}") from error


def _tensors(stored: Stored, names: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """By the keys of files, the types and shapes of what a checkpoint holds under these names."""
    known = {*stored.keys("model.")}
    missing = [name for name in names.values() if name not in known]
    if missing:
        raise CheckpointError(
            f"{stored.folder} does not hold {some(missing)}",
            hint="export a checkpoint of this package, or of the same folder in other stages",
        )
    return {key: stored.like(f"model.{name}") for key, name in names.items()}


def _write_files(
    like: Mapping[str, torch.Tensor],
    read: Callable[[str], torch.Tensor],
    folder: Path,
    shard_bytes: int,
    *,
    adapter: bool,
) -> None:
    shards = {ADAPTER_FILE: like} if adapter else by_file(like, shard_bytes)
    for name, shard in shards.items():
        write_file(shard, folder / name, _FORMAT, read=read)
    if len(shards) > 1:
        size = sum(tensor.nbytes for tensor in like.values())
        files = {key: name for name, shard in shards.items() for key in shard}
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(files.items()))}
        text = json.dumps(index, indent=2) + "\n"
        (folder / HUGGING_FACE_INDEX).write_text(text, encoding="utf-8")
