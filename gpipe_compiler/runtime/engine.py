"""Executes one device's program: the stages it holds, micro-batch by micro-batch."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from .choices import Manner
from .errors import PipelineError, StageError
from .job import Job, Values, Work
from .random import SeededRandom
from .schedule.actions import Compute, Phase, Receive, Send, SharedSum, Transfer
from .transport import Endpoint
from .wiring import StageWiring, Step


@dataclass(slots=True)
class Outcome:
    """What a device has made of a job: losses by micro-batch, and kept values of each."""

    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    results: list[Values] = field(default_factory=list)


@dataclass(slots=True)
class _InFlight:
    """What a stage keeps from a micro-batch's forward until its backward."""

    leaves: Values
    outputs: Values
    loss: torch.Tensor | None


class Engine:
    """The stages of one device, and the order of their work.

    Args:
        modules: the stages it holds, by number.
        device: where its stages compute.
        loss_name: the value that is the loss, where the pipeline has one.
        manner: how its stages compute.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        device: torch.device,
        loss_name: str | None,
        manner: Manner,
    ) -> None:
        self.modules = modules
        self.device = device
        self.loss_name = loss_name
        self.manner = manner

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
        self.training = job.work is Work.TRAIN
        self.values: list[Values] = [dict(values) for values in job.inputs]
        self.values.extend({} for _ in range(job.microbatches - len(job.inputs)))
        self.gradients: dict[tuple[str, int, int], torch.Tensor | None] = {}
        self.in_flight: dict[tuple[int, int], _InFlight] = {}
        self.losses: dict[int, torch.Tensor] = {}
        self.results: list[Values] = [{} for _ in range(job.microbatches)]

    def execute(self, step: Step) -> None:
        action = step.action
        match action:
            case Compute():
                microbatch = action.microbatch
                self._compute(action)
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

    def _compute(self, action: Compute) -> None:
        stage = self.wiring[action.stage]
        try:
            if action.phase is Phase.FORWARD:
                self._forward(stage, action.microbatch)
            else:
                self._backward(stage, action.microbatch)
        except PipelineError:
            raise
        except Exception as error:  # whatever the model's code raises
            raise StageError(
                f"stage {action.stage}, {action.phase.name.lower()} of micro-batch "
                f"{action.microbatch} ({action}): {type(error).__name__}: {error}"
            ) from error

    def _forward(self, stage: StageWiring, microbatch: int) -> None:
        values = self.values[microbatch]
        module = self.engine.modules[stage.index]
        arguments, leaves = self._arguments(stage, microbatch)
        with self._random(stage, module, microbatch):
            result = module(*arguments[: stage.arguments])
            names = stage.spec.outputs
            outputs: Values = dict(
                zip(names, (result,) if len(names) == 1 else result, strict=True)
            )
            loss = self._loss(stage, module, arguments, outputs)
        for name, output in outputs.items():
            values[name] = output.detach() if self.training else output
            if name in self.job.kept:
                self.results[microbatch][name] = values[name]
        if loss is not None:
            self.losses[microbatch] = loss.detach()
        if self.training:
            roots = {name: outputs[name] for name, _ in stage.returned if name in outputs}
            self.in_flight[stage.index, microbatch] = _InFlight(leaves, roots, loss)

    def _arguments(self, stage: StageWiring, microbatch: int) -> tuple[list[torch.Tensor], Values]:
        """What a stage reads: tensors that need a gradient become leaves of its own graph."""
        values = self.values[microbatch]
        arguments = []
        leaves: Values = {}
        for need in stage.needs:
            tensor = values.get(need.value)
            if tensor is None:
                tensor = self._arrived(need.value, need.sender, need.via, microbatch)
            if need.gradient:
                tensor = tensor.detach().requires_grad_()
                leaves[need.value] = tensor
            arguments.append(tensor)
        return arguments, leaves

    def _arrived(self, value: str, sender: int | None, via: int, microbatch: int) -> torch.Tensor:
        if sender is None:
            raise PipelineError(f"the input {value} is missing")
        tensor = self.endpoint.take(Transfer(value, microbatch, sender, via))
        if tensor is None:
            raise PipelineError(f"nothing arrived for {value}")
        self.values[microbatch][value] = tensor
        return tensor

    def _random(
        self, stage: StageWiring, module: nn.Module, microbatch: int
    ) -> contextlib.AbstractContextManager[object]:
        if not (stage.spec.random_ops and module.training):
            return contextlib.nullcontext()
        key = self.job.random
        return SeededRandom(key.seed, key.step, key.first + microbatch, stage.spec.random_ops)

    def _loss(
        self,
        stage: StageWiring,
        module: nn.Module,
        arguments: Sequence[torch.Tensor],
        outputs: Values,
    ) -> torch.Tensor | None:
        name = self.engine.loss_name
        if not stage.makes_loss or name is None:
            return None
        if name in outputs:
            return outputs[name]
        known = dict(zip((need.value for need in stage.needs), arguments, strict=True)) | outputs
        loss: torch.Tensor = module.loss(*(known[item] for item in stage.spec.loss_inputs))  # type: ignore[operator]  # the last stage of a pipeline with a loss has this method
        return loss

    def _backward(self, stage: StageWiring, microbatch: int) -> None:
        kept = self.in_flight.pop((stage.index, microbatch))
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
