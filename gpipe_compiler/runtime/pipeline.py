"""The pipeline as its user sees it: a loss per mini-batch, parameters, weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import nn

from .choices import (
    TransportKind,
    listed_devices,
    own_device,
    schedule_kind,
    transport_kind,
)
from .distributed import Network
from .engine import Job, Values
from .errors import UsageError
from .inputs import Inputs, batch_of, bind, rebuild, split
from .programs import Prepared, prepare, spread
from .runners import DistributedRunner, LocalRunner, Result, Runner, default_devices
from .shared import alias_buffers, canonical_first, shared_parameters, trainable_shared
from .spec import PipelineSpec, Reduction, ScheduleKind
from .state import copy_into, named_tensors
from .weights import Weights, build_stage, parameter_kinds
from .wiring import inputs_for, output_leaves

__all__ = ["Pipeline", "TransportKind"]


@dataclass(frozen=True, slots=True)
class _Call:
    """What a call is about; under torchrun the ranks agree on it. No samples: refused."""

    samples: int
    microbatches: int
    training: bool


class Pipeline:
    """A model in stages, trained and run micro-batch by micro-batch on several devices.

    In one process a thread works for each device. Under torchrun each process holds its share of
    the stages; rank 0's inputs are used, and every rank makes the same calls.

        pipe = Pipeline(spec, weights)
        loss = pipe.step(inputs, target)     # gradients are in .grad, as after backward()
        optimizer.step()

    Args:
        weights: the folder of weights; None for stages that initialise themselves.
        devices: where the stages compute, in order; their number divides that of the stages. One
            per stage by default. Under torchrun, this rank's device, or that of every rank.
        microbatches, schedule: those the package was compiled with, unless given.
        seed: of dropout and the like, and of weights that are made here.
        transport: distributed under torchrun, local otherwise, unless given.
        timeout_s: seconds after which a value from another process is given up.

    Raises:
        UsageError: for arguments that do not fit the pipeline.
        WeightsError: when the weights are not those of this pipeline.
        ScheduleError, DeadlockError: when the package's schedule is wrong.
    """

    def __init__(
        self,
        spec: PipelineSpec,
        weights: Path | None,
        *,
        devices: Sequence[torch.device | str] | torch.device | str | None = None,
        microbatches: int | None = None,
        schedule: ScheduleKind | str | None = None,
        seed: int = 0,
        transport: TransportKind | str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self.spec = spec
        self.seed = seed
        self.microbatches = spec.microbatches if microbatches is None else microbatches
        self.schedule = spec.schedule if schedule is None else schedule_kind(schedule)
        kind = transport_kind(transport)
        given = listed_devices(devices)
        self._network: Network | None = None
        if kind is TransportKind.DISTRIBUTED:
            self._network = Network.join(own_device(given), timeout_s)
            count = self._network.size
        else:
            given = given or default_devices(len(spec.stages))
            count = len(given)
        placement = spread(len(spec.stages), count)
        owners = trainable_shared(spec, lambda stage: parameter_kinds(spec.stages[stage]))
        self.placement = placement
        self._inference = {self.microbatches: prepare(spec, placement, self.microbatches, None, {})}
        self._training: Prepared | None = None
        if spec.loss is not None:
            self._training = prepare(spec, placement, self.microbatches, self.schedule, owners)
        store = None if weights is None else Weights.open(Path(weights))
        self.stages: dict[int, nn.Module] = {}
        for index, stage in enumerate(spec.stages):
            if self._network is None:
                self.stages[index] = build_stage(stage, store, given[placement[index]], seed)
            elif placement[index] == self._network.rank:
                self.stages[index] = build_stage(stage, store, self._network.device, seed)
        self._shared = shared_parameters(spec, self.stages)
        alias_buffers(spec, self.stages)
        self._devices = given
        self._runner = self._make_runner(given)
        if self._network is not None and store is None:
            self._share_initial(owners, placement)
        self._no_parameter = nn.Parameter(torch.empty(0))
        self._step = 0
        self.train(spec.loss is not None)

    def _make_runner(self, devices: Sequence[torch.device]) -> Runner:
        if self._network is None:
            return LocalRunner(self.spec, self.stages, devices)
        shared = {item.name: item for item in self._shared}
        return DistributedRunner(self.spec, self.stages, self._network, shared)

    def _share_initial(
        self, owners: Mapping[str, tuple[int, ...]], placement: Sequence[int]
    ) -> None:
        """Tied weights that were made here are those of their first owner."""
        assert self._network is not None
        kept = {item.name: item for item in self._shared}
        for name, stages in owners.items():
            source = placement[stages[0]]
            facts = parameter_shape(self.spec, stages[0], name)
            mine = kept[name].canonical.detach() if name in kept else torch.empty(facts)
            value = self._network.broadcast(mine, source, f"the initial {name}")
            if name in kept:
                with torch.no_grad():
                    kept[name].canonical.copy_(value)

    @property
    def rank(self) -> int:
        """This process's number; 0 for the only one."""
        return 0 if self._network is None else self._network.rank

    @property
    def threads(self) -> int:
        """Intra-op threads that a stage computes with on a CPU."""
        return self._runner.threads

    def step(self, inputs: Inputs = None, target: object = None) -> torch.Tensor:
        """Forward and backward of a mini-batch: adds to `.grad` of every parameter.

        The loss and the gradients are those of the whole mini-batch: with a mean loss the mean
        over micro-batches. Under torchrun every rank gets the loss, and only rank 0 passes inputs.

        Args:
            inputs: a tensor; a tuple of positional arguments; a dict of keyword arguments; or the
                pair (tuple, dict).
            target: what the loss compares with.

        Raises:
            UsageError: for inputs that do not fit.
            StageError: when the model's code raises.
            TransportError: when another process is gone.
        """
        return self.step_with_outputs(inputs, target, outputs=False)[0]

    def step_with_outputs(
        self, inputs: Inputs = None, target: object = None, *, outputs: bool = True
    ) -> tuple[torch.Tensor, object]:
        """As `step`, and what the model returns besides; under torchrun on rank 0 only."""
        if self._training is None or self.spec.loss is None:
            raise UsageError(
                f"{self.spec.name} was compiled for inference, it has no loss",
                hint="compile it with --mode train",
            )
        mean = self.spec.loss.reduction is Reduction.MEAN
        weight = 1.0 / self.microbatches if mean else 1.0
        for shared in self._shared:
            shared.spread()
            shared.begin()
        try:
            result, bound = self._run(inputs, target, weight, outputs)
        finally:
            for shared in self._shared:
                shared.finish()
        self._step += 1
        if result.loss is None:
            raise UsageError(f"{self.spec.name} made no loss")
        return result.loss, self._outputs(result, bound) if outputs else None

    def __call__(self, inputs: Inputs = None) -> object:
        """What the model returns, without gradients; under torchrun on rank 0, None elsewhere.

        Stages are in train or eval mode as `train()` and `eval()` say. An output that belongs to
        the batch as a whole is the mean over micro-batches when it is a floating scalar, otherwise
        that of the last micro-batch.
        """
        for shared in self._shared:
            shared.spread()
        result, bound = self._run(inputs, None, None, True)
        return self._outputs(result, bound)

    def _run(
        self,
        inputs: Inputs,
        target: object,
        weight: float | None,
        outputs: bool,
    ) -> tuple[Result, Values]:
        if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
            raise UsageError(
                "autocast around a pipeline does not reach its stages",
                hint="use autocast inside the model, and compile it again",
            )
        training = weight is not None
        bound: Values = {}
        parts: list[Values] = []
        call = _Call(0, 0, training)
        if self.rank == 0:
            try:
                bound = bind(inputs, target, self.spec, inputs_for(self.spec, training))
                microbatches = self._microbatches(batch_of(bound, self.spec), training)
                parts, samples = split(bound, self.spec, microbatches)
                call = _Call(samples, microbatches, training)
            except UsageError:
                self._announce(call)
                raise
        call = self._announce(call)
        kept = frozenset(leaf.value for leaf in output_leaves(self.spec.outputs)) - {
            source.name for source in self.spec.inputs
        }
        job = Job(
            call.microbatches,
            parts,
            weight,
            kept if outputs else frozenset(),
            self.seed,
            self._step,
        )
        return self._runner.run(self._prepared(call), job, call.samples), bound

    def _microbatches(self, batch: int | None, training: bool) -> int:
        """Inference splits a batch that does not divide as planned into fewer micro-batches."""
        if training or not batch:
            return self.microbatches
        return next(m for m in range(self.microbatches, 0, -1) if batch % m == 0)

    def _prepared(self, call: _Call) -> Prepared:
        if call.training:
            assert self._training is not None  # step has looked
            return self._training
        if call.microbatches not in self._inference:
            self._inference[call.microbatches] = prepare(
                self.spec, self.placement, call.microbatches, None, {}
            )
        return self._inference[call.microbatches]

    def _announce(self, call: _Call) -> _Call:
        """Under torchrun: rank 0 tells the others what is coming."""
        if self._network is None:
            return call
        header = torch.tensor([call.samples, call.microbatches, int(call.training)])
        samples, microbatches, training = self._network.broadcast(header, 0, "the header").tolist()
        if samples == 0 and self.rank != 0:
            raise UsageError("rank 0 refused its inputs; its own message says why")
        if bool(training) != call.training:
            raise UsageError(
                f"rank {self.rank} and rank 0 do not make the same call",
                hint="every rank calls step, or every rank calls the pipeline",
            )
        return _Call(samples, microbatches, bool(training))

    def _outputs(self, result: Result, bound: Values) -> object:
        if self.rank != 0:
            return None
        return rebuild(self.spec.outputs, {**bound, **result.outputs})

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters held here under the model's own names, each once."""
        hidden = canonical_first(self._shared)
        seen: set[str] = set()
        for index, module in self.stages.items():
            names = self.spec.stages[index].state
            for own, parameter in module.named_parameters():
                name = names.get(own, own)
                if id(parameter) not in hidden and name not in seen:
                    seen.add(name)
                    yield name, parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters held here, each once: what an optimizer is made of.

        A process whose stages train none gives an empty one besides, that nothing uses: the same
        loop runs in every process, and torch's optimizers refuse an empty list.
        """
        found = [parameter for _, parameter in self.named_parameters()]
        if not any(parameter.requires_grad for parameter in found):
            found.append(self._no_parameter)
        return iter(found)

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The buffers held here under the model's own names, each once."""
        seen: set[str] = set()
        for index, module in self.stages.items():
            names = self.spec.stages[index].state
            for own, buffer in module.named_buffers():
                name = names.get(own, own)
                if name not in seen:
                    seen.add(name)
                    yield name, buffer

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What is held here, as the model's own `state_dict` would name it, tied names included."""
        return named_tensors(self.spec, self.stages)

    def gather_state_dict(self) -> dict[str, torch.Tensor]:
        """The whole state on rank 0, on the CPU; empty elsewhere. Every rank calls it."""
        if self._network is None:
            return self.state_dict()
        return self._network.gather(self.state_dict())

    def load_state_dict(self, state: Mapping[str, torch.Tensor], *, strict: bool = True) -> None:
        """Take over the tensors of a `state_dict` of the model or of a pipeline of it.

        Args:
            strict: whether every name held here must be there, and every name there be known.

        Raises:
            UsageError: naming what is missing, unknown, or of another shape.
        """
        copy_into(self.spec, self.stages, state, strict=strict)

    def train(self, mode: bool = True) -> Pipeline:
        """Put every stage into training mode."""
        for module in self.stages.values():
            module.train(mode)
        return self

    def eval(self) -> Pipeline:
        """Put every stage into evaluation mode."""
        return self.train(False)

    @property
    def training(self) -> bool:
        """Whether the stages are in training mode."""
        return all(module.training for module in self.stages.values())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        for module in self.stages.values():
            module.zero_grad(set_to_none)

    def close(self) -> None:
        """End the threads, or leave the process group."""
        self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def describe(self) -> str:
        """The pipeline in one line."""
        if self._network is None:
            devices = ", ".join(dict.fromkeys(map(str, self._devices)))
            count = len(self._devices)
            where = f"{count} thread{'s' if count > 1 else ''} on {devices}"
        else:
            where = f"{self._network.size} processes on {self._network.device.type}"
        return (
            f"{self.spec.name}: {len(self.spec.stages)} stages, {self.microbatches} micro-batches, "
            f"{self.schedule.value}, {where}"
        )

    def __repr__(self) -> str:
        return f"Pipeline({self.describe()})"


def parameter_shape(spec: PipelineSpec, stage: int, name: str) -> tuple[int, ...]:
    """The sizes of a parameter, by the model's name."""
    with torch.device("meta"):
        module = spec.stages[stage].module()
    names = spec.stages[stage].state
    for own, parameter in module.named_parameters():
        if names.get(own, own) == name:
            return tuple(parameter.shape)
    raise KeyError(name)
