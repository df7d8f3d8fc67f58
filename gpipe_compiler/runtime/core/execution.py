"""Runs one call of a pipeline: binds its inputs, agrees across ranks, executes the programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import AgreedError, UsageError
from ..spec import Joined, PipelineSpec
from .inputs import Inputs, batch_of, bind, passed_to, split
from .loss_weights import Counts, LossWeigher, summed
from .outputs import as_returned, rebuild
from .programs import ProgramCache
from .request import RandomKey, RunRequest, StepRequest, Values
from .runners import Runner
from .topology import Replicas, Topology
from .wiring import inputs_for, output_leaves


@dataclass(frozen=True, slots=True)
class CallArgs:
    """What a caller wants of a mini-batch.

    Attributes:
        training: whether the stages are in training mode.
        outputs: whether what the model returns is wanted.
        key: what random ops depend on.
        loss_scale: gradients are those of the loss times this.
        read: the checksum of the mini-batch that this is a replica's share of (`Call`).
    """

    work: RunRequest
    training: bool
    inputs: Inputs
    target: object
    outputs: bool
    key: RandomKey
    loss_scale: float = 1.0
    read: int = 0


@dataclass(frozen=True, slots=True)
class Call:
    """What a call of the pipeline is about, in this replica of it.

    Attributes:
        training: whether the stages are in training mode.
        sizes: samples in each micro-batch; none where the inputs were refused, or where this
            replica's share of the mini-batch is empty.
        loss_weights: of each micro-batch, what the terms of its loss are means over; () without a
            loss.
        refusal: the problem and the hint, where the inputs are wrong.
        wanted: the inputs whose gradients the caller wants.
        read: a checksum of the whole mini-batches that this replica has taken its share of since
            the last call; 0 where it has not.
        first: the number in the mini-batch of this replica's first micro-batch.
        total: the loss weights of the mini-batch, over all replicas; () without any.
    """

    work: RunRequest
    training: bool
    sizes: tuple[int, ...] = ()
    loss_weights: tuple[Counts, ...] = ()
    refusal: tuple[str, str] | None = None
    wanted: frozenset[str] = frozenset()
    read: int = 0
    first: int = 0
    total: Counts = ()

    def packed(self) -> dict[str, object]:
        """Its fields, of Python's own types: ranks may have the package under different names."""
        own = {name: getattr(self, name) for name in self.__slots__}
        return {**own, "work": self.work.value}


def agree(replicas: Replicas | None, call: Call, number: int) -> Call:
    """The call of this rank's replica, on every rank, with what it needs to know of the others'.

    Args:
        call: what this rank knows of it; all ranks but the first of each replica know no more
            than the work and the mode.
        number: of the mini-batch, from 1, for messages.

    Raises:
        AgreedError: on every rank, when a replica has taken its share of another mini-batch.
        UsageError: on every rank, when a replica has refused its inputs, when there are fewer
            samples than replicas, or when ranks do not make the same call.
    """
    if replicas is None:
        return dataclasses.replace(call, total=summed(call.loss_weights))
    calls = _exchange(replicas, call)
    firsts = range(0, replicas.world.size, replicas.pipeline.size)
    for rank, other in zip(firsts, calls, strict=True):
        _check_same(replicas.world.rank, call, rank, other)
    for rank, other in zip(firsts, calls, strict=True):
        if other.refusal is not None:
            raise _refused(call.refusal or other.refusal, None if call.refusal else rank)
    for rank, other in zip(firsts, calls, strict=True):
        if other.read and calls[0].read and other.read != calls[0].read:
            raise _other_data(rank, number)
    if not all(other.sizes for other in calls):
        samples = sum(sum(other.sizes) for other in calls)
        raise UsageError(f"a batch of {samples} is too small for {replicas.count} replicas")
    return dataclasses.replace(
        calls[replicas.number],
        first=sum(len(other.sizes) for other in calls[: replicas.number]),
        total=summed([counts for other in calls for counts in other.loss_weights]),
    )


def _exchange(replicas: Replicas, call: Call) -> list[Call]:
    """The calls of all replicas, on every rank."""
    calls: list[dict[str, Any]] | None = None
    if replicas.pipeline.rank == 0:
        what = "the calls of the replicas"
        gathered = replicas.peers.gather_objects(call.packed(), what)
        calls = replicas.peers.broadcast_object(gathered, 0, what)
    calls = replicas.pipeline.broadcast_object(calls, 0, "the call")
    return [Call(**{**found, "work": RunRequest(found["work"])}) for found in calls]


def _check_same(own_rank: int, own: Call, rank: int, other: Call) -> None:
    if other.work is not own.work:
        raise UsageError(
            f"rank {own_rank} and rank {rank} do not make the same call: {own.work.value} here, "
            f"{other.work.value} there",
            hint="every rank calls step, or evaluate, or the pipeline itself",
        )
    if other.training is not own.training:
        modes = {True: "training", False: "evaluation"}
        raise UsageError(
            f"rank {own_rank} is in {modes[own.training]} mode, and rank {rank} in "
            f"{modes[other.training]} mode",
            hint="every rank calls train() and eval()",
        )


def _refused(refusal: tuple[str, str], rank: int | None = None) -> UsageError:
    """The error of what this process refuses, or another rank."""
    problem, hint = refusal
    return UsageError(
        problem if rank is None else f"rank {rank} refused its inputs: {problem}", hint=hint
    )


