"""The pipeline as its user sees it: a loss per mini-batch, parameters, weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import nn

from .agreement import Call, agree
from .choices import (
    TransportKind,
    chosen,
    listed_devices,
    manner,
    own_device,
    transport_kind,
)
from .clipping import NormClipping, parameter_names, told_here
from .distributed import Network
from .errors import UsageError
from .held import HeldStages
from .inputs import Inputs, batch_of, bind, rebuild, split
from .job import Job, RandomKey, Values, Work
from .joint import joint_stages
from .programs import Prepared, prepare, spread
from .reducer import Reducer, collected, share_initial
from .replicas import Replicas
from .runners import DistributedRunner, LocalRunner, Result, Runner, default_devices
from .scaler import OverRanks, PipelineScaler, alone, check_weights
from .sharding import share_of
from .shared import trainable_shared
from .spec import BatchNorm, PipelineSpec, Precision, Remat, ScheduleKind
from .weighing import Scales
from .weights import Weights, build_stage, parameter_kinds
from .wiring import inputs_for, output_leaves

__all__ = ["Pipeline", "TransportKind"]


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
        microbatches, schedule, remat, batchnorm, precision: as the package was compiled, unless
            given; `remat` is then that of every stage.
        seed: of dropout and the like, and of weights that are made here.
        transport: distributed under torchrun, local otherwise, unless given.
        data_parallel: under torchrun, the replicas of the pipeline that train together, each with
            its share of every mini-batch.
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
        remat: Remat | str | None = None,
        batchnorm: BatchNorm | str | None = None,
        precision: Precision | str | None = None,
        seed: int = 0,
        transport: TransportKind | str | None = None,
        data_parallel: int = 1,
        timeout_s: float = 600.0,
    ) -> None:
        self.spec = spec
        self.seed = seed
        self.step_number = 0
        self.microbatches = spec.microbatches if microbatches is None else microbatches
        self.schedule = chosen(ScheduleKind, "schedule", schedule, spec.schedule)
        self.manner = manner(spec, batchnorm, precision, remat)
        given = listed_devices(devices)
        self._replicas: Replicas | None = None
        if transport_kind(transport) is TransportKind.DISTRIBUTED:
            self._replicas = Replicas.join(own_device(given), timeout_s, data_parallel)
        elif data_parallel != 1:
            raise UsageError(
                f"{data_parallel} replicas need a process for every device of each",
                hint="start them with torchrun --nproc-per-node",
            )
        else:
            given = given or default_devices(len(spec.stages))
        self._devices = given
        count = len(given) if self.network is None else self.network.size
        self.placement = spread(len(spec.stages), count)
        self._owners = trainable_shared(spec, lambda stage: parameter_kinds(spec.stages[stage]))
        self._mode = spec.loss is not None
        self._prepared: dict[tuple[Work, int, frozenset[int]], Prepared] = {}
        for work in (Work.INFER,) if spec.loss is None else (Work.INFER, Work.TRAIN):
            self._programs(work, self.microbatches)
        store = None if weights is None else Weights.open(Path(weights))
        self.held = HeldStages(spec, self._build(store))
        self._scales = Scales(spec, store, seed)
        self.scaler = self._make_scaler()
        self._reducer = self._make_reducer()
        self._runner = self._make_runner()
        if self._replicas is not None and store is None:
            share_initial(self._replicas, self.spec, self.held, self._owners, self.placement)
        self.train(self._mode)

    def _build(self, store: Weights | None) -> dict[int, nn.Module]:
        """The stages that this process holds, with their weights."""
        if self.network is None:
            where = {index: self._devices[d] for index, d in enumerate(self.placement)}
        else:
            mine = [i for i, d in enumerate(self.placement) if d == self.network.rank]
            where = dict.fromkeys(mine, self.network.device)
        stages = self.spec.stages
        return {i: build_stage(stages[i], store, device, self.seed) for i, device in where.items()}

    def _make_scaler(self) -> PipelineScaler:
        enabled = self.manner.precision is Precision.FP16 and self.spec.loss is not None
        if enabled:
            check_weights(self.held.modules)
        device = self._devices[0] if self.network is None else self.network.device
        return PipelineScaler(device, enabled=enabled, over_ranks=self._over_ranks)

    @property
    def _over_ranks(self) -> OverRanks:
        """The sum over all processes, those of other replicas too. No reference to the pipeline."""
        return alone if self.world is None else self.world.sum

    def _make_runner(self) -> Runner:
        if self._replicas is None:
            return LocalRunner(self.spec, self.held.modules, self._devices, self.manner)
        shared = {item.name: item for item in self.held.shared}
        return DistributedRunner(
            self.spec, self.held.modules, self._replicas, shared, self.manner, self._reducer
        )

    def _make_reducer(self) -> Reducer | None:
        if self._replicas is None or self._replicas.count == 1:
            return None
        owners = {
            name: tuple(sorted({self.placement[stage] for stage in stages}))
            for name, stages in self._owners.items()
        }
        return Reducer(self._replicas, self.held.unshared(), self.held.shared, owners)

    @property
    def stages(self) -> Mapping[int, nn.Module]:
        """The stages held here, by number."""
        return self.held.modules

    @property
    def rank(self) -> int:
        """This process's number; 0 for the only one."""
        return 0 if self._replicas is None else self._replicas.world.rank

    @property
    def network(self) -> Network | None:
        """The processes of this pipeline (of this replica of it); None in one process."""
        return None if self._replicas is None else self._replicas.pipeline

    @property
    def world(self) -> Network | None:
        """All processes, those of other replicas too; None in one process."""
        return None if self._replicas is None else self._replicas.world

    @property
    def replicas(self) -> int:
        """How many replicas of the pipeline train together."""
        return 1 if self._replicas is None else self._replicas.count

    @property
    def replica(self) -> int:
        """The number of the replica that this process belongs to."""
        return 0 if self._replicas is None else self._replicas.number

    @property
    def feeds(self) -> bool:
        """Whether this process passes inputs: the first of each replica does."""
        return self.network is None or self.network.rank == 0

    @property
    def threads(self) -> int:
        """Intra-op threads that a stage computes with on a CPU."""
        return self._runner.threads

    def step(
        self, inputs: Inputs = None, target: object = None, *, weight: float = 1.0
    ) -> torch.Tensor:
        """Forward and backward of a mini-batch: adds to `.grad` of every parameter.

        The loss and the gradients are those of the whole mini-batch, also where micro-batches
        differ in size or in what their loss is a mean over. Under torchrun every rank gets the
        loss, and only rank 0 passes inputs.

        Args:
            inputs: a tensor; a tuple of positional arguments; a dict of keyword arguments; or the
                pair (tuple, dict). A batch of fewer samples than micro-batches is run as fewer.
            target: what the loss compares with.
            weight: of this mini-batch's gradients, as 1/N when they are accumulated over N of them;
                the loss is returned without it.

        Raises:
            UsageError: for inputs that do not fit.
            StageError: when the model's code raises.
            TransportError: when another process is gone.
        """
        return self.step_with_outputs(inputs, target, weight=weight, outputs=False)[0]

    def step_with_outputs(
        self,
        inputs: Inputs = None,
        target: object = None,
        *,
        weight: float = 1.0,
        outputs: bool = True,
    ) -> tuple[torch.Tensor, object]:
        """As `step`, and what the model returns besides; under torchrun on rank 0 only."""
        with collected(self.held.shared, self._reducer):
            result, bound = self._run(Work.TRAIN, inputs, target, outputs, weight)
        self.step_number += 1
        return self._loss(result), self._outputs(result, bound) if outputs else None

    def evaluate(self, inputs: Inputs = None, target: object = None) -> torch.Tensor:
        """The loss of a mini-batch, without gradients; every rank gets it.

        Stages are in train or eval mode as `train()` and `eval()` say.
        """
        return self.evaluate_with_outputs(inputs, target, outputs=False)[0]

    def evaluate_with_outputs(
        self, inputs: Inputs = None, target: object = None, *, outputs: bool = True
    ) -> tuple[torch.Tensor, object]:
        """As `evaluate`, and what the model returns besides; under torchrun on rank 0 only."""
        result, bound = self._run(Work.EVALUATE, inputs, target, outputs)
        return self._loss(result), self._outputs(result, bound) if outputs else None

    def __call__(self, inputs: Inputs = None) -> object:
        """What the model returns, without gradients; under torchrun on rank 0, None elsewhere.

        Stages are in train or eval mode as `train()` and `eval()` say. An output that belongs to
        the batch as a whole is the mean over samples when it is a floating scalar, otherwise that
        of the last micro-batch.
        """
        result, bound = self._run(Work.INFER, inputs, None, True)
        return self._outputs(result, bound)

    def _run(
        self, work: Work, inputs: Inputs, target: object, outputs: bool, weight: float = 1.0
    ) -> tuple[Result, Values]:
        self._check_call(work)
        for shared in self.held.shared:
            shared.spread()
        call, bound, parts = Call(work, self._mode), Values(), list[Values]()
        if self.feeds:
            call, bound, parts = self._offered(work, inputs, target)
        call = agree(self._replicas, call, self.microbatches)
        made = {leaf.value for leaf in output_leaves(self.spec.outputs)}
        prepared = self._programs(work, len(call.sizes))
        shares = prepared.loss_weights(self._scales.shares(call.loss_weights, call.total))
        job = Job(
            work=work,
            sizes=call.sizes,
            inputs=parts,
            # The mean over the replicas' losses and gradients is the sum of their shares.
            loss_weights=tuple(self.replicas * share for share in shares),
            kept=frozenset(made - {x.name for x in self.spec.inputs} if outputs else ()),
            random=RandomKey(self.seed, self.step_number, call.first),
            loss_scale=weight * self.scaler.get_scale() if work is Work.TRAIN else 1.0,
        )
        return self._runner.run(prepared, job), bound

    def _offered(
        self, work: Work, inputs: Inputs, target: object
    ) -> tuple[Call, Values, list[Values]]:
        """What this process's inputs come to: the call, and its tensors whole and split."""
        try:
            bound = bind(inputs, target, self.spec, inputs_for(self.spec, work))
            if self.replicas > 1 and batch_of(bound, self.spec) == 0:
                return Call(work, self._mode), bound, []
            parts, sizes = split(bound, self.spec, self.microbatches)
        except UsageError as error:
            return Call(work, self._mode, refusal=error), {}, []
        weights = self._scales.weigh(parts, sizes) if work.makes_loss else ()
        return Call(work, self._mode, sizes, weights), bound, parts

    def _check_call(self, work: Work) -> None:
        if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
            raise UsageError(
                "autocast around a pipeline does not reach its stages",
                hint="make the pipeline with precision='bf16' or 'fp16'",
            )
        if work.makes_loss and self.spec.loss is None:
            raise UsageError(
                f"{self.spec.name} was compiled for inference, it has no loss",
                hint="compile it with --mode train",
            )

    def _programs(self, work: Work, microbatches: int) -> Prepared:
        exact = self.manner.batchnorm is BatchNorm.EXACT and self._mode
        joint = joint_stages(self.spec.stages, self.replicas) if exact else frozenset()
        key = work, microbatches, joint
        if key not in self._prepared:
            self._prepared[key] = prepare(
                self.spec, self.placement, microbatches, work, self.schedule, self._owners, joint
            )
        return self._prepared[key]

    def _loss(self, result: Result) -> torch.Tensor:
        if result.loss is None:
            raise UsageError(f"{self.spec.name} made no loss")
        return result.loss

    def _outputs(self, result: Result, bound: Values) -> object:
        if not self.feeds:
            return None
        return rebuild(self.spec.outputs, {**bound, **result.outputs})

    def share(self, numbers: Sequence[float], what: str) -> tuple[float, ...]:
        """Rank 0's numbers on every rank, which all call this with as many.

        Args:
            what: they are, for the message of a rank that waits for them in vain.
        """
        if self.world is None:
            return tuple(numbers)
        row = torch.tensor(list(numbers), dtype=torch.float64)
        return tuple(self.world.broadcast(row, 0, what).tolist())

    def loss_weight(self, inputs: Inputs = None, target: object = None) -> float:
        """What the loss of a mini-batch is a mean over: samples, tokens, ...; 1 for a sum.

        Mini-batches weighted by it have the mean loss of all of them as one.

        Raises:
            UsageError: for inputs that do not fit.
        """
        bound = bind(inputs, target, self.spec, inputs_for(self.spec, Work.TRAIN))
        parts, sizes = split(bound, self.spec, 1)
        return sum(self._scales.weigh(parts, sizes))

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters held here under the model's own names, each once."""
        return self.held.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters held here, each once: what an optimizer is made of.

        A process whose stages train none gives an empty one besides, that nothing uses: the same
        loop runs in every process, and torch's optimizers refuse an empty list.
        """
        return self.held.parameters()

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The buffers held here under the model's own names, each once."""
        return self.held.named_buffers()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What is held here, as the model's own `state_dict` would name it, tied names included."""
        return self.held.state_dict()

    def gather_state_dict(self) -> dict[str, torch.Tensor]:
        """The whole state on rank 0, on the CPU; empty elsewhere. Every rank calls it."""
        if self.network is None:
            return self.state_dict()
        return self.network.gather(self.state_dict()) if self.replica == 0 else {}

    def load_state_dict(self, state: Mapping[str, torch.Tensor], *, strict: bool = True) -> None:
        """Take over the tensors of a `state_dict` of the model or of a pipeline of it.

        Args:
            strict: whether every name held here must be there, and every name there be known.

        Raises:
            UsageError: naming what is missing, unknown, or of another shape.
        """
        self.held.load_state_dict(state, strict=strict)
        self._scales.load(state)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around steps that accumulate gradients: they are not averaged over replicas yet.

        The next step outside averages all that has been accumulated. Every rank uses it alike.
        Without it the gradients are the same, but are averaged after every step.
        """
        if self._reducer is None:
            yield
            return
        before, self._reducer.paused = self._reducer.paused, True
        try:
            yield
        finally:
            self._reducer.paused = before

    def shard(self, inputs: Inputs = None, target: object = None) -> tuple[Inputs, object]:
        """This replica's share of a mini-batch that every replica has whole: consecutive samples.

            loss = pipe.step(*pipe.shard(inputs, target))

        Replicas then do together what one pipeline with `replicas` times the micro-batches does.
        A batch with fewer samples than replicas leaves some none, which `step` refuses.
        """
        if self.replicas == 1 or not self.feeds:
            return inputs, target
        call = inputs, target
        return share_of(self.spec, call, self.replica, self.replicas, self.microbatches)

    def train(self, mode: bool = True) -> Pipeline:
        """Put every stage into training mode."""
        self._mode = mode
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

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients so that their norm is at most `max_norm`; gives it as it was.

        That of torch.nn.utils.clip_grad_norm_ on the whole model: over all stages, ranks and
        devices, a tied parameter once. Every rank calls it and gets the same. Under fp16 after
        `scaler.unscale_(optimizer)`.

        Raises:
            AgreedError: on every rank, when a gradient is sparse; when the norm is not finite and
                `error_if_nonfinite`.
        """
        first = self._replicas is None or self._replicas.number == 0
        clipping = NormClipping(
            parameter_names(self.spec),
            told_here(self.spec, self.stages) if first else frozenset(),
            self._devices[0] if self.network is None else self.network.device,
            first=self.rank == 0,
            over_ranks=self._over_ranks,
        )
        parameters = dict(self.named_parameters())
        return clipping(parameters, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

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
        if self.network is None:
            devices = ", ".join(dict.fromkeys(map(str, self._devices)))
            count = len(self._devices)
            where = f"{count} thread{'s' if count > 1 else ''} on {devices}"
        else:
            where = f"{self.network.size} processes on {self.network.device.type}"
        if self.replicas > 1:
            where = f"{self.replicas} replicas of {where}"
        return (
            f"{self.spec.name}: {len(self.spec.stages)} stages, {self.microbatches} micro-batches, "
            f"{self.schedule.value}, {where}"
        )

    def __repr__(self) -> str:
        return f"Pipeline({self.describe()})"
