"""One of two processes that send each other messages over gloo, as the runtime does.

python -m gpipe_compiler.cluster.link_rank STORE RANK SMALL LARGE TIMEOUT; rank 0 prints the seconds
that the sizes take one way.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from gpipe_compiler.runtime.distributed import Network

_TRIES, _TRIES_LARGE = 200, 8


def main(words: list[str]) -> None:
    """Obeys the command line."""
    store, rank, small, large, timeout = words
    timeout_s = float(timeout)
    dist.init_process_group(
        "gloo",
        init_method=Path(store).as_uri(),
        rank=int(rank),
        world_size=2,
        timeout=timedelta(seconds=timeout_s),
    )
    network = Network.of_all(torch.device("cpu"), timeout_s)
    seconds = [_one_way(network, int(small), _TRIES), _one_way(network, int(large), _TRIES_LARGE)]
    if network.rank == 0:
        print(*seconds)
    dist.destroy_process_group()


def _one_way(network: Network, size: int, tries: int) -> float:
    """Half the shortest time in which a message went there and back."""
    other = 1 - network.rank
    payload = torch.ones(size, dtype=torch.uint8)
    best = float("inf")
    for tag in range(tries):
        buffer = torch.empty(size, dtype=torch.uint8)
        expected = network.receive(buffer, other, tag)
        start = time.perf_counter()
        if network.rank == 1:
            network.finish(expected, "at the first half")
        network.finish(network.send(payload, other, tag), "sending")
        if network.rank == 0:
            network.finish(expected, "at the second half")
        best = min(best, time.perf_counter() - start)
    return best / 2


if __name__ == "__main__":
    main(sys.argv[1:])
