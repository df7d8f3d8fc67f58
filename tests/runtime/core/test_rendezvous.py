"""Over what the processes meet, by the GPUs that they have: these are pretended."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from gpipe_compiler.runtime.core import devices, topology

CPU = torch.device("cpu")


def agreed(found: list[str]) -> set[str]:
    """What ranks with these GPUs agree on."""
    store = dist.HashStore()
    with ThreadPoolExecutor(len(found)) as pool:
        answers = pool.map(
            lambda rank: topology._agreed_backend(store, rank, len(found), found[rank]),
            range(len(found)),
        )
        return set(answers)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (["a"], "nccl"),
        (["a", "b", "c", "d"], "nccl"),
        (["a", "a", "a", "a"], "gloo"),
        (["a", "b", "c", "b"], "gloo"),
        (["", "", ""], "gloo"),
        (["a", ""], "gloo"),
    ],
)
def test_nccl_is_for_ranks_with_a_gpu_each(
    found: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert agreed(found) == {expected}

    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert agreed(found) == {"gloo"}


def facts(bus: int | None, uuid: str) -> SimpleNamespace:
    """What torch tells of a GPU; older ones know no place on the bus."""
    if bus is None:
        return SimpleNamespace(uuid=uuid)
    return SimpleNamespace(uuid=uuid, pci_domain_id=0, pci_bus_id=bus, pci_device_id=0)


def test_a_gpu_is_told_from_others_on_all_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by its number, which counts what a process sees; two slices of a GPU are the same."""
    machines = {
        ("one", "0"): facts(7, "x"),
        ("one", "0, of another process"): facts(8, "y"),
        ("one", "1, a slice of the first"): facts(7, "z"),
        ("other", "0"): facts(7, "u"),
        ("old", "0"): facts(None, "v"),
        ("old", "1"): facts(None, "w"),
    }
    told = []
    for (host, _), found in machines.items():
        monkeypatch.setattr(devices, "this_host", lambda host=host: host)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, found=found: found)
        told.append(devices.identity(torch.device("cuda", 0)))

    first, second, piece, *others = told
    assert first == piece
    assert len({first, second, *others}) == 5
    assert devices.identity(CPU) == ""
