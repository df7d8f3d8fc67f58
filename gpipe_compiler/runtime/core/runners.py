"""Runs a prepared schedule once: on the threads of this process, or as one of several processes."""

from __future__ import annotations

import dataclasses
import queue
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import nn

from ..schedule.actions import SharedSum
from ..spec import Crossing, PipelineSpec
from .distributed import DistributedEndpoint
from .engine import DeviceResult, Engine
from .local_stages import LocalStages, SharedParameter
from .local_transport import Inbox, LocalEndpoint, Workers
from .options import ExecutionOptions
from .outputs import join
from .precision import crossing_dtypes, run_of_devices
from .programs import PreparedSchedule
from .reducer import Reducer, share_buffers, written
from .request import StepRequest, Values
from .topology import Replicas, Topology
from .wiring import makers, output_leaves


@dataclass(frozen=True, slots=True)
class Result:
    """What a mini-batch comes to.

    Attributes:
        loss: its terms, mostly one, in a row.
        outputs: those that were asked for, by value name.
        gradients: of the inputs whose caller wants them, by name and micro-batch; None is zeros.
    """

    loss: torch.Tensor | None
    outputs: Mapping[str, torch.Tensor]
    gradients: Mapping[tuple[str, int], torch.Tensor | None]


class Runner(Protocol):
    """The way in which a pipeline's programs are executed.

    Attributes:
        threads: intra-op threads that a stage computes with on a CPU.
        engines: of the devices that this process drives.
    """

    threads: int
    engines: Sequence[Engine]

    def run(self, prepared: PreparedSchedule, request: StepRequest) -> Result:
        """Execute every device's program once."""

    def close(self) -> None:
        """Let go of threads and connections."""


