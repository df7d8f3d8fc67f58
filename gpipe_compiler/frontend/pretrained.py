"""What a package is told of the folder of Hugging Face's that its model was built from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where the numbers of a tensor are.

    Attributes:
        key: what the file calls it.
    """

    file: Path
    key: str


@dataclass(frozen=True, eq=False, slots=True)
class Pretrained:
    """The weights of a model in a folder, and what is to lie beside them when they are exported.

    Attributes:
        stored: by the names of tensors in the model; empty for a folder without weights.
        anew: the names of those that the folder does not hold, and that begin as in a new model.
        exported: by the keys of files that are written of a trained model, the names of tensors.
        adapter: whether these are adapters, in a file of peft's.
        texts: the files to lie beside the weights, by name.
        copies: those that are copied.
        copied_weights: whether the package is to have copies of the weights.
    """

    folder: Path
    stored: Mapping[str, StoredTensor]
    anew: frozenset[str]
    exported: Mapping[str, str]
    adapter: bool
    texts: Mapping[str, str]
    copies: tuple[Path, ...]
    copied_weights: bool = False
