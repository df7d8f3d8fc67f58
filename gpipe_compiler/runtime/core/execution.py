"""Runs one call of a pipeline: binds its inputs, agrees across ranks, executes the programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..errors import AgreedError, UsageError
from ..spec import Joined, PipelineSpec
from .inputs import Inputs, batch_of, bind, passed_to, split
from .loss_weights import Counts, LossWeigher, summed
from .outputs import as_returned, rebuild
from .programs import ProgramCache
from .request import RandomKey, StepRequest, Values, Work
from .runners import Runner
from .topology import Replicas, Topology
from .wiring import inputs_for, output_leaves

_MOST_WANTED = 50
"""Inputs that can have gradients: as many bits are exact in a floating-point number."""


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

    work: Work
    training: bool
    inputs: Inputs
    target: object
    outputs: bool
    key: RandomKey
    loss_scale: float = 1.0
    read: int = 0


_WORKS = tuple(Work)

_NUMBERS = 7
"""In the header before sizes and weights: work, mode, micro-batches, the bytes of a refusal, the
wanted gradients, and the halves of a checksum."""


@dataclass(frozen=True, slots=True)
class Call:
    """What a call of the pipeline is about, in this replica of it.

    Attributes:
        training: whether the stages are in training mode.
        sizes: samples in each micro-batch; none where the inputs were refused, or where this
            replica's share of the mini-batch is empty.
        loss_weights: of each micro-batch, what the terms of its loss are means over; () without a
            loss.
        refusal: what is wrong with the inputs.
        wanted: the inputs whose gradients the caller wants: bit i for input i.
        read: a checksum of the whole mini-batches that this replica has taken its share of since
            the last call; 0 where it has not.
        first: the number in the mini-batch of this replica's first micro-batch.
        total: the loss weights of the mini-batch, over all replicas; () without any.
    """

    work: Work
    training: bool
    sizes: tuple[int, ...] = ()
    loss_weights: tuple[Counts, ...] = ()
    refusal: UsageError | None = None
    wanted: int = 0
    read: int = 0
    first: int = 0
    total: Counts = ()


def agree(replicas: Replicas | None, call: Call, most: int, terms: int, number: int) -> Call:
    """The call of this rank's replica, on every rank, with what it needs to know of the others'.

    Args:
        call: what this rank knows of it; all ranks but the first of each replica know no more
            than the work and the mode.
        most: micro-batches that a replica has at most.
        terms: of the loss.
        number: of the mini-batch, from 1, for messages.

    Raises:
        AgreedError: on every rank, when a replica has taken its share of another mini-batch.
        UsageError: on every rank, when a replica has refused its inputs, when there are fewer
            samples than replicas, or when ranks do not make the same call.
    """
    if replicas is None:
        if call.refusal is not None:
            raise call.refusal
        return dataclasses.replace(call, total=summed(call.loss_weights))
    calls = _exchange(replicas, call, most, terms)
    firsts = range(0, replicas.world.size, replicas.pipeline.size)
    for rank, (other, _) in zip(firsts, calls, strict=True):
        _check_same(replicas.world.rank, call, rank, other)
    for rank, (_, refused) in zip(firsts, calls, strict=True):
        if refused:
            _refuse(replicas, call.refusal, rank, refused)
    for rank, (other, _) in zip(firsts, calls, strict=True):
        if other.read and calls[0][0].read and other.read != calls[0][0].read:
            raise _other_data(rank, number)
    if not all(other.sizes for other, _ in calls):
        samples = sum(sum(other.sizes) for other, _ in calls)
        raise UsageError(f"a batch of {samples} is too small for {replicas.count} replicas")
    before = [other for other, _ in calls[: replicas.number]]
    return dataclasses.replace(
        calls[replicas.number][0],
        first=sum(len(other.sizes) for other in before),
        total=summed([counts for other, _ in calls for counts in other.loss_weights]),
    )


def _exchange(replicas: Replicas, call: Call, most: int, terms: int) -> list[tuple[Call, int]]:
    """The calls of all replicas, with the length of their refusals, on every rank."""
    length = _NUMBERS + most + terms * most
    rows = torch.zeros(replicas.count, length, dtype=torch.float64)
    if replicas.pipeline.rank == 0:
        rows = torch.stack(
            replicas.peers.gathered(_header(call, most, length), "the calls of the replicas")
        )
    rows = replicas.pipeline.broadcast(rows, 0, "the call")
    found = []
    for work, training, count, refused, wanted, upper, lower, *numbers in rows.tolist():
        kind = _WORKS[int(work)]
        sizes = tuple(map(int, numbers[: int(count)]))
        counts: list[Counts] = []
        if kind.makes_loss:
            counts = [tuple(numbers[most + terms * m :][:terms]) for m in range(int(count))]
        read = int(upper) << 32 | int(lower)
        own = Call(kind, bool(training), sizes, tuple(counts), wanted=int(wanted), read=read)
        found.append((own, int(refused)))
    return found


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


def _other_data(rank: int, number: int) -> AgreedError:
    return AgreedError(
        f"mini-batch {number}, as rank {rank} has read it, is not that of rank 0",
        hint="every replica reads the same mini-batches, whole, and takes its share of each: use "
        "the same seed on every rank and a sampler that does not know the rank; samples that only "
        "one replica reads are passed to step() without shard()",
    )


def _header(call: Call, most: int, length: int) -> torch.Tensor:
    header = torch.zeros(length, dtype=torch.float64)
    count = len(call.sizes)
    halves = call.read >> 32, call.read & 0xFFFFFFFF  # each is exact in 64 bits of floating point
    refused = len(_text(call.refusal))
    _put(header, 0, (_WORKS.index(call.work), call.training, count, refused, call.wanted))
    _put(header, _NUMBERS - len(halves), halves)
    _put(header, _NUMBERS, call.sizes)
    _put(header, _NUMBERS + most, [count for counts in call.loss_weights for count in counts])
    return header


def _put(header: torch.Tensor, start: int, numbers: Sequence[float]) -> None:
    header[start : start + len(numbers)] = torch.tensor(numbers, dtype=torch.float64)


def _refuse(replicas: Replicas, own: UsageError | None, rank: int, length: int) -> None:
    """Raise the refusal of a rank, on every rank; one that has refused too raises its own."""
    text = torch.zeros(length, dtype=torch.uint8)
    if replicas.world.rank == rank:
        text = torch.tensor(list(_text(own)), dtype=torch.uint8)
    text = replicas.world.broadcast(text, rank, f"what rank {rank} refuses")
    if own is not None:
        raise own
    problem, hint = bytes(text.tolist()).decode().split("\0")
    raise UsageError(f"rank {rank} refused its inputs: {problem}", hint=hint)


def _text(refusal: UsageError | None) -> bytes:
    return b"" if refusal is None else f"{refusal.problem}\0{refusal.hint}".encode()


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
        terms, number = len(self._weigher.terms), args.key.step + 1
        call = agree(self._topology.members, call, self._microbatches, terms, number)
        wanted = frozenset(
            source.name for i, source in enumerate(self._spec.inputs) if call.wanted >> i & 1
        )
        prepared = self._programs.of(
            args.work, len(call.sizes), training=args.training, wanted=wanted
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
        if wanted and self._topology.feeds:
            self._give_back(args, bound, result.gradients, call.sizes)
        if args.work.makes_loss and result.loss is None:
            raise UsageError(f"{self._spec.name} made no loss")
        if not (args.outputs and self._topology.feeds):
            return result.loss, None
        outputs = rebuild(self._spec.outputs, {**bound, **result.outputs}, sum(call.sizes))
        return result.loss, as_returned(outputs, self._spec.classes)

    def loss_weights(self, inputs: Inputs, target: object) -> Counts:
        """What the terms of a mini-batch's loss are means over: samples, ...; 1 for a sum."""
        bound = bind(inputs, target, self._spec, inputs_for(self._spec, Work.TRAIN))
        parts, sizes = split(bound, self._spec, 1)
        return summed(self._weigher.weigh(parts, sizes))

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

    def _offered(self, args: CallArgs) -> tuple[Call, Values, list[Values]]:
        """What this process's inputs come to: the call, and its tensors whole and split."""
        work, training = args.work, args.training
        try:
            needed = inputs_for(self._spec, work)
            bound = bind(args.inputs, args.target, self._spec, needed)
            if self._topology.replicas > 1 and batch_of(bound, self._spec) == 0:
                return Call(work, training), bound, []
            microbatches = self._microbatches
            if self._apart and args.outputs and not (training or work is Work.TRAIN):
                microbatches = 1
            parts, sizes = split(bound, self._spec, microbatches)
            weights = self._weigher.weigh(parts, sizes) if work.makes_loss else ()
            wanted = self._wanted(args)
        except UsageError as error:
            return Call(work, training, refusal=error), {}, []
        return Call(work, training, sizes, weights, wanted=wanted), bound, parts

    def _wanted(self, args: CallArgs) -> int:
        """The inputs whose gradients the caller wants, as the bits of a number.

        Raises:
            UsageError: where ranks cannot tell each other so many.
        """
        if args.work is not Work.TRAIN:
            return 0
        passed = passed_to(self._spec, args.inputs, args.target)
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
