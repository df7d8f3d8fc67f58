"""What the tests of ONNX stages share: models in files, and packages of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from onnx import ModelProto

sys.path.insert(0, str(Path(__file__).parent))

import onnx_models
from onnx_compiling import compile_onnx

from gpipe_compiler.compile import Compiled, CompileOptions

Compile = Callable[..., Compiled]


@pytest.fixture
def compile_model(tmp_path: Path) -> Compile:
    """Compiles a model into `tmp_path/model_x<stages>`; compared with the whole model."""

    def run(
        proto: ModelProto, stages: int = 2, inputs: tuple[str, ...] = (), **options: object
    ) -> Compiled:
        path = onnx_models.write(proto, tmp_path / "model.onnx")
        chosen = CompileOptions(stages, **options)  # type: ignore[arg-type]  # as the tests give them
        return compile_onnx(path, chosen, tmp_path / f"model_x{stages}", inputs=inputs)

    return run
