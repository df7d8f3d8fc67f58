"""The devices that this process computes on: those named, those there, those planned."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from ..errors import UsageError
from ..wording import counted, first_line
from .same_host import this_host
from .typed import from_environment

_PLACE = ("pci_domain_id", "pci_bus_id", "pci_device_id")


def gpu_count() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def identity(device: torch.device) -> str:
    """What identifies a GPU, on any host and whatever its number here; empty for others.

    Slices of one GPU are one: NCCL goes by the place on the bus too.
    """
    if device.type != "cuda":
        return ""
    facts = torch.cuda.get_device_properties(device)
    place = [getattr(facts, name, None) for name in _PLACE]
    return f"{this_host()} {facts.uuid if None in place else place}"


def listed_devices(
    devices: Sequence[torch.device | str] | torch.device | str | None,
) -> tuple[torch.device, ...]:
    """The devices that were named, none for None.

    Raises:
        UsageError: when torch knows no such device.
    """
    if devices is None:
        return ()
    listed = [devices] if isinstance(devices, torch.device | str) else devices
    try:
        return tuple(torch.device(device) for device in listed)
    except RuntimeError as error:
        raise UsageError(first_line(error)) from error


def own_device(given: Sequence[torch.device]) -> torch.device | None:
    """This rank's device among those given for all ranks.

    Raises:
        UsageError: when several were given, and not one for every rank.
    """
    rank = from_environment("RANK")
    if len(given) > 1 and rank >= len(given):
        raise UsageError(f"{len(given)} devices were named, and none for rank {rank}")
    own = given[rank] if len(given) > 1 else given[0] if given else None
    return None if own is None else there(own)


def there(device: torch.device) -> torch.device:
    """The same device; the CPU without a number, as torch's files are read onto it.

    Raises:
        UsageError: when this machine, or this torch, has none such that holds numbers.
    """
    if device.type == "cuda":  # where asking for memory would begin to use it
        lacking = (device.index or 0) >= gpu_count()
        why = f"torch finds {counted(gpu_count(), 'GPU')}"
    elif device.type == "cpu":
        lacking, why = bool(device.index), "all of the CPU is one device"
        device = device if lacking else torch.device("cpu")
    else:
        try:
            torch.empty(0, device=device).cpu()
            lacking, why = False, ""
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            lacking, why = True, first_line(error)
    if lacking:
        raise UsageError(f"there is no device {device} here: {why}", hint="name others: cpu")
    return device


def default_devices(devices: int, order: Sequence[int] = ()) -> tuple[torch.device, ...]:
    """A number of workers, spread in order over the GPUs; without any, on the CPU.

    Args:
        order: for each worker the GPU that was planned; followed where these are all there.
    """
    count = gpu_count()
    if not count:
        return (torch.device("cpu"),) * devices
    if len(order) == devices and max(order) < count:
        return tuple(torch.device("cuda", number) for number in order)
    used = min(count, devices)
    return tuple(torch.device("cuda", number * used // devices) for number in range(devices))


def device_of_rank(named: torch.device | None, order: Sequence[int] = ()) -> torch.device:
    """Where this rank computes: as named, "cuda" being the GPU of its local rank.

    Args:
        order: as planned, for each device of the pipeline, its number among those of the machine,
            or host by host of all machines.
    """
    count = gpu_count()
    device = torch.device("cuda", gpu_of_rank(order, count)) if count else torch.device("cpu")
    return device if named in (None, torch.device(device.type)) else named


def gpu_of_rank(order: Sequence[int], count: int) -> int:
    """The number of this rank's GPU, of `count` on its host.

    As planned, the replicas one after another. Where that does not give each rank of this host a
    GPU of its own here, in order.
    """
    rank, local, beside = (
        from_environment(name, least)
        for name, least in (("RANK", 0), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1))
    )
    if order:
        host = (rank - local) // beside
        places = (divmod(rank - local + own, len(order)) for own in range(beside))
        planned = [order[place] + replica * len(order) - host * count for replica, place in places]
        if len(set(planned)) == beside and all(0 <= number < count for number in planned):
            return planned[local]
    return local % count


@contextlib.contextmanager
def intra_op_threads(count: int | None) -> Iterator[None]:
    """Computes with that many intra-op threads, as a stage does; None leaves them as they are.

    Some of torch's libraries know one number for the process. With another one kernels sum in
    another order. A deep network with BatchNorm turns that rounding into other signs before its
    ReLUs: gradients of a ResNet-50 at initialisation, on one thread and on two, differ by a tenth
    of their size.
    """
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count is not None:
            torch.set_num_threads(before)
