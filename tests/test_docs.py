"""The documentation's code runs, its commands are taken, and what it names is there."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.run import get_args_parser
from torch.nn import functional as F

from gpipe_compiler import emit, passes, plan
from gpipe_compiler import trace as trace_call
from gpipe_compiler.cli.arguments import compile_parser
from gpipe_compiler.cli.inspecting import inspect_parser, memory_parser
from gpipe_compiler.cli.main import compile_command
from gpipe_compiler.cluster import Link, read_cluster
from gpipe_compiler.cluster.catalogue import NVLINK3
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.frontend.tracing import trace
from gpipe_compiler.ir import Graph
from gpipe_compiler.onnx.runtime import spec as onnx_spec
from gpipe_compiler.onnx.runtime.command import parser_for as onnx_parser_for
from gpipe_compiler.passes import pipeline
from gpipe_compiler.plan import Plan
from gpipe_compiler.runtime.spec import ScheduleKind
from gpipe_compiler.runtime.train.arguments import parser_for
from gpipe_compiler.runtime.train.hooks import UserHooks

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [ROOT / "README.md"]
    + [
        page
        for folder in ("docs", "examples", "benchmarks")
        for page in (ROOT / folder).glob("*.md")
    ]
)

COMMAND_PAGES = [page for page in PAGES if page.parent.name != "benchmarks"]
"""Those that speak of no other scripts' options."""


class Twice(nn.Module):
    """One layer called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.layer(x.relu())


@pytest.fixture(scope="module")
def graph() -> Graph:
    return trace(Subject(name="twice", model=Twice(), args=(torch.randn(4, 4),), training=False))


def build_model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The `model_x4` that pages speak of."""
    folder = tmp_path_factory.mktemp("documented")
    model = build_model()
    batch = torch.randn(8, 4), torch.randint(4, (8,))
    graph = trace_call(model, (batch[0],), target=batch[1], loss_fn=F.cross_entropy)
    emit(plan(graph, stages=4, microbatches=2), folder / "model_x4")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield importlib.import_module("model_x4")
        for name in [name for name in sys.modules if name.partition(".")[0] == "model_x4"]:
            del sys.modules[name]


def blocks_of(page: str) -> list[str]:
    """The Python of a page."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def commands_of(text: str) -> Iterator[list[str]]:
    """The words of the commands that stand in a page by themselves."""
    joined = re.sub(r" *\\\n *", " ", text)
    for line in re.findall(r"^ {4}(?:\$ )?(.*)$", joined, re.MULTILINE):
        if re.match(r"gpipe-compile |gpipe-inspect |torchrun |python \S*run\.py ", line):
            yield shlex.split(line, comments=True)


@pytest.fixture
def documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`passes/pipeline.py` with the page's two passes: a file, an import and an entry each."""
    analysis, transformation = blocks_of("docs/writing_passes.md")
    (tmp_path / "parameter_use.py").write_text(analysis)
    (tmp_path / "fuse_clamps.py").write_text(transformation)
    text = Path(pipeline.__file__).read_text()
    page = (ROOT / "docs" / "writing_passes.md").read_text()
    own = "from gpipe_compiler.passes"
    for added, before in (
        (f"{own}.fuse_clamps import FuseClamps", f"{own}.inplace"),
        (f"{own}.parameter_use import parameter_use", f"{own}.pass_setting"),
        ('    Pass("fuse_clamps", FuseClamps()),', "    # Last: planning"),
        ('    Analysis("parameter_use", parameter_use),', '    Analysis("effects", effects),'),
    ):
        assert added in page or added.startswith(own)
        assert text.count(before) == 1
        text = text.replace(before, f"{added}\n{before}")
    name = "gpipe_compiler.passes.pipeline"
    made = ModuleType(name)
    monkeypatch.setattr(passes, "__path__", [*passes.__path__, str(tmp_path)])
    monkeypatch.setitem(sys.modules, name, made)  # as it is while it imports the passes
    exec(compile(text, "pipeline.py", "exec"), vars(made))
    for kind in ("fuse_clamps", "parameter_use"):
        monkeypatch.delitem(sys.modules, f"gpipe_compiler.passes.{kind}")
    return made


def test_the_documented_analysis_finds_the_layer_that_is_called_twice(
    graph: Graph, documented: ModuleType
) -> None:
    use = documented.parameter_use(graph)

    assert {"layer.weight", "layer.bias"} == set(use.shared)


