"""Ends processes in many ways after collectives of gloo; fails unless each exits as it should.

Processes are forked from one without threads, so that many cost little. Each ends through the
interpreter's own end, where a thread that still lets go of a tensor aborts it.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from gpipe_compiler.runtime.core.distributed import Network
from gpipe_compiler.runtime.core.topology import Topology

FAILED = 5


def start(rank, store):
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, 2),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=300),
    )
    network = Network.of_all(torch.device("cpu"), 300)
    return Topology.among((0,), network, 2, owns_world=True)


def closed(replicas):
    """As it should be."""
    for work in [replicas.collectives.all_reduce(torch.ones(1000)) for _ in range(4)]:
        work.wait()
    replicas.close()


def forgotten(replicas):
    """Nobody waits, and nobody closes."""
    for _ in range(8):
        replicas.collectives.all_reduce(torch.ones(10))


def failed(replicas):
    """An error while the other process still takes part."""
    replicas.collectives.all_reduce(torch.ones(300_000))
    if replicas.replica == 0:
        sys.exit(FAILED)
    replicas.close()


def left(replicas):
    """The other process does not take part in a second one, and ends."""
    # Nobody leaves before the other has its group: joining would fail, which is another end.
    replicas.collectives.all_reduce(torch.ones(1)).wait()
    if replicas.replica == 0:
        sys.exit(FAILED)
    try:
        replicas.collectives.all_reduce(torch.ones(1000)).wait()
    except RuntimeError:
        replicas.close()
        sys.exit(FAILED)


EXPECTED = {closed: {0: 2}, forgotten: {0: 2}, failed: {FAILED: 1, 0: 1}, left: {FAILED: 2}}


def codes(way, store):
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            way(start(rank, store))
            sys.exit(0)
        children.append(child)
    return Counter(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


def main(times, directory):
    torch.set_num_threads(1)
    for way, expected in EXPECTED.items():
        for turn in range(times):
            found = codes(way, str(Path(directory, f"{way.__name__}{turn}")))
            if found != expected:
                sys.exit(f"{way.__name__}: {dict(found)}, not {expected}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
