"""Packages of ONNX files of every kind, held against plain ONNX Runtime on calls of other sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kinds
import numpy as np
import onnx_models
import packages
import pytest
from loading import load_package
from onnx_compiling import compile_onnx

from gpipe_compiler.compile import CompileOptions
from gpipe_compiler.options import Constraints


def _arrays(sizes: kinds.Sizes, seed: int) -> dict[str, Any]:
    generator = np.random.default_rng(seed)
    return {
        name: np.array(kinds.WORDS, object)[generator.integers(0, len(kinds.WORDS), shape)]
        if name == "t"
        else generator.standard_normal(shape).astype(np.float32)
        for name, shape in sizes.items()
    }


def _held(folder: Path, kind: kinds.Kind, options: CompileOptions) -> Any:
    """Compiles a file and compares every call; gives what the package says of itself."""
    path = onnx_models.write(kind.model, folder / "model.onnx")
    made = compile_onnx(path, options, folder / "package", inputs=kind.inputs)
    assert made.directory is not None
    module = load_package(made.directory)
    with module.Pipeline() as pipe:
        for seed, sizes in enumerate(kind.sizes):
            arrays = _arrays(sizes, seed)
            expected, found = packages.whole(path, arrays), pipe(arrays)
            assert found.keys() == expected.keys()
            for name, array in expected.items():
                assert found[name].dtype == array.dtype
                if array.dtype == object:
                    np.testing.assert_array_equal(found[name], array)
                else:
                    np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-5)
    return module.SPEC


@pytest.mark.parametrize("kind", list(kinds.KINDS))
def test_is_what_onnx_runtime_makes_of_the_file(kind: str, tmp_path: Path) -> None:
    _held(tmp_path, kinds.KINDS[kind](), CompileOptions(3))


@pytest.mark.parametrize(
    ("kind", "crossing"),
    [("words", ("lower", "said")), ("sequences", ("halves", "h")), ("optionals", ("some", "yes"))],
)
def test_what_is_no_tensor_of_numbers_crosses(
    kind: str, crossing: tuple[str, str], tmp_path: Path
) -> None:
    """From the node that makes it to one that takes it."""
    made, taker = crossing
    apart = Constraints(pins=((made, 0), (taker, 1)))
    spec = _held(tmp_path, kinds.KINDS[kind](), CompileOptions(2, constraints=apart))
    assert made in spec.stages[1].inputs
    assert not spec.whole_batch
