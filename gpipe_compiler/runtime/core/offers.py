"""What a process offers the others of its inputs: the call that all ranks then agree on."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..errors import UsageError
from ..limits import refuse_alone, refuse_torn, refuse_untried
from ..spec import Joined, PipelineSpec
from .call import Call, CallArgs
from .gradients import wanted_of
from .inputs import NO_SIZES, BoundCall, bind_call
from .loss_weights import LossWeigher
from .options import ExecutionOptions, refuse_fused, refuse_left_out, refuse_parts
from .request import RunRequest
from .session import begins_anew
from .topology import Topology
from .wiring import inputs_for, output_leaves


class Offers:
    """Binds a caller's inputs, splits them, and weighs the micro-batches in the loss."""

    def __init__(
        self,
        spec: PipelineSpec,
        topology: Topology,
        options: ExecutionOptions,
        weigher: LossWeigher,
    ) -> None:
        self._spec = spec
        self._topology = topology
        self._options = options
        self._weigher = weigher
        # In one piece a mini-batch in eval mode has these, too.
        self._apart = any(leaf.joined is Joined.APART for leaf in output_leaves(spec.outputs))
        self._carried = frozenset(state.past for state in spec.carried)

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
                needed -= self._carried
            bound = bind_call(
                *(args.inputs, args.target, self._spec, needed, microbatches),
                may_be_empty=replicas > 1,
                known=NO_SIZES if begins or args.session is None else args.session.sizes,
            )
            if args.session is not None and not begins:
                args.session.check(self._spec, bound.samples)
            refuse_parts(self._spec, len(bound.samples))
            self.refuse_fused(training=training)
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

    def shares(self, call: Call) -> tuple[tuple[float, ...], ...]:
        """The weights of each micro-batch's terms in those of the mini-batch's loss."""
        if call.work.makes_loss and self._is_whole(call.samples):
            return (tuple(1.0 for _ in self._weigher.terms),)
        return self._weigher.shares(call.loss_weights, call.total)

    def _is_whole(self, samples: Sequence[int]) -> bool:
        """Whether a mini-batch is one micro-batch, whose loss is that of the mini-batch."""
        guarded = any(term.above > -math.inf for term in self._weigher.terms)
        return len(samples) == self._topology.replicas == 1 and not guarded

    def refuse_fused(self, *, training: bool) -> None:
        """As that of the options."""
        refuse_fused(self._spec, self._options, self._topology.devices, training=training)
