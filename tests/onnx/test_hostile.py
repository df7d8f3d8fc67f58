"""Names and values that nobody expects, in packages of ONNX stages."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx_models
import pytest
from hostile import CODES, VALUES, files, options
from loading import load_package
from onnx import helper
from onnx_compiling import compile_onnx
from packages import assert_equal

from gpipe_compiler.compile import CompileOptions

NAMES = (
    'x"); open("pwned","w") #',
    "line\nopen('pwned','w')\n",
    '"""',
    "a | b `c` <script>",
    "\x1b[31m\u202e{{ x }} %(prog)s",
    "back\\slash\\",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chain of layers in which everything has a hostile name, the file too."""
    nodes, weights, last = [], [], NAMES[0]
    for index, name in enumerate(NAMES[1:]):
        weights.append(onnx_models.weight(f"w{name}", 16, 16))
        nodes.append(helper.make_node("MatMul", [last, f"w{name}"], [f"m{name}"], name=name))
        last = name if index < len(NAMES) - 2 else f"out {name}"
        nodes.append(helper.make_node("Relu", [f"m{name}"], [last], name=f"{name} again"))
    proto = onnx_models.model_of(nodes, weights, [onnx_models.rows(NAMES[0])], [last, NAMES[2]])
    folder = tmp_path_factory.mktemp("hostile") / "a 'b' $(touch pwned)"
    folder.mkdir()
    return onnx_models.write(proto, folder / '"); open("pwned") #""" %(prog)s\n\x1b.onnx')


@pytest.fixture(scope="module")
def package(model: Path) -> Path:
    made = compile_onnx(model, CompileOptions(3), model.parent / "out", inputs=("8x16",))
    assert made.directory is not None
    return made.directory


def test_names_stay_names(model: Path, package: Path) -> None:
    inputs = {NAMES[0]: np.random.default_rng(1).standard_normal((5, 16)).astype(np.float32)}
    found = assert_equal(package, model, inputs)

    assert set(found) == {NAMES[2], f"out {NAMES[-1]}"}
    for file in [*package.glob("*.py"), package / "README.md", package / "report.html"]:
        text = file.read_text(encoding="utf-8")
        assert text.replace("\n", "").isprintable()
        if file.suffix == ".py":
            called = [n.func for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call)]
            assert not [call for call in called if isinstance(call, ast.Name) and call.id == "open"]
    assert {path.name for path in model.parent.iterdir()} == {model.name, "out"}


@pytest.fixture(scope="module")
def command(package: Path) -> tuple[ModuleType, object]:
    made = load_package(package)
    return importlib.import_module(f"{made.__name__}.runtime.onnx.command"), made.SPEC


def code_of(command: tuple[ModuleType, object], package: Path, words: list[str]) -> int:
    module, spec = command
    try:
        return int(module.main(spec, package, words))
    except SystemExit as ended:  # of argparse
        return int(ended.code or 0)


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("name", ["infer", "check", "bench"])
def test_values_and_files(
    name: str,
    command: tuple[ModuleType, object],
    package: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    parser = command[0].parser_for(command[1])._subparsers._group_actions[0].choices[name]
    for option in options(parser):
        paths = files(tmp_path / option) if option in {"--input", "--reference"} else ()
        (tmp_path / option).mkdir()
        for value in (*VALUES, *map(str, paths)):
            if option == "--steps" and len(value) > 3:
                continue  # as many as are asked for
            few = ["--steps=1"] if name == "bench" else []
            code = code_of(command, package, [name, *few, f"{option}={value}"])
            assert code in CODES, (option, value)
            if value.startswith("s3:") and option in {"--input", "--output", "--reference"}:
                assert code == 2, option
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err


def test_a_rank_that_is_no_number(
    command: tuple[ModuleType, object],
    package: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RANK", "x")
    assert code_of(command, package, ["infer"]) == 2
    assert "RANK in the environment: 'x' is no whole number" in capsys.readouterr().err
