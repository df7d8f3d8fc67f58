"""Replicas that divide weights and optimizer among them, by torchrun, against a plain loop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import sharded_model
import torch
from safetensors.torch import load_file

import gpipe_compiler
from gpipe_compiler import CompileOptions
from gpipe_compiler.frontend.source import load
from gpipe_compiler.runtime.spec import WeightSharding

HERE = Path(__file__).parent
TRAIN = ("train", "--epochs", 1, "--clip-norm", sharded_model.CLIP)


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """The model in two stages, for two replicas that divide it, and in three."""
    folder = tmp_path_factory.mktemp("sharded")
    subject = load(str(HERE / "sharded_model.py"))
    for stages, replicas in ((2, 2), (3, 1)):
        options = CompileOptions(
            stages=stages,
            microbatches=2,
            data_parallel=replicas,
            sharding=WeightSharding.OPTIMIZER if replicas > 1 else WeightSharding.NONE,
            validate=False,
        )
        gpipe_compiler.compile(subject, options, folder / f"x{stages}")
    return folder


@pytest.fixture(scope="module")
def plain():
    return sharded_model.plain()


def launch(processes, words, folder, **variables):
    """By torchrun; or by Python alone, for no processes."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes)
    return subprocess.run(
        [str(word) for word in (sys.executable, *(torchrun if processes else ()), *words)],
        check=False,
        capture_output=True,
        text=True,
        timeout=500,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
    )


def same_weights(file, state):
    found = load_file(file)
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize(
    ("form", "words"),
    [
        pytest.param("optimizer", "optimizer and resting weights divided", marks=pytest.mark.slow),
        ("full", "weights, gradients and optimizer divided"),
    ],
)
def test_sharded_replicas_train_as_a_plain_loop(packages, plain, tmp_path, form, words):
    """Twenty steps of AdamW with clipping, on tied weights; the last weights and all losses."""
    run = (packages / "x2" / "run.py", *TRAIN, "--save", "last.safetensors", "--log-file", "log")
    done = launch(4, (*run, "--shard", form), tmp_path)

    assert done.returncode == 0, done.stderr
    assert words in done.stdout
    state, losses = plain
    same_weights(tmp_path / "last.safetensors", state)
    found = [json.loads(line)["loss"] for line in (tmp_path / "log").read_text().splitlines()]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(losses))


@pytest.mark.slow
def test_others_go_on_where_sharded_replicas_were_killed(packages, plain, tmp_path):
    """Four processes are killed; two replicas of one process go on, and then three stages alone."""
    checkpoints = ("--checkpoint-dir", "ck", "--checkpoint-every", 5)
    sharded = (packages / "x2" / "run.py", *TRAIN, *checkpoints)
    killed = launch(4, sharded, tmp_path, KILLED_AT="12")

    assert killed.returncode != 0
    assert [path.name for path in sorted((tmp_path / "ck").glob("step_*"))][-1] == "step_00000010"
    state, _ = plain
    two = (*sharded, "--resume", "--data-parallel", 2, "--shard", "optimizer", "--steps", 16)
    done = launch(2, two, tmp_path)
    assert done.returncode == 0, done.stderr
    alone = (
        packages / "x3" / "run.py",
        *TRAIN,
        *checkpoints,
        "--resume",
        "--save",
        "w.safetensors",
    )
    done = launch(0, alone, tmp_path)
    assert done.returncode == 0, done.stderr
    same_weights(tmp_path / "w.safetensors", state)
    export = (
        packages / "x2" / "run.py",
        "export",
        "--checkpoint",
        "ck",
        "--output",
        "e.safetensors",
    )
    done = launch(0, export, tmp_path)
    assert done.returncode == 0, done.stderr
    same_weights(tmp_path / "e.safetensors", state)


@pytest.mark.slow
def test_each_replica_keeps_its_part_alone(packages, tmp_path):
    """Of weights, gradients and what Adam remembers: the rows of a replica, and no more memory."""
    kinds = ("optimizer", "full")
    done = launch(4, (HERE / "sharded_ranks.py", packages / "x2", "kept", *kinds), tmp_path)

    assert done.returncode == 0, done.stderr
    for rank in range(4):
        found = json.loads((tmp_path / f"kept.{rank}").read_text())
        whole = found["none"]
        for name, shape in whole["shapes"].items():
            assert whole["weights"][name] == 8 * torch.Size(shape).numel()
        for kind in kinds:
            part = found[kind]
            assert part["shapes"] == whole["shapes"]
            for name, shape in part["shapes"].items():
                rows = -(-shape[0] // 2) if shape else 1
                most = 8 * rows * torch.Size(shape[1:]).numel()
                assert part["weights"][name] <= most
                assert part["gradients"][name] <= most
                assert part["remembered"][name] <= 2 * most
            # Of weights that are gathered block by block, and their gradients, no more than those
            # of a block and of the one before it.
            assert part["largest"] <= 2 * 2 * sharded_model.BLOCK_BYTES
            blocks = any(name.startswith("blocks.") for name in part["shapes"])
            assert (part["largest"] > 0) == (blocks and kind == "full")
            undivided = [name for name, shape in part["shapes"].items() if not shape]
            assert part["whole"] == 8 * len(undivided)
