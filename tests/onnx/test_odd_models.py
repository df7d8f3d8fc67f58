"""Unusual models: compared with ONNX Runtime running them in one piece, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import odd_models
import onnx
import onnx_models
import packages
import pytest
from loading import load_package
from onnx import ModelProto, TensorProto, helper
from onnx_compiling import compile_onnx

from gpipe_compiler.compile import CompileOptions
from gpipe_compiler.errors import ModelError, UsageError

ROWS = np.random.default_rng(0).standard_normal((9, 16)).astype(np.float32)


def _compile(path: Path, *inputs: str, stages: int = 2, validate: bool = False) -> Path:
    options = CompileOptions(stages, validate=validate)
    made = compile_onnx(path, options, path.with_name("package"), inputs=inputs)
    assert made.directory is not None
    return made.directory


@pytest.mark.parametrize(
    "make",
    [
        odd_models.passed_on,
        odd_models.used_inside,
        odd_models.early,
        odd_models.weights_as_inputs,
        odd_models.sparse,
        odd_models.collected,
    ],
)
def test_equals_the_whole_model(make: Callable[[], ModelProto], tmp_path: Path) -> None:
    path = onnx_models.write(make(), tmp_path / "model.onnx")
    packages.assert_equal(_compile(path), path, {"x": ROWS})


def test_subgraphs_that_read_what_other_stages_make(tmp_path: Path) -> None:
    path = onnx_models.write(odd_models.nested(), tmp_path / "model.onnx")
    package = _compile(path, stages=5)
    assert {"r0", "r1"} & {n for stage in load_package(package).SPEC.stages for n in stage.inputs}
    for flag in (True, False):
        packages.assert_equal(package, path, {"x": ROWS, "flag": np.array(flag)})


def test_numbers_for_inputs(tmp_path: Path) -> None:
    path = onnx_models.write(odd_models.numbers(), tmp_path / "model.onnx")
    found = packages.assert_equal(_compile(path), path, {"x": np.array(0.5, np.float32)})
    assert found["y"].shape == ()


def test_tensors_without_elements(tmp_path: Path) -> None:
    path = onnx_models.write(odd_models.nothing(), tmp_path / "model.onnx")
    none = np.zeros((9, 0), np.float32)
    found = packages.assert_equal(_compile(path), path, {"x": ROWS, "none": none})
    assert found["empty"].shape == (9, 0)


def test_an_input_without_a_shape(tmp_path: Path) -> None:
    path = onnx_models.write(odd_models.without_shape(), tmp_path / "model.onnx")
    with pytest.raises(UsageError, match=r"x \(its whole shape\)"):
        _compile(path)
    packages.assert_equal(_compile(path, "8x16"), path, {"x": ROWS})


NAMES: dict[str, Callable[[str], str]] = {
    "in:0": lambda name: "in:0" if name == "x" else f"{name}:0",
    "../a b/größe→": lambda name: "../a b/größe→" if name == "x" else f"/{name}/",
    "a=b": lambda name: "a=b" if name == "x" else f"a.{name}",
    "a/b": lambda name: {"x": "a/b", "r0": "a.b", "r1": "a b", "r2": "a_b"}.get(name, name),
    "'\"\n{{<b>": lambda name: "'\"\n{{<b>" if name == "x" else f"{name}{{%\\n'",
    "long": lambda name: "long" if name == "x" else name + "_long" * 100,
}


@pytest.mark.parametrize("name", NAMES)
def test_names(name: str, tmp_path: Path) -> None:
    path = onnx_models.write(odd_models.renamed(NAMES[name]), tmp_path / "a: model ö.onnx")
    packages.assert_equal(_compile(path, f"{name}=8x16"), path, {name: ROWS})


@pytest.mark.parametrize("make", [odd_models.half, odd_models.brain])
def test_floats_of_16_bits(make: Callable[[], ModelProto], tmp_path: Path) -> None:
    path = onnx_models.write(make(), tmp_path / "model.onnx")
    _compile(path, validate=True)


def test_any_length(tmp_path: Path) -> None:
    """A size that is open in the file is open in the package; a symbol is given once."""
    path = onnx_models.write(onnx_models.sequence_model(), tmp_path / "model.onnx")
    with pytest.raises(UsageError, match="length as 6 and, in mask, as 7"):
        _compile(path, "tokens=8x6", "mask=8x7")
    package = _compile(path, "tokens=8x6")
    tokens = np.random.default_rng(0).integers(0, 32, (5, 11))
    mask = np.zeros((5, 11), np.float32)
    packages.assert_equal(package, path, {"tokens": tokens, "mask": mask})


def test_weights_behind_links(tmp_path: Path) -> None:
    """As model hubs keep files: under hashes, with links of the right names elsewhere."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    onnx.save(
        onnx_models.chain(4),
        blobs / "1",
        save_as_external_data=True,
        location="2",
        size_threshold=0,
    )
    proto = onnx.load(blobs / "1", load_external_data=False)
    for tensor in proto.graph.initializer:
        tensor.external_data[0].value = "model.data"
    onnx.save(proto, blobs / "1")
    path = snapshot / "model.onnx"
    path.symlink_to("../blobs/1")
    (snapshot / "model.data").symlink_to("../blobs/2")
    packages.assert_equal(_compile(path), path, {"x": ROWS})


