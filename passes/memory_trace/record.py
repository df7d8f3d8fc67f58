"""Runs one stage on fake tensors and records the memory of each of its actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from gpipe_compiler.passes.allocation_trace import (
    AllocationTrace,
    BlockKind,
    Growth,
    StageTraces,
    StorageEvent,
    StorageLife,
    forward_alone,
)
from gpipe_compiler.passes.dry_run import DryRun
from gpipe_compiler.passes.memory_trace.part import GraphPart, part_module, stage_run
from gpipe_compiler.passes.memory_trace.unwatched import adds_in_place, parts
from gpipe_compiler.passes.memory_trace.watch import StorageWatch
from gpipe_compiler.quiet import quiet
from gpipe_compiler.runtime.core.precision import run_of_device, run_of_devices
from gpipe_compiler.runtime.core.stage_run import StageRun


@dataclass(frozen=True)
class PartInputs:
    """What a part reads of others.

    Attributes:
        tensors: fake tensors like those it receives, by name.
        sizes: values that it does not receive, and asks for their sizes alone; numbers.
    """

    tensors: Mapping[str, torch.Tensor]
    sizes: Mapping[str, object]


@dataclass(slots=True)
class _Round:
    """One micro-batch: its forward and its backward, as the watch saw them.

    Attributes:
        born: the blocks that came up to the end of the forward.
    """

    born: range
    received: Mapping[str, int]
    returned: Mapping[str, int]
    forward: tuple[StorageEvent, ...]
    kept: frozenset[int]
    arriving: Mapping[str, int] = field(default_factory=dict)
    sent_back: Mapping[str, int] = field(default_factory=dict)
    backward: tuple[StorageEvent, ...] = ()
    weight: tuple[StorageEvent, ...] = ()


def record(part: GraphPart, given: PartInputs, *, split: bool) -> StageTraces:
    """The traces of a part.

    Args:
        split: whether the backward is in two parts.
    """
    stage = _Stage(part, given, split=split)
    with (
        stage.watch,
        torch.set_grad_enabled(part.training),
        run_of_devices(part.graph.precision),
        run_of_device(part.graph.precision),
        quiet(),
    ):
        first = stage.round()
        lasting = stage.watch.alive()
        later = stage.round()
        traces = _Traces(stage, first, later, lasting).made()
        stage.watch.forget()
    return traces


class _Stage:
    """A part at work under a watch."""

    def __init__(self, part: GraphPart, given: PartInputs, *, split: bool) -> None:
        self.watch = StorageWatch()
        run = DryRun.of(part.graph, training=part.training, mode=self.watch)
        # Constants that name the meta device mean the host in a dry run.
        self.part = part = replace(part, graph=run.graph, ops=run.graph.ops)
        self.given = given
        self.states = [run.states[name] for name in part.states]
        self.watch.begin(self.states)
        self.module = part_module(part, run.interpreter, given.sizes, self._started)
        needs = {name for name, tensor in given.tensors.items() if tensor.requires_grad}
        self.wiring = part.wiring(needs, split=split)
        self._adds = [adds_in_place(part.graph, op, draws=part.draws) for op in part.ops]
        self._forwards = False

    def _started(self, position: int | None) -> None:
        if position is None:
            # Within a forward the next op shows it; in a backward the nodes do.
            self.watch.op = self.watch.op if self._forwards else None
        elif self._forwards:
            self.watch.start(position, adds_in_place=self._adds[position])
        else:
            self.watch.start_again(position, adds_in_place=self._adds[position])

    def parameter_gradients(self) -> frozenset[int]:
        grads = [state.grad for state in self.states if state.grad is not None]
        numbers = {self.watch.number(part) for grad in grads for part in parts(grad)}
        return frozenset(number for number in numbers if number is not None)

    def sparse_gradients(self) -> list[torch.Tensor]:
        """The gradients of parameters that are sparse, as the first micro-batch leaves them."""
        found = (state.grad for state in self.states)
        return [grad for grad in found if grad is not None and grad.is_sparse]

    def round(self) -> _Round:
        run = stage_run(self.part, self.module, self.wiring)
        first = len(self.watch.born)
        received = [self.watch.adopt(self.given.tensors[name]) for name in self.part.inputs]
        names = self._numbers(dict(zip(self.part.inputs, received, strict=True)))
        self._forwards = True
        found = run.forward(0, received, waits=True)
        self._forwards = False
        names_of_losses = () if self.part.loss is None else (self.part.loss,)
        loss = dict(zip(names_of_losses, found.losses, strict=False))
        returned = self._numbers({**found.outputs, **loss})
        forms = {name: self.watch.form(found.outputs[name]) for name in self.part.returned}
        self.watch.rest()
        del received, found, loss
        events, kept = self.watch.take(), self.watch.alive()
        born = range(first, len(self.watch.born))
        made = _Round(born, names, returned, events, kept)
        if self.part.training:
            self._backward(run, made, forms)
            self.watch.sums.forget()
        return made

    def _backward(self, run: StageRun, made: _Round, forms: Mapping[str, torch.Tensor]) -> None:
        """As `runtime.core.engine` asks for it.

        Args:
            forms: tensors like the outputs.
        """
        graph = run.graph(0)
        roots = [root.edge for root in graph.outputs.values()]
        gradients = [self.watch.adopt(forms[name]) for name in graph.outputs]
        made.arriving = self._numbers(dict(zip(graph.outputs, gradients, strict=True)))
        losses = [loss for loss in graph.losses if loss is not None]
        roots.extend(loss.edge for loss in losses)
        gradients.extend(torch.full_like(loss.like, 1.0) * 1.0 for loss in losses)
        self.watch.sums.walk(roots)
        self.watch.follow_nodes()
        sent = run.backward(0, roots, gradients, graph.leaves)
        made.sent_back = self._numbers(sent)
        self.watch.rest()
        del graph, losses, roots, gradients, sent
        made.backward = self.watch.take()
        if self.wiring.split:
            self.watch.follow_nodes()
            run.weight(0)
            self.watch.rest()
            made.weight = self.watch.take()

    def _numbers(self, tensors: Mapping[str, torch.Tensor | None]) -> dict[str, int]:
        found = {n: self.watch.number(t) for n, t in tensors.items() if t is not None}
        return {name: number for name, number in found.items() if number is not None}


class _Traces:
    """Puts what two micro-batches took into the blocks of one.

    Args:
        lasting: the blocks that were alive after the first micro-batch.
    """

    def __init__(
        self, stage: _Stage, first: _Round, later: _Round, lasting: frozenset[int]
    ) -> None:
        self._stage = stage
        self._first = first
        self._later = later
        self._gradients = stage.parameter_gradients()
        born = stage.watch.born
        self._casts = {n for n in lasting.intersection(first.born) if born[n].for_op}
        self._casts -= self._gradients
        one = [number for number in first.born if number not in self._casts]
        pairs = list(zip(later.born, one, strict=True))
        for new, old in ((later.arriving, first.arriving), (later.sent_back, first.sent_back)):
            pairs.extend((number, old[name]) for name, number in new.items())
        self._same = dict(pairs)

    def made(self) -> StageTraces:
        first, later = self._first, self._later
        split = self._stage.wiring.split
        kinds = {number: self._kind(number) for number in range(len(self._stage.watch.born))}
        forward = AllocationTrace(first.forward)
        traces = [forward, AllocationTrace(first.backward), self._renumbered(later.backward)]
        weights = (
            [AllocationTrace(first.weight), self._renumbered(later.weight)]
            if split
            else [None, None]
        )
        seen = {event.block for trace in (*traces, *weights) if trace for event in trace.events}
        seen.update(first.received.values(), first.arriving.values())
        blocks = {number: self._block(number, kinds[number]) for number in sorted(seen)}
        kept = frozenset(n for n in first.kept if kinds[n] is not BlockKind.CAST)
        return StageTraces(
            ops=tuple(op.name for op in self._stage.part.ops),
            blocks=blocks,
            received=first.received,
            returned=first.returned,
            arriving=first.arriving,
            sent_back=first.sent_back,
            forward=forward,
            kept=kept,
            forward_again=forward_alone(forward, kept, blocks),
            first_backward=traces[1],
            backward=traces[2],
            first_weight=weights[0],
            weight=weights[1],
            growth=self._growth(kinds),
        )

    def _growth(self, kinds: Mapping[int, BlockKind]) -> Growth | None:
        found = [part for grad in self._stage.sparse_gradients() for part in parts(grad)]
        if not found:
            return None
        numbers = {self._stage.watch.number(part) for part in found}
        own = [n for n in numbers if n is not None and kinds[n] is BlockKind.PARAMETER_GRADIENT]
        return Growth(
            first=sum(self._stage.watch.born[number].bytes for number in own),
            each=sum(part.numel() * part.element_size() for part in found),
        )

    def _kind(self, number: int) -> BlockKind:
        first = self._first
        if number in first.received.values() or number in first.arriving.values():
            return BlockKind.RECEIVED
        if number in self._gradients:
            return BlockKind.PARAMETER_GRADIENT
        if number in self._casts:
            return BlockKind.CAST
        if self._stage.watch.born[number].for_op:
            return BlockKind.ACTIVATION
        return BlockKind.BUFFER if number in first.born else BlockKind.GRADIENT

    def _block(self, number: int, kind: BlockKind) -> StorageLife:
        born = self._stage.watch.born[number]
        return StorageLife(born.bytes, kind, born.op, born.shape, born.dtype)

    def _renumbered(self, events: Sequence[StorageEvent]) -> AllocationTrace:
        same = self._same
        return AllocationTrace(tuple(replace(e, block=same.get(e.block, e.block)) for e in events))
