"""Stages of models that everybody knows, as texts to be read, in the folder `golden/known`.

    pytest tests/codegen/test_known_models.py --rewrite-golden -m "slow or not slow"

writes the folder anew; read the difference before committing it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from loading import load_script
from versions import pinned

from gpipe_compiler.cluster import Cluster, Device, Link
from gpipe_compiler.codegen.facts import CodeFacts
from gpipe_compiler.codegen.stage import write_stages
from gpipe_compiler.compile import plan, trace

HERE = Path(__file__).parent
GOLDEN = HERE / "golden" / "known"
CLUSTER = Cluster.of(Device("test", 1e12, 1e11, 1 << 34, 1e-6), Link(1e10, 1e-6))


known = load_script(HERE / "known_models.py", "codegen_known_models")


@pytest.mark.parametrize(
    "label", [*known.QUICK, *(pytest.param(label, marks=pytest.mark.slow) for label in known.SLOW)]
)
def test_the_stages_of_a_model(label: str, request: pytest.FixtureRequest) -> None:
    """Four stages are, word for word, those that were read, and no longer than promised."""
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = (known.QUICK | known.SLOW)[label]()
    graph = trace(model.model, model.args, model.kwargs, target=model.target, loss_fn=model.loss_fn)
    made = plan(graph, stages=4, microbatches=4, cluster=CLUSTER)
    assert made.graph is not None
    sources = write_stages(made, CodeFacts.of(made.graph))
    texts = {f"stage_{stage.index}.py": stage.text for stage in sources.stages}
    texts["layers.py"] = sources.layers
    folder = GOLDEN / label
    if request.config.getoption("--rewrite-golden", default=False):
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in texts.items():
            (folder / file).write_text(text)

    assert max(len(text.splitlines()) for text in texts.values()) <= model.most
    if pinned("torch") and pinned("transformers"):
        assert texts == {file: (folder / file).read_text() for file in texts}


def test_ruff_finds_nothing_in_the_stages() -> None:
    options = ["--isolated", "--line-length", "100", "--no-cache"]
    check = ["check", "--select", "E4,E7,E9,F"]
    for command in (check, ["format", "--diff"]):
        ruff = [sys.executable, "-m", "ruff", *command, *options, GOLDEN]
        done = subprocess.run(ruff, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_mypy_finds_nothing_in_the_stages(tmp_path: Path) -> None:
    """As strict as it can be."""
    options = ["--strict", "--namespace-packages", "--explicit-package-bases"]
    mypy = [sys.executable, "-m", "mypy", *options, f"--cache-dir={tmp_path}", "."]
    done = subprocess.run(mypy, cwd=GOLDEN, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
