"""Recomputation and deferred BatchNorm over processes, against the same on threads, to the bit.

What threads do is compared with plain torch in `test_recompute` and `test_batchnorm`.
"""

from __future__ import annotations

from pathlib import Path

import forked
import torch
from stateful_ranks import CASES, collect

RANKS = Path(__file__).parents[1] / "stateful_ranks.py"


def test_processes_recompute_as_threads_do(tmp_path):
    """Two ranks, whose shared matrix and skipping value cross between them."""
    done = forked.run([RANKS, tmp_path], ranks=2)
    assert done.returncode == 0, done.stderr
    for case in CASES:
        expected = collect(case, devices=["cpu"] * 2)
        found = torch.load(tmp_path / f"{case}.pt")
        assert expected.keys() == found.keys()
        for name, tensor in expected.items():
            assert torch.equal(tensor, found[name]), (case, name)
