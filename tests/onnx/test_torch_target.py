"""Torch models compiled for ONNX Runtime, compared with the models themselves in eval mode."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from loading import load_package
from onnx_compiling import compile_exported
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from gpipe_compiler.cli.main import compile_command
from gpipe_compiler.compile import Compiled, CompileOptions
from gpipe_compiler.errors import EmitError, ModelError, UsageError
from gpipe_compiler.frontend.subject import Subject

EXAMPLES = Path(__file__).parents[2] / "examples"


class Tied(nn.Module):
    """Every kind of thing that goes wrong when a stage is exported by itself.

    A weight of two stages, several outputs in a dict, an input that the last stage uses, BatchNorm
    and dropout (which do nothing in eval mode), a constant, names that the exporter uses too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.norm = nn.BatchNorm1d(12)
        self.dropout = nn.Dropout(0.5)
        self.middle = nn.Sequential(*(nn.Linear(12, 12) for _ in range(4)))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("table", torch.arange(12.0), persistent=False)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        add = self.norm(self.first(x)) + self.table
        val_0 = self.dropout(add) * self.scale
        linear = self.middle(val_0).relu_()
        tied = nn.functional.linear(linear, self.first.weight)
        return {"y": tied.masked_fill(mask, 0.0), "early": val_0, "sum": linear.sum(1)}


