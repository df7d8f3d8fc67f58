"""Measures what joins two devices of this machine, in a few seconds."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from gpipe_compiler.cluster.local import best_seconds
from gpipe_compiler.cluster.machines import Link
from gpipe_compiler.errors import UsageError
from gpipe_compiler.runtime.gpus import gpu_count

SMALL, LARGE = 4 * 2**10, 16 * 2**20
"""Bytes that latency and bandwidth are measured with."""

_TIMEOUT_S = 60.0


def timed_link(timeout_s: float = _TIMEOUT_S) -> Link:
    """The link between two devices of this machine, as packages under torchrun use it.

    Between GPUs, copies from the first to the second; with one GPU there is nothing to measure.
    Without GPUs, messages between two processes over gloo.

    Raises:
        UsageError: when there is only one GPU, or the processes do not find each other.
    """
    gpus = gpu_count()
    if gpus == 1:
        raise UsageError(
            "this machine has one GPU: there is no link to measure",
            hint="name devices and links, such as --devices 4xH200, or say --devices local",
        )
    small_s, large_s = _between_gpus() if gpus else _between_processes(timeout_s)
    return link_of(small_s, large_s, "copies" if gpus else "gloo")


def link_of(small_s: float, large_s: float, name: str) -> Link:
    """The link that moves `SMALL` and `LARGE` bytes in these times."""
    # A machine that was disturbed in between may have moved the small ones more slowly.
    bandwidth = (LARGE - SMALL) / max(large_s - small_s, large_s / 10)
    return Link(bandwidth, max(0.0, small_s - SMALL / bandwidth), name)


def _between_gpus() -> tuple[float, float]:
    one, other = torch.device("cuda", 0), torch.device("cuda", 1)

    def seconds(size: int) -> float:
        source = torch.ones(size, dtype=torch.uint8, device=one)
        target = torch.empty(size, dtype=torch.uint8, device=other)

        def copy() -> None:
            target.copy_(source)
            torch.cuda.synchronize(other)

        return best_seconds(copy, one, tries=10)

    return seconds(SMALL), seconds(LARGE)


def _between_processes(timeout_s: float) -> tuple[float, float]:
    """Seconds that two processes take for `SMALL` and `LARGE` bytes, one way."""
    with tempfile.TemporaryDirectory() as folder:
        words = [
            sys.executable,
            "-m",
            "gpipe_compiler.cluster.link_rank",
            str(Path(folder, "store")),
        ]
        sizes = [str(SMALL), str(LARGE), str(timeout_s)]
        ranks = [
            subprocess.Popen(
                [*words, str(rank), *sizes],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            said = [rank.communicate(timeout=timeout_s) for rank in ranks]
        except subprocess.TimeoutExpired:
            said = []
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    if not said or any(rank.returncode for rank in ranks):
        complaints = [complaint.strip().splitlines()[-1:] for _, complaint in said]
        why = next((lines[0] for lines in complaints if lines), f"nothing within {timeout_s:.0f} s")
        raise UsageError(
            f"the link between two processes cannot be measured: {why}",
            hint="say --devices local, with --bandwidth and --latency where they are known",
        )
    small_s, large_s = map(float, said[0][0].split())
    return small_s, large_s
