"""The GPUs that this process can use: all that the rest asks torch about them."""

from __future__ import annotations

import torch

from .same_host import this_host

_PLACE = ("pci_domain_id", "pci_bus_id", "pci_device_id")


def gpu_count() -> int:
    """How many there are."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def identity(device: torch.device) -> str:
    """What tells a GPU from any other, on any host and whatever its number here; empty for others.

    Slices of one GPU are one: NCCL goes by the place on the bus too.
    """
    if device.type != "cuda":
        return ""
    facts = torch.cuda.get_device_properties(device)
    place = [getattr(facts, name, None) for name in _PLACE]
    return f"{this_host()} {facts.uuid if None in place else place}"