class SkipsOne(nn.Module):
    """Something else of a single sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if len(x) > 1:
            hidden = hidden.tanh()
        return self.last(hidden)


class Squeezed(SkipsOne):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x[:, None]).tanh().squeeze())


@pytest.mark.parametrize("make", [SkipsOne, Squeezed])
def test_one_sample_of_which_the_model_computes_something_else(
    make: type[SkipsOne], tmp_path: Path
) -> None:
    model = make().eval()
    made = _compile(model, tmp_path / "x2", torch.randn(8, 6))
    assert made.directory is not None
    pipe = load_package(made.directory).Pipeline()
    for samples, microbatches in ((9, None), (2, None), (7, 3), (5, None)):
        x = torch.randn(samples, 6)
        (found,) = pipe({"x": x.numpy()}, microbatches=microbatches).values()
        torch.testing.assert_close(torch.from_numpy(found), model(x).detach())
    for samples, microbatches in ((1, None), (4, 4)):
        with pytest.raises(Exception, match=r"takes two samples or more.*test_torch_target\.py"):
            pipe({"x": np.zeros((samples, 6), np.float32)}, microbatches=microbatches)


def _subject(model: nn.Module, *args: torch.Tensor) -> Subject:
    return Subject(type(model).__name__, model, args, training=False)


def _compile(model: nn.Module, folder: Path, *args: torch.Tensor, stages: int = 2) -> Compiled:
    options = CompileOptions(stages, microbatches=4, training=False)
    return compile_exported(_subject(model, *args), options, folder)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    torch.manual_seed(0)
    model = Tied()
    model.norm.running_mean.normal_()
    args = torch.randn(8, 12), torch.rand(8, 12) > 0.5
    return _compile(model, tmp_path_factory.mktemp("tied") / "package", *args, stages=3)


def test_equals_the_model(tied: Compiled) -> None:
    assert tied.validation is not None
    assert tied.validation.passed
    assert [row.compared for row in tied.validation.rows] == [3, 3, 3]
    assert {row.what for row in tied.validation.rows} == {
        f"outputs of a batch of {samples}" for samples in (8, 2, 9)
    }


def test_stages_are_named_as_the_values(tied: Compiled) -> None:
    assert tied.directory is not None
    for stage in tied.plan.stages:
        proto = onnx.load(tied.directory / f"stage_{stage.index}.onnx")
        onnx.checker.check_model(proto, full_check=True)
        assert tuple(value.name for value in proto.graph.input) == stage.inputs
        assert tuple(value.name for value in proto.graph.output) == stage.outputs
        assert not any(node.metadata_props for node in proto.graph.node)
        first = proto.graph.input[0].type.tensor_type.shape.dim[0]
        assert first.dim_param == "batch"


def test_the_whole_model_is_there_too(tied: Compiled) -> None:
    """With its nodes in stages, and right by itself."""
    assert tied.directory is not None
    (path,) = tied.directory.glob("*.staged.onnx")
    proto = onnx.load(path)
    told = {entry.value for node in proto.graph.node for entry in node.metadata_props
            if entry.key == "gpipe.stage"}  # fmt: skip
    assert told == {"0", "1", "2"}
    weights = [tensor.name for tensor in proto.graph.initializer]
    assert len(weights) == len(set(weights))
    torch.manual_seed(0)
    model = Tied()
    model.norm.running_mean.normal_()
    x, mask = torch.randn(5, 12), torch.rand(5, 12) > 0.5
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    found = session.run(None, dict(zip(names, (x.numpy(), mask.numpy()), strict=True)))
    expected = model.eval()(x, mask)
    for one in expected.values():
        near = [other.shape == one.shape and np.allclose(other, one.detach(), atol=1e-5)
                for other in found]  # fmt: skip
        assert any(near)


def test_runs_without_torch(tied: Compiled, tmp_path: Path) -> None:
    assert tied.directory is not None
    program = (
        "import runpy, sys\n"
        "sys.modules['gpipe_compiler'] = sys.modules['torch'] = None\n"
        "del sys.argv[0]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    for command in ("infer", "check"):
        done = subprocess.run(
            [sys.executable, "-c", program, str(tied.directory / "run.py"), command],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr


class Fourier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers(x)
        return torch.linalg.eigvals(x.unsqueeze(1) * x.unsqueeze(2)).real


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.register_buffer("calls", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return self.layers(x) + self.calls


def test_an_op_that_onnx_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(EmitError, match=r"stage 1.*No ONNX function") as caught:
        _compile(Fourier(), tmp_path / "package", torch.randn(8, 4))
    assert caught.value.location is not None
    assert "eigvals" in Path(caught.value.location.file).read_text().splitlines()[
        caught.value.location.line - 1
    ]  # fmt: skip
    assert not (tmp_path / "package").exists()


def test_a_model_that_remembers(tmp_path: Path) -> None:
    with pytest.raises(EmitError, match=r"stage \d writes to calls"):
        _compile(Counter(), tmp_path / "package", torch.randn(8, 4))


class In16Bits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.last(self.first(x).relu()).float()


def test_autocast_of_the_model_s_own_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"runs under torch\.autocast") as caught:
        _compile(In16Bits(), tmp_path / "package", torch.randn(8, 6))

    assert caught.value.location is not None
    assert "self.first(x)" in caught.value.location.code


class Packs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.last = nn.LSTM(6, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        _, (found, _) = self.cell(pack_padded_sequence(x, lengths, True, False))
        return self.last(found[-1])


def test_packed_sequences_are_refused(tmp_path: Path) -> None:
    """What torch exports reads the padding, too."""
    lengths = torch.randint(1, 5, (8,))
    with pytest.raises(ModelError, match="packs sequences") as caught:
        _compile(Packs(), tmp_path / "package", torch.randn(8, 4, 6), lengths)

    assert caught.value.location is not None
    assert "self.cell(" in caught.value.location.code


def test_training_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not train") as caught:
        compile_exported(
            _subject(Counter(), torch.randn(8, 4)), CompileOptions(2), tmp_path / "package"
        )
    assert "--mode infer" in caught.value.hint


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "stages"),
    [
        *(
            (name, stages)
            for name in ("mlp_digits", "transformer", "alexnet", "resnet50", "inception", "unet")
            for stages in (2, 4)
        ),
        ("gpt2_huggingface", 2),
    ],
)
def test_examples(example: str, stages: int, tmp_path: Path) -> None:
    words = [str(EXAMPLES / f"{example}.py"), "--stages", str(stages), "--mode", "infer"]
    output = tmp_path / "package"
    if example == "gpt2_huggingface":  # without labels, and so without a loss
        words += ["--input", "input_ids=8x64:int64"]
    assert compile_command([*words, "--target", "onnxruntime", "-o", str(output)]) == 0
    assert (output / f"stage_{stages - 1}.onnx").is_file()