@pytest.mark.parametrize("page", ["writing_passes", "adding_a_schedule", "adding_an_output_format"])
def test_the_code_of_the_pages_passes_ruff(page: str) -> None:
    """By this project's rules, as a contributor's file does."""
    files = [block for block in blocks_of(f"docs/{page}.md") if block.startswith('"""')]
    assert files
    for block in files:
        for command in (["check"], ["format", "--check"]):
            ruff = [sys.executable, "-m", "ruff", *command]
            ruff += ["--stdin-filename", str(ROOT / "gpipe_compiler" / "targets" / "x.py")]
            found = subprocess.run(
                [*ruff, "-"], input=block, capture_output=True, text=True, check=False
            )
            assert found.returncode == 0, found.stdout


class Clamped(nn.Module):
    """Two pairs of clamps, the first of what is written between; one that others read between."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        z = x * 2.0
        least = z.clamp_min(-1.0)
        z.add_(1.0)
        y = self.layer(least.clamp_max(1.0) + z).clamp_min(-0.5).clamp_max(0.5)
        low = y.clamp_min(0.1)
        return low.clamp_max(0.2) + low


CLAMPED_FILE = """
import torch
from tests.test_docs import Clamped as build_model

def example_inputs():
    return torch.linspace(-2, 2, 16).reshape(4, 4),

def example_target():
    return torch.zeros(4, 4)

def loss_fn(output, target):
    return (output - target).square().mean()
"""


def methods_of(text: str) -> list[str]:
    return re.findall(r"\.(clamp\w*)\(", text)


def test_the_documented_passes_are_added_by_an_entry_each(
    documented: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The transformation with its option, by the command; and the package equals the model."""
    monkeypatch.setattr(pipeline, "PASSES", documented.PASSES)
    monkeypatch.setattr(pipeline, "ANALYSES", documented.ANALYSES)
    (tmp_path / "clamped.py").write_text(CLAMPED_FILE)
    asked = [str(tmp_path / "clamped.py"), "--stages", "2", "-o", str(tmp_path / "package")]
    asked += ["--microbatches", "2", "--no-inplace", "--print-after", "parameter_use"]
    printed = []
    for option in ([], ["--pass-option", "fuse_clamps.most=1", "--dry-run"]):
        assert compile_command([*asked, "--print-after", "fuse_clamps", *option]) == 0
        printed.append(capfd.readouterr().err)

    assert ["# after fuse_clamps: 2 samples, fp32" in text for text in printed] == [True, True]
    left = ["clamp_min", "clamp_max"]
    assert [methods_of(text) for text in printed] == [
        ["clamp", "clamp", *left],
        ["clamp", *left, *left],
    ]
    assert all("layer.weight: (layer)" in text for text in printed)


