"""Every shell line of the documentation is run, or is in a list that says why it is not.

A page is a session: its lines run one after the other in a folder of their own, where there is a
`model.py`, a `model.onnx` and so on. What only another machine has is changed as `CHANGED` says.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    str(page.relative_to(ROOT))
    for pattern in ("README.md", "docs/*.md", "examples/*.md", "benchmarks/*.md")
    for page in ROOT.glob(pattern)
)
COMMANDS = ("gpipe-compile ", "gpipe-inspect ", "torchrun ", "python ", "make ", "pip ", "export ")
COMMANDS += (".venv/bin/",)

CHANGED = (
    ("cpu,cuda:0", "cpu", "no GPU is needed to run the tests"),
    ("--steps 5000", "--steps 6", "5,000 steps take long"),
    ("--warmup-steps 100", "--warmup-steps 2", "of 6 steps"),
    ("--evaluate-every 500", "--evaluate-every 3", "of 6 steps"),
    ("--checkpoint-every 100", "--checkpoint-every 2", "of few steps"),
    ("--input 32x3x224x224", "--input 32x6", "the model here takes rows of 6"),
    (".venv/bin/", "", "where `make` installs, and these tests may not run"),
)
"""What a line says, what is run, and why."""

NOT_RUN = {
    "make demo": "downloads an environment; its commands are the session that follows it",
    "make test": "runs this test",
    "pip install .": "downloads an environment",
    "pip install --no-deps": "downloads libraries",
    'pip install "gpipe-compiler[onnx]"': "needs a published release",
    "--nnodes 2": "needs two hosts; tests/faults/test_kills.py has network namespaces for them",
    "export GLOO_SOCKET_IFNAME": "names an interface of the reader's",
    "--reference FILE": "names a file of results that the compiler writes",
    "benchmarks/": "takes minutes to hours, and is for its figures; its options are parsed",
    "tests/exactness/table.py": "takes minutes; tests/exactness/test_exactness.py holds its rows",
    "tests/planner/test_scale.py": "is a slow test by itself",
}
"""By what a line contains."""

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Linear(6, 8)
        self.encoder = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        self.decoder = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.encoder(self.embedding(x).tanh())
        return self.head(self.norm(self.decoder(x)))


def build_model():
    return Model()


def example_inputs():
    return torch.randn(32, 6)


def example_target():
    return torch.randint(3, (32,))


def loss_fn(output, target):
    return F.cross_entropy(output, target)


def train_data():
    for _ in range(2):
        yield example_inputs(), example_target()


def eval_data():
    yield example_inputs(), example_target()
"""

DATA = """
import torch


def train_data():
    words = torch.randint(50, (8, 16))
    yield {"input_ids": words, "labels": words}, None
"""


def lines_of(page: str) -> list[str]:
    """The commands of a page, each in one line."""
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    joined = re.sub(r" *\\\n *", " ", text)
    found = re.findall(r"^ {4}(?:\$ )?(\S.*)$", joined, re.MULTILINE)
    return [line.partition(" #")[0].strip() for line in found if line.startswith(COMMANDS)]


def why_not(line: str) -> str:
    """Why a line is not run; "" for one that is."""
    return next((why for part, why in NOT_RUN.items() if part in line), "")


LINES = {page: lines_of(page) for page in PAGES}


def test_what_is_not_run_is_there() -> None:
    everything = [line for lines in LINES.values() for line in lines]
    unused = [part for part in NOT_RUN if not any(part in line for line in everything)]

    # These stand within sentences.
    assert set(unused) <= {"pip install .", "tests/exactness/table.py"}
    assert all(any(old in line for line in everything) for old, _, _ in CHANGED)


