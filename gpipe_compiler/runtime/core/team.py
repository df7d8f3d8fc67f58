"""Who computes what: the devices of a pipeline, the processes that drive them, and its replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..errors import UsageError
from ..spec import PipelineSpec, ScheduleKind
from ..wording import counted
from .choices import TransportKind, listed_devices, own_device, there, transport_kind
from .distributed import Network
from .gpus import gpu_count
from .programs import devices_by_default, spread
from .replicas import Replicas
from .scaler import OverRanks, alone


@dataclass(frozen=True)
class Team:
    """This process among those of a pipeline.

    Attributes:
        placement: the device of each stage, by its number in the pipeline.
        devices: in one process, where each device computes.
        members: the processes; None for one alone.
    """

    placement: tuple[int, ...]
    devices: tuple[torch.device, ...]
    members: Replicas | None

    @classmethod
    def gather(
        cls,
        spec: PipelineSpec,
        schedule: ScheduleKind,
        devices: Sequence[torch.device | str] | torch.device | str | None,
        transport: TransportKind | str | None,
        data_parallel: int,
        timeout_s: float,
    ) -> Team:
        """Find the devices, and join the other processes.

        Raises:
            UsageError: when stages, devices, processes and replicas do not go into one another.
        """
        given = listed_devices(devices)
        if transport_kind(transport) is TransportKind.DISTRIBUTED:
            own, order = own_device(given), spec.device_order
            members = Replicas.join(own, timeout_s, data_parallel, order)
            return cls(spread(spec, schedule, members.pipeline.size), given, members)
        if data_parallel != 1:
            raise UsageError(
                f"{data_parallel} replicas need a process for every device of each",
                hint="start them with torchrun --nproc-per-node",
            )
        given = tuple(map(there, given))
        given = given or default_devices(devices_by_default(spec, schedule), spec.device_order)
        return cls(spread(spec, schedule, len(given)), given, None)

    @property
    def pipeline(self) -> Network | None:
        """The processes of this replica of the pipeline; None in one process."""
        return None if self.members is None else self.members.pipeline

    @property
    def world(self) -> Network | None:
        """All processes, those of other replicas too; None in one process."""
        return None if self.members is None else self.members.world

    @property
    def rank(self) -> int:
        """This process's number; 0 for the only one."""
        return 0 if self.members is None else self.members.world.rank

    @property
    def replicas(self) -> int:
        """How many replicas of the pipeline there are."""
        return 1 if self.members is None else self.members.count

    @property
    def replica(self) -> int:
        """The number of the replica that this process belongs to."""
        return 0 if self.members is None else self.members.number

    @property
    def feeds(self) -> bool:
        """Whether this process passes inputs: the first of each replica does."""
        return self.pipeline is None or self.pipeline.rank == 0

    @property
    def device(self) -> torch.device:
        """Where this process computes; the first of its devices."""
        return self.devices[0] if self.pipeline is None else self.pipeline.device

    @property
    def where(self) -> Mapping[int, torch.device]:
        """The stages of this process, and where they compute."""
        if self.pipeline is None:
            return {stage: self.devices[d] for stage, d in enumerate(self.placement)}
        mine = [stage for stage, d in enumerate(self.placement) if d == self.pipeline.rank]
        return dict.fromkeys(mine, self.pipeline.device)

    @property
    def over_ranks(self) -> OverRanks:
        """The sum over all processes, those of other replicas too."""
        return alone if self.world is None else self.world.sum

    def share(self, numbers: Sequence[float], what: str) -> tuple[float, ...]:
        """Rank 0's numbers on every rank, which all call this with as many.

        Args:
            what: they are, for the message of a rank that waits for them in vain.
        """
        if self.world is None:
            return tuple(numbers)
        row = torch.tensor(list(numbers), dtype=torch.float64)
        return tuple(self.world.broadcast(row, 0, what).tolist())

    def __str__(self) -> str:
        if self.pipeline is None:
            devices = ", ".join(dict.fromkeys(map(str, self.devices)))
            count = len(self.devices)
            where = f"{counted(count, 'thread')} on {devices}"
        else:
            count = self.pipeline.size
            where = f"{counted(count, 'process', 'es')} on {self.pipeline.device.type}"
        return f"{self.replicas} replicas of {where}" if self.replicas > 1 else where


def default_devices(devices: int, order: Sequence[int] = ()) -> tuple[torch.device, ...]:
    """So many workers, spread in order over the GPUs; without any, on the CPU.

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
