"""Runs one call of a pipeline: binds its inputs, agrees across ranks, sets the engines to work."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import queue
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass
from functools import partial

import torch

from ..errors import AgreedError, TransportError, UsageError
from ..limits import refuse_alone, refuse_torn, refuse_untried
from ..schedule.actions import SharedSum
from ..spec import Joined, PipelineSpec, Precision
from .blocks import StageBlocks
from .call import Call, CallArgs, agree
from .engine import DeviceResult, Engine
from .gradients import give_back, wanted_of
from .inputs import NO_SIZES, BoundCall, bind_call
from .local_stages import LocalStages
from .loss_weights import Counts, LossWeigher, summed
from .options import ExecutionOptions, refuse_fused, refuse_left_out, refuse_parts
from .outputs import Results
from .precision import run_of_devices
from .programs import PreparedSchedule, ProgramCache
from .reducer import Reducer, share_buffers, written
from .request import RandomKey, RunRequest, StepRequest, Values
from .session import begins_anew, without_state
from .topology import Topology
from .transport import (
    CrossingTypes,
    DistributedEndpoint,
    Endpoint,
    Inbox,
    LocalEndpoint,
    Workers,
)
from .wiring import inputs_for, output_leaves
from .written import WrittenBuffers, undone_in_error


@dataclass(eq=False)
class Execution:
    """Runs mini-batches: on every rank that takes part, all of which make the same calls.

    Attributes:
        microbatches: into which a mini-batch is split, at most.
        engines: of the devices of this process.
        threads: intra-op threads that a stage computes with on a CPU.
        _reducer: averages gradients over replicas, where there are any.
        _even: whether every replica is to have as many micro-batches: they wait for one another in
            each of them.
        blocks: by stage, what gathers its weights block by block, where replicas divide them so.
    """

    _spec: PipelineSpec
    _topology: Topology
    _stages: LocalStages
    _options: ExecutionOptions
    _programs: ProgramCache
    _weigher: LossWeigher
    _reducer: Reducer | None
    microbatches: int
    blocks: InitVar[Mapping[int, StageBlocks]]
    _even: bool

    def __post_init__(self, blocks: Mapping[int, StageBlocks]) -> None:
        spec, topology, stages, options = self._spec, self._topology, self._stages, self._options
        self._leaves = output_leaves(spec.outputs)
        # An output of a mini-batch in one piece alone, as there may be in eval mode.
        self._has_apart = any(leaf.joined is Joined.APART for leaf in self._leaves)
        self._results = Results(spec, topology)
        self._carried = frozenset(state.past for state in spec.carried)
        self._stateless = without_state(spec)
        self._types: dict[bool, CrossingTypes] = {}
        loss = None if spec.loss is None else spec.loss.value
        placed = zip(topology.numbers, topology.devices, strict=True)
        self.engines: Sequence[Engine] = [
            Engine(
                {s: stages.modules[s] for s, d in enumerate(topology.placement) if d == number},
                device,
                loss,
                options,
                spec.stages,
                partial(topology.peers.gathered, what="the statistics of the replicas"),
                blocks,
            )
            for number, device in placed
        ]
        on_cpu = sum(device.type == "cpu" for device in topology.devices)
        threads = max(1, torch.get_num_threads() // on_cpu) if on_cpu > 1 else None
        self.threads = threads or torch.get_num_threads()
        self._workers: Workers[DeviceResult] = Workers(topology.devices, threads)
        self._interrupted = False
        self._freezes = any(stage.trainable - stage.trained for stage in spec.stages)
        pairs = ((stages.modules[s], spec.stages[s].writes) for s in stages.modules)
        self._written = [WrittenBuffers(*pair) for pair in pairs if spec.decides]

    def run(self, args: CallArgs) -> tuple[torch.Tensor | None, object]:
        """The terms of the loss, where one is made, and the outputs, where inputs are passed.

        Raises:
            AgreedError: when replicas have read other data.
            UsageError: for inputs that do not fit.
            StageError: when the model's code raises.
            TransportError: when another process is gone, or an earlier call ended in the middle.
        """
        self._check(args.work)
        written = self._written if args.training else ()
        with self._in_step(), undone_in_error(written):
            return self._run(args)

    @contextlib.contextmanager
    def _in_step(self) -> Iterator[None]:
        """Notes a call that ends in the middle: what ranks have sent one another is on its way."""
        try:
            yield
        except (AgreedError, UsageError):  # every rank raises it alike
            raise
        except BaseException:
            self._interrupted = self._topology.world.size > 1
            raise

    def _run(self, args: CallArgs) -> tuple[torch.Tensor | None, object]:
        call, bound = self._agreed(args, self.microbatches)
        if self._even and call.fewest < call.most:
            if call.listed:
                raise AgreedError(
                    f"replicas are given lists of {call.fewest} and of {call.most} micro-batches, "
                    "and with --shard full each has as many",
                    hint="pass lists whose length their number divides, or use --shard optimizer",
                )
            call, bound = self._agreed(args, call.fewest)
        session = args.session
        held = frozenset() if session is None or call.begins else self._carried
        prepared = self._programs.of(
            args.work,
            len(call.samples),
            training=args.training,
            wanted=call.wanted,
            held=held,
            unfrozen=self._first_unfrozen() if args.work is RunRequest.TRAIN else None,
        )
        if call.varied:
            self._check_varied(prepared)
        request = self._request(args, call, bound, prepared)
        results = self._run_engines(prepared, request, training=args.training)
        loss = self._results.loss(results, request) if args.work.makes_loss else None
        structure, leaves = self._spec.outputs, self._leaves
        if session is not None:
            session.take(self._spec, call, [result.results for result in results])
            structure, leaves = self._stateless, output_leaves(self._stateless)
        made = self._results.gathered(results, request, call.groups, leaves)
        if call.wanted and self._topology.feeds:
            gradients, replicas = results[0].gradients, self._topology.replicas
            give_back(self._spec, bound, call.groups, gradients, replicas)
        if args.work.makes_loss and loss is None:
            raise UsageError(f"{self._spec.name} made no loss")
        if not (args.outputs and self._topology.feeds):
            return loss, None
        own_loss = loss if self._spec.loss is not None and self._spec.loss.returned else None
        outputs = [
            self._results.returned(
                structure, {**whole, **own}, call, group, None if call.listed else own_loss
            )
            for whole, own, group in zip(bound.wholes, made, call.groups, strict=True)
        ]
        return loss, outputs if call.listed else outputs[0]

    def _first_unfrozen(self) -> int | None:
        """The first stage, on any rank, that trains what was not trained as it was compiled."""
        if not self._freezes:
            return None
        trained = torch.zeros(len(self._spec.stages))
        trained[list(self._stages.unfrozen())] = 1.0
        world = self._topology.world
        found = world.sum(trained, "which stages are trained").nonzero()
        return int(found[0]) if len(found) else None

    def _request(
        self, args: CallArgs, call: Call, bound: BoundCall, prepared: PreparedSchedule
    ) -> StepRequest:
        session, replicas = args.session, self._topology.replicas
        kept = self._results.made if args.outputs else frozenset[str]()
        held: Sequence[Values] = ()
        handed_back = frozenset[str]()
        if session is not None:
            presents = {state.present for state in self._spec.carried}
            kept |= presents
            inputs = {source.name for source in self._spec.inputs}
            handed_back = frozenset(presents & inputs)
            held = () if call.begins else session.given(self._spec, self._topology.where, call)
        shares = self._shares(call, as_one=prepared.makes_one_loss)
        return StepRequest(
            work=args.work,
            samples=call.samples,
            sizes=call.sizes,
            inputs=bound.parts,
            # The mean over the replicas' losses and gradients is the sum of their shares.
            loss_weights=tuple(tuple(replicas * share for share in own) for own in shares),
            kept=kept,
            random=RandomKey(args.key.seed, args.key.step, call.first),
            vanished=self._weigher.vanished(call.total),
            loss_scale=args.loss_scale,
            held=held,
            handed_back=handed_back,
        )

    def _agreed(self, args: CallArgs, microbatches: int) -> tuple[Call, BoundCall]:
        """What all ranks run, in so many micro-batches at most, and this process's inputs."""
        call, bound = Call(args.work, args.training), BoundCall()
        if self._topology.feeds:
            call, bound = self._offered(args, microbatches)
        if args.read:
            call = dataclasses.replace(call, read=args.read)
        return agree(self._topology, call, args.key.step + 1), bound

    def _offered(self, args: CallArgs, microbatches: int) -> tuple[Call, BoundCall]:
        """What this process's inputs come to: the call, and its tensors whole and split."""
        work, training = args.work, args.training
        try:
            needed = inputs_for(self._spec, work)
            replicas = self._topology.replicas
            if self._has_apart and args.outputs and not (training or work is RunRequest.TRAIN):
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

    def _shares(self, call: Call, *, as_one: bool) -> tuple[tuple[float, ...], ...]:
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

    def loss_weights(self, inputs: object, target: object) -> Counts:
        """What the terms of a mini-batch's loss are means over: samples, ...; 1 for a sum."""
        needed = inputs_for(self._spec, RunRequest.TRAIN)
        return summed(self._weigher.weigh(bind_call(inputs, target, self._spec, needed, 1)))

    def close(self) -> None:
        """End the threads."""
        self._workers.close()

    def _check(self, work: RunRequest) -> None:
        if self._interrupted:
            raise TransportError(
                "an earlier call of this pipeline ended in the middle, so its ranks would take "
                "what was left of it for what comes next",
                hint="start all processes again; training goes on from its last checkpoint",
            )
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

    def _check_varied(self, prepared: PreparedSchedule) -> None:
        """Refuses micro-batches of different sizes where they cannot be taken together."""
        joint = [stage.index for stage in prepared.wiring if stage.joint is not None]
        if joint:
            raise UsageError(
                f"stage {joint[0]} takes all micro-batches as one, for exact BatchNorm or a loss "
                "of the whole mini-batch: they must be of the same sizes",
                hint="pad them to the same sizes",
            )
        if self._weigher.unknown and any(stage.makes_loss for stage in prepared.wiring):
            raise UsageError(
                f"micro-batches of {self._spec.name} must be of the same sizes: how many things "
                "its loss is a mean over is not known at others",
                hint="pad them to the same sizes, or write the loss as a sum divided by a count",
            )

    def _run_engines(
        self, prepared: PreparedSchedule, request: StepRequest, *, training: bool
    ) -> Sequence[DeviceResult]:
        types = None
        fixed = self._options.precision is self._spec.precision is Precision.FP32
        if not fixed or any(stage.autocasts for stage in self._spec.stages):
            types = self._types.setdefault(training, {})
        inboxes: list[Inbox] = [queue.SimpleQueue() for _ in self.engines]
        ended = None if self._reducer is None else self._reducer.stage_ended
        tasks = []
        for place, number in enumerate(self._topology.numbers):
            engine, own = self.engines[place], dataclasses.replace(request, inputs=())
            if number == 0:
                own = _on(request, engine.device)
            endpoint = self._endpoint(place, inboxes, prepared, request, types)
            steps = prepared.steps[number]
            tasks.append(partial(engine.run, steps, prepared.wiring, own, endpoint, ended))

        def abort() -> None:
            for inbox in inboxes:
                inbox.put(None)

        with run_of_devices(self._options.precision):
            results = self._workers.run(tasks, abort)
        if self._topology.replicas > 1:
            share_buffers(self._topology.peers, written(self._spec, self._stages.modules))
        return results

    def _endpoint(
        self,
        place: int,
        inboxes: Sequence[Inbox],
        prepared: PreparedSchedule,
        request: StepRequest,
        types: CrossingTypes | None,
    ) -> Endpoint:
        topology = self._topology
        if topology.pipeline.size == 1:
            return LocalEndpoint(place, inboxes, topology.devices, prepared.placement)
        return DistributedEndpoint(
            topology.pipeline,
            prepared.placement,
            {crossing.value: crossing for crossing in prepared.crossings},
            types,
            request.samples,
            request.sizes,
            self._spec.microbatch_size,
            self._sum_shared,
        )

    def _sum_shared(self, total: SharedSum) -> None:
        pipeline = self._topology.pipeline
        ranks = sorted({self._topology.rank_of(stage) for stage in total.stages})

        def over_ranks(name: str, gradient: torch.Tensor) -> torch.Tensor:
            return pipeline.sum(gradient, f"the gradient of {name}", ranks)

        (shared,) = (item for item in self._stages.shared if item.name == total.parameter)
        shared.exchange(over_ranks)


def _on(request: StepRequest, device: torch.device) -> StepRequest:
    if all(tensor.device == device for values in request.inputs for tensor in values.values()):
        return request
    moved = [
        {
            name: tensor.to(device, non_blocking=device.type != "cpu")
            for name, tensor in values.items()
        }
        for values in request.inputs
    ]
    return dataclasses.replace(request, inputs=moved)
