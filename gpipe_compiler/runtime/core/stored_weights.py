"""Where the weights of a model are stored: safetensors files in a package, or in a folder of
Hugging Face's, of which every process reads what its stages hold."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..errors import WeightsError
from .assembly import Assembly
from .weights import INDEX, ONE_FILE, aligned, read_tensors, shapes_in

HUGGING_FACE_INDEX = "model.safetensors.index.json"
ADAPTER_FILE = "adapter_model.safetensors"
"""What peft calls the file with what it trains beside a frozen model."""

PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_ANOTHER = "--weights DIR names the folder with the model's weights"


@dataclass(frozen=True)
class Weights:
    """Tensors by their names in the model.

    Attributes:
        directory: the folder of the index.
        files: for every tensor the file that holds it, as a path from `directory`.
        keys: what tensors are called in their files, where that is not their name.
        anew: the names of tensors that no file holds, and that begin as in a new model.
        assembled: how tensors are made that are stored in pieces, of the pieces' keys.
        pieces: for every piece the file that holds it, as `files`.
    """

    directory: Path
    files: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    anew: frozenset[str] = frozenset()
    assembled: Mapping[str, Assembly] = field(default_factory=dict)
    pieces: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def open(cls, directory: Path) -> Weights:
        """The folder, by the index.json of a package or by what Hugging Face's libraries write.

        Raises:
            WeightsError: when there is no such folder, or the index is broken.
        """
        for name in (INDEX, HUGGING_FACE_INDEX):
            if os.path.lexists(directory / name):  # a link in a circle is broken, not missing
                return cls._indexed(directory, directory / name)
        for name in (ONE_FILE, ADAPTER_FILE):
            if (directory / name).exists():
                return cls.of_file(directory / name)
        pickled = next((name for name in PICKLED if (directory / name).exists()), None)
        if pickled is not None:
            raise WeightsError(
                f"{directory} has pickled weights alone ({pickled}), and none in safetensors files",
                hint="from_pretrained(FOLDER).save_pretrained(FOLDER) of a recent transformers "
                "writes these",
            )
        problem = f"{directory / INDEX} is missing, and {directory / HUGGING_FACE_INDEX} is too"
        raise WeightsError(problem, hint=f"compile the model again; {_ANOTHER}")

    @classmethod
    def of_file(cls, path: Path) -> Weights:
        """All tensors of one safetensors file."""
        return cls(path.parent, dict.fromkeys(shapes_in(path), path.name))

    @classmethod
    def _indexed(cls, directory: Path, index: Path) -> Weights:
        try:
            content = json.loads(index.read_text(encoding="utf-8"))
            files = content.get("weight_map", content)
            return cls(
                directory,
                {str(name): str(file) for name, file in files.items()},
                {str(name): str(key) for name, key in content.get("keys", {}).items()},
                frozenset(map(str, content.get("anew", ()))),
                {str(n): Assembly.read(how) for n, how in content.get("assembled", {}).items()},
                {str(key): str(file) for key, file in content.get("pieces", {}).items()},
            )
        except (
            OSError,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            RecursionError,
        ) as error:
            raise WeightsError(f"{index} is no index of weights: {error}") from error

    def moved(self, directory: Path) -> Weights:
        """The same tensors from another folder, as of the same model fine-tuned.

        Adapters stay where they are. A folder whose keys have one word more in front, or one less,
        as that of a base model beside one with a head, is taken as well.

        Raises:
            WeightsError: as `open`; and when the folder holds none of them.
        """
        there = Weights.open(directory)
        fronts = dict.fromkeys(key.partition(".")[0] for key in there.files)

        def found_of(key: str) -> str | None:
            likely = (key, key.partition(".")[2], *(f"{front}.{key}" for front in fronts))
            return next((own for own in likely if own in there.files), None)

        assembled, pieces = {}, {}
        for name, how in self.assembled.items():
            of = [own for own in map(found_of, how.of) if own is not None]
            if len(of) == len(how.of):
                assembled[name] = dataclasses.replace(how, of=tuple(of))
                pieces.update({own: there.files[own] for own in of})
        files, keys = {}, {}
        for name in (*self.files, *self.anew):
            if Path(self.files.get(name, "")).name == ADAPTER_FILE:
                files[name] = str((self.directory / self.files[name]).resolve())
                keys[name] = self.keys.get(name, name)
                continue
            found = found_of(self.keys.get(name, name))
            if found is not None:
                files[name], keys[name] = there.files[found], found
        if not files and not assembled:
            raise WeightsError(
                f"{directory} holds no tensor of this model",
                hint="name a folder of the model that the package was compiled from",
            )
        anew = self.anew - files.keys()
        return Weights(there.directory, files, keys, anew, assembled, pieces)

    def load(
        self, like: Mapping[str, torch.Tensor], device: torch.device
    ) -> dict[str, torch.Tensor]:
        """These tensors, on a device; those that no file holds are left out.

        Args:
            like: what they are to be like: their shapes are compared, their types taken over.

        Raises:
            WeightsError: when a file is missing or broken, or a shape is another one.
        """
        return dict(self.loading(like, device))

    def loading(
        self, like: Mapping[str, torch.Tensor], device: torch.device
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The same one by one, so that no more is in memory than what is held and one tensor."""
        for file, names in self._by_file(like).items():
            path = self.directory / file
            own = path.parent == self.directory and (self.directory / INDEX).exists()
            for key, tensor in read_tensors(path, names):
                for name in names[key]:
                    _check_shape(name, tuple(tensor.shape), like[name])
                    loaded = tensor.to(device, like[name].dtype)
                    if loaded is tensor and not own:
                        loaded = tensor.clone()  # whose file may be overwritten as this runs
                    yield name, aligned(loaded)
        for name in like:
            if name in self.assembled:
                made = self._put_together(name)
                _check_shape(name, tuple(made.shape), like[name])
                yield name, made.to(device, like[name].dtype).contiguous()

    def _put_together(self, name: str) -> torch.Tensor:
        """A tensor that is stored in pieces."""
        how = self.assembled[name]
        read: dict[str, torch.Tensor] = {}
        for file, keys in self._pieces_by_file([name]).items():
            read.update(read_tensors(self.directory / file, keys))
        made = how.of_tensors([read.pop(key) for key in how.of])
        return made if how.copies else made.clone()  # as the file may be overwritten

    def check(self, like: Mapping[str, torch.Tensor]) -> None:
        """Raises a WeightsError where `load` would, but for what only the numbers show."""
        for file, names in self._by_file(like).items():
            for key, shape in self._shapes(file, names).items():
                for name in names[key]:
                    _check_shape(name, shape, like[name])
        assembled = [name for name in like if name in self.assembled]
        there: dict[str, tuple[int, ...]] = {}
        for file, keys in self._pieces_by_file(assembled).items():
            there |= self._shapes(file, keys)
        for name in assembled:
            how = self.assembled[name]
            try:
                made = how.of_tensors([torch.empty(there[key], device="meta") for key in how.of])
            except (RuntimeError, IndexError) as error:
                problem = f"{name} cannot be made of {how.of[0]} and its like: {error}"
                raise WeightsError(problem, hint=_ANOTHER) from error
            _check_shape(name, tuple(made.shape), like[name])

    def _shapes(self, file: str, keys: Iterable[str]) -> dict[str, tuple[int, ...]]:
        path = self.directory / file
        there = shapes_in(path)
        for key in keys:
            if key not in there:
                raise WeightsError(f"{path} does not hold {key}, which the index says it does")
        return {key: there[key] for key in keys}

    def _pieces_by_file(self, names: Iterable[str]) -> dict[str, list[str]]:
        """The pieces of these tensors, by file."""
        found: dict[str, list[str]] = {}
        for name in names:
            for key in self.assembled[name].of:
                file = self.pieces[key]
                if file not in found:
                    self._check_file(file, key)
                found.setdefault(file, []).append(key)
        return found

    def _check_file(self, file: str, name: str) -> None:
        if not (self.directory / file).is_file():
            path = (self.directory / file).resolve()
            raise WeightsError(f"{path}, which holds {name}, is missing", hint=_ANOTHER)

    def _by_file(self, like: Iterable[str]) -> dict[str, dict[str, list[str]]]:
        """The names of these tensors by file, and by what they are called there."""
        found: dict[str, dict[str, list[str]]] = {}
        for name in filter(self.files.get, like):
            file, key = self.files[name], self.keys.get(name, name)
            if file not in found:
                self._check_file(file, name)
            found.setdefault(file, {}).setdefault(key, []).append(name)
        return found


def _check_shape(name: str, shape: tuple[int, ...], like: torch.Tensor) -> None:
    if shape != tuple(like.shape):
        raise WeightsError(
            f"{name} has shape {shape} in the weights, {tuple(like.shape)} in the stage"
        )
