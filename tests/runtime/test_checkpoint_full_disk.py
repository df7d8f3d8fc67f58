"""Checkpoints that do not fit: where the disk is full, or the kernel lets no file grow.

The truth is what was in memory before, and the checkpoint before, in a process of its own.
"""

from __future__ import annotations

import os
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
directory, limit = Path(sys.argv[1]), int(sys.argv[2])
run = Run("tied", "adam", 2)
run.train(1)
first = run.save(directory)
truth = run.state()
run.train(2)
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
else:
    with (directory / "ballast").open("wb", buffering=0) as stream:
        try:
            while stream.write(bytes(4096)):
                pass
        except OSError:
            pass
state = run.state()
try:
    run.save(directory)
except CheckpointError as error:
    print(error)
else:
    print("saved")
assert equal(run.state(), state)
assert latest(directory) == first
assert [path.name for path in directory.iterdir() if path.name.startswith(".")] == []
run.load(first)
assert equal(run.state(), truth)
"""


def full(directory, limit):
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", FULL, str(directory), str(limit)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("limit", "file"), [(3000, "__0_0.distcp"), (36_000, "__0_0.distcp"), (100, "__0_0.distcp")]
)
def test_a_write_that_fails_leaves_the_last_checkpoint(limit, file, tmp_path):
    """The kernel refuses to let a file grow."""
    said = full(tmp_path, limit)
    assert f"{file}: File too large" in said
    assert "earlier checkpoints" in said


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
