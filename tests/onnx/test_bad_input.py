"""Files that are no pipeline: each error names what is wrong, and where."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_models
import pytest
from onnx import TensorProto, helper
from onnx_compiling import compile_onnx

from gpipe_compiler.compile import CompileOptions
from gpipe_compiler.errors import ModelError, UsageError
from gpipe_compiler.onnx.frontend.reading import read_model


def test_a_truncated_file(tmp_path: Path) -> None:
    path = onnx_models.write(onnx_models.chain(), tmp_path / "model.onnx")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ModelError, match="only part of one"):
        read_model(path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no file"):
        read_model(tmp_path / "model.onnx")


def test_something_else(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_text("not a model")
    with pytest.raises(ModelError, match="no ONNX model"):
        read_model(path)


@pytest.mark.parametrize("harm", ["missing", "short"])
def test_weights_that_cannot_be_read(harm: str, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(
        onnx_models.chain(width=64),
        path,
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=0,
    )
    weights = tmp_path / "weights.bin"
    if harm == "missing":
        weights.unlink()
    else:
        weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ModelError, match=r"w0 .*weights\.bin") as caught:
        read_model(path)
    assert "b5" in caught.value.problem or "more" in caught.value.problem  # all of them, at once


def test_a_node_that_is_none(tmp_path: Path) -> None:
    proto = onnx_models.chain()
    proto.graph.node[3].op_type = "Multiply"
    proto.graph.node[3].name = "wrong"
    path = onnx_models.write(proto, tmp_path / "model.onnx")
    with pytest.raises(ModelError, match="Multiply wrong"):
        read_model(path)


def test_a_model_that_onnx_runtime_refuses(tmp_path: Path) -> None:
    proto = onnx_models.chain()
    proto.graph.node[3].domain = "nobody.knows"
    proto.graph.node[3].op_type = "Stranger"
    proto.opset_import.append(helper.make_opsetid("nobody.knows", 1))
    proto.graph.value_info.append(
        helper.make_tensor_value_info("m1", TensorProto.FLOAT, ["batch", 16])
    )
    path = onnx_models.write(proto, tmp_path / "model.onnx")
    with pytest.raises(ModelError, match="Stranger that makes m1"):
        compile_onnx(path, CompileOptions(2), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_output_whose_shape_follows_from_numbers(tmp_path: Path) -> None:
    proto = onnx_models.chain(2)
    proto.graph.node.append(helper.make_node("NonZero", ["r1"], ["places"], name="find"))
    proto.graph.output[0].name = "places"
    proto.graph.output[0].type.tensor_type.elem_type = TensorProto.INT64
    path = onnx_models.write(proto, tmp_path / "model.onnx")
    with pytest.raises(ModelError, match="NonZero find"):
        compile_onnx(path, CompileOptions(2, microbatches=4), None)


def test_a_cut_that_shapes_do_not_allow(tmp_path: Path) -> None:
    """Nothing but the values behind a NonZero lies between the ends of the model."""
    proto = onnx_models.data_dependent()
    path = onnx_models.write(proto, tmp_path / "model.onnx")
    with pytest.raises(ModelError, match="NonZero find"):
        compile_onnx(path, CompileOptions(9, microbatches=4), None)


def test_sizes_left_open(tmp_path: Path) -> None:
    path = onnx_models.write(onnx_models.sequence_model(), tmp_path / "model.onnx")
    with pytest.raises(UsageError, match=r"tokens \(length\); mask \(length\)"):
        compile_onnx(path, CompileOptions(2), None)


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        (("nobody=8x16",), "no input nobody"),
        (("8x16", "8x16"), "1 inputs"),
        (("8x17",), "takes batchx16"),
        (("8x16:int64",), "takes float32"),
    ],
)
def test_inputs_that_do_not_fit(inputs: tuple[str, ...], said: str, tmp_path: Path) -> None:
    path = onnx_models.write(onnx_models.chain(), tmp_path / "model.onnx")
    with pytest.raises(UsageError, match=said):
        compile_onnx(path, CompileOptions(2), None, inputs=inputs)
