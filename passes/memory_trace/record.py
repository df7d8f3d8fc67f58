"""Runs one stage on fake tensors and records the memory of each of its actions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from gpipe_compiler.passes.allocation_trace import (
    AllocationTrace,
    BlockKind,
    Growth,
    StageTraces,
    StorageEvent,
)
from gpipe_compiler.passes.dry_run import DryRun
from gpipe_compiler.passes.memory_trace.part import GraphPart, part_module, stage_run
from gpipe_compiler.passes.memory_trace.unwatched import adds_in_place, parts
from gpipe_compiler.passes.memory_trace.watch import StorageWatch
from gpipe_compiler.quiet import quiet
from gpipe_compiler.runtime.core.precision import run_of_device, run_of_devices
from gpipe_compiler.runtime.core.stage_run import StageRun


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


def record(part: GraphPart, value: Callable[[str], Any], *, split: bool) -> StageTraces:
    """The traces of a part.

    Args:
        value: makes a fake tensor like one that others make, or gives a number that they make.
        split: whether the backward is in two parts.
    """
    stage = _Stage(part, value, split=split)
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

    def __init__(self, part: GraphPart, value: Callable[[str], Any], *, split: bool) -> None:
        self.watch = StorageWatch()
        run = DryRun.of(part.graph, training=part.training, mode=self.watch)
        # Constants that name the meta device mean the host in a dry run.
        self.part = part = replace(part, graph=run.graph, ops=run.graph.ops)
        self.given: Mapping[str, torch.Tensor] = {name: value(name) for name in part.inputs}
        self.states = [run.states[name] for name in part.states]
        self.watch.begin(self.states)
        sizes = {name: value(name) for name in part.unreceived}
        self.module = part_module(part, run.interpreter, sizes, self._started)
        needs = {name for name, tensor in self.given.items() if tensor.requires_grad}
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
        born = self.watch.born
        stay = self.watch.alive().intersection(made.born) - self.parameter_gradients()
        return frozenset(number for number in stay if born[number].kind is BlockKind.ACTIVATION)

    def sparse_gradients(self) -> list[torch.Tensor]:
        """The gradients of parameters that are sparse, as the first micro-batch leaves them."""
        found = (state.grad for state in self.states)
        return [grad for grad in found if grad is not None and grad.is_sparse]

    def round(self) -> _Round:
        run = stage_run(self.part, self.module, self.wiring)
        first = len(self.watch.born)
        received = [self.watch.adopt(self.given[name]) for name in self.part.inputs]
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
        born = stage.watch.born
        end = len(born) if later is None else later.born.start
        self._numbers = self._numbered(end)
        self._born = {new: born[old] for old, new in self._numbers.items()}
        self._born.update(enumerate(born[:end]))

    def made(self) -> StageTraces:
        first, later = self._first, self._later
        split = self._stage.wiring.split
        forward = first.forward
        traces = [forward, self._of_first(first.backward), self._of_later(later.backward)]
        weights = (
            [self._of_first(first.weight), self._of_later(later.weight)] if split else [None, None]
        )
        seen = {event.block for trace in (*traces, *weights) if trace for event in trace}
        seen.update(first.received.values(), first.arriving.values())
        blocks = {n: replace(self._born[n], kind=self._kind(n)) for n in sorted(seen)}
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
            first_backward=traces[1],
            backward=traces[2],
            first_weight=weights[0],
            weight=weights[1],
            growth=self._growth(),
        )

    def _numbered(self, end: int) -> dict[int, int]:
        """Of blocks of the later micro-batch: their numbers in the first, which has them too, but
        for what its backward makes, which have others.

        Args:
            end: the number of blocks of the first.
        """
        first, later = self._first, self._later
        one = [number for number in first.born if number not in self._casts]
        numbers = dict(zip(later.born, one, strict=True))
        for new, old in ((later.arriving, first.arriving), (later.sent_back, first.sent_back)):
            numbers.update((number, old[name]) for name, number in new.items())
        events = (*later.backward, *later.weight)
        born = (e.block for e in events if e.alive and e.block not in self._copied)
        further = itertools.count(end)
        return numbers | {number: next(further) for number in born if number not in numbers}

    def _of_first(self, events: Sequence[StorageEvent]) -> AllocationTrace:
        """With the gradients that stay."""
        stay = self._stage.watch.taken_over
        return tuple(e for e in events if e.alive or e.block not in stay)

    def _of_later(self, events: Sequence[StorageEvent]) -> AllocationTrace:
        """With the gradients neither copied nor kept."""
        numbers = self._numbers
        added = (event for event in events if event.block not in self._copied)
        return tuple(replace(e, block=numbers.get(e.block, e.block)) for e in added)

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
        kind = self._born[number].kind
        made = kind is BlockKind.ACTIVATION or number not in first.born
        return kind if made else BlockKind.BUFFER
