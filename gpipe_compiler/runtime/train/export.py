"""`run.py export`: a checkpoint as one file of weights, or as a folder of Hugging Face's."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors
import torch

from .. import checkpoint
from ..checkpoint.files import Stored
from ..core.stored_weights import ADAPTER_FILE, HUGGING_FACE_INDEX, ONE_FILE, Weights
from ..core.weights import write_file
from ..errors import CheckpointError, UsageError, WeightsError
from ..spec import PipelineSpec
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
    path: Path,
    output: Path,
    *,
    directory: Path,
    weights: Weights | None,
    hugging_face: bool,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the weights of a checkpoint; of a folder of checkpoints, of the newest.

    Args:
        directory: the package.
        weights: where the package reads its weights: those of the model that no stage uses are
            taken over from there.
        shard_bytes: of a file of a folder, at most, unless one tensor is larger.

    Raises:
        UsageError: when the package was not compiled from a folder of Hugging Face's, or the output
            is there already.
        CheckpointError: when the checkpoint is damaged, or the output cannot be written.
    """
    newest = checkpoint.latest(path) or path
    if hugging_face:
        _export_folder(spec, newest, output, directory / HUGGING_FACE, weights, shard_bytes)
    else:
        checkpoint.export(newest, output)
    say(f"weights of {newest} written to {output}")


@dataclass(frozen=True)
class _Tensors:
    """What is written, by the keys of the files.

    Attributes:
        like: types and shapes.
        names: in the model.
    """

    stored: Stored
    weights: Weights | None
    like: Mapping[str, torch.Tensor]
    names: Mapping[str, str]

    def read(self, key: str) -> torch.Tensor:
        name = self.names[key]
        if self.weights is None or not _is_source(self.stored, name):
            (tensor,) = self.stored.read([f"model.{name}"]).values()
            return tensor  # type: ignore[no-any-return]  # `tensor_facts` knows that it is one
        return self.weights.load({name: self.like[key]}, torch.device("cpu"))[name]


def _is_source(stored: Stored, name: str) -> bool:
    """Whether a tensor is that of the model before training, as no stage uses it."""
    return f"model.{name}" not in stored.metadata.state_dict_metadata


def _export_folder(
    spec: PipelineSpec,
    path: Path,
    output: Path,
    beside: Path,
    weights: Weights | None,
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
    tensors = _tensors(Stored.open(path), weights, content["names"])
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
        try:
            _write_files(tensors, scratch, shard_bytes, adapter=content["adapter"])
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


def _tensors(stored: Stored, weights: Weights | None, names: Mapping[str, str]) -> _Tensors:
    like, missing = {}, []
    sources = {name: key for key, name in names.items() if _is_source(stored, name)}
    shapes = {} if weights is None else weights.facts(sources)
    for key, name in names.items():
        if name not in sources:
            facts = stored.tensor_facts(f"model.{name}")
            if facts is None:
                raise CheckpointError(f"model.{name} of {stored.folder} is no tensor")
            like[key] = torch.empty(facts[0], dtype=facts[1], device="meta")
        elif name in shapes:
            like[key] = shapes[name]
        else:
            missing.append(name)
    if missing:
        raise WeightsError(
            f"{stored.folder} does not hold {', '.join(missing[:5])}, as no stage uses it, and "
            "neither do the weights of the package",
            hint="--weights DIR names the folder with the model's weights",
        )
    return _Tensors(stored, weights, like, names)


def _write_files(tensors: _Tensors, folder: Path, shard_bytes: int, *, adapter: bool) -> None:
    shards = [tensors.like] if adapter else list(_shards(tensors.like, shard_bytes))
    files: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = ADAPTER_FILE if adapter else ONE_FILE
        if len(shards) > 1:
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_file(shard, folder / name, _FORMAT, read=tensors.read)
        files.update(dict.fromkeys(shard, name))
    if len(shards) > 1:
        size = sum(tensor.nbytes for tensor in tensors.like.values())
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(files.items()))}
        text = json.dumps(index, indent=2) + "\n"
        (folder / HUGGING_FACE_INDEX).write_text(text, encoding="utf-8")


def _shards(tensors: Mapping[str, torch.Tensor], most: int) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors in order, in parts of that many bytes at most."""
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for key, tensor in tensors.items():
        if shard and size + tensor.nbytes > most:
            yield shard
            shard, size = {}, 0
        shard[key] = tensor
        size += tensor.nbytes
    yield shard
