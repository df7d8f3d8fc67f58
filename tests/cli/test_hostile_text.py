"""Names that would be code where they are pasted raw stay names, and the package exact."""

from __future__ import annotations

import ast
import contextlib
import html.parser
import io
import json
import re
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from loading import load_package

from gpipe_compiler.cli import main as cli
from gpipe_compiler.frontend.source import load

PWN = 'open("pwned","w")'

NAMES = (
    f"line\n{PWN}\n",
    f'quotes """\n{PWN}\n"""',
    f"quotes '''\n{PWN}\n'''",
    f'"); {PWN} #',
    f"'); {PWN} #",
    "\\x22\\N{ ends in a backslash \\",
    "{{ 7*7 }} {% raw %} {x!r} %s %(prog)s",
    "<script>alert(1)</script> ]]> & <!-- -->",
    "a | b `c` [d](e) *f* __g__ [/x] [bold]y[/bold]",
    "\x1b[31m\x1b]0;t\x07\x9b2J\u202eesrever\u2066\ufeff\u2028next\x85next\x0cnext\x00nul",
    "$(touch pwned) `touch pwned`; touch pwned",
    "class",
    "forward",
    "e\u0301",
    "\xe9",
    " ",
    "1",
    "a b",
    "a-b",
    "x" * 300,
)
"""Of modules, buffers, inputs and outputs. torch allows everything but "." in a module's name."""

FOLDER = "a 'b' \"c\" $(touch pwned) \\ [x] {{ d }} # %s\n\x1b[31m\u202e"
FILE = '"); open("pwned","w") #""" \n $(touch pwned) `x` | <b> [_y] %(prog)s {{ z }}.py'

MODEL = f"""
import torch
from torch import nn

NAMES = {NAMES!r}

class Block(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.inner = nn.ModuleDict({{name: nn.Linear(3, 3)}})
        self.register_buffer(name.replace(".", ""), torch.ones(3))

    def forward(self, x):
        (inner,) = self.inner.values()
        (buffer,) = self.buffers(recurse=False)
        return torch.tanh(inner(x)) * buffer

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleDict({{name: Block(name) for name in NAMES if name != "forward"}})

    def forward(self, batch, **more):
        x = sum(batch[name] for name in NAMES)
        outputs = {{}}
        for index, (name, block) in enumerate(self.blocks.items()):
            x = x + block(x)
            if index % 8 == 0:
                outputs[name] = x
        return {{**outputs, "last": [x, {{NAMES[0]: x * 2}}]}}

def build_model():
    return Model()

def example_inputs():
    return {{name: torch.rand(4, 3) for name in NAMES}},

def example_target():
    return {{name: torch.rand(4, 3) for name in NAMES[:2]}}

def loss_fn(output, target):
    return sum(((output["last"][0] - part) ** 2).mean() for part in target.values())

def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)
"""


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile") / FOLDER
    folder.mkdir()
    file = folder / FILE.replace("/", "")
    file.write_text(MODEL, encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def module_patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@dataclass(frozen=True)
class Made:
    """What the command has written, and said."""

    directory: Path
    said: str


@pytest.fixture(scope="module")
def made(model_file: Path, module_patch: pytest.MonkeyPatch) -> Made:
    """What the command makes of the file, in whose folder everything happens."""
    module_patch.chdir(model_file.parent)
    output = Path(f"-out {FOLDER.strip()}")
    words = [str(model_file), "--stages", "3", f"--output={output}", "--no-validate"]
    words += ["--split-at", f"blocks.{NAMES[1]}", "--split-at", f"blocks.{NAMES[8]}"]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert cli.compile_command(words) == 0
    return Made(output.absolute(), said.getvalue())


@pytest.fixture(autouse=True)
def _nothing_ran(made: Made) -> Iterator[None]:
    yield
    folder = made.directory.parent
    found = {path.name for path in folder.iterdir()} - {"__pycache__"}
    assert found == {made.directory.name, next(folder.glob("*.py")).name}


def test_the_package_is_exact(made: Made, model_file: Path) -> None:
    subject = load(str(model_file), input_specs=[], training=True)
    model, (batch,), target = subject.model, subject.args, subject.target
    package = load_package(made.directory)
    assert subject.loss_fn is not None

    with package.Pipeline() as pipe:
        # The factory draws other weights than those that were compiled.
        model.load_state_dict(pipe.state_dict())
        loss = pipe.step((batch,), target)
        gradients = {name: p.grad for name, p in pipe.named_parameters()}
        pipe.eval()
        outputs = pipe((batch,))

    expected = subject.loss_fn(model(batch), target)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, msg=repr(name))
    torch.testing.assert_close(outputs, model.eval()(batch))


