"""The pipeline as its user sees it: a loss per mini-batch, parameters, weights."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Self

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from ..errors import UsageError
from ..spec import (
    BatchNorm,
    PipelineSpec,
    Precision,
    Remat,
    ScheduleKind,
    WeightSharding,
)
from ..wording import counted
from .building import build_stage
from .calls import Calls
from .compiled_blocks import check_compiler, refuse_compiled
from .distributed import Network
from .execution import Execution
from .gradients import PipelineScaler, check_weights, clip_gradients, first_stages
from .inputs import Inputs
from .local_stages import LocalStages, trainable_shared
from .loss_weights import LossWeigher
from .options import (
    TransportKind,
    check_numbers,
    chosen,
    execution_options,
    refuse_parts,
    refuse_split,
    weight_sharding,
)
from .programs import ProgramCache
from .reducer import share_initial
from .request import RunRequest
from .session import Session
from .shard_reducer import blocks_by_stage, make_reducer
from .sharding import checksum_of, share_of
from .shards import divide
from .stored_weights import Weights
from .topology import Topology
from .typed import LONGEST_WAIT_S

__all__ = ["Pipeline", "TransportKind"]


class Pipeline(Calls):
    """A model in stages, trained and run micro-batch by micro-batch on several devices.

    In one process a thread works for each device. Under torchrun each process holds its share of
    the stages; rank 0's inputs are used, and every rank makes the same calls.

        pipe = Pipeline(spec, weights)
        loss = pipe.step(inputs, target)     # gradients are in .grad, as after backward()
        optimizer.step()

    Args:
        weights: the folder of weights, or where else they are stored; None for stages that
            initialise themselves.
        devices: where the stages compute, in order, as many as the schedule can have. As planned
            by default. Under torchrun, this rank's device, or that of every rank.
        microbatches, schedule, remat, batchnorm, precision: as the package was compiled, unless
            given; `remat` is then that of every stage.
        seed: of dropout and the like, and of weights that are made here.
        transport: distributed under torchrun, local otherwise, unless given.
        data_parallel: under torchrun, the replicas of the pipeline that train together, each with
            its share of every mini-batch.
        sharding: what these divide among them of weights and optimizer; as the package was compiled
            by default. Divided parameters are DTensors, and so are their gradients.
        compile_blocks: run the blocks of stages through torch.compile (`compiled_blocks.py`).
        timeout_s: seconds after which a value from another process is given up.

    Raises:
        UsageError: for arguments that do not fit the pipeline.
        PipelineError: where torch.compile does not work and is asked for.
        WeightsError: when the weights are not those of this pipeline.
        ScheduleError, DeadlockError: when the package's schedule is wrong.
    """

    def __init__(
        self,
        spec: PipelineSpec,
        weights: Path | Weights | None,
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
        sharding: WeightSharding | str | None = None,
        compile_blocks: bool = False,
        timeout_s: float = 600.0,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.seed = seed
        self.step_number = 0
        self._calls = 0
        self._read = 0
        self.microbatches = spec.microbatches if microbatches is None else microbatches
        self.schedule = chosen(ScheduleKind, "schedule", schedule, spec.schedule)
        self.options = execution_options(spec, batchnorm, precision, remat, compiled=compile_blocks)
        check_numbers(seed, self.microbatches, timeout_s)
        refuse_parts(spec, self.microbatches * data_parallel)
        self.sharding = weight_sharding(spec, sharding, data_parallel)
        refuse_split(self.sharding, self.schedule)
        if compile_blocks:
            refuse_compiled(self.schedule, self.sharding)
        wait_s = min(timeout_s, LONGEST_WAIT_S)
        self._topology = Topology.gather(
            spec, self.schedule, devices, transport, data_parallel, wait_s
        )
        if compile_blocks:
            check_compiler(self._topology.devices)
        self._owners = trainable_shared(spec)
        trains = spec.loss is not None
        self._draws_in_eval = any(stage.random_in_eval for stage in spec.stages)
        self._programs = ProgramCache(
            spec, self._topology, self.schedule, self.options.batchnorm, self._owners
        )
        for work in (RunRequest.INFER, *([RunRequest.TRAIN] if trains else [])):
            self._programs.of(work, self.microbatches, training=trains)
        store = Weights.open(Path(weights)) if isinstance(weights, str | Path) else weights
        where = self._topology.where.items()
        self._weigher = LossWeigher(spec, store, seed)
        self._owns_topology = True
        modules = {i: build_stage(spec.stages[i], store, d, seed) for i, d in where}
        if store is None or store.anew:
            made = None if store is None else store.anew
            share_initial(self._topology, LocalStages(spec, modules), self._owners, made)
        self._assemble(modules)
        self.train(trains)

    def _assemble(self, modules: Mapping[int, nn.Module]) -> None:
        """Make what runs these stages."""
        spec = self.spec
        self.local_stages = LocalStages(spec, modules)
        self._shards = None
        if self.sharding is not WeightSharding.NONE:
            self._shards = divide(
                *(spec, self._topology, modules, self.local_stages.copies),
                by_block=self.sharding is WeightSharding.FULL,
                shared=self._owners,
            )
        with self._gathered():
            if self._shards is not None:  # of the weights that are computed with
                self.local_stages = LocalStages(spec, modules)
            self._reducer = make_reducer(
                self._topology, self.local_stages, self._owners, self._shards
            )
        scales = self.options.precision is Precision.FP16 and spec.loss is not None
        if scales:
            check_weights(modules)
        self.scaler = PipelineScaler(self.world, enabled=scales)
        self.execution = Execution(
            spec,
            self._topology,
            self.local_stages,
            self.options,
            self._programs,
            self._weigher,
            self._reducer,
            self.microbatches,
            blocks_by_stage(self._reducer),
            self.sharding is WeightSharding.FULL,
        )
        self.hold(self.local_stages, self._weigher)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A pipeline with weights of its own, which an average of them can be kept in.

        It runs on the same devices and in the same processes. Closing it closes its threads alone.
        Its scaler begins anew.

        Raises:
            UsageError: where replicas divide the weights.
        """
        if self._shards is not None:
            raise UsageError(
                "a pipeline whose replicas divide its weights cannot be copied",
                hint="keep an average of weights with replicas that divide nothing",
            )
        made = memo[id(self)] = type(self).__new__(type(self))
        vars(made).update(vars(self))
        made._owns_topology = False
        made._weigher = copy.deepcopy(self._weigher, memo)
        made._assemble(copy.deepcopy(dict(self.stages), memo))
        made.train(self.training)
        return made

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise UsageError(
            "a pipeline has threads or other processes, and cannot be pickled",
            hint="save its state_dict(), and make a Pipeline where it is to run",
        )

    @property
    def stages(self) -> Mapping[int, nn.Module]:
        """The stages held here, by number."""
        return self.local_stages.modules

    @property
    def placement(self) -> tuple[int, ...]:
        """The device of each stage, by its number in the pipeline."""
        return self._topology.placement

    @property
    def rank(self) -> int:
        """This process's number; 0 for the only one."""
        return self._topology.world.rank

    @property
    def world(self) -> Network:
        """All processes, those of other replicas too."""
        return self._topology.world

    @property
    def replicas(self) -> int:
        """How many replicas of the pipeline train together."""
        return self._topology.replicas

    @property
    def replica(self) -> int:
        """The number of the replica that this process belongs to."""
        return self._topology.replica

    @property
    def feeds(self) -> bool:
        """Whether this process passes inputs: the first of each replica does."""
        return self._topology.feeds

    def session(self) -> Session:
        """Calls that follow one another, with state that each stage holds between them.

        Raises:
            UsageError: where the model was compiled without `--state`.
        """
        return Session(self)

    def loss_weights(self, inputs: Inputs = None, target: object = None) -> tuple[float, ...]:
        """What each term of a mini-batch's loss is a mean over: samples, tokens; 1 for a sum.

        A loss has one term, unless it adds up means over different things. Mini-batches weighted
        by it have the mean of all of them as one.

        Raises:
            UsageError: for inputs that do not fit.
        """
        return self.execution.loss_weights(inputs, target)

    def gather_state_dict(self) -> dict[str, torch.Tensor]:
        """The whole state on rank 0, on the CPU; empty elsewhere. Every rank calls it."""
        state: dict[str, torch.Tensor] = self.state_dict()
        with self._gathered(blocks=True):
            if self._shards is not None:
                state = self._shards.whole(state, self.spec.aliases, copy=self.rank == 0)
            return self._topology.pipeline.gather(state) if self.replica == 0 else {}

    def load_state_dict(  # type: ignore[override]  # tensors are copied, never assigned
        self, state: Mapping[str, torch.Tensor], strict: bool = True
    ) -> _IncompatibleKeys:
        """Take over the tensors of a `state_dict` of the model or of a pipeline of it.

        Args:
            strict: whether every name held here must be there, and every name there be known.

        Returns:
            what is missing and what is unknown, as torch's modules do.

        Raises:
            UsageError: naming what is missing, unknown, or of another shape.
        """
        if self._shards is not None:
            self._shards.release()
        found = self.local_stages.load_state_dict(state, strict=strict)
        self._weigher.load(state)
        return found

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Around steps that accumulate gradients: they are not averaged over replicas yet.

        The next step outside averages all that has been accumulated. Every rank uses it alike.
        Without it the gradients are the same, but are averaged after every step.
        """
        return contextlib.nullcontext() if self._reducer is None else self._reducer.pause()

    def shard(self, inputs: Inputs = None, target: object = None) -> tuple[Inputs, object]:
        """This replica's share of a mini-batch that every replica has whole: consecutive samples.

            loss = pipe.step(*pipe.shard(inputs, target))

        Of a list of micro-batches it is consecutive ones. Replicas then do together what one
        pipeline with `replicas` times the micro-batches does.
        `step` refuses a batch with fewer samples than replicas, and shares of batches that differ.
        """
        if self.replicas == 1 or not self.feeds:
            return inputs, target
        call = inputs, target
        self.note_read(checksum_of(self.spec, call))
        return share_of(self.spec, call, self.replica, self.replicas, self.microbatches)

    def note_read(self, mark: int) -> None:
        """Have the next call refuse, where other replicas note another number: of their data."""
        self._read = (31 * self._read + mark) % 2**64

    def train(self, mode: bool = True) -> Self:
        """Put every stage into training mode, or into evaluation mode."""
        super().train(mode)
        for module in self.stages.values():
            module.train(mode)
        return self

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients so that their norm is at most `max_norm`; gives it as it was.

        That of torch.nn.utils.clip_grad_norm_ on the whole model, a tied parameter once. Every rank
        calls it and gets the same. Under fp16 after `scaler.unscale_(optimizer)`.

        Raises:
            AgreedError: on every rank, when a gradient is sparse; when the norm is not finite and
                `error_if_nonfinite`.
        """
        own = self.stages if self.replica == 0 else ()
        contributes = {name: stage in own for name, stage in first_stages(self.spec).items()}
        return clip_gradients(
            *(dict(self.named_parameters()), contributes, self.world, max_norm, norm_type),
            error_if_nonfinite=error_if_nonfinite,
            peers=None if self._shards is None else self._topology.peers,
        )

    def rewind(self) -> None:
        """Draw random numbers as from the first step and the first call on."""
        self.step_number, self._calls = 0, 0

    def close(self) -> None:
        """End the threads, or leave the process group."""
        self.execution.close()
        if self._owns_topology:
            self._topology.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def describe(self) -> str:
        """The pipeline in one line."""
        stages = counted(len(self.spec.stages), "stage")
        microbatches = counted(self.microbatches, "micro-batch", "es")
        shared = self.sharding.described
        return (
            f"{self.spec.name}: {stages}, {microbatches}, {self.schedule.value}, {self._topology}"
            f"{shared and f', {shared}'}"
            f"{', blocks compiled' if self.options.compiled else ''}"
        )

    def __repr__(self) -> str:
        return f"Pipeline({self.describe()})"
