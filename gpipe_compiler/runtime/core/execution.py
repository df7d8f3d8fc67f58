"""What a call of the pipeline comes to: inputs taken, ranks agreed, programs run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..errors import UsageError
from ..spec import BatchNorm, Joined, PipelineSpec, ScheduleKind
from .agreement import Call, agree
from .inputs import Inputs, batch_of, bind, passed_to, rebuild, split
from .job import Job, RandomKey, Values, Work
from .joint import joint_stages
from .output_classes import as_returned
from .programs import Prepared, prepare
from .runners import Runner
from .team import Team
from .weighing import Counts, Scales, summed
from .wiring import inputs_for, output_leaves

_MOST_WANTED = 50
"""Inputs that can have gradients: as many bits are exact in a floating-point number."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a caller wants of a mini-batch.

    Attributes:
        training: whether the stages are in training mode.
        outputs: whether what the model returns is wanted.
        key: what random ops depend on.
        loss_scale: gradients are those of the loss times this.
        read: the checksum of the mini-batch that this is a replica's share of (`Call`).
    """

    work: Work
    training: bool
    inputs: Inputs
    target: object
    outputs: bool
    key: RandomKey
    loss_scale: float = 1.0
    read: int = 0


class Programs:
    """The schedules of a pipeline, each made and proved when it is first asked for.

    Args:
        owners: trainable parameters of several stages, and these.
    """

    def __init__(
        self,
        spec: PipelineSpec,
        team: Team,
        schedule: ScheduleKind,
        batchnorm: BatchNorm,
        owners: Mapping[str, Sequence[int]],
    ) -> None:
        self._spec = spec
        self._team = team
        self._schedule = schedule
        self._batchnorm = batchnorm
        self._owners = owners
        self._known: dict[tuple[Work, int, frozenset[int], frozenset[str]], Prepared] = {}

    def of(
        self,
        work: Work,
        microbatches: int,
        *,
        training: bool,
        wanted: frozenset[str] = frozenset(),
    ) -> Prepared:
        """The programs for so many micro-batches, of stages in this mode.

        Args:
            wanted: the inputs whose gradients the caller wants.

        Raises:
            UsageError: when there are none in this manner.
            ScheduleError, DeadlockError: when the package's own orders are wrong.
        """
        exact = self._batchnorm is BatchNorm.EXACT and training
        joint = joint_stages(self._spec.stages, self._team.replicas) if exact else frozenset()
        key = work, microbatches, joint, wanted
        if key not in self._known:
            placement = self._team.placement
            self._known[key] = prepare(
                self._spec,
                placement,
                microbatches,
                work,
                self._schedule,
                self._owners,
                joint,
                wanted,
            )
        return self._known[key]


class Execution:
    """Runs mini-batches: on every rank that takes part, all of which make the same calls.

    Args:
        microbatches: into which a mini-batch is split, at most.
    """

    def __init__(
        self,
        spec: PipelineSpec,
        team: Team,
        programs: Programs,
        scales: Scales,
        runner: Runner,
        microbatches: int,
    ) -> None:
        self._spec = spec
        self._team = team
        self._programs = programs
        self._scales = scales
        self._runner = runner
        self._microbatches = microbatches
        leaves = output_leaves(spec.outputs)
        # In one piece a mini-batch in eval mode has these, too.
        self._apart = any(leaf.joined is Joined.APART for leaf in leaves)
        made = {leaf.value for leaf in leaves}
        self._made = frozenset(made - {source.name for source in spec.inputs})

    def run(self, asked: Asked) -> tuple[torch.Tensor | None, object]:
        """The terms of the loss, where one is made, and the outputs, where inputs are passed.

        Raises:
            AgreedError: when replicas have read other data.
            UsageError: for inputs that do not fit.
            StageError: when the model's code raises.
            TransportError: when another process is gone.
        """
        self._check(asked.work)
        call, bound, parts = Call(asked.work, asked.training), Values(), list[Values]()
        if self._team.feeds:
            call, bound, parts = self._offered(asked)
        if asked.read:
            call = dataclasses.replace(call, read=asked.read)
        terms, number = len(self._scales.terms), asked.key.step + 1
        call = agree(self._team.members, call, self._microbatches, terms, number)
        wanted = frozenset(
            source.name for i, source in enumerate(self._spec.inputs) if call.wanted >> i & 1
        )
        prepared = self._programs.of(
            asked.work, len(call.sizes), training=asked.training, wanted=wanted
        )
        shares = prepared.loss_weights(self._scales.shares(call.loss_weights, call.total))
        job = Job(
            work=asked.work,
            sizes=call.sizes,
            inputs=parts,
            # The mean over the replicas' losses and gradients is the sum of their shares.
            loss_weights=tuple(
                tuple(self._team.replicas * share for share in own) for own in shares
            ),
            kept=self._made if asked.outputs else frozenset(),
            random=RandomKey(asked.key.seed, asked.key.step, call.first),
            loss_scale=asked.loss_scale,
        )
        result = self._runner.run(prepared, job)
        if wanted and self._team.feeds:
            self._give_back(asked, bound, result.gradients, call.sizes)
        if asked.work.makes_loss and result.loss is None:
            raise UsageError(f"{self._spec.name} made no loss")
        if not (asked.outputs and self._team.feeds):
            return result.loss, None
        outputs = rebuild(self._spec.outputs, {**bound, **result.outputs}, sum(call.sizes))
        return result.loss, as_returned(outputs, self._spec.classes)

    def loss_weights(self, inputs: Inputs, target: object) -> Counts:
        """What the terms of a mini-batch's loss are means over: samples, ...; 1 for a sum."""
        bound = bind(inputs, target, self._spec, inputs_for(self._spec, Work.TRAIN))
        parts, sizes = split(bound, self._spec, 1)
        return summed(self._scales.weigh(parts, sizes))

    def _check(self, work: Work) -> None:
        if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
            raise UsageError(
                "autocast around a pipeline does not reach its stages",
                hint="make the pipeline with precision='bf16' or 'fp16'",
            )
        if work.makes_loss and self._spec.loss is None:
            raise UsageError(
                f"{self._spec.name} was compiled for inference, it has no loss",
                hint="compile it with --mode train",
            )

    def _offered(self, asked: Asked) -> tuple[Call, Values, list[Values]]:
        """What this process's inputs come to: the call, and its tensors whole and split."""
        work, training = asked.work, asked.training
        try:
            needed = inputs_for(self._spec, work)
            bound = bind(asked.inputs, asked.target, self._spec, needed)
            if self._team.replicas > 1 and batch_of(bound, self._spec) == 0:
                return Call(work, training), bound, []
            microbatches = self._microbatches
            if self._apart and asked.outputs and not (training or work is Work.TRAIN):
                microbatches = 1
            parts, sizes = split(bound, self._spec, microbatches)
            weights = self._scales.weigh(parts, sizes) if work.makes_loss else ()
            wanted = self._wanted(asked)
        except UsageError as error:
            return Call(work, training, refusal=error), {}, []
        return Call(work, training, sizes, weights, wanted=wanted), bound, parts

    def _wanted(self, asked: Asked) -> int:
        """The inputs whose gradients the caller wants, as the bits of a number.

        Raises:
            UsageError: where ranks cannot tell each other so many.
        """
        if asked.work is not Work.TRAIN:
            return 0
        passed = passed_to(self._spec, asked.inputs, asked.target)
        places = [
            place
            for place, source in enumerate(self._spec.inputs)
            if source.name in passed and passed[source.name].requires_grad
        ]
        if places and places[-1] >= _MOST_WANTED:
            raise UsageError(
                f"{self._spec.inputs[places[-1]].name} requires a gradient, which only the first "
                f"{_MOST_WANTED} inputs can have"
            )
        return sum(1 << place for place in places)

    def _give_back(
        self,
        asked: Asked,
        bound: Values,
        gradients: Mapping[tuple[str, int], torch.Tensor | None],
        sizes: Sequence[int],
    ) -> None:
        """Adds the gradients of inputs to them, as a backward of the plain model does."""
        passed = passed_to(self._spec, asked.inputs, asked.target)
        roots, found = [], []
        for source in self._spec.inputs:
            pieces = [gradients.get((source.name, m)) for m in range(len(sizes))]
            if all(piece is None for piece in pieces):
                continue
            total = torch.zeros_like(bound[source.name])
            start = 0
            for piece, size in zip(pieces, sizes, strict=True):
                if piece is not None:
                    source.part(total, start, size).add_(piece.to(total.device))
                start += size
            roots.append(passed[source.name])
            # Those of replicas are averaged for the parameters, of which each has its own here.
            found.append(total / self._team.replicas)
        if roots:
            torch.autograd.backward(roots, found)
