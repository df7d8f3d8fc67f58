"""On a machine with GPUs, however many: packages run there, and come to what the processor does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MODEL = """
import torch
from torch import nn

def build_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))

def example_inputs():
    return (torch.randn(8, 6),)

def example_target():
    return torch.randint(0, 4, (8,))

def loss_fn(output, target):
    return nn.functional.cross_entropy(output, target)
"""


@pytest.mark.skipif(
    not any(Path(name).exists() for name in ("/dev/nvidiactl", "/dev/kfd")),
    reason="of machines with GPUs",
)
@pytest.mark.timeout(300)
def test_stages_share_the_gpus_that_there_are(tmp_path: Path, seeing_gpus: dict[str, str]) -> None:
    """Five processes, and as many threads: more than there are GPUs, or as many of these."""
    (tmp_path / "model.py").write_text(MODEL)
    package = tmp_path / "package"
    words = ["model.py", "--stages", "5", "-o", str(package)]

    def ran(environment: dict[str, str], *command: object) -> str:
        done = subprocess.run(
            [sys.executable, *map(str, command)],
            cwd=tmp_path,
            env={**environment, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    start = (
        "import sys; from gpipe_compiler.cli.main import compile_command as run; sys.exit(run())"
    )
    ran(seeing_gpus, "-c", start, *words)
    train = [package / "run.py", "train", "--steps", "3"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=5"]
    losses = [
        [float(line.split()[3]) for line in text.splitlines() if line.startswith("step ")]
        for text in (
            ran(seeing_gpus, *train),
            ran(seeing_gpus, *torchrun, *train),
            ran(dict(os.environ), *train),
        )
    ]

    assert len(losses[2]) == 3
    assert losses[0] == pytest.approx(losses[2], rel=1e-4)
    assert losses[1] == pytest.approx(losses[2], rel=1e-4)
