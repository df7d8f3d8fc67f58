"""Weights from where else they are stored (`--weights`, `--load`), and to elsewhere: `--save`, and
`run.py export`, a checkpoint as one file, or as a folder of Hugging Face's."""

from __future__ import annotations

import errno
import functools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import safetensors
import torch

from .. import checkpoint
from ..checkpoint.files import Stored
from ..core.address import Address, Place
from ..core.assembly import Assembly
from ..core.pipeline import Pipeline
from ..core.stored_weights import (
    ADAPTER_FILE,
    HUGGING_FACE_INDEX,
    PICKLED,
    Weights,
)
from ..core.weights import INDEX, ONE_FILE, by_file, save_file, save_weights, write_file
from ..errors import CheckpointError, UsageError, WeightsError
from ..spec import PipelineSpec
from ..wording import said, some
from .process import say

ANEW = "none"
"""As `--weights`: none are read, and the stages begin as a new model."""

_PICKLES = (".pt", ".pth", ".bin")

HUGGING_FACE = "huggingface"
"""The folder of a package with the files that lie beside weights: configurations, tokenizers."""

NAMES = "names.json"
"""In it: by the keys of the files of weights, the names of tensors, or how each is made of some."""

_FORMAT = {"format": "pt"}
"""What Hugging Face's libraries look for in the metadata of a file."""

SHARD_BYTES = 5 << 30


def open_weights(own: Path | None, asked: str | None) -> Weights | None:
    """Where a package reads its weights; None where its stages begin as a new model.

    Args:
        own: the folder of the package's weights, None where it has none.
        asked: what `--weights` says, None where it is not given.

    Raises:
        WeightsError: when there are none.
    """
    if asked == ANEW:
        return None
    gone = own is None or (asked is not None and not own.exists())
    known = None if own is None or gone else Weights.open(own)
    if asked is None:
        return known
    return Weights.open(Path(asked)) if known is None else known.moved(Path(asked))


def load_weights(pipe: Pipeline, path: Place, home: Weights | None = None) -> None:
    """Take over weights: one safetensors file, a folder of them, a pickled `state_dict` (`.pt`), or
    a checkpoint; of a folder of checkpoints the newest. At an address there are checkpoints alone.

    Every rank calls it, and reads what it holds. Files of peft hold adapters alone; the rest stays.

    Args:
        home: where the package reads its weights, which knows what files of Hugging Face's call
            them.

    Raises:
        WeightsError, CheckpointError: when there are none that can be read.
        UsageError: when they are those of another model.
    """
    if isinstance(path, Address):
        _load_checkpoint(pipe, path)
        return
    if path.is_dir():
        kinds = (INDEX, HUGGING_FACE_INDEX, ONE_FILE, ADAPTER_FILE, *PICKLED)
        if not any((path / kind).exists() for kind in kinds):
            _load_checkpoint(pipe, path)
            return
        stored = Weights.open(path)
    elif path.suffix in _PICKLES:
        _load_pickled(pipe, path, home)
        return
    else:
        stored = Weights.of_file(path)
    adapter = {Path(file).name for file in stored.files.values()} == {ADAPTER_FILE}
    there = {*stored.files, *stored.assembled}
    keys, assembled = _keys(pipe.spec, there, home, partly=adapter)
    found = Weights(
        stored.directory,
        {name: stored.files[key] for name, key in keys.items() if key in stored.files},
        {name: stored.keys.get(key, key) for name, key in keys.items()},
        assembled={n: stored.assembled[key] for n, key in keys.items() if key in stored.assembled}
        | assembled,
        pieces={**stored.files, **stored.pieces},
    )
    states, taken = _states(pipe.spec), {*keys, *assembled}
    try:
        found.check({name: states[name] for name in states if name in taken})
    except WeightsError as error:
        raise UsageError(f"{path} does not fit {pipe.spec.name}: {error.problem}") from error
    held = {name: tensor for name, tensor in pipe.state_dict().items() if name in taken}
    held |= {name: tensor for name, tensor in states.items() if name in _counted(pipe.spec)}
    for name, tensor in found.loading(held, torch.device("cpu")):
        pipe.load_state_dict({name: tensor}, strict=False)


def _load_checkpoint(pipe: Pipeline, path: Place) -> None:
    seed, step = pipe.seed, pipe.step_number
    checkpoint.load_checkpoint(pipe, None, checkpoint.latest(path) or path)
    pipe.seed, pipe.step_number = seed, step


