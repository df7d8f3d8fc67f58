"""A file of an ONNX stage that is not what was written is told when it is loaded."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import onnx_models
import pytest
from loading import load_package
from onnx_compiling import compile_onnx

from gpipe_compiler.compile import CompileOptions
from gpipe_compiler.onnx.codegen import stages, weights


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of two stages, the weights of each in a file of their own."""
    monkeypatch.setattr(stages, "INLINE", 0)
    monkeypatch.setattr(weights, "_SMALL", 0)
    path = onnx_models.write(onnx_models.chain(4), tmp_path / "model.onnx")
    options = CompileOptions(2, microbatches=2, validate=False)
    found = compile_onnx(path, options, tmp_path / "package", inputs=["8x16"]).directory
    assert found is not None
    return found


def _run(package: Path) -> np.ndarray:
    arrays = {"x": np.ones((8, 16), np.float32)}
    (result,) = load_package(package).Pipeline()(arrays).values()
    return np.asarray(result)


def test_a_changed_byte_is_refused(package: Path) -> None:
    before = _run(package)
    files = sorted(package.glob("stage_*"))
    assert len(files) == 4
    chosen = random.Random(0)
    for file in files:
        content = file.read_bytes()
        for place in chosen.sample(range(len(content)), 8):
            changed = bytearray(content)
            changed[place] ^= 1 << chosen.randrange(8)
            file.write_bytes(changed)
            with pytest.raises(Exception, match=f"{file.name} is missing, or is not what was"):
                _run(package)
        file.write_bytes(content)
    assert np.array_equal(_run(package), before)


def test_damaged_sums_are_told(package: Path) -> None:
    (package / "checksums.json").write_text('{"stage_0.onnx": 1')
    with pytest.raises(Exception, match=r"checksums\.json is missing"):
        _run(package)


def test_a_missing_file_is_refused(package: Path) -> None:
    (package / "stage_1.onnx.data").unlink()
    with pytest.raises(Exception, match=r"stage_1.onnx.data is missing"):
        _run(package)


def test_files_of_the_users_are_taken(package: Path) -> None:
    (package / "checksums.json").unlink()
    assert _run(package).shape[0] == 8