class LocalRunner:
    """All devices in this process, a thread for each.

    Args:
        devices: where each worker computes; several may be the same.
        placement: the worker of each stage.
    """

    def __init__(
        self,
        spec: PipelineSpec,
        modules: Mapping[int, nn.Module],
        devices: Sequence[torch.device],
        placement: Sequence[int],
        options: ExecutionOptions,
    ) -> None:
        self.spec = spec
        self.precision = options.precision
        self.devices = tuple(devices)
        loss = spec.loss.value if spec.loss is not None else None
        self.engines: Sequence[Engine] = [
            Engine(
                {s: modules[s] for s, holder in enumerate(placement) if holder == d},
                device,
                loss,
                options,
            )
            for d, device in enumerate(devices)
        ]
        on_cpu = sum(device.type == "cpu" for device in devices)
        threads = max(1, torch.get_num_threads() // on_cpu) if on_cpu > 1 else None
        self.threads = threads or torch.get_num_threads()
        self.workers: Workers[DeviceResult] = Workers(devices, threads)

    def run(self, prepared: PreparedSchedule, request: StepRequest) -> Result:
        """Execute every device's program once."""
        inboxes: list[Inbox] = [queue.SimpleQueue() for _ in self.devices]
        tasks = []
        for index, engine in enumerate(self.engines):
            endpoint = LocalEndpoint(index, inboxes, self.devices, prepared.placement)
            tasks.append(
                partial(
                    engine.run,
                    prepared.steps[index],
                    prepared.wiring,
                    dataclasses.replace(request, inputs=())
                    if index
                    else _on(request, self.devices[0]),
                    endpoint,
                )
            )

        def abort() -> None:
            for inbox in inboxes:
                inbox.put(None)

        with run_of_devices(self.precision):
            results = self.workers.run(tasks, abort)
        losses = {m: loss for result in results for m, loss in result.losses.items()}
        outputs = {}
        for leaf in output_leaves(self.spec.outputs):
            for result in results:
                if request.kept and leaf.value in result.results[0]:
                    pieces = [values[leaf.value] for values in result.results]
                    outputs[leaf.value] = join(leaf, pieces, request.sizes)
        return Result(_total(losses, request), outputs, results[0].gradients)

    def close(self) -> None:
        """Join the threads."""
        self.workers.close()


class DistributedRunner:
    """This process's device; the others are other processes."""

    def __init__(
        self,
        spec: PipelineSpec,
        modules: Mapping[int, nn.Module],
        replicas: Replicas,
        shared: Mapping[str, SharedParameter],
        options: ExecutionOptions,
        reducer: Reducer | None,
    ) -> None:
        self.spec = spec
        self.replicas = replicas
        self.reducer = reducer
        self.network = replicas.pipeline
        self.threads = torch.get_num_threads()
        self.precision = options.precision
        self.dtypes: dict[bool, Mapping[str, torch.dtype]] = {}
        self.shared = shared
        loss = spec.loss.value if spec.loss is not None else None
        engine = Engine(modules, self.network.device, loss, options, self._statistics)
        self.engines: Sequence[Engine] = (engine,)
        self.makers = makers(spec)

    def run(self, prepared: PreparedSchedule, request: StepRequest) -> Result:
        """Execute this rank's program once; the loss comes to all ranks, outputs to the first."""
        endpoint = DistributedEndpoint(
            self.network,
            prepared.placement,
            self._crossings(prepared),
            request.sizes,
            self.spec.microbatch_size,
            partial(self._sum, prepared),
        )
        rank = self.network.rank
        with run_of_devices(self.precision):
            (engine,) = self.engines
            result = engine.run(
                prepared.steps[rank],
                prepared.wiring,
                _on(request, self.network.device),
                endpoint,
                None if self.reducer is None else self.reducer.stage_ended,
            )
        if self.replicas.count > 1:
            share_buffers(self.replicas.peers, written(self.spec, engine.modules))
        loss = None
        if request.work.makes_loss and self.spec.loss is not None:
            source = prepared.placement[self.makers[self.spec.loss.value]]
            mine = self._loss(result.losses, request)
            told = None if mine is None else (mine.tolist(), mine.dtype)
            found = self.network.broadcast_object(told, source, "the loss")
            if found is not None:
                terms, dtype = found
                loss = torch.tensor(terms, dtype=dtype, device=self.network.device)
        return Result(loss, self._gather(prepared, request, result), result.gradients)

    def _loss(
        self, losses: Mapping[int, tuple[torch.Tensor, ...]], request: StepRequest
    ) -> torch.Tensor | None:
        """The loss of the mini-batch, over all replicas; None where none is made."""
        total = _total(losses, request)
        if total is None or self.replicas.count == 1:
            return total
        # A replica in whose share nothing counts has no such term, and adds nothing.
        counts = total.new_tensor(
            [any(column) for column in zip(*request.loss_weights, strict=True)]
        )
        rows = torch.stack([torch.where(counts > 0, total, 0.0), counts])
        value, replicas = self.replicas.peers.sum(rows.double(), "the loss")
        mean = value / self.replicas.count
        return torch.where(replicas > 0, mean, torch.nan).to(total.dtype)

    def _statistics(self, own: torch.Tensor) -> Sequence[torch.Tensor]:
        """Those of all replicas."""
        if self.replicas.count == 1:
            return (own,)
        return self.replicas.peers.gathered(own, "the statistics of the replicas")

    def _crossings(self, prepared: PreparedSchedule) -> list[Crossing]:
        """What is sent, in the types that it has in this precision."""
        training = all(
            module.training for engine in self.engines for module in engine.modules.values()
        )
        if training not in self.dtypes:
            kind = self.network.device.type
            self.dtypes[training] = crossing_dtypes(
                self.spec, self.precision, kind, training=training
            )
        dtypes = self.dtypes[training]
        return [dataclasses.replace(one, dtype=dtypes[one.value]) for one in prepared.crossings]

    def _gather(
        self, prepared: PreparedSchedule, request: StepRequest, result: DeviceResult
    ) -> Values:
        """The outputs, on rank 0: one after another, in the same order on all ranks."""
        outputs: Values = {}
        for leaf in output_leaves(self.spec.outputs):
            if leaf.value not in request.kept:
                continue
            source = prepared.placement[self.makers[leaf.value]]
            if source not in (0, self.network.rank) and self.network.rank != 0:
                continue
            mine = None
            if source == self.network.rank:
                mine = join(leaf, [values[leaf.value] for values in result.results], request.sizes)
            if source != 0 and self.network.rank in (0, source):
                mine = self.network.pass_on(mine, source, f"output {leaf.value}")
            if mine is not None and self.network.rank == 0:
                outputs[leaf.value] = mine
        return outputs

    def _sum(self, prepared: PreparedSchedule, total: SharedSum) -> None:
        ranks = sorted({prepared.placement[stage] for stage in total.stages})

        def over_ranks(name: str, gradient: torch.Tensor) -> torch.Tensor:
            return self.network.sum(gradient, f"the gradient of {name}", ranks)

        self.shared[total.parameter].exchange(over_ranks)

    def close(self) -> None:
        """Leave the process groups."""
        self.replicas.close()


def _on(request: StepRequest, device: torch.device) -> StepRequest:
    if all(tensor.device == device for values in request.inputs for tensor in values.values()):
        return request
    moved = [
        {
            name: tensor.to(device, non_blocking=device.type != "cpu")
            for name, tensor in values.items()
        }
        for values in request.inputs
    ]
    return dataclasses.replace(request, inputs=moved)


def _total(
    losses: Mapping[int, tuple[torch.Tensor, ...]], request: StepRequest
) -> torch.Tensor | None:
    """The terms of the mini-batch's loss; one of weight 0 is left out, it may be nan."""
    if not losses:
        return None
    totals = []
    for number, like in enumerate(losses[0]):
        scalars = [
            losses[m][number].reshape(()) * weights[number]
            for m, weights in enumerate(request.loss_weights)
            if weights[number]
        ] or [like.new_full((), torch.nan)]
        totals.append(scalars[0] if len(scalars) == 1 else torch.stack(scalars).sum())
    return torch.stack(totals)


def make_runner(
    spec: PipelineSpec,
    topology: Topology,
    stages: LocalStages,
    options: ExecutionOptions,
    reducer: Reducer | None,
) -> Runner:
    """What executes the schedule: threads of one process, or this one of several."""
    if topology.members is None:
        return LocalRunner(spec, stages.modules, topology.devices, topology.placement, options)
    shared = {item.name: item for item in stages.shared}
    return DistributedRunner(spec, stages.modules, topology.members, shared, options, reducer)
