"""Packages of small ONNX models, compared with ONNX Runtime on the whole model in one piece."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_models
import packages
import pytest

from gpipe_compiler.compile import Compiled
from gpipe_compiler.errors import ModelError, PlanError
from gpipe_compiler.ir import ValueKind

Compile = Callable[..., Compiled]

SEQUENCES = ("8x6", "mask=8x6")

CASES = {
    "chain": (onnx_models.chain, ()),
    "long_skip": (onnx_models.long_skip, ()),
    "shared_weight": (onnx_models.shared_weight, ()),
    "conditional": (onnx_models.conditional, ()),
    "loop": (onnx_models.loop, ()),
    "scan": (onnx_models.scan, ()),
    "own_functions": (onnx_models.own_functions, ()),
    "of_runtime": (onnx_models.of_runtime, ()),
    "sequence_model": (onnx_models.sequence_model, SEQUENCES),
}


@pytest.mark.parametrize("stages", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_equals_the_whole_model(
    name: str, stages: int, compile_model: Compile, tmp_path: Path
) -> None:
    """For the planned mini-batch, for one sample, and for a batch that does not split evenly."""
    make, inputs = CASES[name]
    compiled = compile_model(make(), stages, inputs, validate=False)
    assert compiled.directory is not None
    for samples in (8, 1, 9):
        arrays = packages.random(compiled.directory, samples)
        packages.assert_equal(compiled.directory, tmp_path / "model.onnx", arrays)
    for stage in compiled.plan.stages:
        onnx.checker.check_model(compiled.directory / f"stage_{stage.index}.onnx", full_check=False)


def test_validation_is_of_several_batches(compile_model: Compile) -> None:
    compiled = compile_model(onnx_models.long_skip(), microbatches=4)
    assert compiled.validation is not None
    assert [row.what for row in compiled.validation.rows] == [
        f"outputs of a batch of {samples}" for samples in (8, 2, 9)
    ]
    assert all(row.compared == 2 for row in compiled.validation.rows)
    assert all(row.largest_difference == 0 for row in compiled.validation.rows)


def test_nodes_are_carried_over_as_they_are(compile_model: Compile) -> None:
    proto = onnx_models.conditional()
    compiled = compile_model(proto, 3, validate=False)
    assert compiled.directory is not None
    found = [
        node.SerializeToString()
        for stage in compiled.plan.stages
        for node in onnx.load(compiled.directory / f"stage_{stage.index}.onnx").graph.node
    ]
    assert sorted(found) == sorted(node.SerializeToString() for node in proto.graph.node)


def test_constants_are_in_every_stage_that_reads_them(compile_model: Compile) -> None:
    compiled = compile_model(onnx_models.shared_weight(), 3, validate=False)
    assert not {"w", "table", "scale"} & {c.value for c in compiled.plan.crossings}
    graph = compiled.plan.graph
    assert graph is not None
    for stage in compiled.plan.stages:
        reads = any("w" in graph.op_of[name].states({}) for name in stage.ops)
        assert ("w" in stage.state) == reads


def test_a_batch_of_one_size_only(compile_model: Compile) -> None:
    compiled = compile_model(onnx_models.fixed_batch(2), 2, microbatches=3)
    assert (compiled.plan.microbatch_size, compiled.plan.batch_size) == (2, 6)
    assert compiled.validation is not None
    assert compiled.validation.passed


def test_samples_that_meet_are_refused_in_parts(compile_model: Compile) -> None:
    with pytest.raises(ModelError, match="the samples of a batch meet") as caught:
        compile_model(onnx_models.data_dependent(), microbatches=4)
    assert "--microbatches 1" in caught.value.hint


def test_samples_that_meet_are_computed_in_whole_calls(
    compile_model: Compile, tmp_path: Path
) -> None:
    """Unless parts are asked for; what has another shape in every call may cross too."""
    compiled = compile_model(onnx_models.data_dependent(), 8)
    assert "a micro-batch is a whole call" in compiled.batch
    assert compiled.plan.known_graph.values["places"].kind is ValueKind.TENSOR
    assert compiled.directory is not None
    for samples in (8, 1, 9):
        arrays = packages.random(compiled.directory, 1)
        arrays["x"] = np.random.default_rng(samples).normal(size=(samples, 16)).astype(np.float32)
        packages.assert_equal(compiled.directory, tmp_path / "model.onnx", arrays)


def test_too_many_stages(compile_model: Compile) -> None:
    with pytest.raises(PlanError):
        compile_model(onnx_models.chain(1), 4)
