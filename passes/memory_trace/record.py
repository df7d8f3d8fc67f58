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
        casts = stage.casts(first)
        # Autograd runs the nodes of casts of weights last where a forward before has made them.
        later = stage.round() if casts else None
        traces = _Traces(stage, first, later, casts).made()
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

    def casts(self, made: _Round) -> frozenset[int]:
        """The casts of weights that a first micro-batch has made: they stay."""
        stay = self.watch.alive().intersection(made.born) - self.parameter_gradients()
        return frozenset(number for number in stay if self.watch.born[number].for_op)

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
    """The traces of a micro-batch whose gradients are the first, and of one where there are some.

    A parameter takes its first gradient over, or a copy of it where others hold it too or where it
    lies otherwise in memory (torch/csrc/autograd/functions/accumulate_grad.h). A later one is added
    to that in place, and ends where all others let go of it, as the watch has seen.
    """

    def __init__(
        self, stage: _Stage, first: _Round, later: _Round | None, casts: frozenset[int]
    ) -> None:
        self._stage = stage
        self._first = first
        self._later = later or first
        self._casts = casts
        self._copied = stage.parameter_gradients()
        self._born = dict(enumerate(stage.watch.born))
        if later is None:
            self._numbers = self._numbers_of_later()
            self._born.update({new: self._born[old] for old, new in self._numbers.items()})
        else:
            self._numbers = self._numbers_of_first(later)

    def made(self) -> StageTraces:
        first, later = self._first, self._later
        split = self._stage.wiring.split
        forward = AllocationTrace(first.forward)
        traces = [forward, self._of_first(first.backward), self._of_later(later.backward)]
        weights = (
            [self._of_first(first.weight), self._of_later(later.weight)] if split else [None, None]
        )
        seen = {event.block for trace in (*traces, *weights) if trace for event in trace.events}
        seen.update(first.received.values(), first.arriving.values())
        blocks = {number: self._block(number) for number in sorted(seen)}
        kept = frozenset(n for n in first.kept if self._kind(n) is not BlockKind.CAST)
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
            growth=self._growth(),
        )

    def _numbers_of_later(self) -> dict[int, int]:
        """Of blocks that the first backward makes: their numbers in a later one that was not run,
        as if it had been. What is sent back has the same in both."""
        first = self._first
        before = len(self._born) + len(first.born) + len({*first.arriving.values()})
        events = (*first.backward, *first.weight)
        born = [e.block for e in events if e.alive and e.block not in self._copied]
        numbers = {old: new for new, old in enumerate(born, before)}
        return {n: new for n, new in numbers.items() if n not in first.sent_back.values()}

    def _numbers_of_first(self, later: _Round) -> dict[int, int]:
        """Of blocks of the later micro-batch that the first has, too: their numbers there."""
        first = self._first
        one = [number for number in first.born if number not in self._casts]
        pairs = list(zip(later.born, one, strict=True))
        for new, old in ((later.arriving, first.arriving), (later.sent_back, first.sent_back)):
            pairs.extend((number, old[name]) for name, number in new.items())
        return dict(pairs)

    def _of_first(self, events: Sequence[StorageEvent]) -> AllocationTrace:
        """With the gradients that stay."""
        stay = self._stage.watch.taken_over
        return AllocationTrace(tuple(e for e in events if e.alive or e.block not in stay))

    def _of_later(self, events: Sequence[StorageEvent]) -> AllocationTrace:
        """With the gradients neither copied nor kept."""
        numbers = self._numbers
        added = (event for event in events if event.block not in self._copied)
        return AllocationTrace(
            tuple(replace(e, block=numbers.get(e.block, e.block)) for e in added)
        )

    def _growth(self) -> Growth | None:
        found = [part for grad in self._stage.sparse_gradients() for part in parts(grad)]
        if not found:
            return None
        own = [n for n in self._stage.watch.sparse if self._kind(n) is BlockKind.PARAMETER_GRADIENT]
        return Growth(
            first=sum(self._born[number].bytes for number in own),
            each=sum(part.numel() * part.element_size() for part in found),
        )

    def _kind(self, number: int) -> BlockKind:
        first = self._first
        if number in first.received.values() or number in first.arriving.values():
            return BlockKind.RECEIVED
        if number in self._copied or number in self._stage.watch.taken_over:
            return BlockKind.PARAMETER_GRADIENT
        if number in self._casts:
            return BlockKind.CAST
        if self._born[number].for_op:
            return BlockKind.ACTIVATION
        return BlockKind.BUFFER if number in first.born else BlockKind.GRADIENT

    def _block(self, number: int) -> StorageLife:
        born = self._born[number]
        return StorageLife(born.bytes, self._kind(number), born.op, born.shape, born.dtype)
