"""Executes one device's program: the stages it holds, micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn
from torch.autograd.graph import GradientEdge

from ..errors import PipelineError, StageError
from ..schedule.actions import Compute, Phase, Receive, Send, SharedSum, Transfer
from ..spec import StageSpec
from ..wording import said
from .batchnorm import Gather, alone
from .blocks import StageBlocks
from .compiled_blocks import CompiledBlocks
from .full_batch import ActionBatch
from .options import ExecutionOptions
from .precision import run_of_device
from .request import RunRequest, StepRequest, Values
from .stage_run import BackwardGraph, StageRun
from .transport import Endpoint
from .wiring import ActionStep, GradientPart, Need, StageWiring, last_backwards

_WORDS = {
    Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward",
    Phase.WEIGHT: "backward for the parameters",
}


@dataclass(slots=True)
class DeviceResult:
    """What a device has made of a job: the terms of losses by micro-batch, and kept values.

    Attributes:
        gradients: of the inputs whose caller wants them, by micro-batch; None is zeros.
    """

    losses: dict[int, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    results: list[Values] = field(default_factory=list)
    gradients: dict[tuple[str, int], torch.Tensor | None] = field(default_factory=dict)


@dataclass
class Engine:
    """The stages of one device, and the order of their work.

    Attributes:
        modules: the stages it holds, by number.
        loss_name: the value that is the loss, where the pipeline has one.
        specs: of the stages, by number.
        run_class: carries out a program; another one may watch it.
        gather: joins statistics with those of the other replicas.
        blocks: by stage, what gathers its weights block by block, where replicas divide them so.
    """

    modules: Mapping[int, nn.Module]
    device: torch.device
    loss_name: str | None
    options: ExecutionOptions
    specs: Sequence[StageSpec]
    gather: Gather = alone
    blocks: Mapping[int, StageBlocks] = field(default_factory=dict)
    run_class: Callable[..., EngineRun] = field(default_factory=lambda: EngineRun)

    @cached_property
    def compiled(self) -> Mapping[int, CompiledBlocks]:
        """The blocks that are compiled, by the number of their stage."""
        if not self.options.compiled:
            return {}
        return {
            index: CompiledBlocks(module, self.specs[index])
            for index, module in self.modules.items()
        }

    def run(
        self,
        steps: Sequence[ActionStep],
        wiring: Sequence[StageWiring],
        request: StepRequest,
        endpoint: Endpoint,
        ended: Callable[[int], None] | None = None,
    ) -> DeviceResult:
        """Execute the program once.

        Args:
            ended: called with every stage whose last backward is done, both parts of it.

        Raises:
            StageError: when a stage raises; the message names stage, micro-batch and action.
            TransportError: when a value does not come.
        """
        run = self.run_class(self, wiring, request, endpoint)
        last = {} if ended is None else last_backwards(steps)
        gradients = torch.enable_grad() if request.work is RunRequest.TRAIN else torch.no_grad()
        with gradients, run_of_device(self.options.precision):
            for position, step in enumerate(steps):
                run.execute(step)
                if ended is not None and position in last:
                    ended(last[position])
            endpoint.flush()
        for stage in run.stages.values():
            stage.finish(self.gather)
        return DeviceResult(run.losses, run.results, run.wanted)


class EngineRun:
    """The state of one execution of a program."""

    def __init__(
        self,
        engine: Engine,
        wiring: Sequence[StageWiring],
        request: StepRequest,
        endpoint: Endpoint,
    ) -> None:
        self.engine = engine
        self.wiring = wiring
        self.request = request
        self.endpoint = endpoint
        self.stages = {n: StageRun(engine, wiring[n], request) for n in engine.modules}
        self.values: list[Values] = [dict(values) for values in request.inputs]
        self.values.extend({} for _ in range(request.microbatches - len(request.inputs)))
        for values, held in zip(self.values, request.held, strict=False):
            values.update(held)
        self.gradients: dict[tuple[str, int, int], torch.Tensor | None] = {}
        self.losses: dict[int, tuple[torch.Tensor, ...]] = {}
        self.results: list[Values] = [{} for _ in range(request.microbatches)]
        self.wanted: dict[tuple[str, int], torch.Tensor | None] = {}

    def execute(self, step: ActionStep) -> None:
        action = step.action
        match action:
            case Compute():
                self._compute(action, step)
            case Send(transfer=transfer):
                self._send(transfer)
            case Receive(transfer=transfer):
                self.endpoint.expect(transfer)
            case SharedSum():
                self.endpoint.exchange(action)
        self._drop(step)

    def take(self, transfer: Transfer) -> torch.Tensor | None:
        """Wait for what another device sends."""
        return self.endpoint.take(transfer)

    def _drop(self, step: ActionStep) -> None:
        for name, microbatch in step.drops:
            self.values[microbatch].pop(name, None)

    def _compute(self, action: Compute, step: ActionStep) -> None:
        stage = self.wiring[action.stage]
        m = action.microbatch
        if stage.joint is None:
            batch = ActionBatch((m,), (self.request.samples[m],), {})
        else:
            batch = ActionBatch(
                tuple(range(self.request.microbatches)), self.request.samples, stage.joint
            )
        try:
            match action.phase:
                case Phase.FORWARD:
                    self._forward(stage, batch, step)
                case Phase.BACKWARD:
                    self._backward(stage, batch)
                case Phase.WEIGHT:
                    self.stages[stage.index].weight(batch.first)
        except PipelineError:
            raise
        except Exception as error:  # whatever the model's code raises
            what = f"micro-batch {m} ({action})" if stage.joint is None else "the mini-batch"
            raise StageError(
                f"stage {action.stage}, {_WORDS[action.phase]} of {what}: {said(error)}"
            ) from error

    def _forward(self, stage: StageWiring, batch: ActionBatch, step: ActionStep) -> None:
        received = [
            batch.join(need.value, [self._received(need, m) for m in batch.microbatches])
            for need in stage.needs
        ]
        self._drop(step)  # what was joined is not held in pieces while the stage computes
        found = self.stages[stage.index].forward(batch.first, received, waits=step.waits)
        for name, output in found.outputs.items():
            for m, piece in zip(batch.microbatches, batch.split(name, output), strict=True):
                self.values[m][name] = piece
                if name in self.request.kept:
                    self.results[m][name] = piece
        if found.losses:
            self.losses[batch.first] = found.losses

    def _received(self, need: Need, microbatch: int) -> torch.Tensor:
        tensor = self.values[microbatch].get(need.value)
        if tensor is None:
            tensor = self._arrived(need.value, need.sender, need.via, microbatch)
        if need.value in self.request.handed_back:
            self.results[microbatch][need.value] = tensor
        return tensor

    def _arrived(self, value: str, sender: int | None, via: int, microbatch: int) -> torch.Tensor:
        if sender is None:
            raise PipelineError(f"the input {value} is missing")
        tensor = self.take(Transfer(value, microbatch, sender, via))
        if tensor is None:
            raise PipelineError(f"nothing arrived for {value}")
        self.values[microbatch][value] = tensor
        return tensor

    def _backward(self, stage: StageWiring, batch: ActionBatch) -> None:
        # Recomputing needs no gradient yet: it comes before waiting for them.
        run = self.stages[stage.index]
        kept = run.graph(batch.first)
        roots, gradients = self._roots(stage, batch, kept)
        for name, gradient in run.backward(batch.first, roots, gradients, kept.leaves).items():
            parted = batch.split_gradient(name, gradient)
            for m, piece in zip(batch.microbatches, parted, strict=True):
                if name in stage.wanted:
                    self.wanted[name, m] = _sum(self.wanted.get((name, m)), piece)
                else:
                    self.gradients[name, stage.index, m] = piece

    def _roots(
        self, stage: StageWiring, batch: ActionBatch, kept: BackwardGraph
    ) -> tuple[list[GradientEdge], list[torch.Tensor]]:
        """Where the gradients of what the stage has made arrive, and these."""
        roots, gradients = [], []
        for value, parts in stage.returned:
            pieces = [self._gradient(stage, value, parts, m) for m in batch.microbatches]
            if value in stage.wanted:
                keys = ((value, m) for m in batch.microbatches)
                self.wanted.update(zip(keys, pieces, strict=True))
                continue
            output = kept.outputs.get(value)
            if output is None:
                continue
            gradient = batch.join_gradients(value, output.like, pieces)
            if gradient is not None:
                roots.append(output.edge)
                gradients.append(gradient)
        if not kept.losses:
            return roots, gradients
        weights = self.request.loss_weights[batch.first]
        for number, (loss, weight) in enumerate(zip(kept.losses, weights, strict=True)):
            if loss is not None and (weight or number in self.request.vanished):
                roots.append(loss.edge)
                # As autograd comes to it when the plain model's weighted loss is scaled: where the
                # loss is of 16 bits that cannot hold the scale it overflows, whatever its weight.
                gradient = torch.full_like(loss.like, self.request.loss_scale)
                gradients.append(gradient if weight == 1 else gradient * weight)
        return roots, gradients

    def _gradient(
        self, stage: StageWiring, value: str, parts: Sequence[GradientPart], microbatch: int
    ) -> torch.Tensor | None:
        """The sum of what the users of a value give back; None is zeros."""
        gradient = None
        for part in parts:
            if part.remote:
                transfer = Transfer(value, microbatch, part.stage, stage.index, gradient=True)
                summand = self.take(transfer)
            else:
                summand = self.gradients.pop((value, part.stage, microbatch))
            gradient = _sum(gradient, summand)
        return gradient

    def _send(self, transfer: Transfer) -> None:
        if not transfer.gradient:
            self.endpoint.send(transfer, self.values[transfer.microbatch][transfer.value])
            return
        total = None
        for stage in sorted(self.engine.modules, reverse=True):
            key = transfer.value, stage, transfer.microbatch
            if key in self.gradients:
                total = _sum(total, self.gradients.pop(key))
        self.endpoint.send(transfer, total)


def _sum(total: torch.Tensor | None, summand: torch.Tensor | None) -> torch.Tensor | None:
    """The sum of two gradients, None being zeros; neither is written to."""
    if total is None or summand is None:
        return summand if total is None else total
    return total + summand
