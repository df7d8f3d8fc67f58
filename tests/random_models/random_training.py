"""Random ways to train a package, and the plain loop that says what is right.

The plain loop knows nothing of stages, schedules or recomputation. It takes every mini-batch whole
where the model has neither random numbers nor anything that depends on how a batch is split, and
computes in doubles; otherwise micro-batch by micro-batch. Deferred BatchNorm is torch's own on all
that the layers were given (`MiniBatchStatistics`), exact BatchNorm the model on the whole
mini-batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from random_models import IGNORED, LOSS_FUNCTIONS, RandomModel, Recipe, call_of
from random_packages import Layout, device_counts, layouts
from torch import Tensor, nn

from gpipe_compiler.passes.cross_sample_ops import mixing_ops
from gpipe_compiler.passes.effects import effects
from gpipe_compiler.plan import Plan
from gpipe_compiler.runtime.core.pipeline import Pipeline
from gpipe_compiler.runtime.core.random import SeededRandom
from gpipe_compiler.runtime.spec import (
    BatchNorm,
    PipelineSpec,
    Precision,
    Reduction,
    Remat,
    ScheduleKind,
)
from gpipe_compiler.runtime.train.comparison import flat_tensors
from gpipe_compiler.validate.plain_run import MiniBatchStatistics

SEED = 5
RANDOM = frozenset({"dropout", "functional_dropout", "drop_path"})
MIXING = frozenset({"batch_norm", "running"})
"""Steps that see the other samples of a batch."""
SPLIT = RANDOM | MIXING | {"flatten"}
"""Steps whose results depend on how a batch is split."""


@dataclass(frozen=True)
class Training:
    """How a package is run, whatever it was planned for.

    Attributes:
        sizes: the samples of every mini-batch.
        accumulate: mini-batches of one step of the optimizer.
        microbatches, schedule, batchnorm, precision: None for as planned; so is a schedule that
            cannot have so many stages.
        remat: of each stage in turn; None for as planned.
        devices: picks one of the numbers that the schedule can have the stages on; None for those
            of the package.
        clip: the norm that gradients are clipped to.
        frozen: the parameters whose bit is set are frozen before compiling.
        eval_step: the mini-batch that is run in eval mode, if there are so many.
    """

    sizes: tuple[int, ...] = (4, 4)
    accumulate: int = 1
    microbatches: int | None = None
    schedule: ScheduleKind | None = None
    batchnorm: BatchNorm | None = None
    precision: Precision | None = None
    remat: tuple[Remat, ...] | None = None
    devices: int | None = 0
    clip: float | None = None
    adam: bool = False
    frozen: int = 0
    eval_step: int | None = None


trainings = st.builds(
    Training,
    st.lists(st.integers(1, 13), min_size=1, max_size=5).map(tuple),
    st.integers(1, 3),
    st.one_of(st.none(), st.integers(1, 5)),
    st.one_of(st.none(), st.sampled_from(ScheduleKind)),
    st.one_of(st.none(), st.sampled_from(BatchNorm)),
    st.one_of(st.none(), st.sampled_from((Precision.FP32, Precision.BF16))),
    st.one_of(st.none(), st.lists(st.sampled_from(Remat), min_size=6, max_size=6).map(tuple)),
    st.one_of(st.none(), st.integers(0, 3)),
    st.sampled_from((None, 0.01, 0.5, 100.0)),
    st.booleans(),
    st.one_of(st.just(0), st.integers(0, (1 << 12) - 1)),
    st.one_of(st.none(), st.integers(0, 3)),
)


def _trained(layout: Layout, wide: bool) -> Layout:
    wide = wide and layout.precision is Precision.FP32
    return dataclasses.replace(layout, training=True, wide=wide)


training_layouts = st.builds(_trained, layouts, st.sampled_from((True, True, True, False)))


def freeze(model: nn.Module, bits: int) -> None:
    """Freezes parameters, never the first: something is left to train."""
    for number, parameter in enumerate(list(model.parameters())[1:]):
        if bits >> number % 12 & 1:
            parameter.requires_grad_(False)


def pipeline(spec: PipelineSpec, folder: Any, training: Training) -> Pipeline:
    """The pipeline of a package, run in this way; exact BatchNorm goes with one schedule alone."""
    if training.remat is not None:
        stages = [
            dataclasses.replace(stage, remat=remat)
            for stage, remat in zip(spec.stages, training.remat, strict=False)
        ]
        spec = dataclasses.replace(spec, stages=tuple(stages))
    schedule = training.schedule or spec.schedule
    if (training.batchnorm or spec.batchnorm) is BatchNorm.EXACT:
        schedule = ScheduleKind.GPIPE
    if not device_counts(schedule, len(spec.stages)):
        schedule = spec.schedule
    numbers = device_counts(schedule, len(spec.stages))
    # Three stages interleave on one device, but only where somebody says so.
    unusual = schedule is not spec.schedule and len(spec.stages) % 2 == 1
    devices = None
    if training.devices is not None or unusual:
        devices = ["cpu"] * numbers[(training.devices or 0) % len(numbers)]
    return Pipeline(
        spec,
        folder,
        devices=devices,
        microbatches=training.microbatches,
        schedule=schedule,
        batchnorm=training.batchnorm,
        precision=training.precision,
        seed=SEED,
        timeout_s=60,
    )


@dataclass(frozen=True)
class Ran:
    """What a mini-batch came to."""

    loss: Tensor
    outputs: Mapping[str, Tensor]


class PlainLoop:
    """The model, trained by hand.

    Args:
        pipe: told about: the choices made for it.
    """

    def __init__(self, recipe: Recipe, model: RandomModel, plan: Plan, pipe: Pipeline) -> None:
        self.recipe = recipe
        self.model = model
        self.plan = plan
        self.batchnorm = pipe.options.batchnorm
        self.half = pipe.options.precision is Precision.BF16
        self.microbatches = pipe.microbatches
        kinds = {step.kind for step in recipe.steps}
        self.mixes = any(stage.mixes for stage in pipe.spec.stages)
        assert self.mixes or "batch_norm" not in kinds
        wide = next(model.parameters()).dtype is torch.float64
        self.whole = wide and not self.half and not kinds & SPLIT
        joint = bool(kinds & MIXING or mixing_ops(plan.graph) or effects(plan.graph).state_writes)
        self.takes_whole = self.batchnorm is BatchNorm.EXACT and joint
        self.step_number = 0

    def run(self, seed: int, size: int, dtype: torch.dtype, weight: float, *, train: bool) -> Ran:
        """One mini-batch; in training its gradients are added to those there are."""
        joint = self.takes_whole and self.model.training
        least = 2 if self.mixes else 1
        count = max(1, min(self.microbatches, size // least))
        if joint or self.whole:
            count = 1
        calls = [
            _part(call_of(self.recipe, size, seed=seed, dtype=dtype), size, count, m)
            for m in range(count)
        ]
        shares = self._shares([target for _, _, target, _ in calls], [n for *_, n in calls])
        statistics = MiniBatchStatistics(self.model)
        deferred = self.batchnorm is BatchNorm.DEFERRED and self.model.training
        losses, outputs = [], []
        for number, (args, kwargs, target, _) in enumerate(calls):
            around = statistics.microbatch() if deferred else contextlib.nullcontext()
            draws = SeededRandom(SEED, self.step_number, number, ())
            half = torch.autocast("cpu", torch.bfloat16) if self.half else contextlib.nullcontext()
            with torch.set_grad_enabled(train), draws, around, half:
                output = self.model(*args, **kwargs)
                loss = self._loss(output, target)
            kept = {k: v for k, v in output.items() if k != "loss"} if self._own else output
            outputs.append({name: t.detach() for name, t in flat_tensors(kept).items()})
            if not shares[number]:
                continue
            losses.append(loss.detach() * shares[number])
            if train and loss.requires_grad:
                (loss * shares[number] * weight).backward()
        if deferred:
            statistics.commit()
        self.step_number += train
        total = torch.stack(losses).sum() if losses else torch.full_like(loss.detach(), math.nan)
        joined = {name: torch.cat([part[name] for part in outputs]) for name in outputs[0]}
        return Ran(total, joined | {"loss": total} if self._own else joined)

    @property
    def _own(self) -> bool:
        return self.recipe.loss == "own"

    def _loss(self, output: Any, target: Tensor | None) -> Tensor:
        if self._own:
            return output["loss"]
        if self.recipe.loss == "none":
            found = flat_tensors(output).values()
            squares = [t.square().sum() for t in found if t.is_floating_point()]
            return functools.reduce(operator.add, squares)  # in the type of each sum so far
        return LOSS_FUNCTIONS[self.recipe.loss](output, target)

    def _shares(self, targets: Sequence[Any], sizes: Sequence[int]) -> list[float]:
        """The part of each micro-batch's loss in that of the mini-batch."""
        match self.recipe.loss:
            case "none":
                return [1.0] * len(sizes)
            case "tokens" | "words":
                counts = [int((target != IGNORED).sum()) for target in targets]
                return [count / sum(counts) if sum(counts) else 0.0 for count in counts]
            case "masked":
                counts = [int((target != IGNORED).sum()) for target in targets]
                return [max(count, 1) / max(sum(counts), 1) for count in counts]
            case _:
                assert self.plan.graph is not None
                assert self.plan.graph.loss is not None
                assert self.plan.graph.loss.reduction is Reduction.MEAN
                return [size / sum(sizes) for size in sizes]


def _part(call: Any, size: int, count: int, number: int) -> tuple[Any, Any, Any, int]:
    """Arguments, target and samples of a micro-batch: sizes differ by one, the larger first."""
    sizes = [size // count + (m < size % count) for m in range(count)]
    first = sum(sizes[:number])

    def cut(item: Any) -> Any:
        if isinstance(item, Tensor):
            return (
                item.clone() if len(item) != size else item[first : first + sizes[number]].clone()
            )
        if isinstance(item, dict):
            return {key: cut(value) for key, value in item.items()}
        return tuple(map(cut, item)) if isinstance(item, tuple) else item

    return cut(call.args), cut(dict(call.kwargs)), cut(call.target), sizes[number]
