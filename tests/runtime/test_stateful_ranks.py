"""Recomputation and deferred BatchNorm over processes, against the same on threads, to the bit.

What threads do is held against plain torch in `test_recompute` and `test_batchnorm`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from stateful_ranks import CASES, collect

RANKS = Path(__file__).with_name("stateful_ranks.py")


@pytest.mark.timeout(150)
def test_processes_recompute_as_threads_do(tmp_path):
    """Two ranks, whose shared matrix and skipping value cross between them."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes=1"]
    command += ["--nproc-per-node=2", str(RANKS), str(tmp_path)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(RANKS.parent), *sys.path]),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    for case in CASES:
        expected = collect(case, devices=["cpu"] * 2)
        found = torch.load(tmp_path / f"{case}.pt")
        assert expected.keys() == found.keys()
        for name, tensor in expected.items():
            assert torch.equal(tensor, found[name]), (case, name)
