"""What a caller wants of a mini-batch, and how all ranks come to know it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..errors import AgreedError, UsageError
from ..limits import refuse_alone, refuse_torn, refuse_untried
from ..sizes import Sizes
from ..spec import Joined, PipelineSpec
from .gradients import wanted_of
from .inputs import NO_SIZES, BoundCall, Inputs, bind_call
from .loss_weights import Counts, LossWeigher, summed
from .options import ExecutionOptions, refuse_fused, refuse_left_out, refuse_parts
from .request import RandomKey, RunRequest
from .session import HeldState, begins_anew
from .topology import Topology
from .wiring import inputs_for, output_leaves


@dataclass(frozen=True, slots=True)
class CallArgs:
    """What a caller wants of a mini-batch.

    Attributes:
        training: whether the stages are in training mode.
        outputs: whether what the model returns is wanted.
        key: what random ops depend on.
        loss_scale: gradients are those of the loss times this.
        session: what is held from an earlier call, and after this one.
    """

    work: RunRequest
    training: bool
    inputs: Inputs
    target: object
    outputs: bool
    key: RandomKey
    loss_scale: float = 1.0
    read: int = 0
    deferred: bool = False
    session: HeldState | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """What a call of the pipeline is about, in this replica of it.

    Attributes:
        samples: in each micro-batch; none where the inputs were refused, or where this replica's
            share of the mini-batch is empty.
        listed: whether the micro-batches were passed as a list.
        loss_weights: of each micro-batch, what the terms of its loss are means over; () without a
            loss.
        refusal: the problem and the hint, where the inputs are wrong.
        read: a checksum of the whole mini-batches that this replica has taken its share of since
            the last call; 0 where it has not.
        first: the number in the mini-batch of this replica's first micro-batch.
        total: the loss weights of the mini-batch, over all replicas; () without any.
        begins: whether a session's state is passed with the inputs, in place of what it holds.
        varied: whether sizes differ among the micro-batches of the mini-batch, over all replicas.
        fewest, most: micro-batches of a replica.
    """

    work: RunRequest
    training: bool
    samples: tuple[int, ...] = ()
    sizes: tuple[Sizes, ...] = ()
    listed: bool = False
    loss_weights: tuple[Counts, ...] = ()
    refusal: tuple[str, str] | None = None
    wanted: frozenset[str] = frozenset()
    read: int = 0
    first: int = 0
    total: Counts = ()
    varied: bool = False
    begins: bool = False
    fewest: int = 0
    most: int = 0

    @property
    def groups(self) -> Sequence[Sequence[int]]:
        """The micro-batches that were passed together, and whose outputs are one."""
        numbers = range(len(self.samples))
        return [[m] for m in numbers] if self.listed else [numbers]

    def packed(self) -> dict[str, object]:
        """Its fields, of Python's own types: ranks may have the package under different names."""
        own = {name: getattr(self, name) for name in self.__slots__}
        return {**own, "work": self.work.value}

    def among(self, calls: Sequence[Call], replica: int = 0) -> Call:
        """This call as that of one replica among all, with what it needs to know of theirs."""
        sizes = [own for call in calls for own in call.sizes]
        return dataclasses.replace(
            self,
            first=sum(len(call.samples) for call in calls[:replica]),
            total=summed([counts for call in calls for counts in call.loss_weights]),
            varied=any(own != sizes[0] for own in sizes),
            fewest=min(len(call.samples) for call in calls),
            most=max(len(call.samples) for call in calls),
        )


