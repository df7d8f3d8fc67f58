"""Packages that are moved to where the model's file is not: they train the same, and name no path
of the machine that they were written on."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import forked
import pytest
import torch
from safetensors.torch import load_file

import gpipe_compiler
from gpipe_compiler.cli.main import compile_command, inspect_command
from gpipe_compiler.plan import Plan

BEGINNING = """
import torch
from torch import nn

def build_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

def example_inputs():
    return torch.rand(8, 6, generator=torch.Generator().manual_seed(2))

def loss_fn(output, target):
    return nn.functional.cross_entropy(output, target)

def example_target():
    return torch.arange(8) % 3
"""

NEIGHBOURS = {
    "model.py": f"""{BEGINNING}
import rates
from parts.text import words as of_parts

def counted():
    calls = []
    def make(parameters):
        calls.append(1)
        return torch.optim.SGD(parameters, lr=rates.RATE * len(calls))
    return make

make_optimizer = counted()

def train_data():
    from parts import batches
    return batches.drawn(of_parts())

torch.manual_seed(11)
""",
    "rates.py": "RATE = 0.3\n",
    "parts/__init__.py": "",
    "parts/text.py": "from .numbers import COUNT\n\ndef words():\n    return COUNT\n",
    "parts/numbers.py": "COUNT = 5\n",
    "parts/batches.py": """
import torch

def drawn(count):
    for _ in range(count):
        yield torch.randn(8, 6), torch.randint(3, (8,))
""",
    "other.py": "raise RuntimeError('nobody imports this')\n",
}
"""A closure over state, neighbours imported at the top, in a function and from one another, and
numbers drawn after the seed that the file sets as it is imported."""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory, with modules of its own."""
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.chdir(folder)
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield folder
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("model", "rates", "parts", "fast", "project"):
            del sys.modules[name]