def _load_pickled(pipe: Pipeline, path: Path, home: Weights | None) -> None:
    """Take over a `state_dict` that torch.save has written, which may lie in a dict as `model`."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # of many kinds, for a file that is anything
        raise WeightsError(
            f"cannot read {path}: {said(error)}",
            hint="a file of torch.save(model.state_dict(), FILE) is read with weights_only=True, "
            "so it may hold tensors, numbers and names alone",
        ) from error
    for key in ("model", "state_dict"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not all(
        isinstance(tensor, torch.Tensor) for tensor in content.values()
    ):
        raise UsageError(
            f"{path} holds no state_dict: a dict of tensors by name is needed",
            hint="torch.save(model.state_dict(), FILE) writes one",
        )
    keys, assembled = _keys(pipe.spec, content, home, partly=False)
    pipe.load_state_dict({name: content[key] for name, key in keys.items()}, strict=False)
    for name, how in assembled.items():
        made = how.of_tensors([content[key] for key in how.of])
        pipe.load_state_dict({name: made}, strict=False)


def _keys(
    spec: PipelineSpec, there: Iterable[str], home: Weights | None, *, partly: bool
) -> tuple[dict[str, str], dict[str, Assembly]]:
    """What every tensor of a pipeline is called among the keys of a file, and how those are made
    that are there in pieces.

    Args:
        partly: whether some of the tensors are enough.

    Raises:
        UsageError: naming what is missing or unknown.
    """
    given = dict.fromkeys(there)
    others = {} if home is None else home.keys
    further: dict[str, list[str]] = {}
    for alias, name in spec.aliases.items():
        further.setdefault(name, []).append(alias)
    found, assembled = {}, {}
    for name in _states(spec):
        likely = (name, *further.get(name, ()), others.get(name, name))
        key = next((key for key in likely if key in given), None)
        how = None if home is None else home.assembled.get(name)
        if how is not None and all(piece in given for piece in how.of):
            assembled[name] = how
        elif key is not None:
            found[name] = key
    unused = () if home is None else (*home.files, *home.keys.values(), *home.anew, *home.pieces)
    known = {*found.values(), *_states(spec), *spec.aliases, *unused}
    missing = [name for name in _states(spec) if name not in found and name not in assembled]
    problems = [f"{name} is missing" for name in missing]
    problems = ([] if partly and found else problems) + [
        f"{key} is unknown" for key in given if key not in known
    ]
    if problems:
        raise UsageError(f"these weights do not fit {spec.name}: {some(problems, '; ')}")
    return found, assembled


def _states(spec: PipelineSpec) -> dict[str, torch.Tensor]:
    """The state of all stages, without memory, under the model's own names."""
    weight = () if spec.loss is None or spec.loss.weight is None else (spec.loss.weight,)
    found: dict[str, torch.Tensor] = {}
    for stage in (*spec.stages, *weight):
        with torch.device("meta"):
            state = stage.module().state_dict()
        found.update({stage.named(own): tensor for own, tensor in state.items()})
    return found


def _counted(spec: PipelineSpec) -> frozenset[str]:
    """The names of what the terms of the loss are counted with, as weights of classes."""
    if spec.loss is None or spec.loss.weight is None:
        return frozenset()
    return frozenset(spec.loss.weight.state.values())


def check_place(path: Path) -> None:
    """Whether `save_model` may write there, as far as it shows before anything is trained.

    Raises:
        OSError: naming the path, when it may not.
    """
    there = next(each for each in (path, *path.absolute().parents) if each.exists())
    one_file = there == path and path.suffix == ".safetensors"
    if there.is_dir() is one_file:
        code = errno.EISDIR if one_file else errno.ENOTDIR
        raise OSError(code, os.strerror(code), str(path))
    if not one_file:
        with tempfile.TemporaryFile(dir=there):
            pass


def save_model(pipe: Pipeline, path: Path) -> None:
    """Write the weights under the model's names: one file, or a folder with an index."""
    state = pipe.gather_state_dict()
    if pipe.rank != 0:
        return
    if path.suffix == ".safetensors":
        save_file(state, path)
    else:
        save_weights(state, path)
    say(f"weights saved to {path}")


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
    made = {key: Assembly.read(how) for key, how in content["assembled"].items()}
    like = _tensors(stored, names, made)

    def tensor_of(name: str) -> torch.Tensor:
        (tensor,) = stored.read([f"model.{name}"]).values()
        return tensor  # type: ignore[no-any-return]  # as `_tensors` has seen

    # A block's gate and up projections are pieces of one tensor, its down projections of another,
    # and a file holds them in turn.
    held = functools.lru_cache(maxsize=2)(tensor_of)

    def read(key: str) -> torch.Tensor:
        if key in names:
            return tensor_of(names[key])
        return made[key].of_tensors([held(name) for name in made[key].of])

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


def _tensors(
    stored: Stored, names: Mapping[str, str], made: Mapping[str, Assembly]
) -> dict[str, torch.Tensor]:
    """By the keys of files, the types and shapes of what a checkpoint holds under these names, and
    of what is made of it."""
    known = {*stored.keys("model.")}
    needed = dict.fromkeys((*names.values(), *(name for how in made.values() for name in how.of)))
    missing = [name for name in needed if name not in known]
    if missing:
        raise CheckpointError(
            f"{stored.folder} does not hold {some(missing)}",
            hint="export a checkpoint of this package, or of the same folder in other stages",
        )
    like = {name: stored.like(f"model.{name}") for name in needed}
    pieces = {key: how.of_tensors([like[name] for name in how.of]) for key, how in made.items()}
    return {key: like[name] for key, name in names.items()} | pieces


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