def _other_data(rank: int, number: int) -> AgreedError:
    return AgreedError(
        f"mini-batch {number}, as rank {rank} has read it, is not that of rank 0",
        hint="every replica reads the same mini-batches, whole, and takes its share of each: use "
        "the same seed on every rank and a sampler that does not know the rank; samples that only "
        "one replica reads are passed to step() without shard()",
    )


class Execution:
    """Runs mini-batches: on every rank that takes part, all of which make the same calls.

    Args:
        microbatches: into which a mini-batch is split, at most.
    """

    def __init__(
        self,
        spec: PipelineSpec,
        topology: Topology,
        programs: ProgramCache,
        weigher: LossWeigher,
        runner: Runner,
        microbatches: int,
    ) -> None:
        self._spec = spec
        self._topology = topology
        self._programs = programs
        self._weigher = weigher
        self._runner = runner
        self._microbatches = microbatches
        leaves = output_leaves(spec.outputs)
        # In one piece a mini-batch in eval mode has these, too.
        self._apart = any(leaf.joined is Joined.APART for leaf in leaves)
        made = {leaf.value for leaf in leaves}
        self._made = frozenset(made - {source.name for source in spec.inputs})

    def run(self, args: CallArgs) -> tuple[torch.Tensor | None, object]:
        """The terms of the loss, where one is made, and the outputs, where inputs are passed.

        Raises:
            AgreedError: when replicas have read other data.
            UsageError: for inputs that do not fit.
            StageError: when the model's code raises.
            TransportError: when another process is gone.
        """
        self._check(args.work)
        call, bound, parts = Call(args.work, args.training), Values(), list[Values]()
        if self._topology.feeds:
            call, bound, parts = self._offered(args)
        if args.read:
            call = dataclasses.replace(call, read=args.read)
        call = agree(self._topology.members, call, args.key.step + 1)
        prepared = self._programs.of(
            args.work, len(call.sizes), training=args.training, wanted=call.wanted
        )
        shares = prepared.loss_weights(self._weigher.shares(call.loss_weights, call.total))
        request = StepRequest(
            work=args.work,
            sizes=call.sizes,
            inputs=parts,
            # The mean over the replicas' losses and gradients is the sum of their shares.
            loss_weights=tuple(
                tuple(self._topology.replicas * share for share in own) for own in shares
            ),
            kept=self._made if args.outputs else frozenset(),
            random=RandomKey(args.key.seed, args.key.step, call.first),
            loss_scale=args.loss_scale,
        )
        result = self._runner.run(prepared, request)
        if call.wanted and self._topology.feeds:
            self._give_back(args, bound, result.gradients, call.sizes)
        if args.work.makes_loss and result.loss is None:
            raise UsageError(f"{self._spec.name} made no loss")
        if not (args.outputs and self._topology.feeds):
            return result.loss, None
        outputs = rebuild(self._spec.outputs, {**bound, **result.outputs}, sum(call.sizes))
        return result.loss, as_returned(outputs, self._spec.classes)

    def loss_weights(self, inputs: Inputs, target: object) -> Counts:
        """What the terms of a mini-batch's loss are means over: samples, ...; 1 for a sum."""
        bound = bind(inputs, target, self._spec, inputs_for(self._spec, RunRequest.TRAIN))
        parts, sizes = split(bound, self._spec, 1)
        return summed(self._weigher.weigh(parts, sizes))

    def _check(self, work: RunRequest) -> None:
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

    def _offered(self, args: CallArgs) -> tuple[Call, Values, list[Values]]:
        """What this process's inputs come to: the call, and its tensors whole and split."""
        work, training = args.work, args.training
        try:
            needed = inputs_for(self._spec, work)
            bound = bind(args.inputs, args.target, self._spec, needed)
            if self._topology.replicas > 1 and batch_of(bound, self._spec) == 0:
                return Call(work, training), bound, []
            microbatches = self._microbatches
            if self._apart and args.outputs and not (training or work is RunRequest.TRAIN):
                microbatches = 1
            parts, sizes = split(bound, self._spec, microbatches)
            weights = self._weigher.weigh(parts, sizes) if work.makes_loss else ()
            wanted = self._wanted(args)
        except UsageError as error:
            if self._topology.members is None:
                raise
            return Call(work, training, refusal=(error.problem, error.hint)), {}, []
        return Call(work, training, sizes, weights, wanted=wanted), bound, parts

    def _wanted(self, args: CallArgs) -> frozenset[str]:
        """The inputs whose gradients the caller wants."""
        if args.work is not RunRequest.TRAIN:
            return frozenset()
        passed = passed_to(self._spec, args.inputs, args.target)
        return frozenset(name for name, tensor in passed.items() if tensor.requires_grad)

    def _give_back(
        self,
        args: CallArgs,
        bound: Values,
        gradients: Mapping[tuple[str, int], torch.Tensor | None],
        sizes: Sequence[int],
    ) -> None:
        """Adds the gradients of inputs to them, as a backward of the plain model does."""
        passed = passed_to(self._spec, args.inputs, args.target)
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
            found.append(total / self._topology.replicas)
        if roots:
            torch.autograd.backward(roots, found)