def written(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def compiled(model: str, package: Path, *words: object) -> Path:
    own = ["--stages", "2", "-o", package, "--no-validate", "--fix", "all", *words]
    assert compile_command([model, *map(str, own)]) == 0
    return package


def trained(package: Path, *words: object, code: int = 0) -> str:
    """What five steps print; the weights are in `w.safetensors` of the current directory."""
    line = [package / "run.py", "train", "--steps", 5, "--save", "w.safetensors", *words]
    done = forked.run(line)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def files_of(package: Path) -> list[str]:
    folder = package / "hooks"
    files = (file.relative_to(folder) for file in folder.rglob("*.py"))
    return sorted(str(file) for file in files)


def test_hooks_travel_with_what_they_import(home: Path, tmp_path: Path) -> None:
    """The moved package trains as with the user's own file, bit for bit, when that is gone."""
    written(home, NEIGHBOURS)
    package = compiled("model.py", home / "out")
    trained(package, "--hooks", "model.py")
    expected = load_file("w.safetensors")
    assert files_of(package) == sorted({*NEIGHBOURS} - {"other.py"})

    moved = Path(shutil.move(package, tmp_path / "elsewhere"))
    for name in NEIGHBOURS:
        (home / name).unlink()
    trained(moved)
    found = load_file(home / "w.safetensors")

    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_hooks_of_a_module_travel_with_its_package(home: Path, tmp_path: Path) -> None:
    written(
        home,
        {
            "project/__init__.py": "",
            "project/models.py": f"{BEGINNING}\nfrom .rates import make_optimizer\n",
            "project/rates.py": "import torch\n\n"
            "def make_optimizer(parameters):\n    return torch.optim.SGD(parameters, lr=0.25)\n",
        },
    )
    package = compiled("project.models:build_model", home / "out")
    assert files_of(package) == ["project/__init__.py", "project/models.py", "project/rates.py"]
    moved = Path(shutil.move(package, tmp_path / "elsewhere"))
    shutil.rmtree(home / "project")

    trained(moved)
    trained(moved, "--optimizer", "sgd", "--lr", "0.25", "--save", "own.safetensors")

    found, own = load_file("w.safetensors"), load_file("own.safetensors")
    assert all(torch.equal(found[name], own[name]) for name in own)


def test_what_cannot_be_copied_is_named(
    home: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A compiled neighbour: training asks for the file, and never goes on without its data."""
    fast = home / "fast.so"
    written(home, {"model.py": f"{BEGINNING}\ndef train_data():\n    import fast\n    yield 1\n"})
    fast.write_bytes(b"")
    spec = sys.modules["fast"] = type(sys)("fast")
    spec.__file__ = str(fast)
    package = compiled("model.py", home / "out")

    note = " ".join(capsys.readouterr().err.split())
    assert "model.py is not copied into the package, which is trained with --hooks FILE" in note
    assert f"model.py, line 19: fast is {fast}, no file of Python's source" in note
    said = trained(package, code=1)
    assert "hooks/model.py, which offers the data or the optimizer, is not there" in said
    assert "--hooks FILE" in said

    written(
        home, {"other.py": "import torch\n\ndef train_data():\n    yield torch.rand(8, 6), 3\n"}
    )
    said = trained(package, "--hooks", "other.py", code=2)
    assert "other.py" in said


def test_files_that_hooks_look_for_beside_them_are_told(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hook = "def log(step, metrics):\n    open(__file__).close()\n"
    written(home, {"model.py": f"{BEGINNING}\n{hook}"})
    package = compiled("model.py", home / "out")

    note = " ".join(capsys.readouterr().err.split())
    assert "model.py asks for __file__ in line 19: other files that it finds by it are not" in note
    trained(package)


def test_a_name_that_import_module_is_given_is_followed(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hook = """
import importlib

def make_optimizer(parameters):
    rates = importlib.import_module("rates")
    assert __import__("parts").__name__ == importlib.import_module("".join(("par", "ts"))).__name__
    return torch.optim.SGD(parameters, lr=rates.RATE)
"""
    files = {"rates.py": NEIGHBOURS["rates.py"], "parts/__init__.py": ""}
    written(home, {"model.py": f"{BEGINNING}\n{hook}", **files})
    package = compiled("model.py", home / "out")

    note = " ".join(capsys.readouterr().err.split())
    assert "model.py imports in line 23 by a name that is made up as it runs" in note
    assert files_of(package) == ["model.py", "parts/__init__.py", "rates.py"]
    for name in files:
        (home / name).unlink()
    trained(package)


def test_a_missing_library_is_named(home: Path, tmp_path: Path) -> None:
    """The hint says what to install, where the machine has less than the one it was written on."""
    written(home, {"model.py": f"{BEGINNING}\ndef log(step, metrics):\n    pass\n"})
    package = compiled("model.py", home / "out")
    copied = package / "hooks" / "model.py"
    copied.write_text(f"import surely_not_there\n{copied.read_text()}")

    assert "hint: pip install surely_not_there" in trained(package, code=1)


# --- what a package says of where it comes from ---------------------------------------------------


def texts_of(package: Path) -> Iterator[tuple[Path, bytes]]:
    """Every file but what Python itself keeps of those that it has run."""
    for file in package.rglob("*"):
        if file.is_file() and "__pycache__" not in file.parts:
            yield file, file.read_bytes()


def assert_portable(package: Path, *homes: Path) -> None:
    for file, content in texts_of(package):
        assert not file.is_symlink(), file
        for home in (*homes, Path(gpipe_compiler.__file__).parent.parent, Path(sys.prefix)):
            assert str(home).encode() not in content, (file, home)


def test_no_file_of_a_package_names_a_place(home: Path, tmp_path: Path) -> None:
    """Compiled by absolute paths; trained once, from a file that `--load` names."""
    written(home, NEIGHBOURS)
    package = compiled(str(home / "model.py"), tmp_path / "out", "--cost", "roofline")
    trained(package)
    words = ["--load", home / "w.safetensors", "--checkpoint-dir", package / "checkpoints"]
    trained(package, *words, "--log-file", package / "log.jsonl", "--profile", 1)

    assert_portable(package, tmp_path)


def test_no_file_of_an_onnx_package_names_a_place(home: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    written(home, {"model.py": BEGINNING})
    words = [str(home / "model.py"), "--stages=2", "--target=onnxruntime", "--mode=infer"]
    assert compile_command([*words, "--no-validate", "-o", str(tmp_path / "out")]) == 0
    (stage,) = (tmp_path / "out").glob("stage*0*.onnx")
    shutil.copy(stage, home / "file.onnx")
    words = [str(home / "file.onnx"), "--stages=1", "--no-validate", "-o", str(tmp_path / "again")]
    assert compile_command(words) == 0

    assert_portable(tmp_path / "out", tmp_path)
    assert_portable(tmp_path / "again", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("copied", [False, True])
def test_no_file_of_a_folders_package_names_a_place(
    home: Path, tmp_path: Path, copied: bool
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=9, n_positions=8, n_embd=4, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(home / "gpt2")
    (home / "data.py").write_text("def log(step, metrics):\n    pass\n")
    words = ["--input", "input_ids=8x8:int64", "--hooks", home / "data.py"]
    package = compiled(
        str(home / "gpt2"), home / "out", *words, *(["--copy-weights"] if copied else [])
    )
    trained(package)

    assert files_of(package) == ["data.py"]
    assert_portable(package, tmp_path)


def test_a_plan_says_what_made_it(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Versions, and the command as a shell takes it, in plan.json and by `run.py --version`."""
    written(home, {"my model.py": BEGINNING})
    package = compiled(str(home / "my model.py"), home / "out")
    capsys.readouterr()

    plan = json.loads((package / "plan.json").read_text())
    words = shlex.split(plan["origin"]["command"])
    own = ["--stages", "2", "-o", "out", "--no-validate", "--fix", "all"]
    assert words == ["gpipe-compile", "my model.py", *own]
    assert plan["origin"]["compiler"] == gpipe_compiler.__version__
    assert plan["origin"]["torch"] == torch.__version__
    assert Plan.from_json(json.dumps(plan)).origin.command == plan["origin"]["command"]

    said = forked.run([package / "run.py", "--version"]).stdout
    versions = f"gpipe-compiler {gpipe_compiler.__version__}, with torch {torch.__version__}"
    assert said == f"{versions}: {plan['origin']['command']}\n"
    (package / "plan.json").unlink()
    said = forked.run([package / "run.py", "--version"]).stdout
    assert said == "the package has no plan.json that says what wrote it\n"


@pytest.mark.parametrize("command", ["gpipe-compile", "gpipe-inspect"])
def test_the_commands_say_their_version(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = compile_command if command == "gpipe-compile" else inspect_command
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"{command} {gpipe_compiler.__version__}\n"