def _refused(proto: ModelProto, said: str, folder: Path) -> ModelError:
    path = onnx_models.write(proto, folder / "model.onnx")
    with pytest.raises(ModelError, match=said) as caught:
        compile_onnx(path, CompileOptions(2), folder / "package")
    assert not (folder / "package").exists()
    return caught.value


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("weight", "output w0 .* is a weight"),
        ("random", "RandomNormalLike that makes odd draws random numbers"),
    ],
)
def test_outputs_that_are_refused(kind: str, said: str, tmp_path: Path) -> None:
    _refused(odd_models.with_output(kind), said, tmp_path)


def test_outputs_that_have_no_parts(tmp_path: Path) -> None:
    """Of whole calls they are what ONNX Runtime gives."""
    path = onnx_models.write(odd_models.with_output("sequence"), tmp_path / "model.onnx")
    options = CompileOptions(2, microbatches=4)
    with pytest.raises(ModelError, match=r"output odd .* is no tensor \(sequence\)"):
        compile_onnx(path, options, tmp_path / "package")
    package = _compile(path, validate=True)
    found = load_package(package).Pipeline()({"x": ROWS})
    expected = packages.whole(path, {"x": ROWS})
    assert len(found["odd"]) == len(expected["odd"]) == 2
    for one, other in zip(found["odd"], expected["odd"], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_mean_of_a_batch_has_no_parts(tmp_path: Path) -> None:
    path = onnx_models.write(odd_models.with_output("mean"), tmp_path / "model.onnx")
    options = CompileOptions(2, microbatches=4)
    with pytest.raises(ModelError, match=r"output odd \(a number\) .* no rows for the samples"):
        compile_onnx(path, options, tmp_path / "package")
    packages.assert_equal(_compile(path), path, {"x": ROWS})


@pytest.mark.parametrize("kind", ["sequence", "optional"])
def test_inputs_that_are_refused(kind: str, tmp_path: Path) -> None:
    said = r"the input odd .* (\(sequence\)|\(optional\))"
    _refused(odd_models.with_input(kind), said, tmp_path)


def test_two_weights_of_a_name(tmp_path: Path) -> None:
    proto = onnx_models.chain(3)
    proto.graph.initializer.append(proto.graph.initializer[2])
    _refused(proto, "several weights of the name w1", tmp_path)


def test_products_that_do_not_fit(tmp_path: Path) -> None:
    """What ONNX Runtime says of it, and not that a shape is unknown."""
    proto = onnx_models.chain(3)
    proto.graph.initializer.append(onnx_models.weight("small", 3, 3))
    proto.graph.node.append(helper.make_node("MatMul", ["r2", "small"], ["y"], name="the product"))
    proto.graph.output[0].name = "y"
    _refused(proto, r"Incompatible dimensions .*\(at MatMul the product\)", tmp_path)


def test_an_operator_that_only_the_user_has(tmp_path: Path) -> None:
    """It is known by its declared shape; what runs it is named, or it cannot be held."""
    proto = onnx_models.chain(4)
    proto.graph.node[3].domain, proto.graph.node[3].op_type = "theirs", "Product"
    proto.opset_import.append(helper.make_opsetid("theirs", 1))
    proto.graph.value_info.append(odd_models.value("m1", TensorProto.FLOAT, ["batch", 16]))
    error = _refused(proto, "theirs:Product.* is not a registered", tmp_path)
    assert "--custom-ops" in error.hint
    path = tmp_path / "model.onnx"
    package = _compile(path)
    domains = [
        node.domain
        for stage in range(2)
        for node in onnx.load(package / f"stage_{stage}.onnx").graph.node
    ]
    assert sorted(domains) == [*[""] * 11, "theirs"]
    with pytest.raises(UsageError, match=r"--custom-ops: there is no file .*none\.so"):
        compile_onnx(path, CompileOptions(2), None, custom_ops=[tmp_path / "none.so"])