@pytest.mark.parametrize(
    ("words", "listed"),
    [
        (["--print-after", "simplfy"], ["simplify", "inplace", "saved_tensors", "all"]),
        (["--pass-option", "simplify.most=1"], ["there is no such option"]),
    ],
)
def test_a_name_that_there_is_not_lists_those_that_there_are(
    words: list[str], listed: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "clamped.py").write_text(CLAMPED_FILE)

    code = compile_command([str(tmp_path / "clamped.py"), "--stages", "2", "--dry-run", *words])

    assert code == 2
    told = capfd.readouterr().err
    assert all(name in told for name in listed)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    local = [target for target in targets if "://" not in target]

    assert [target for target in local if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_are_taken(page: Path, package: ModuleType) -> None:
    """By the parsers that they are for, torchrun's among them."""
    for words in commands_of(page.read_text()):
        match words:
            case ["gpipe-compile", *rest]:
                compile_parser().parse_args(rest)
            case ["gpipe-inspect", "memory", *rest]:
                memory_parser().parse_args(rest)
            case ["gpipe-inspect", *rest]:
                inspect_parser().parse_args(rest)
            case ["torchrun", *rest]:
                started = get_args_parser().parse_args(rest)
                assert started.training_script.endswith("run.py")
                parser_for(package.SPEC).parse_args(started.training_script_args)
            case ["python", _, *rest] if "--help" not in rest:
                parser_for(package.SPEC).parse_args(rest)


ONNX = onnx_spec.OnnxPipelineSpec("model", (), (), (), (), ("cpu",), (), 1, 1)


def test_commands_are_found() -> None:
    """Without which the test above holds nothing."""
    pages = {
        "README.md": 3,
        "docs/first_run.md": 3,
        "docs/training.md": 10,
        "docs/many_hosts.md": 4,
        "docs/package.md": 5,
        "docs/planning.md": 10,
        "docs/graph_file.md": 1,
        "docs/memory.md": 5,
        "docs/serving.md": 7,
        "docs/writing_passes.md": 2,
    }

    assert {page: len(list(commands_of((ROOT / page).read_text()))) for page in pages} == pages


@pytest.mark.parametrize("page", COMMAND_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_options_exist(page: Path, package: ModuleType) -> None:
    parsers = [compile_parser(), inspect_parser(), memory_parser()]
    for own in (parser_for(package.SPEC), onnx_parser_for(ONNX)):
        parsers += [own, *own._subparsers._group_actions[0].choices.values()]
    known = {option for parser in parsers for option in parser._option_string_actions}
    known |= {option.replace("_", "-") for option in get_args_parser()._option_string_actions}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", page.read_text()))
    elsewhere = {"--help", "--rewrite-golden"}  # of other scripts
    elsewhere |= {"--build-arg", "--abort-on-container-failure"}  # of Docker

    assert named - known == elsewhere & named - known


def test_all_options_of_compiling_are_told() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    told = "".join(page.read_text() for page in pages)
    options = [o for o in compile_parser()._option_string_actions if o.startswith("--")]

    assert [option for option in options if not re.search(rf"{option}(?![\w-])", told)] == []


def test_all_schedules_are_told() -> None:
    page = (ROOT / "docs" / "planning.md").read_text()
    told = set(re.findall(r"^\| `([\w-]+)` \|", page, re.MULTILINE))

    assert {kind.value for kind in ScheduleKind} <= told


def test_documented_cluster_file_describes_its_devices(tmp_path: Path) -> None:
    (text,) = re.findall(
        r"```toml\n(.*?)```", (ROOT / "docs" / "planning.md").read_text(), re.DOTALL
    )
    (tmp_path / "cluster.toml").write_text(text)
    cluster = read_cluster(tmp_path / "cluster.toml")

    assert [device.name for device in cluster.devices] == ["mine"] * 8 + ["slower"] * 2
    assert cluster.between(0, 4) == Link(50e9, 5e-6)
    assert cluster.between(0, 1) == NVLINK3
    assert cluster.between(8, 9) == Link(13e9, 8e-6)
    assert cluster.devices[9].memory == 30 * 2**30


def test_documented_plan_is_made() -> None:
    """By the Python block of the page on planning, under its constraint."""
    names: dict[str, object] = {
        "model": build_model(),
        "inputs": torch.randn(8, 4),
        "target": torch.randint(4, (8,)),
        "loss_fn": F.cross_entropy,
    }
    (block,) = blocks_of("docs/planning.md")
    exec(block, names)
    found = names["found"]

    assert isinstance(found, Plan)
    assert [device.name for device in found.devices] == ["V100"] * 4
    assert found.constraints.words == ("--split-at 2",)


def test_all_options_of_training_are_told(package: ModuleType) -> None:
    train = parser_for(package.SPEC)._subparsers._group_actions[0].choices["train"]
    told = (ROOT / "docs" / "training.md").read_text()
    told += (ROOT / "docs" / "package.md").read_text()

    words = set(re.findall(r"(?<![\w-])-[\w-]+", told))
    untold = [option for option in train._option_string_actions if option not in words]
    assert untold == ["-h", "--help", "--traceback"]


def test_hooks_are_those_of_the_runtime() -> None:
    hooks = {field.name for field in fields(UserHooks)} - {"name"}
    page = (ROOT / "docs" / "training.md").read_text()
    (model_file,) = blocks_of("docs/model_file.md")
    subject = {"build_model", "example_inputs", "loss_fn", "example_target"}

    assert set(re.findall(r"^\| `(\w+)\(\w*(?:, \w+)*\)` \|", page, re.MULTILINE)) == hooks
    assert set(re.findall(r"^def (\w+)", model_file, re.MULTILINE)) == hooks | subject


def test_loops_of_the_pages_run(
    package: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order in which a reader would need them: a checkpoint is written before it is read."""
    monkeypatch.chdir(tmp_path)
    model = build_model()
    inputs, target = torch.randn(8, 4), torch.randint(4, (8,))
    names: dict[str, object] = {
        "torch": torch,
        "Path": Path,
        "Pipeline": package.Pipeline,
        "model": model,
        "inputs": inputs,
        "target": target,
        "batches": [(inputs, target)] * 2,
        "groups_of_four": [[(inputs, target)] * 4],
        "state": model.state_dict(),
        "folder": Path("checkpoints"),
    }
    (served,) = blocks_of("docs/serving.md")
    (calls,) = blocks_of("docs/package.md")
    loop, accumulate, read, write = blocks_of("docs/training.md")
    exec(served, names)
    exec(loop, names)
    exec(calls, names)
    exec(accumulate, names)
    for block in blocks_of("docs/training_loops.md"):
        exec(block, names)
    exec(write, names)
    names["optimizer"] = torch.optim.AdamW(model.parameters())
    exec(read, names)

    for name, tensor in names["pipe"].state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