def test_code_is_made_of_ops_alone(made: Made) -> None:
    files = sorted(made.directory.glob("*.py"))
    assert len(files) == 6
    for file in files:
        text = file.read_text(encoding="utf-8")
        calls = [node.func for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
        assert not [call for call in calls if isinstance(call, ast.Name) and call.id == "open"]
        assert text.replace("\n", "").isprintable(), file.name


def test_the_printed_command_runs_as_it_is(made: Made) -> None:
    (line,) = re.findall(r"^  (python .*) train$", made.said, flags=re.MULTILINE)
    command = f"{line} train --steps 1 --checkpoint-dir {shlex.quote(str(made.directory / 'c'))}"

    # As bash, for what it has beyond POSIX.
    done = subprocess.run(
        ["bash", "-c", command.replace("python", shlex.quote(sys.executable), 1)],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "loss" in done.stdout


def test_the_terminal_is_told_names_and_no_markup(
    made: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.inspect_command(["./" + made.directory.name]) == 0
    assert cli.inspect_command(["memory", "./" + made.directory.name]) == 0
    said = made.said + capsys.readouterr().out

    assert said.replace("\n", "").isprintable()
    assert r"…line\nopen" in said
    assert "[bold]y[/bold]" in said


class _Reader(html.parser.HTMLParser):
    """Collects tags, their attributes, and text."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.events: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.events += [name for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_pages_show_names_as_text(made: Made, tmp_path: Path) -> None:
    page = _Reader()
    page.feed((made.directory / "report.html").read_text(encoding="utf-8"))

    assert "script" not in page.tags
    assert not page.events
    assert page.text.replace("\n", "").isprintable()
    assert r"blocks.line\nopen" in page.text

    for words in (["--stage", "0"], ["--stage", "1"], []):
        picture = tmp_path / "picture.svg"
        assert (
            cli.inspect_command(["graph", "./" + made.directory.name, "-o", str(picture), *words])
            == 0
        )
        tags = {item.tag.rpartition("}")[2] for item in ET.parse(picture).iter()}
        assert tags <= {"svg", "title", "style", "marker", "path", "rect", "text", "g"}


def test_the_readme_shows_names_as_text(made: Made) -> None:
    text = (made.directory / "README.md").read_text(encoding="utf-8")

    assert text.replace("\n", "").isprintable()
    assert set(re.findall(r"<(\S+?)>", text)) <= {"code", "/code"}
    assert not re.search(r"^\s*open\(", text, flags=re.MULTILINE)


def test_pictures_and_traces_stay_in_this_folder(made: Made, tmp_path: Path) -> None:
    """Whatever a plan from elsewhere says that the model is called."""
    plan = json.loads((made.directory / "plan.json").read_text())
    (tmp_path / "here").mkdir()
    for name in ("../../up", "/tmp/root", "-o", ".hidden", "", "x" * 300, "é" * 200, "nul\0"):
        file = tmp_path / "plan.json"
        file.write_text(json.dumps(plan | {"name": name}))
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path / "here")
            assert cli.inspect_command(["trace", str(file)]) == 0

    assert len([*(tmp_path / "here").iterdir()]) == 8


def test_no_line_of_an_error_is_one_that_a_name_makes_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(
        "from torch import nn, ones\n"
        "class Said(nn.Module):\n"
        "    def forward(self, x):\n"
        "        raise RuntimeError('a\\nerror: b\\x1b[2J\\r')\n"
        "build_model, example_inputs = Said, lambda: ones(2)\n"
    )

    assert cli.compile_command(["model.py", "--stages", "2"]) == 1

    said = capsys.readouterr().err
    assert said.replace("\n", "").isprintable()
    assert [line[:6] for line in said.splitlines() if not line.startswith("  ")] == ["error:"]


def test_a_name_that_no_file_holds_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.py").write_text(
        "import torch\nfrom torch import nn\n\nclass Odd(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        '        self.layers = nn.ModuleDict({"\\udcff": nn.Linear(4, 4)})\n\n'
        "    def forward(self, x):\n        return self.layers.values()[0](x)\n\n"
        "build_model = Odd\n\ndef example_inputs():\n    return torch.randn(4, 4)\n"
    )
    words = [str(tmp_path / "model.py"), "--stages=1", "--mode=infer", "-o", str(tmp_path / "out")]
    assert cli.compile_command(words) == 1
    told = capsys.readouterr().err
    assert "model.py:4: '\\udcff' of ModuleDict cannot be written to a file in UTF-8" in told
    assert "hint: give it another name" in told


def test_a_folder_that_no_weights_are_read_from_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.py").write_text(
        "import torch\nbuild_model = lambda: torch.nn.Linear(4, 4)\n"
        "def example_inputs():\n    return torch.randn(4, 4)\n"
    )
    words = [str(tmp_path / "model.py"), "--stages=1", "--mode=infer"]
    assert cli.compile_command([*words, "-o", str(tmp_path / "m\udcff")]) == 1
    assert "is no path in UTF-8" in capsys.readouterr().err
    assert not [path for path in tmp_path.iterdir() if path.name != "model.py"]