PARSED_ONLY = """
import argparse, runpy, sys
parse = argparse.ArgumentParser.parse_args
def leave(self, *arguments, **options):
    parse(self, *arguments, **options)
    raise SystemExit(0)
argparse.ArgumentParser.parse_args = leave
sys.argv = sys.argv[1:]
sys.path.insert(0, "benchmarks")
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "line", [line for line in LINES["benchmarks/README.md"] if "benchmarks/" in line]
)
def test_benchmarks_take_their_options(line: str) -> None:
    """A script that takes none is there."""
    _, script, *options = line.replace(".venv/bin/", "").split()
    assert (ROOT / script).is_file()
    if "parse_args" not in (ROOT / script).read_text():
        assert not options
        return
    words = shlex.split(line.partition(script)[2])
    words = ["alexnet" if word == "NAME" else word for word in words]
    ran = subprocess.run(
        [sys.executable, "-c", PARSED_ONLY, script, *words],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]


class Session:
    """A folder in which lines are run as in a shell."""

    def __init__(self, folder: Path) -> None:
        self.folder, bin_ = folder, folder / "bin"
        bin_.mkdir()
        python = f"exec {sys.executable}"
        program = "from gpipe_compiler.cli import main; import sys; sys.exit(main.{}_command())"
        for name, what in (
            ("python", ""),
            ("torchrun", "-m torch.distributed.run"),
            ("gpipe-compile", f"-c '{program.format('compile')}'"),
            ("gpipe-inspect", f"-c '{program.format('inspect')}'"),
        ):
            (bin_ / name).write_text(f'#!/bin/sh\n{python} {what} "$@"\n')
            (bin_ / name).chmod(0o755)
        (folder / "model.py").write_text(MODEL)
        shutil.copytree(ROOT / "examples", folder / "examples")
        (block,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/planning.md").read_text(), re.S)
        (folder / "cluster.toml").write_text(block)
        (folder / "graph.json").write_text(graph_text())

    def run(self, line: str) -> None:
        """Runs a line, after what it needs is there."""
        for old, new, _ in CHANGED:
            line = line.replace(old, new)
        self.prepare(line)
        where = {**os.environ, "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"}
        where["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        package = self.folder / "model_x4"
        ran = subprocess.run(
            line,
            shell=True,
            check=False,
            cwd=package if line.startswith("python run.py") else self.folder,
            env={**where, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert ran.returncode == 0, f"{line}\n{ran.stdout[-1500:]}\n{ran.stderr[-3000:]}"
        assert "Traceback" not in ran.stderr, f"{line}\n{ran.stderr[-3000:]}"

    def prepare(self, line: str) -> None:
        """Makes room for the package that a line writes, and brings what a line reads."""
        named = re.search(r"(\w+?_x\d)/run.py|(?:python )(run\.py)|memory (\w+_x\d)", line)
        if "./llama" in line and not (self.folder / "llama").is_dir():
            self.write_folder()
        if line.startswith("gpipe-compile"):
            for old in (*self.folder.glob("*_x*"), *self.folder.glob("*_auto")):
                shutil.rmtree(old)
            if "model.onnx" in line:
                self.write_onnx()
        elif named:
            package = self.folder / (named[1] or named[3] or "model_x4")
            if not package.is_dir() or ("train" in line and not trains(package)):
                shutil.rmtree(package, ignore_errors=True)
                model = "model.py" if package.name.startswith("model") else "examples/resnet50.py"
                self.run_plainly(f"gpipe-compile {model} --stages {package.name[-1]} -o {package}")
            self.write_arrays()
        if "export --checkpoint checkpoints" in line:
            where = self.folder / "model_x4" if line.startswith("python run.py") else self.folder
            if not (where / "checkpoints").is_dir():
                run = "run.py" if where != self.folder else "model_x4/run.py"
                self.run_plainly(
                    f"python {run} train --steps 2 --checkpoint-dir checkpoints", where
                )
        elif "--checkpoint-dir checkpoints" in line and "--resume" not in line:
            # A directory belongs to one run.
            shutil.rmtree(self.folder / "checkpoints", ignore_errors=True)

    def run_plainly(self, line: str, where: Path | None = None) -> None:
        """Runs what a line needs."""
        environment = {**os.environ, "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"}
        environment["PYTHONPATH"] = str(ROOT)
        ran = subprocess.run(
            line,
            shell=True,
            check=False,
            cwd=where or self.folder,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, f"{line}\n{ran.stderr[-2000:]}"

    def write_folder(self) -> None:
        """A Hugging Face folder, data for it, and a configuration of adapters."""
        import transformers

        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4}
        config = transformers.LlamaConfig(vocab_size=50, num_hidden_layers=2, **sizes)
        transformers.LlamaForCausalLM(config).save_pretrained(self.folder / "llama")
        (self.folder / "data.py").write_text(DATA)
        (self.folder / "lora").mkdir()
        lora = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "target_modules": ["q_proj"]}
        (self.folder / "lora" / "adapter_config.json").write_text(json.dumps(lora))

    def write_onnx(self) -> None:
        """The model as an ONNX file."""
        if not (self.folder / "model.onnx").exists():
            program = (
                "import torch, model; torch.onnx.export(model.build_model(), "
                "(model.example_inputs(),), 'model.onnx', dynamic_shapes=({0: 'batch'},), "
                "input_names=['x'], output_names=['y'])"
            )
            self.run_plainly(f'python -c "{program}"')

    def write_arrays(self) -> None:
        """What an ONNX package infers on."""
        import numpy

        numpy.savez(self.folder / "x.npz", x=torch.randn(8, 6).numpy())


def trains(package: Path) -> bool:
    """Whether a package is one of torch that can train."""
    return '"training": true' in (package / "plan.json").read_text() and not any(
        package.glob("*.onnx")
    )


def graph_text() -> str:
    """A chain that is long enough for eight stages."""
    figures = {"forward_s": 0.001, "backward_s": 0.002, "output_bytes": 1000, "parameter_bytes": 10}
    ops = [{"name": f"op{number}", **figures} for number in range(12)]
    edges = [[f"op{number}", f"op{number + 1}"] for number in range(11)]
    return json.dumps({"ops": ops, "edges": edges})


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(not why_not(li) for li in LINES[page])]
)
def test_every_line_runs(page: str, tmp_path: Path) -> None:
    if page == "docs/onnx.md":
        pytest.importorskip("onnxruntime")
    if page == "docs/hugging_face.md":
        pytest.importorskip("transformers")
    session = Session(tmp_path)
    for line in LINES[page]:
        if "--peft" in line:
            pytest.importorskip("peft")
        if not why_not(line):
            session.run(line)
