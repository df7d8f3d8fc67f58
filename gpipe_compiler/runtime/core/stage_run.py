"""One stage in one run: its forward of each micro-batch, and what is kept until the backward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..spec import BatchNorm, Remat
from .batchnorm import DeferredStatistics, Gather
from .loss_weights import terms_of
from .precision import autocast, lower_dtype, no_weight, run_of_device
from .random import OverDraws, SeededRandom
from .recompute import Received, SegmentContext, Segments, unwritten
from .request import RunRequest, StepRequest, Values
from .split_backward import WeightPart, split_backward
from .wiring import StageWiring
from .written import WrittenBuffers

if TYPE_CHECKING:
    from .engine import Engine


@dataclass(frozen=True, slots=True)
class Computed:
    """What one forward came to.

    Attributes:
        leaves: the arguments whose gradients are wanted, by value name.
        losses: the terms of the loss where the stage makes it.
    """

    leaves: Values
    outputs: Values
    losses: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Root:
    """What a forward made and a gradient comes back to; its memory is not held.

    Attributes:
        like: of its shape and type, with a single element in memory.
    """

    edge: GradientEdge
    like: torch.Tensor

    @classmethod
    def of(cls, made: torch.Tensor) -> Root | None:
        """None where no gradient is wanted."""
        if not made.requires_grad:
            return None
        return cls(get_gradient_edge(made), made.detach().new_empty(()).expand(made.shape))


@dataclass(frozen=True, slots=True)
class BackwardGraph:
    """The graph that a backward runs through.

    Attributes:
        leaves: the arguments whose gradients are wanted, by value name.
        outputs: those that gradients come for, by value name.
        losses: the terms of the loss where the stage makes it; None for one without a gradient.
    """

    leaves: Values
    outputs: Mapping[str, Root]
    losses: tuple[Root | None, ...]


class StageRun:
    """A stage at work on one job. A run that fails is dropped, with all that it has collected."""

    def __init__(self, engine: Engine, stage: StageWiring, request: StepRequest) -> None:
        options, module = engine.options, engine.modules[stage.index]
        self._blocks = engine.blocks.get(stage.index)
        self._precision = options.precision
        self._autocasts = stage.spec.autocasts or lower_dtype(options.precision) is not None
        self._device = engine.device
        self._compiled = engine.compiled.get(stage.index)
        self._stage = stage
        self._module = module
        self._job = request
        self._loss_name = engine.loss_name if stage.makes_loss else None
        self._training = request.work is RunRequest.TRAIN
        self._deferred: DeferredStatistics | None = None
        if options.batchnorm is BatchNorm.DEFERRED:
            self._deferred = DeferredStatistics(module, stage.spec.renamed)
        self._once = stage.spec.once if request.microbatches > 1 else ()
        trains = any(parameter.requires_grad for parameter in module.parameters())
        gradients = trains or any(need.gradient for need in stage.needs)
        self._recomputes = gradients and options.remat[stage.index] is Remat.FULL
        self._segments = Segments(module, stage.spec.segments, keeps=stage.split)
        # What a stage runs again in segments though all of it runs again was planned so.
        again = options.remat[stage.index]
        planned = again is Remat.FULL and stage.spec.remat is Remat.FULL
        self._segmented = again is Remat.SEGMENTS or planned
        self._kept: dict[int, BackwardGraph | Received] = {}
        self._weights: dict[int, WeightPart] = {}

    @cached_property
    def _written(self) -> WrittenBuffers:
        return WrittenBuffers(self._module, self._stage.spec.writes, self._once)

    @cached_property
    def _written_once(self) -> WrittenBuffers:
        return WrittenBuffers(self._module, self._once)

    def forward(
        self, microbatch: int, received: Sequence[torch.Tensor], *, waits: bool
    ) -> Computed:
        """The first forward of a micro-batch; its outputs and loss are free of any graph.

        Args:
            received: a tensor for each of the stage's needs.
            waits: whether another micro-batch comes before its backward (`schedule.waiting`).
        """
        self._written_once.begin()
        self._watch_draws(microbatch, received)
        if not self._training:
            return self._compute(microbatch, received, again=False)
        if waits and self._recomputes:
            self._kept[microbatch] = Received(tuple(received), self._written.copies())
            with unwritten(received):
                found = self._compute(microbatch, received, again=False)
        else:
            # Where the backward is split, its second part may wait though its first one does not.
            apart = waits or self._stage.split
            with self._apart() if apart else contextlib.nullcontext():
                found = self._compute(microbatch, received, again=False)
            self._kept[microbatch] = self._graph(found)
        outputs = {name: output.detach() for name, output in found.outputs.items()}
        # Torch's mean losses lie in memory as large as what they are the mean of.
        return Computed({}, outputs, tuple(loss.detach().clone() for loss in found.losses))

    def graph(self, microbatch: int) -> BackwardGraph:
        """What the backward of a micro-batch runs through: kept, or computed again. Once only."""
        kept = self._kept.pop(microbatch)
        if isinstance(kept, BackwardGraph):
            return kept
        self._written_once.begin()
        apart = self._written_once.apart() if self._stage.split else contextlib.nullcontext()
        with self._written.replaced(kept.state), apart:
            return self._graph(self._compute(microbatch, kept.arguments, again=True))

    def backward(
        self,
        microbatch: int,
        roots: Sequence[GradientEdge],
        gradients: Sequence[torch.Tensor],
        leaves: Values,
    ) -> Mapping[str, torch.Tensor | None]:
        """The gradients of what was received, by name; None is zeros.

        Those of the parameters are added to theirs, at once or where the backward is split by
        `weight`.

        Args:
            roots: of the graph of this micro-batch: what gradients have come for.
        """
        if self._stage.split:
            found, self._weights[microbatch] = split_backward(roots, gradients, leaves)
            return found
        blocks = self._blocks
        with contextlib.nullcontext() if blocks is None else blocks.backward(microbatch):
            if roots:
                torch.autograd.backward(roots, gradients)
        return {name: leaf.grad for name, leaf in leaves.items()}

    def weight(self, microbatch: int) -> None:
        """The second part of a backward that is split. Once only."""
        self._weights.pop(microbatch).run()

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        with self._written.apart(), self._written_once.apart():
            yield

    def _graph(self, found: Computed) -> BackwardGraph:
        roots = {
            name: root
            for name, _ in self._stage.returned
            if name in found.outputs and (root := Root.of(found.outputs[name])) is not None
        }
        return BackwardGraph(found.leaves, roots, tuple(map(Root.of, found.losses)))

    def finish(self, gather: Gather) -> None:
        """After the last micro-batch: what changes once a mini-batch."""
        if self._deferred is not None:
            self._deferred.commit(gather)

    def _watch_draws(self, microbatch: int, received: Sequence[torch.Tensor]) -> None:
        """Finds out which blocks draw, by a forward that leaves no trace; once in a mode."""
        if self._compiled is None or self._compiled.knows(self._random(microbatch)):
            return
        copies = [tensor.clone() for tensor in received]
        with self._written.replaced(self._written.copies()):
            self._compute(microbatch, copies, again=True, watched=True)
        self._written_once.begin()

    def _in_blocks(
        self, random: SeededRandom | None, *, watched: bool
    ) -> contextlib.AbstractContextManager[None]:
        if self._compiled is None:
            return contextlib.nullcontext()
        if watched:
            assert random is not None  # else there is nothing to watch
            return self._compiled.watch(random)
        return self._compiled.compiled(random)

    def _compute(
        self,
        microbatch: int,
        received: Sequence[torch.Tensor],
        *,
        again: bool,
        watched: bool = False,
    ) -> Computed:
        leaves: Values = {}
        arguments = []
        for need, tensor in zip(self._stage.needs, received, strict=True):
            if need.gradient:
                leaf = leaves[need.value] = tensor.detach().requires_grad_()
                arguments.append(no_weight(leaf) if self._autocasts else leaf)
            else:
                arguments.append(tensor)
        random = self._random(microbatch)
        with contextlib.ExitStack() as around:
            if self._blocks is not None:
                around.enter_context(self._blocks.forward(microbatch))
            if self._deferred is not None:
                around.enter_context(self._deferred.forward(again=again))
            if random is not None:
                around.enter_context(OverDraws(random))
            around.enter_context(autocast(self._precision, self._device))
            if self._training:
                around.enter_context(self._of_segments(random))
            around.enter_context(self._in_blocks(random, watched=watched))
            result = self._module(*arguments[: self._stage.arguments])
            names = self._stage.spec.outputs
            outputs = dict(zip(names, (result,) if len(names) == 1 else result, strict=True))
            return Computed(leaves, outputs, self._losses(arguments, outputs))

    def _of_segments(
        self, random: SeededRandom | None
    ) -> contextlib.AbstractContextManager[object]:
        if not self._segmented:
            return self._segments.forward(None)

        def around() -> contextlib.ExitStack:
            contexts = contextlib.ExitStack()
            if self._blocks is not None:
                contexts.enter_context(self._blocks.again())
            if self._deferred is not None:
                contexts.enter_context(self._deferred.forward(again=True))
            # On a GPU a backward has a thread of its own, which would empty the table of casts.
            contexts.enter_context(run_of_device(self._precision))
            contexts.enter_context(autocast(self._precision, self._device))
            contexts.enter_context(self._in_blocks(random, watched=False))
            return contexts

        return self._segments.forward(SegmentContext(self._device, around, random))

    def _random(self, microbatch: int) -> SeededRandom | None:
        numbers, shared = self._stage.spec.randoms(training=self._module.training)
        if not numbers:
            return None
        key = self._job.random
        return SeededRandom(key.seed, key.step, key.first + microbatch, numbers, shared)

    def _losses(
        self, arguments: Sequence[torch.Tensor], outputs: Values
    ) -> tuple[torch.Tensor, ...]:
        name = self._loss_name
        if name is None:
            return ()
        if name in outputs:
            return (outputs[name],)
        needs = (need.value for need in self._stage.needs)
        known = dict(zip(needs, arguments, strict=True)) | outputs
        inputs = self._stage.spec.loss_inputs
        return terms_of(self._module.loss(*(known[item] for item in inputs)))  # type: ignore[operator]  # the last stage of a pipeline with a loss has this method
