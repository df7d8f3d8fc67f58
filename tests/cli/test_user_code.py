"""Whatever the user's code raises, and wherever it is called, is told by its line."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import rich.text
import safetensors.numpy
import sympy
import torch

from gpipe_compiler.cli import commands
from gpipe_compiler.cli import main as cli
from gpipe_compiler.frontend.locate import is_users

MODEL = """
import sys
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.first(x).relu())

def build_model():
    return Model()

def example_inputs():
    return torch.rand(4, 4)

def example_target():
    return torch.rand(4, 4)

def loss_fn(output, target):
    return ((output - target) ** 2).mean()

class Left(BaseException):
    pass

"""
LINE = MODEL.count("\n") + 2

CASES = {
    "forward leaves": (
        "def left(self, x):\n    sys.exit(5)\nModel.forward = left\n",
        f"model.py:{LINE}: left() ends the program with exit(5)",
    ),
    "the loss leaves": (
        "def loss_fn(output, target):\n    sys.exit('enough')\n",
        f"model.py:{LINE}: loss_fn() ends the program with exit('enough')",
    ),
    "make_optimizer leaves": (
        "def make_optimizer(parameters):\n    sys.exit(0)\n",
        f"model.py:{LINE}: make_optimizer() ends the program with exit(0)",
    ),
    "no Exception in forward": (
        "def left(self, x):\n    raise Left('of old')\nModel.forward = left\n",
        f"model.py:{LINE}: left() raises Left: of old",
    ),
    "no Exception in the factory": (
        "def build_model():\n    raise Left('of old')\n",
        f"model.py:{LINE}: build_model() raises Left: of old",
    ),
    "train() raises": (
        "def kept(self, mode=True):\n    raise ValueError('as it is')\nModel.train = kept\n",
        f"model.py:{LINE}: kept() raises ValueError: as it is",
    ),
    "sparse samples": (
        "def example_inputs():\n    return torch.eye(4).to_sparse()\n",
        "the input x is a tensor of layout torch.sparse_coo, which cannot be cut",
    ),
    "nested samples": (
        "def example_inputs():\n"
        "    return torch.nested.nested_tensor([torch.rand(3, 4), torch.rand(2, 4)])\n",
        "example_inputs() holds a nested tensor, which no graph holds",
    ),
    "no hash": (
        "Model.__hash__ = None\n",
        "torch cannot tell the modules of build_model() apart: unhashable type: 'Model'",
    ),
    "in a circle": (
        "def build_model():\n    model = Model()\n    model.first.up = model\n    return model\n",
        f"model.py:{LINE - 1}: modules of build_model() hold themselves",
    ),
    "no text": ("\0", "running model.py fails: it is no valid Python: "),
    "a list of samples": (
        "def example_inputs():\n    return [torch.rand(4, 4)]\n",
        "example_inputs() returns a list, not a tensor",
    ),
    "its number of samples made a constant": (
        "def forward(self, x):\n"
        "    return self.last(self.first(x)) * torch.tensor(len(x))\n"
        "Model.forward = forward\n",
        f"model.py:{LINE}: the model cannot be traced: the model works for a batch of 4 only",
    ),
    "scripted": (
        "def build_model():\n    return torch.jit.script(Model())\n",
        "torch.jit has compiled it",
    ),
}


def compiled(folder: Path, more: str) -> int:
    (folder / "model.py").write_text(MODEL + more)
    return cli.compile_command(["model.py", "--stages", "2", "--dry-run"])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", CASES)
def test_what_it_raises_is_told(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    more, said = CASES[name]

    assert compiled(tmp_path, more) == 1
    errors = capsys.readouterr().err
    assert said in errors
    assert "hint:" in errors


def test_a_parameter_of_eight_bits_beside_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no sums in torch, by which others are moved to look at them again."""
    monkeypatch.chdir(tmp_path)
    narrow = "nn.Parameter(torch.zeros(3).to(torch.float8_e4m3fn))"
    text = (
        f"def build_model():\n    model = Model()\n    model.table = {narrow}\n    return model\n"
    )

    assert compiled(tmp_path, text) == 0


