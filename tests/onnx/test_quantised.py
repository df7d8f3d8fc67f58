"""Quantised models, compared with ONNX Runtime running the whole quantised model in one piece.

The models are made by `onnxruntime.quantization`: QDQ, by numbers that a calibration gives, and
dynamic, by those of each call. Their nodes round alike in one piece and in stages.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_models
import packages
import pytest
import torch
from onnx import TensorProto, helper
from onnx_compiling import compile_onnx
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
)
from torch import nn
from torch.export import Dim
from transformers import BertConfig, BertModel

from gpipe_compiler.compile import CompileOptions
from gpipe_compiler.errors import GPipeCompilerError
from gpipe_compiler.frontend.source import load
from gpipe_compiler.options import Constraints

EXAMPLES = Path(__file__).parents[2] / "examples"


class Random(CalibrationDataReader):
    """A few batches of normal numbers."""

    def __init__(self, name: str, *shape: int) -> None:
        generator = np.random.default_rng(0)
        self._batches: Iterator[dict[str, np.ndarray]] = iter(
            [{name: generator.standard_normal(shape).astype(np.float32)} for _ in range(2)]
        )

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._batches, None)


def _qdq(model: Path, path: Path, name: str, *shape: int) -> Path:
    quantize_static(
        str(model),
        str(path),
        Random(name, *shape),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        weight_type=QuantType.QInt8,
    )
    return path


def _dynamic(model: Path, path: Path) -> Path:
    quantize_dynamic(str(model), str(path), weight_type=QuantType.QInt8)
    return path


def _operators(path: Path) -> set[str]:
    return {node.op_type for node in onnx.load(path, load_external_data=False).graph.node}


@pytest.fixture(autouse=True)
def _no_advice() -> None:
    """The quantiser advises to prepare models first; here they are taken as they are."""
    logging.getLogger().setLevel(logging.ERROR)


@pytest.mark.parametrize("kind", ["qdq", "dynamic"])
@pytest.mark.parametrize("stages", [2, 3])
def test_small(kind: str, stages: int, tmp_path: Path) -> None:
    plain = onnx_models.write(onnx_models.chain(6), tmp_path / "plain.onnx")
    model = tmp_path / "model.onnx"
    if kind == "qdq":
        _qdq(plain, model, "x", 8, 16)
        assert {"QuantizeLinear", "DequantizeLinear"} <= _operators(model)
    else:
        _dynamic(plain, model)
        assert {"DynamicQuantizeLinear", "MatMulInteger"} <= _operators(model)
    made = compile_onnx(model, CompileOptions(stages, validate=False), tmp_path / "p")
    assert made.directory is not None
    # What is rounded by the largest number of a batch is not split.
    assert ("whole call" in made.batch) == (kind == "dynamic")
    plan = None if kind == "dynamic" else made.plan
    for samples in (8, 5, 1):
        x = np.random.default_rng(samples).standard_normal((samples, 16)).astype(np.float32)
        packages.assert_equal(made.directory, model, {"x": x}, plan=plan, saturates=True)


def _residual() -> onnx.ModelProto:
    """Blocks that add what they were given; its quantised form reads each sum twice."""
    nodes, weights, last = [], [], "x"
    for layer in range(4):
        weights += [
            onnx_models.weight(f"w{layer}", 16, 16),
            onnx_models.weight(f"v{layer}", 16, 16),
        ]
        nodes += [
            helper.make_node("MatMul", [last, f"w{layer}"], [f"m{layer}"]),
            helper.make_node("Relu", [f"m{layer}"], [f"r{layer}"]),
            helper.make_node("MatMul", [f"r{layer}", f"v{layer}"], [f"n{layer}"]),
            helper.make_node("Add", [last, f"n{layer}"], [f"s{layer}"]),
        ]
        last = f"s{layer}"
    return onnx_models.model_of(nodes, weights, [onnx_models.rows()], [last])


@pytest.mark.parametrize("stages", [2, 4])
def test_only_quantised_values_cross(stages: int, tmp_path: Path) -> None:
    # Cut elsewhere, an operator would run in floating point that runs in integers in one piece:
    # equal on processors with VNNI, and off by quanta on others.
    plain = onnx_models.write(_residual(), tmp_path / "plain.onnx")
    model = _qdq(plain, tmp_path / "model.onnx", "x", 8, 16)
    inside = Constraints(split_at=("n1",))
    with pytest.raises(GPipeCompilerError, match="r1_DequantizeLinear and n1 cannot be cut apart"):
        compile_onnx(model, CompileOptions(stages, constraints=inside), tmp_path / "p")
    made = compile_onnx(model, CompileOptions(stages, validate=False), tmp_path / "p")
    assert made.directory is not None
    files = sorted(made.directory.rglob("stage_*.onnx"))
    assert len(files) == stages
    for file in files[1:]:
        graph = onnx.load(file).graph
        kinds = {value.name: value.type.tensor_type.elem_type for value in graph.input}
        assert kinds.pop("x", TensorProto.FLOAT) == TensorProto.FLOAT
        assert set(kinds.values()) <= {TensorProto.UINT8, TensorProto.INT8}
        assert kinds
    for samples in (8, 3):
        x = np.random.default_rng(samples).standard_normal((samples, 16)).astype(np.float32)
        packages.assert_equal(made.directory, model, {"x": x})


def _export(model: nn.Module, args: torch.Tensor, path: Path) -> Path:
    with torch.no_grad():
        program = torch.onnx.export(
            model.eval(),
            (args,),
            dynamo=True,
            dynamic_shapes=({0: Dim("batch")},),
            input_names=["x"],
            verbose=False,
        )
    assert program is not None
    program.save(path, external_data=False)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 4])
def test_resnet50_in_qdq(stages: int, tmp_path: Path) -> None:
    subject = load(str(EXAMPLES / "resnet50.py"), input_specs=[], training=False)
    plain = _export(subject.model, torch.randn(2, 3, 64, 64), tmp_path / "plain.onnx")
    model = _qdq(plain, tmp_path / "model.onnx", "x", 4, 3, 64, 64)
    options = CompileOptions(stages, microbatches=4)
    made = compile_onnx(model, options, tmp_path / "p", inputs=["8x3x64x64"])
    assert made.validation is not None
    assert [row.what for row in made.validation.rows] == [
        f"outputs of a batch of {samples}" for samples in (8, 2, 9)
    ]
    assert made.validation.passed


class Encoder(nn.Module):
    """The encoder of BERT, small, of tokens alone."""

    def __init__(self) -> None:
        super().__init__()
        config = BertConfig(
            vocab_size=1024,
            hidden_size=256,
            num_hidden_layers=6,
            num_attention_heads=8,
            intermediate_size=1024,
            max_position_embeddings=64,
        )
        self.model = BertModel(config, add_pooling_layer=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.model(x).last_hidden_state
        return hidden


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 4])
def test_a_transformer_quantised_dynamically(stages: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    tokens = torch.randint(0, 1024, (2, 32))
    plain = _export(Encoder(), tokens, tmp_path / "plain.onnx")
    model = _dynamic(plain, tmp_path / "model.onnx")
    assert "MatMulInteger" in _operators(model)
    options = CompileOptions(stages, microbatches=4)
    made = compile_onnx(model, options, tmp_path / "p", inputs=["8x32"])
    assert made.validation is not None
    assert made.validation.passed
    assert made.directory is not None
    for samples in (8, 5, 1):
        x = np.random.default_rng(samples).integers(0, 1024, (samples, 32))
        # A last place that differs at a cut may be rounded to the next of 256 numbers.
        packages.assert_equal(made.directory, model, {"x": x}, plan=made.plan, share=5e-3)
