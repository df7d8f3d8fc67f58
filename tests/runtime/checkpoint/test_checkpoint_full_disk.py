"""Checkpoints that do not fit: where the disk is full, or the kernel lets no file grow.

The truth is what was in memory before, and the checkpoint before, in a process of its own.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FULL = """
import resource, sys, torch
from pathlib import Path
from checkpoint_runs import Run, equal
from gpipe_compiler.runtime.checkpoint import latest
from gpipe_compiler.runtime.errors import CheckpointError
directory, limits = Path(sys.argv[1]), map(int, sys.argv[2:])
run = Run("tied", "adam", 2)
run.train(1)
first = run.save(directory)
truth = run.state()
run.train(2)
state = run.state()
for limit in limits:
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    else:
        with (directory / "ballast").open("wb", buffering=0) as stream:
            try:
                while stream.write(bytes(4096)):
                    pass
            except OSError:
                pass
    try:
        run.save(directory)
    except CheckpointError as error:
        print(limit, error)
    else:
        print(limit, "saved")
    assert equal(run.state(), state)
    assert latest(directory) == first
    assert [path.name for path in directory.iterdir() if path.name.startswith(".")] == []
run.load(first)
assert equal(run.state(), truth)
"""


def full(directory, *limits):
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", FULL, str(directory), *map(str, limits)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, check=False, timeout=500
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_write_that_fails_leaves_the_last_checkpoint(tmp_path):
    """The kernel refuses to let a file grow, at the start, in the middle and near the end."""
    limits = (100, 3000, 36_000)
    said = full(tmp_path, *limits)
    for limit in limits:
        assert re.search(rf"^{limit} .*__0_0.distcp: File too large", said, re.M), said
    assert said.count("earlier checkpoints") == len(limits)


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(tmp_path)]
    if shutil.which("mount") is None or subprocess.run(mount, check=False).returncode != 0:
        pytest.skip("mounting is not permitted here")
    try:
        said = full(tmp_path, 0)
        assert "No space left on device" in said
        assert "cannot write" in said
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
