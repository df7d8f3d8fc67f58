"""Some ops of a graph as the module that a stage would be, to be traced."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partialmethod
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gpipe_compiler.ir import Graph, Op
from gpipe_compiler.ir.interpret import Interpreter, bind
from gpipe_compiler.ir.ops import autocasts
from gpipe_compiler.passes.dry_run import RAISED_BY_OPS, refusal
from gpipe_compiler.runtime.core.engine import Engine
from gpipe_compiler.runtime.core.options import ExecutionOptions
from gpipe_compiler.runtime.core.request import RandomKey, RunRequest, StepRequest
from gpipe_compiler.runtime.core.stage_run import StageRun
from gpipe_compiler.runtime.core.wiring import Need, StageWiring
from gpipe_compiler.runtime.spec import BatchNorm, Remat, StageSpec

Started = Callable[[int | None], None]
"""Called with the position of each op before it runs; None after a recomputed segment."""


@dataclass(frozen=True)
class GraphPart:
    """Consecutive ops of a graph, and their connections to the rest of it.

    Attributes:
        inputs: the values they are given.
        outputs: the values they hand on, the loss not among them.
        returned: those of the outputs for which gradients come back.
        segments: runs of ops that are recomputed in the backward, as ranges of positions.
        writes: the buffers and frozen parameters that they write to in training.
        loss: the value that is the loss, where it is made here.
        draws: whether any op draws random numbers.
        calls: the positions of the ops of each call of a module, inner ones first. A call holds
            what it is given until it returns, however early that is read for the last time.
    """

    graph: Graph
    ops: tuple[Op, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    returned: tuple[str, ...]
    segments: tuple[range, ...] = ()
    writes: tuple[str, ...] = ()
    loss: str | None = None
    draws: bool = False
    calls: tuple[range, ...] = ()

    @property
    def training(self) -> bool:
        return self.graph.loss is not None

    @property
    def results(self) -> tuple[str, ...]:
        """The outputs and the loss."""
        loss = () if self.loss is None or self.loss in self.outputs else (self.loss,)
        return (*self.outputs, *loss)

    @property
    def unreceived(self) -> frozenset[str]:
        """What it reads of others and does not receive: numbers, and what it asks for its sizes."""
        made = {name for op in self.ops for name in op.outputs}
        read = {name for op in self.ops for name in op.inputs}.union(self.outputs)
        return frozenset(read.difference(made, self.inputs))

    @cached_property
    def states(self) -> tuple[str, ...]:
        """The parameters, buffers and constants that its ops read."""
        names = (name for op in self.ops for name in op.states(self.graph.modules))
        return tuple(dict.fromkeys(names))

    @cached_property
    def _last(self) -> Mapping[str, int]:
        """For each value the position of the last op that makes or reads it."""
        last: dict[str, int] = {}
        for position, op in enumerate(self.ops):
            last.update(dict.fromkeys((*op.inputs, *op.outputs), position))
        return last

    @cached_property
    def done(self) -> tuple[tuple[str, ...], ...]:
        """For each op the values that are freed after it."""
        end = dict(self._last)
        made = {name: position for position, op in enumerate(self.ops) for name in op.outputs}
        for call in self.calls:
            for name in (name for op in self.ops[call.start : call.stop] for name in op.inputs):
                if made.get(name, -1) < call.start and end[name] in call:
                    end[name] = call.stop - 1
        for name in self.results:
            end.pop(name, None)
        found: list[list[str]] = [[] for _ in self.ops]
        for name, position in end.items():
            found[position].append(name)
        return tuple(map(tuple, found))

    @cached_property
    def steps(self) -> tuple[int | range, ...]:
        """The positions of ops, those of a segment together."""
        starts = {segment.start: segment for segment in self.segments}
        found: list[int | range] = []
        position = 0
        while position < len(self.ops):
            step = starts.get(position, position)
            found.append(step)
            position = step.stop if isinstance(step, range) else position + 1
        return tuple(found)

    def ends(self, segment: range) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The values that a segment reads, and those of its own that are read after it."""
        ops = self.ops[segment.start : segment.stop]
        made = dict.fromkeys(name for op in ops for name in op.outputs)
        read = dict.fromkeys(name for op in ops for name in op.inputs)
        return (
            tuple(name for name in read if name not in made),
            tuple(n for n in made if n in self.results or self._last[n] >= segment.stop),
        )

    def _written_in(self, segment: range) -> tuple[str, ...]:
        """The buffers that a segment uses, of those that the part writes to."""
        ops = self.ops[segment.start : segment.stop]
        used = {name for op in ops for name in op.states(self.graph.modules)}
        return tuple(_key(self.states.index(name)) for name in self.writes if name in used)

    def wiring(self, needs_gradient: Collection[str], *, split: bool) -> StageWiring:
        writes = [_key(self.states.index(name)) for name in self.writes]
        spec = StageSpec(
            nn.Module,
            self.inputs,
            self.results,
            writes=tuple(writes),
            segments={
                _method(number): self._written_in(segment)
                for number, segment in enumerate(self.segments)
            },
            autocasts=any(map(autocasts, self.ops)),
        )
        return StageWiring(
            index=0,
            spec=spec,
            needs=tuple(Need(name, name in needs_gradient, None, 0) for name in self.inputs),
            arguments=len(self.inputs),
            returned=tuple((name, ()) for name in self.returned),
            makes_loss=self.loss is not None,
            split=split,
        )


