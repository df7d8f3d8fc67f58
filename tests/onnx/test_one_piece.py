"""Models whose samples meet, compiled for one micro-batch: whole batches alone, of any size.

Held against ONNX Runtime and plain PyTorch on the batch in one piece.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_models
import packages
import pytest
import torch
from loading import load_package
from onnx import ModelProto, helper
from onnx_compiling import compile_exported
from torch import nn

from gpipe_compiler.compile import Compiled, CompileOptions
from gpipe_compiler.errors import ModelError, UsageError
from gpipe_compiler.frontend.subject import Subject

Compile = Callable[..., Compiled]


def _meeting(operator: str, **attributes: int) -> ModelProto:
    """Layers, then an op that takes samples together."""
    proto = onnx_models.chain(3)
    proto.graph.node.append(helper.make_node(operator, ["r2"], ["y"], **attributes))
    proto.graph.output[0].name = "y"
    return proto


def _centred() -> ModelProto:
    proto = _meeting("ReduceMean", keepdims=1)
    proto.graph.node[-1].attribute.append(helper.make_attribute("axes", [0]))
    proto.graph.node.append(helper.make_node("Sub", ["r2", "y"], ["centred"]))
    proto.graph.output[0].name = "centred"
    return proto


def _over_samples() -> ModelProto:
    return _meeting("Softmax", axis=0)


def _total() -> ModelProto:
    return _meeting("ReduceMean", keepdims=0)


@pytest.mark.parametrize("make", [_centred, _over_samples, _total, onnx_models.data_dependent])
def test_a_file(make: Callable[[], ModelProto], compile_model: Compile, tmp_path: Path) -> None:
    compiled = compile_model(make(), 2, microbatches=1)
    assert compiled.directory is not None
    for samples in (8, 16, 17, 3):
        arrays = packages.random(compiled.directory, samples)
        packages.assert_equal(compiled.directory, tmp_path / "model.onnx", arrays)
    _assert_whole(compiled, packages.random(compiled.directory, 8))


def test_what_is_of_a_fixed_batch_has_no_mean_of_two(
    compile_model: Compile, tmp_path: Path
) -> None:
    proto = _total()
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 4
    compiled = compile_model(proto, 2, microbatches=1)
    assert compiled.directory is not None
    arrays = packages.random(compiled.directory, 4)
    packages.assert_equal(compiled.directory, tmp_path / "model.onnx", arrays)
    twice = {name: np.concatenate([array, array + 1]) for name, array in arrays.items()}
    with pytest.raises(Exception, match="the input x is 8x16, not 4x16"):
        load_package(compiled.directory).Pipeline()(twice)


def test_samples_that_do_not_meet_are_split_all_the_same(compile_model: Compile) -> None:
    compiled = compile_model(onnx_models.chain(), 2, microbatches=1)
    assert compiled.directory is not None
    assert compiled.validation is not None
    assert [row.what[-2:] for row in compiled.validation.rows] == [" 8", " 9"]
    pipe = load_package(compiled.directory).Pipeline()
    arrays = packages.random(compiled.directory, 12)
    whole, split = pipe(arrays, microbatches=1), pipe(arrays, microbatches=3)
    for name, array in whole.items():
        np.testing.assert_allclose(split[name], array, rtol=1e-5, atol=1e-6)


class _Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(x)
        return found - found.mean(0)


class _Total(_Centred):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


class _TimeFirst(_Centred):
    """Its samples lie in dimension 1, along which ONNX stages are not cut."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cumsum(self.layers(x), 0)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (_Centred, (8, 6)),
        pytest.param(_Total, (8, 6), marks=pytest.mark.slow),
        pytest.param(_TimeFirst, (8, 4, 6), marks=pytest.mark.slow),
    ],
)
def test_a_torch_model(model: type[nn.Module], shape: tuple[int, ...], tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = model()
    subject = Subject("model", made, (torch.randn(shape),), training=False)
    options = CompileOptions(2, microbatches=1, training=False)
    compiled = compile_exported(subject, options, tmp_path / "package")
    assert compiled.directory is not None
    pipe = load_package(compiled.directory).Pipeline()
    for samples in (8, 16, 17, 3):
        x = torch.randn(samples, *shape[1:])
        (found,) = pipe({"x": x.numpy()}).values()
        np.testing.assert_allclose(found, made(x).detach().numpy(), rtol=1e-4, atol=1e-5)
    _assert_whole(compiled, {"x": torch.randn(shape).numpy()})


def test_a_torch_model_in_parts_is_refused_with_ways_out_that_there_are(tmp_path: Path) -> None:
    subject = Subject("model", _Centred(), (torch.randn(8, 6),), training=False)
    options = CompileOptions(2, microbatches=4, training=False)
    with pytest.raises(ModelError, match="takes the samples of a batch together") as told:
        compile_exported(subject, options, tmp_path / "package")
    assert "--microbatches 1" in told.value.hint
    with pytest.raises(UsageError, match="--per-microbatch") as used:
        compile_exported(
            subject, dataclasses.replace(options, per_microbatch=True), tmp_path / "package"
        )
    assert "--per-microbatch" not in told.value.hint + used.value.hint


def _assert_whole(
    compiled: Compiled, arrays: packages.Arrays, microbatches: int | None = 2
) -> None:
    """The package refuses to split a batch, and says why."""
    assert compiled.directory is not None
    pipe = load_package(compiled.directory).Pipeline()
    with pytest.raises(
        Exception, match=r"in one piece, not in 2: .*(meet|together|dimension)"
    ) as e:
        pipe(arrays, microbatches=microbatches)
    assert type(e.value).__name__ == "UsageError"