FAULTS: tuple[Callable[..., object], ...] = (
    sympy.sympify,
    numpy.stack,
    safetensors.numpy.load_file,
    rich.text.Text.from_markup,
    torch.nn.utils.parameters_to_vector,
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__module__.partition(".")[0])
def test_a_fault_of_ours_is_not_the_users(
    fault: Callable[..., object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it surfaces: here, in a library that is given what it does not take."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(commands, "headline", fault)

    with pytest.raises((TypeError, ValueError, AttributeError)):
        compiled(tmp_path, "")


def test_a_fault_of_the_users_in_such_a_library_is_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    more = "import numpy\ndef kept(self, mode=True):\n    numpy.stack([])\nModel.train = kept\n"

    assert compiled(tmp_path, more) == 1
    assert f"model.py:{LINE + 1}: kept() raises ValueError" in capsys.readouterr().err


def required(name: str, found: set[str]) -> set[str]:
    """The distributions that one requires to be installed, and those that these do."""
    for text in importlib.metadata.requires(name) or ():
        (needed,) = re.findall(r"^[\w.-]+", text)
        if "extra ==" in text and "onnx" not in text:
            continue
        if needed not in found:
            found.add(needed)
            try:
                required(needed, found)
            except importlib.metadata.PackageNotFoundError:
                found.discard(needed)
    return found


def test_every_library_that_torch_or_the_compiler_calls_is_known() -> None:
    torchs = Path(torch.__file__).parent.name
    folders = {
        file.parts[0]
        for name in required("gpipe-compiler", set()) - {"gpipe-compiler"}
        for file in importlib.metadata.files(name) or ()
        if file.suffix == ".py" and len(file.parts) > 1 and file.parts[0] not in ("..", torchs)
    }
    known = [name for name in folders if not is_users(f"/x/site-packages/{name}/y.py")]

    assert {"numpy", "sympy", "rich", "safetensors"} <= set(known)
    assert sorted(folders - set(known)) == []


REGISTERING = """
library = torch.library.Library("user_code_a", "DEF")
library.define("twice(Tensor x) -> Tensor")
library.impl("twice", lambda x: x * 2, "CompositeImplicitAutograd")

torch.library.define("user_code_b::thrice", "(Tensor x) -> Tensor")
torch.library.impl("user_code_b::thrice", "CompositeImplicitAutograd", lambda x: x * 3)

@torch.library.custom_op("user_code_c::once", mutates_args=())
def once(x: torch.Tensor) -> torch.Tensor:
    return x.clone()

once.register_fake(torch.empty_like)
once.register_autograd(lambda ctx, gradient: gradient)

def forward(self, x):
    x = torch.ops.user_code_b.thrice(torch.ops.user_code_a.twice(self.first(x)))
    return self.last(once(x))

Model.forward = forward
"""


def test_a_file_that_registers_operators_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by whoever mends the file, which registers them and fails."""
    monkeypatch.chdir(tmp_path)

    assert compiled(tmp_path, REGISTERING) == 0
    assert compiled(tmp_path, f"{REGISTERING}\n1 / 0\n") == 1
    assert compiled(tmp_path, REGISTERING) == 0


OPERATING = """
FACTOR = 2.0

def times(x: torch.Tensor, by: float) -> torch.Tensor:
    return x * by

@torch.library.custom_op("user_code_d::scaled", mutates_args=())
def scaled(x: torch.Tensor, by: float = FACTOR) -> torch.Tensor:
    return times(x, by)

@scaled.register_fake
def _(x, by=FACTOR):
    return torch.empty_like(x)

def keep(ctx, inputs, output):
    ctx.by = inputs[1]

def back(ctx, gradient):
    return times(gradient, ctx.by), None

scaled.register_autograd(back, setup_context=keep)

def forward(self, x):
    return self.last(scaled(self.first(x)))

Model.forward = forward
"""


def test_an_operator_of_the_users_file_stands_in_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all that is registered for it: the package is validated where the file is not known."""
    monkeypatch.chdir(tmp_path)

    (tmp_path / "model.py").write_text(MODEL + OPERATING)
    assert cli.compile_command(["model.py", "--stages", "2", "-o", "package"]) == 0

    (own,) = (tmp_path / "package").glob("own_*.py")
    assert own.read_text().count("scaled.register_") == 2
    stages = "".join(path.read_text() for path in (tmp_path / "package").glob("stage_*.py"))
    assert f"{own.stem}.scaled(" in stages


REGISTERED = """
@torch.library.custom_op("user_code_e::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 50

if True:
    doubled.register_kernel("cpu", lambda x: x * 2)
torch.library.register_fake("user_code_e::doubled", torch.empty_like)

def made(by):
    class Times(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return doubled(x) * by

        @staticmethod
        def backward(ctx, gradient):
            return doubled(gradient) * by

    return Times

Times = made(2.0)

import registering

def forward(self, x):
    return self.last(doubled(Times.apply(self.first(x))))

Model.forward = forward
"""

REGISTERING_ELSEWHERE = """
import torch

def back(ctx, gradient):
    return gradient * 2

torch.library.register_autograd("user_code_e::doubled", back)
"""


def test_an_operator_has_all_that_any_file_registers_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its name or in text, under a condition, and where a class of a function calls it too."""
    monkeypatch.chdir(tmp_path)

    (tmp_path / "registering.py").write_text(REGISTERING_ELSEWHERE)
    (tmp_path / "model.py").write_text(MODEL + REGISTERED)
    assert cli.compile_command(["model.py", "--stages", "2", "-o", "package"]) == 0

    texts = [path.read_text() for path in (tmp_path / "package").glob("own_*.py")]
    assert sum(text.count("def doubled(") for text in texts) == 1


DEFINED = """
library = torch.library.Library("model", "DEF")
library.define("sine(Tensor x) -> Tensor")
library.impl("sine", torch.sin, "CompositeExplicitAutograd")

def slope(gradient, x):
    return gradient * torch.cos(x)

torch.library.define("user_code_f::slope", "(Tensor gradient, Tensor x) -> Tensor")
torch.library.impl("user_code_f::slope", "cpu", slope)

def keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs)

@torch.library.register_fake("user_code_f::slope")
def _(gradient, x):
    return torch.empty_like(x)

def back(ctx, gradient):
    return torch.ops.user_code_f.slope(gradient, *ctx.saved_tensors)

torch.library.register_autograd("model::sine", back, setup_context=keep)

class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.ops.model.sine(x)

    @staticmethod
    def backward(ctx, gradient):
        return torch.ops.user_code_f.slope(gradient, *ctx.saved_tensors)

def forward(self, x):
    return self.last(Sine.apply(torch.ops.model.sine(self.first(x))))

Model.forward = forward
"""


def test_operators_that_are_defined_in_text_stand_in_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Called by the model, by a class of the file or by another operator's backward; a namespace
    may be named as the file is."""
    monkeypatch.chdir(tmp_path)

    (tmp_path / "model.py").write_text(MODEL + DEFINED)
    assert cli.compile_command(["model.py", "--stages", "2", "-o", "package"]) == 0

    stages = "".join(path.read_text() for path in (tmp_path / "package").glob("stage_*.py"))
    assert "torch.ops.model.sine.default(" in stages


UNDEFINED = """
def define(namespace):
    torch.library.define(f"{namespace}::twice", "(Tensor x) -> Tensor")
    torch.library.impl(f"{namespace}::twice", "CompositeImplicitAutograd", lambda x: x * 2)

define("user_code_g")

def forward(self, x):
    return torch.ops.user_code_g.twice(self.first(x))

Model.forward = forward
"""

NOT_CARRIED = {
    "no fake": (
        DEFINED.replace("@torch.library.register_fake(", "@(lambda name: lambda function: name)("),
        "return self.last(Sine.apply(torch.ops.model.sine(self.first(x))))",
        "cannot be planned: it does not run on tensors without numbers",
        "by register_fake",
    ),
    "defined by a function": (
        UNDEFINED,
        "return torch.ops.user_code_g.twice(self.first(x))",
        "no installed module and no statement at the top level of a file defines",
        "torch.library.custom_op",
    ),
    "of torch": (
        'torch.library.impl("aten::relu", "cpu", lambda x: x * 2)\n',
        "torch.library.impl(",
        "replaces what torch's operator relu computes",
        "torch.library.custom_op",
    ),
}


@pytest.mark.parametrize("case", NOT_CARRIED)
def test_operators_that_no_package_carries(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text, line, cause, way_out = NOT_CARRIED[case]
    monkeypatch.chdir(tmp_path)
    file = MODEL + text
    (tmp_path / "model.py").write_text(file)

    assert cli.compile_command(["model.py", "--stages", "2", "-o", "package"]) == 1

    said = " ".join(capsys.readouterr().err.split())
    assert f"model.py:{file[: file.rindex(line)].count(chr(10)) + 1}:" in said
    assert cause in said
    assert way_out in said
