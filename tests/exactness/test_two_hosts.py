"""Two hosts, each with half of the stages: network namespaces with nothing but a cable between.

What they come to is compared with the same plain loops as everything else here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from table import largest_difference
from training_cases import CASES

HERE = Path(__file__).parent
TWO_HOSTS = HERE.parent / "helpers" / "two_hosts.sh"

TORCHRUN = (
    "exec {python} -m torch.distributed.run --nnodes 2 --nproc-per-node 2 --node-rank $HOST "
    "--master-addr 10.77.0.1 --master-port 29400 --local-addr $ADDRESS {words}"
)


def on_two_hosts(words: str) -> subprocess.CompletedProcess[str]:
    """torchrun on both hosts, two processes on each."""
    script = "export GLOO_SOCKET_IFNAME=$CABLE; " + TORCHRUN.format(
        python=sys.executable, words=words
    )
    return subprocess.run(
        [str(TWO_HOSTS), "sh", "-c", script],
        check=False,
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(scope="module", autouse=True)
def hosts():
    """Nothing here can be tested where the kernel lets nobody make namespaces."""
    try:
        made = subprocess.run([str(TWO_HOSTS), "true"], check=False, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no unshare on this system")
    if made.returncode:
        pytest.skip(f"no network namespaces: {made.stderr.decode(errors='replace').strip()}")


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_training_on_two_hosts(folder, packages, plain, tmp_path, schedule):
    """All cases in four stages, two on each host."""
    packages(4)
    result = tmp_path / "result.pt"
    ran = on_two_hosts(f"{HERE / 'train_packages.py'} {folder / 'x4'} {result} {schedule}")

    assert ran.returncode == 0, ran.stderr[-4000:]
    found = torch.load(result, weights_only=False)
    for case in CASES:
        for key, trained in found.items():
            if key[0] == case.name:
                assert largest_difference(plain[case.name], trained) <= case.tolerance, key