@dataclass(frozen=True)
class Offers:
    """What a process offers the others of its inputs: bound, split, and weighed in the loss."""

    _spec: PipelineSpec
    _topology: Topology
    _options: ExecutionOptions
    _weigher: LossWeigher

    @cached_property
    def _apart(self) -> bool:
        """Whether an output is of a mini-batch in one piece alone, as in eval mode it may be."""
        leaves = output_leaves(self._spec.outputs)
        return any(leaf.joined is Joined.APART for leaf in leaves)

    def offered(self, args: CallArgs, microbatches: int) -> tuple[Call, BoundCall]:
        """What this process's inputs come to: the call, and its tensors whole and split."""
        work, training = args.work, args.training
        try:
            needed = inputs_for(self._spec, work)
            replicas = self._topology.replicas
            if self._apart and args.outputs and not (training or work is RunRequest.TRAIN):
                microbatches = 1
            begins = args.session is None or begins_anew(self._spec, args.inputs)
            if not begins:
                needed -= {state.past for state in self._spec.carried}
            bound = bind_call(
                *(args.inputs, args.target, self._spec, needed, microbatches),
                may_be_empty=replicas > 1,
                known=NO_SIZES if begins or args.session is None else args.session.sizes,
            )
            if args.session is not None and not begins:
                args.session.check(self._spec, bound.samples)
            refuse_parts(self._spec, len(bound.samples))
            refuse_fused(self._spec, self._options, self._topology.devices, training=training)
            refuse_alone(self._spec.name, self._spec.alone.get(training, ""), bound.samples)
            together = max if bound.listed else sum
            samples, parts = together(bound.samples or (0,)), len(bound.samples)
            refuse_untried(self._spec.name, self._spec.limits, replicas * samples, replicas * parts)
            refuse_torn(
                *(self._spec.name, self._spec.group, bound.samples, replicas * parts),
                makes_loss=work.makes_loss,
            )
            if args.outputs and training:
                refuse_left_out(self._spec)
            weighed = work.makes_loss and not self._is_whole(bound.samples)
            weights = self._weigher.weigh(bound) if weighed else ()
            trains = work is RunRequest.TRAIN
            wanted = wanted_of(self._spec, bound) if trains else frozenset[str]()
            if wanted and args.deferred:
                raise UsageError(
                    f"{', '.join(sorted(wanted))} requires a gradient, which `loss` does not give",
                    hint="use step, or detach() it",
                )
        except UsageError as error:
            if self._topology.world.size == 1:
                raise
            return Call(work, training, refusal=(error.problem, error.hint)), BoundCall()
        passed = bound.samples, bound.sizes, bound.listed
        return Call(work, training, *passed, weights, wanted=wanted, begins=begins), bound

    def shares(self, call: Call, *, as_one: bool) -> tuple[tuple[float, ...], ...]:
        """The weights of each micro-batch's terms in those of the mini-batch's loss.

        Args:
            as_one: whether one loss is made, of all micro-batches as one: that of the first.
        """
        if call.work.makes_loss and self._is_whole(call.samples):
            return (tuple(1.0 for _ in self._weigher.terms),)
        if as_one and call.loss_weights:
            (whole,) = self._weigher.shares((call.total,), call.total)
            return (whole, *(tuple(0.0 for _ in whole) for _ in call.loss_weights[1:]))
        return self._weigher.shares(call.loss_weights, call.total)

    def _is_whole(self, samples: Sequence[int]) -> bool:
        """Whether a mini-batch is one micro-batch, whose loss is that of the mini-batch."""
        guarded = any(max(t.above, t.least) > -math.inf for t in self._weigher.terms)
        return len(samples) == self._topology.replicas == 1 and not guarded


def agree(topology: Topology, call: Call, number: int) -> Call:
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
    if topology.world.size == 1:
        return call.among([call])
    calls = _exchange(topology, call)
    firsts = range(0, topology.world.size, topology.pipeline.size)
    for rank, other in zip(firsts, calls, strict=True):
        _check_same(topology.world.rank, call, rank, other)
    for rank, other in zip(firsts, calls, strict=True):
        if other.refusal is not None:
            problem, hint = call.refusal or other.refusal
            who = "" if call.refusal else f"rank {rank} refused its inputs: "
            raise UsageError(f"{who}{problem}", hint=hint)
    for rank, other in zip(firsts, calls, strict=True):
        if other.read and calls[0].read and other.read != calls[0].read:
            raise AgreedError(
                f"mini-batch {number}, as rank {rank} has read it, is not that of rank 0",
                hint="every replica reads the same mini-batches, whole, and takes its share of "
                "each: use the same seed on every rank and a sampler that does not know the rank; "
                "samples that only one replica reads are passed to step() without shard()",
            )
    if not all(other.samples for other in calls):
        samples = sum(sum(other.samples) for other in calls)
        raise too_small(samples, topology.replicas)
    return calls[topology.replica].among(calls, topology.replica)


def too_small(samples: int, replicas: int) -> UsageError:
    """The error for a mini-batch of which a replica would have no sample."""
    return UsageError(
        f"a batch of {samples} is too small for {replicas} replicas",
        hint=f"give every batch {replicas} samples or more (drop_last=True leaves out a rest), or "
        "run fewer replicas",
    )


def _exchange(topology: Topology, call: Call) -> list[Call]:
    calls: list[dict[str, Any]] | None = None
    if topology.pipeline.rank == 0:
        what = "the calls of the replicas"
        gathered = topology.peers.gather_objects(call.packed(), what)
        calls = topology.peers.broadcast_object(gathered, 0, what)
    calls = topology.pipeline.broadcast_object(calls, 0, "the call")
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