def stage_run(part: GraphPart, module: PartModule, wiring: StageWiring) -> StageRun:
    request = StepRequest(
        RunRequest.TRAIN if part.training else RunRequest.INFER,
        samples=(1,),
        sizes=({},),
        inputs=({},),
        loss_weights=((1.0,),),
        kept=frozenset(),
        random=RandomKey(0, 0),
    )
    remat = Remat.SEGMENTS if part.segments else Remat.NONE
    options = ExecutionOptions(BatchNorm.MICRO, part.graph.precision, (remat,))
    engine = Engine({0: module}, torch.device("cpu"), part.loss, options, (wiring.spec,))
    return StageRun(engine, wiring, request)


def part_module(
    part: GraphPart, interpreter: Interpreter, sizes: Mapping[str, object], started: Started
) -> PartModule:
    """A part as a module, with a method for each of its segments, as the runtime asks for it."""
    methods = {
        _method(number): partialmethod(PartModule._segment, segment)
        for number, segment in enumerate(part.segments)
    }
    kind = type("PartModule", (PartModule,), methods)
    made: PartModule = kind(part, interpreter, sizes, started)
    return made


class PartModule(nn.Module):
    """A part as a module, which drops each value after its last use, as emitted code does.

    Args:
        interpreter: of the graph of the part, with its state.
        sizes: values that are no tensors and that others have made (batch sizes).
        started: called before every op.
    """

    def __init__(
        self,
        part: GraphPart,
        interpreter: Interpreter,
        sizes: Mapping[str, object],
        started: Started,
    ) -> None:
        super().__init__()
        self.part = part
        self.sizes = sizes
        self.started = started
        for index, name in enumerate(part.states):
            tensor = interpreter.tensors[name]
            if tensor.requires_grad:
                # Not registered: a fake tensor is no nn.Parameter, and need not be one.
                self._parameters[_key(index)] = tensor  # type: ignore[assignment]
            else:
                self.register_buffer(_key(index), tensor)
        self.interpreter = replace(interpreter, tensors=_State(self))
        self.train(part.training)

    def forward(self, *received: torch.Tensor) -> Any:
        """The results of one micro-batch; the bare result where there is one."""
        environment = {**self.sizes, **dict(zip(self.part.inputs, received, strict=True))}
        for step in self.part.steps:
            if isinstance(step, range):
                self._recomputed(step, environment)
            else:
                self._run(step, environment)
        # As emitted code returns what is made in the other mode alone.
        results = tuple(
            environment[name] if name in environment else torch.empty(0)
            for name in self.part.results
        )
        return results[0] if len(results) == 1 else results

    def _run(self, position: int, environment: dict[str, Any]) -> None:
        op = self.part.ops[position]
        if self.interpreter.runs(op):
            self.started(position)
            try:
                made = self.interpreter.alone(op, environment)
            except RAISED_BY_OPS as error:  # fakes of one kind know less of types than another's
                graph = self.part.graph
                raise refusal(graph, op, graph.batch_size, error) from error
            bind(op.result, made, environment)
        for name in self.part.done[position]:
            environment.pop(name, None)

    def _recomputed(self, segment: range, environment: dict[str, Any]) -> None:
        """Runs a segment as emitted code does."""
        taken, given = self.part.ends(segment)
        values = [environment[name] for name in taken]
        for name in (name for position in segment for name in self.part.done[position]):
            environment.pop(name, None)
        method = getattr(self, _method(self.part.segments.index(segment)))
        # The numbers that the pipeline draws are not torch's.
        returned = checkpoint(method, *values, use_reentrant=False, preserve_rng_state=False)
        environment.update(zip(given, returned, strict=True))

    def _segment(self, segment: range, *values: Any) -> tuple[Any, ...]:
        taken, given = self.part.ends(segment)
        environment = dict(zip(taken, values, strict=True))
        try:
            for position in segment:
                self._run(position, environment)
        finally:  # a second run ends with an exception once it has made all that it is to make
            self.started(None)
        return tuple(environment[name] for name in given)


class _State(Mapping[str, torch.Tensor]):
    """The state of a module, as it is now, by canonical name."""

    def __init__(self, module: PartModule) -> None:
        # Not the module itself: it holds the interpreter, which holds this.
        self._parameters = module._parameters
        self._buffers = module._buffers
        self._names = {name: _key(index) for index, name in enumerate(module.part.states)}

    def __getitem__(self, name: str) -> torch.Tensor:
        key = self._names[name]
        found = self._parameters.get(key, self._buffers.get(key))
        if found is None:
            raise KeyError(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _key(index: int) -> str:
    return f"state_{index}"


def _method(number: int) -> str:
    return f"segment_{number}"
