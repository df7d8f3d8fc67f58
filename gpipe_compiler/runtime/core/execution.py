"""Runs one call of a pipeline: binds its inputs, agrees across ranks, sets the engines to work."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass
from functools import partial

import torch

from ..errors import AgreedError, TransportError, UsageError
from ..schedule.actions import SharedSum
from ..spec import PipelineSpec
from .blocks import StageBlocks
from .call import Call, CallArgs, Offers, agree
from .engine import DeviceResult, Engine
from .gradients import give_back
from .inputs import BoundCall, bind_call
from .local_stages import LocalStages
from .loss_weights import Counts, LossWeigher, summed
from .options import ExecutionOptions
from .outputs import Results
from .precision import crossing_dtypes, run_of_devices
from .programs import PreparedSchedule, ProgramCache
from .reducer import Reducer, share_buffers, written
from .request import RandomKey, RunRequest, StepRequest, Values
from .session import without_state
from .topology import Topology
from .transport import DistributedEndpoint, Endpoint, Inbox, LocalEndpoint, Workers
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
        self._offers = Offers(spec, topology, options, self._weigher)
        self._results = Results(spec, topology)
        self._carried = frozenset(state.past for state in spec.carried)
        self._stateless = without_state(spec)
        self._dtypes: dict[bool, Mapping[str, torch.dtype]] = {}
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
        )
        if call.varied:
            self._check_varied(prepared)
        request = self._request(args, call, bound, prepared)
        results = self._run_engines(prepared, request)
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
        shares = self._offers.shares(call, as_one=prepared.makes_one_loss)
        return StepRequest(
            work=args.work,
            samples=call.samples,
            sizes=call.sizes,
            inputs=bound.parts,
            # The mean over the replicas' losses and gradients is the sum of their shares.
            loss_weights=tuple(tuple(replicas * share for share in own) for own in shares),
            kept=kept,
            random=RandomKey(args.key.seed, args.key.step, call.first),
            loss_scale=args.loss_scale,
            held=held,
            handed_back=handed_back,
        )

    def _agreed(self, args: CallArgs, microbatches: int) -> tuple[Call, BoundCall]:
        """What all ranks run, in so many micro-batches at most, and this process's inputs."""
        call, bound = Call(args.work, args.training), BoundCall()
        if self._topology.feeds:
            call, bound = self._offers.offered(args, microbatches)
        if args.read:
            call = dataclasses.replace(call, read=args.read)
        return agree(self._topology, call, args.key.step + 1), bound

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
        self, prepared: PreparedSchedule, request: StepRequest
    ) -> Sequence[DeviceResult]:
        inboxes: list[Inbox] = [queue.SimpleQueue() for _ in self.engines]
        ended = None if self._reducer is None else self._reducer.stage_ended
        tasks = []
        for place, number in enumerate(self._topology.numbers):
            engine, own = self.engines[place], dataclasses.replace(request, inputs=())
            if number == 0:
                own = _on(request, engine.device)
            endpoint = self._endpoint(place, inboxes, prepared, request)
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
        self, place: int, inboxes: Sequence[Inbox], prepared: PreparedSchedule, request: StepRequest
    ) -> Endpoint:
        topology = self._topology
        if topology.pipeline.size == 1:
            return LocalEndpoint(place, inboxes, topology.devices, prepared.placement)
        dtypes = self._crossing_dtypes()
        return DistributedEndpoint(
            topology.pipeline,
            prepared.placement,
            {
                one.value: dataclasses.replace(one, dtype=dtypes[one.value])
                for one in prepared.crossings
            },
            request.samples,
            request.sizes,
            self._spec.microbatch_size,
            self._sum_shared,
        )

    def _crossing_dtypes(self) -> Mapping[str, torch.dtype]:
        """The types of what is sent, in this precision and mode."""
        training = all(module.training for module in self._stages.modules.values())
        if training not in self._dtypes:
            kind = self._topology.world.device.type
            self._dtypes[training] = crossing_dtypes(
                self._spec, self._options.precision, kind, training=training
            )
        return self._dtypes[training]

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
