"""Executes one device's program: the stages it holds, micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from .batchnorm import Gather, alone
from .choices import Manner
from .errors import PipelineError, StageError
from .job import Job, Values, Work
from .schedule.actions import Compute, Phase, Receive, Send, SharedSum, Transfer
from .stage_run import StageRun
from .transport import Endpoint
from .wiring import Need, StageWiring, Step


@dataclass(slots=True)
class Outcome:
    """What a device has made of a job: losses by micro-batch, and kept values of each."""

    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    results: list[Values] = field(default_factory=list)


class Engine:
    """The stages of one device, and the order of their work.

    Args:
        modules: the stages it holds, by number.
        device: where its stages compute.
        loss_name: the value that is the loss, where the pipeline has one.
        manner: how its stages compute.
        gather: joins statistics with those of the other replicas.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        device: torch.device,
        loss_name: str | None,
        manner: Manner,
        gather: Gather = alone,
    ) -> None:
        self.modules = modules
        self.device = device
        self.loss_name = loss_name
        self.manner = manner
        self.gather = gather

    def run(
        self,
        steps: Sequence[Step],
        wiring: Sequence[StageWiring],
        job: Job,
        endpoint: Endpoint,
    ) -> Outcome:
        """Execute the program once.

        Raises:
            StageError: when a stage raises; the message names stage, micro-batch and action.
            TransportError: when a value does not come.
        """
        run = _Run(self, wiring, job, endpoint)
        gradients = torch.enable_grad() if job.work is Work.TRAIN else torch.no_grad()
        with gradients:
            for step in steps:
                run.execute(step)
            endpoint.flush()
        for stage in run.stages.values():
            stage.finish(self.gather)
        return Outcome(run.losses, run.results)


class _Run:
    """The state of one execution of a program."""

    def __init__(
        self, engine: Engine, wiring: Sequence[StageWiring], job: Job, endpoint: Endpoint
    ) -> None:
        self.engine = engine
        self.wiring = wiring
        self.job = job
        self.endpoint = endpoint
        self.stages = {
            index: StageRun(wiring[index], module, job, engine.loss_name, engine.manner)
            for index, module in engine.modules.items()
        }
        self.values: list[Values] = [dict(values) for values in job.inputs]
        self.values.extend({} for _ in range(job.microbatches - len(job.inputs)))
        self.gradients: dict[tuple[str, int, int], torch.Tensor | None] = {}
        self.losses: dict[int, torch.Tensor] = {}
        self.results: list[Values] = [{} for _ in range(job.microbatches)]

    def execute(self, step: Step) -> None:
        action = step.action
        match action:
            case Compute():
                microbatch = action.microbatch
                self._compute(action, waits=step.waits)
            case Send(transfer=transfer):
                microbatch = transfer.microbatch
                self._send(transfer)
            case Receive(transfer=transfer):
                self.endpoint.expect(transfer)
                return
            case SharedSum():
                self.endpoint.exchange(action)
                return
        values = self.values[microbatch]
        for name in step.drops:
            values.pop(name, None)

    def _compute(self, action: Compute, *, waits: bool) -> None:
        stage = self.wiring[action.stage]
        try:
            if action.phase is Phase.FORWARD:
                self._forward(stage, action.microbatch, waits=waits)
            else:
                self._backward(stage, action.microbatch)
        except PipelineError:
            raise
        except Exception as error:  # whatever the model's code raises
            raise StageError(
                f"stage {action.stage}, {action.phase.name.lower()} of micro-batch "
                f"{action.microbatch} ({action}): {type(error).__name__}: {error}"
            ) from error

    def _forward(self, stage: StageWiring, microbatch: int, *, waits: bool) -> None:
        values = self.values[microbatch]
        received = [self._received(need, microbatch) for need in stage.needs]
        found = self.stages[stage.index].forward(microbatch, received, waits=waits)
        values.update(found.outputs)
        for name in found.outputs.keys() & self.job.kept:
            self.results[microbatch][name] = values[name]
        if found.loss is not None:
            self.losses[microbatch] = found.loss

    def _received(self, need: Need, microbatch: int) -> torch.Tensor:
        """What a stage reads: made here, or come from another device."""
        tensor = self.values[microbatch].get(need.value)
        if tensor is not None:
            return tensor
        return self._arrived(need.value, need.sender, need.via, microbatch)

    def _arrived(self, value: str, sender: int | None, via: int, microbatch: int) -> torch.Tensor:
        if sender is None:
            raise PipelineError(f"the input {value} is missing")
        tensor = self.endpoint.take(Transfer(value, microbatch, sender, via))
        if tensor is None:
            raise PipelineError(f"nothing arrived for {value}")
        self.values[microbatch][value] = tensor
        return tensor

    def _backward(self, stage: StageWiring, microbatch: int) -> None:
        # Recomputing needs no gradient yet: it comes before waiting for them.
        kept = self.stages[stage.index].graph(microbatch)
        roots, gradients = [], []
        for value, parts in stage.returned:
            gradient = None
            for part in parts:
                if part.remote:
                    transfer = Transfer(value, microbatch, part.stage, stage.index, gradient=True)
                    summand = self.endpoint.take(transfer)
                else:
                    summand = self.gradients.pop((value, part.stage, microbatch))
                gradient = _sum(gradient, summand)
            output = kept.outputs.get(value)
            if gradient is not None and output is not None and output.requires_grad:
                roots.append(output)
                gradients.append(gradient)
        weight = self.job.loss_weights[microbatch]
        if kept.loss is not None and kept.loss.requires_grad and weight:
            roots.append(kept.loss)
            gradients.append(torch.full_like(kept.loss, weight * self.job.loss_scale))
        if roots:
            torch.autograd.backward(roots, gradients)
        for name, leaf in kept.leaves.items():
            self.gradients[name, stage.index, microbatch] = leaf.grad

    def _send(self, transfer: Transfer) -> None:
        if not transfer.gradient:
            self.endpoint.send(transfer, self.values[transfer.microbatch][transfer.value])
            return
        total = None
        for stage in sorted(self.engine.modules):
            key = transfer.value, stage, transfer.microbatch
            if key in self.gradients:
                total = _sum(total, self.gradients.pop(key))
        self.endpoint.send(transfer, total)


def _sum(total: torch.Tensor | None, summand: torch.Tensor | None) -> torch.Tensor | None:
    """The sum of two gradients, None being zeros; neither is written to."""
    if total is None or summand is None:
        return summand if total is None else total
    return total + summand
