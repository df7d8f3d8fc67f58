"""Parses the caller's options."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

import torch

from ..errors import UsageError
from ..schedule.choosing import SCHEDULES
from ..spec import (
    BatchNorm,
    PipelineSpec,
    Precision,
    Remat,
    ScheduleKind,
    WeightSharding,
)
from .distributed import launched
from .typed import MOST_MICROBATCHES, SEEDS

Choice = TypeVar("Choice", bound=Enum)


class TransportKind(Enum):
    """How values get from stage to stage."""

    LOCAL = "local"
    DISTRIBUTED = "distributed"


@dataclass(frozen=True, slots=True)
class ExecutionOptions:
    """How the stages compute.

    Attributes:
        remat: what each stage keeps between forward and backward.
        compiled: whether the blocks of stages run through torch.compile.
    """

    batchnorm: BatchNorm
    precision: Precision
    remat: tuple[Remat, ...]
    compiled: bool = False


def chosen(kind: type[Choice], what: str, word: Choice | str | None, planned: Choice) -> Choice:
    """The member of an Enum that a caller names, or the planned one.

    Args:
        what: what the Enum's members are, for the message: "schedule".

    Raises:
        UsageError: when there is none of this name.
    """
    if word is None:
        return planned
    try:
        return kind(word)
    except ValueError as error:
        known = ", ".join(str(member.value) for member in kind)
        raise UsageError(f"there is no {what} {word!r}; there are {known}") from error


def execution_options(
    spec: PipelineSpec,
    batchnorm: BatchNorm | str | None,
    precision: Precision | str | None,
    remat: Remat | str | None,
    *,
    compiled: bool = False,
) -> ExecutionOptions:
    """How the stages of a pipeline compute: as planned, unless a caller says otherwise.

    Raises:
        UsageError: for a word that names nothing, and for a precision in which the model does
            something else than the stages.
    """
    computed_in = chosen(Precision, "precision", precision, spec.precision)
    if computed_in in spec.unlike:
        raise UsageError(
            f"in {computed_in.value} the model is another program than these stages: "
            f"{spec.unlike[computed_in]}",
            hint=f"compile it with --precision {computed_in.value}",
        )
    return ExecutionOptions(
        chosen(BatchNorm, "batchnorm", batchnorm, spec.batchnorm),
        computed_in,
        tuple(chosen(Remat, "remat", remat, stage.remat) for stage in spec.stages),
        compiled,
    )


def weight_sharding(
    spec: PipelineSpec, sharding: WeightSharding | str | None, replicas: int
) -> WeightSharding:
    """What replicas divide among them: as planned, unless a caller says otherwise.

    Raises:
        UsageError: for a word that names nothing, and where there is nobody to share with.
    """
    if sharding is None and replicas == 1:
        return WeightSharding.NONE
    found = chosen(WeightSharding, "sharding", sharding, spec.sharding)
    if found is not WeightSharding.NONE and replicas == 1:
        raise UsageError(
            "one replica has nobody to share its weights with",
            hint="train more of them with --data-parallel, under torchrun, or leave --shard out",
        )
    return found


def refuse_split(sharding: WeightSharding, schedule: ScheduleKind) -> None:
    """Makes sure that backwards are in one piece where weights are gathered for them.

    Raises:
        UsageError: naming the schedule.
    """
    if sharding is WeightSharding.FULL and SCHEDULES[schedule].splits_backward:
        raise UsageError(
            "--shard full reduces the gradients of a block as its backward ends, which the "
            f"schedule {schedule.value} puts off",
            hint="use --schedule gpipe, 1f1b or interleaved, or --shard optimizer",
        )


def transport_kind(transport: TransportKind | str | None) -> TransportKind:
    """The transport of this name; unless given, what the process was started for.

    Raises:
        UsageError: when there is none.
    """
    natural = TransportKind.DISTRIBUTED if launched() else TransportKind.LOCAL
    return chosen(TransportKind, "transport", transport, natural)


def refuse_parts(spec: PipelineSpec, parts: int) -> None:
    """Makes sure that a mini-batch is not split where its parts do not give what it does.

    Raises:
        UsageError: saying why.
    """
    if parts > 1 and spec.whole_batch:
        raise UsageError(
            f"{spec.name} takes a mini-batch in one piece, not in {parts}: {spec.whole_batch}",
            hint="run it with microbatches=1 (--microbatches 1) and data_parallel=1, or accept at "
            "compile time with --per-microbatch that every micro-batch is taken by itself",
        )


def refuse_fused(
    spec: PipelineSpec,
    options: ExecutionOptions,
    devices: Iterable[torch.device],
    *,
    training: bool,
) -> None:
    """Makes sure that plain PyTorch in this process has the numbers of the stages under autocast.

    Raises:
        UsageError: naming the line of an encoder that it computes otherwise.
    """
    if options.precision is Precision.FP32:
        return
    if spec.packs and not training:
        raise UsageError(
            "in fp32 PyTorch packs what is padded, as these stages do, and under autocast it does "
            f"not, or fails: {spec.packs}",
            hint="make the encoder with enable_nested_tensor=False; or evaluate in fp32",
        )
    line = spec.fused.get(training, "")
    on_cpu = any(device.type == "cpu" for device in devices)
    if line and on_cpu and torch.backends.mha.get_fastpath_enabled():
        raise UsageError(
            "under autocast on a CPU PyTorch computes an encoder layer as one kernel, which keeps "
            f"in 16 bits what these stages keep in 32: {line}",
            hint="call torch.backends.mha.set_fastpath_enabled(False), here or in the model's file "
            "before it is compiled: PyTorch then computes what the stages do; or use fp32",
        )


def refuse_left_out(spec: PipelineSpec) -> None:
    """Makes sure that a call in train mode has what the model returns then."""
    if spec.left_out:
        raise UsageError(
            f"{spec.name} does not give what its model returns in training: {spec.left_out}",
            hint="call step() or evaluate() for the loss alone, or eval() first; or have the model "
            "return tensors in the same structure in both modes",
        )


def check_numbers(seed: int, microbatches: int, timeout_s: float) -> None:
    """Make sure that numbers which a caller chooses fit where they go.

    Raises:
        UsageError: naming the first that does not.
    """
    if seed not in SEEDS:
        raise UsageError(f"the seed {seed} does not fit into 64 bits")
    if microbatches > MOST_MICROBATCHES:
        raise UsageError(
            f"{microbatches:,} micro-batches are more than there can be: {MOST_MICROBATCHES:,}"
        )
    if not (timeout_s > 0 and math.isfinite(timeout_s)):
        raise UsageError(f"a timeout of {timeout_s} s: a number above 0 is needed")
