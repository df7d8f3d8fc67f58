"""The weights of a Hugging Face folder in a package: where they are, and what lies beside them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from gpipe_compiler.frontend.subject import Pretrained
from gpipe_compiler.runtime.core.weights import INDEX
from gpipe_compiler.runtime.train.export import HUGGING_FACE, NAMES


def write_pretrained(pretrained: Pretrained, folder: Path, progress: Callable[[str], None]) -> None:
    """Writes `weights/index.json`, which refers to the folder's own files by paths relative to it,
    and the folder of what an export takes along.

    Args:
        folder: the package, which may be moved to another name in the folder that it is in.
    """
    weights = folder / "weights"
    if pretrained.stored:
        home = weights.resolve()
        places: dict[Path, str] = {}
        for file in dict.fromkeys(tensor.file for tensor in pretrained.stored.values()):
            places[file] = os.path.relpath(file, home)
            if pretrained.copied_weights:
                progress(f"copying {file.name}")
                places[file] = file.name
                shutil.copyfile(file, weights / file.name)
        keys = {
            name: tensor.key for name, tensor in pretrained.stored.items() if tensor.key != name
        }
        index = {
            "weight_map": {name: places[each.file] for name, each in pretrained.stored.items()},
            "keys": keys | {n: k for k, n in pretrained.exported.items() if n in pretrained.anew},
            "anew": sorted(pretrained.anew),
        }
        (weights / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    beside = folder / HUGGING_FACE
    beside.mkdir()
    for name, text in pretrained.texts.items():
        (beside / name).write_text(text, encoding="utf-8")
    for file in pretrained.copies:
        shutil.copyfile(file, beside / file.name)
    content = {"adapter": pretrained.adapter, "names": dict(pretrained.exported)}
    (beside / NAMES).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
