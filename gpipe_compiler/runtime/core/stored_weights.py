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
    """

    directory: Path
    files: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    anew: frozenset[str] = frozenset()

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
            )
        except (OSError, ValueError, AttributeError, RecursionError) as error:
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
        files, keys = {}, {}
        for name in (*self.files, *self.anew):
            if Path(self.files.get(name, "")).name == ADAPTER_FILE:
                files[name] = str((self.directory / self.files[name]).resolve())
                keys[name] = self.keys.get(name, name)
                continue
            key = self.keys.get(name, name)
            likely = (key, key.partition(".")[2], *(f"{front}.{key}" for front in fronts))
            found = next((own for own in likely if own in there.files), None)
            if found is not None:
                files[name], keys[name] = there.files[found], found
        if not files:
            raise WeightsError(
                f"{directory} holds no tensor of this model",
                hint="name a folder of the model that the package was compiled from",
            )
        return dataclasses.replace(there, files=files, keys=keys, anew=self.anew - files.keys())

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

    def check(self, like: Mapping[str, torch.Tensor]) -> None:
        """Raises a WeightsError where `load` would, but for what only the numbers show."""
        for file, names in self._by_file(like).items():
            path = self.directory / file
            shapes = shapes_in(path)
            for key in names:
                if key not in shapes:
                    raise WeightsError(f"{path} does not hold {key}, which the index says it does")
                for name in names[key]:
                    _check_shape(name, shapes[key], like[name])

    def _by_file(self, like: Iterable[str]) -> dict[str, dict[str, list[str]]]:
        """The names of these tensors by file, and by what they are called there."""
        found: dict[str, dict[str, list[str]]] = {}
        for name in filter(self.files.get, like):
            file, key = self.files[name], self.keys.get(name, name)
            if file not in found and not (self.directory / file).is_file():
                path = (self.directory / file).resolve()
                raise WeightsError(f"{path}, which holds {name}, is missing", hint=_ANOTHER)
            found.setdefault(file, {}).setdefault(key, []).append(name)
        return found


def _check_shape(name: str, shape: tuple[int, ...], like: torch.Tensor) -> None:
    if shape != tuple(like.shape):
        raise WeightsError(
            f"{name} has shape {shape} in the weights, {tuple(like.shape)} in the stage"
        )
