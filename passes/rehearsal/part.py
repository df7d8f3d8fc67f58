"""What a rehearsal runs: some ops of a graph as the module that a stage would be."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gpipe_compiler.ir import Graph, Op
from gpipe_compiler.ir.interpret import Interpreter, bind
from gpipe_compiler.runtime.choices import Manner
from gpipe_compiler.runtime.job import Job, RandomKey, Work
from gpipe_compiler.runtime.spec import BatchNorm, Remat, StageSpec
from gpipe_compiler.runtime.stage_run import StageRun
from gpipe_compiler.runtime.wiring import Need, StageWiring

Started = Callable[[int | None], None]
"""Told the position of each op before it runs; None after the last of a recomputed segment."""


@dataclass(frozen=True)
class Part:
    """Consecutive ops of a graph, and how they hang in it.

    Attributes:
        ops: in the order in which they run.
        inputs: the values they are given.
        outputs: the values they hand on, the loss not among them.
        returned: those of the outputs for which gradients come back.
        segments: runs of ops that are recomputed in the backward, as ranges of positions.
        writes: the buffers that they write to in training.
        loss: the value that is the loss, where it is made here.
    """

    graph: Graph
    ops: tuple[Op, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    returned: tuple[str, ...]
    segments: tuple[range, ...] = ()
    writes: tuple[str, ...] = ()
    loss: str | None = None

    @property
    def training(self) -> bool:
        """Whether there is a backward."""
        return self.graph.loss is not None

    @property
    def results(self) -> tuple[str, ...]:
        """The outputs and the loss."""
        loss = () if self.loss is None or self.loss in self.outputs else (self.loss,)
        return (*self.outputs, *loss)

    @cached_property
    def states(self) -> tuple[str, ...]:
        """The parameters, buffers and constants that its ops read."""
        names = (name for op in self.ops for name in op.states(self.graph.modules))
        return tuple(dict.fromkeys(names))

    @cached_property
    def done(self) -> tuple[tuple[str, ...], ...]:
        """For each op the values that nobody reads after it."""
        last: dict[str, int] = {}
        for position, op in enumerate(self.ops):
            last.update(dict.fromkeys((*op.inputs, *op.outputs), position))
        for name in self.results:
            last.pop(name, None)
        found: list[list[str]] = [[] for _ in self.ops]
        for name, position in last.items():
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

    def wiring(self, needs_gradient: Collection[str], *, split: bool) -> StageWiring:
        """How its stage hangs in a pipeline."""
        writes = [_key(self.states.index(name)) for name in self.writes]
        spec = StageSpec(nn.Module, self.inputs, self.results, writes=tuple(writes))
        return StageWiring(
            index=0,
            spec=spec,
            needs=tuple(Need(name, name in needs_gradient, None, 0) for name in self.inputs),
            arguments=len(self.inputs),
            returned=tuple((name, ()) for name in self.returned),
            makes_loss=self.loss is not None,
            split=split,
        )


def stage_run(part: Part, module: PartModule, wiring: StageWiring) -> StageRun:
    """The part at work as the runtime has it at work."""
    job = Job(
        Work.TRAIN if part.training else Work.INFER,
        sizes=(1,),
        inputs=({},),
        loss_weights=(1.0,),
        kept=frozenset(),
        random=RandomKey(0, 0),
    )
    manner = Manner(BatchNorm.MICRO, part.graph.precision, (Remat.NONE,))
    return StageRun(wiring, module, job, part.loss, manner, torch.device("cpu"))


class PartModule(nn.Module):
    """A part as a module: each value is let go after its last use, as emitted code lets it go.

    Args:
        tensors: the state, by canonical name.
        sizes: values that are no tensors and that others have made (batch sizes).
        started: told of every op.
    """

    def __init__(
        self,
        part: Part,
        tensors: Mapping[str, torch.Tensor],
        sizes: Mapping[str, object],
        started: Started,
    ) -> None:
        super().__init__()
        self.part = part
        self.sizes = sizes
        self.started = started
        for index, name in enumerate(part.states):
            tensor = tensors[name]
            if tensor.requires_grad:
                # Not registered: a fake tensor is no nn.Parameter, and need not be one.
                self._parameters[_key(index)] = tensor  # type: ignore[assignment]
            else:
                self.register_buffer(_key(index), tensor)
        self.interpreter = Interpreter(part.graph, _State(self), part.training).prepare()
        self.train(part.training)

    def forward(self, *received: torch.Tensor) -> Any:
        """The results of one micro-batch; the bare result where there is one."""
        environment = {**self.sizes, **dict(zip(self.part.inputs, received, strict=True))}
        for step in self.part.steps:
            if isinstance(step, range):
                self._recomputed(step, environment)
            else:
                self._run(step, environment)
        results = tuple(environment[name] for name in self.part.results)
        return results[0] if len(results) == 1 else results

    def _run(self, position: int, environment: dict[str, Any]) -> None:
        op = self.part.ops[position]
        if self.interpreter.runs(op):
            self.started(position)
            bind(op.result, self.interpreter.call(op.call, environment), environment)
        for name in self.part.done[position]:
            environment.pop(name, None)

    def _recomputed(self, segment: range, environment: dict[str, Any]) -> None:
        """Runs ops as a segment of which autograd keeps what it reads alone."""
        ops = self.part.ops[segment.start : segment.stop]
        made = dict.fromkeys(name for op in ops for name in op.outputs)
        done = {name for position in segment for name in self.part.done[position]}
        needed = dict.fromkeys(name for op in ops for name in op.inputs)
        taken = [name for name in needed if name not in made]
        given = [name for name in made if name not in done]

        def run(*values: Any) -> tuple[Any, ...]:
            inner = dict(zip(taken, values, strict=True))
            try:
                for position in segment:
                    self._run(position, inner)
            finally:  # a recomputation ends with an exception once it has all that it needs
                self.started(None)
            return tuple(inner[name] for name in given)

        values = [environment[name] for name in taken]
        for name in done:
            environment.pop(name, None)
        returned = checkpoint(run, *values, use_reentrant=False, preserve_rng_state=False)
        environment.update(zip(given, returned, strict=True))


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
