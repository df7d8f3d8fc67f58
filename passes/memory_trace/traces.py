"""Traces the memory of the stages of a graph, each once."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from gpipe_compiler.ir import FunctionCall, Graph, ModuleCall, Op, Ref
from gpipe_compiler.ir.blocks import Body, ShapeReads, Turn, calls_in, turns_around
from gpipe_compiler.ir.classes import Methods, find_blocks
from gpipe_compiler.ir.contents import Contents
from gpipe_compiler.passes.allocation_trace import StageTraces
from gpipe_compiler.passes.cuda_autocast import cuda_autocast
from gpipe_compiler.passes.duplicate import shape_values
from gpipe_compiler.passes.effects import effects
from gpipe_compiler.passes.fakes import HostFakes
from gpipe_compiler.passes.memory_trace.part import GraphPart
from gpipe_compiler.passes.memory_trace.record import record
from gpipe_compiler.passes.observe import ObservedRun, observed


class MemoryTraces:
    """The traces of stages of one annotated graph.

    Args:
        batch_size: samples in a micro-batch; the graph's own by default.
        on_host: whether autocast has the rules of the host, or those of CUDA.
    """

    def __init__(
        self, graph: Graph, batch_size: int | None = None, *, on_host: bool = True
    ) -> None:
        self.graph = graph
        self.on_host = on_host
        self.batch_size = graph.batch_size if batch_size is None else batch_size
        self._mode = HostFakes()
        self._known: dict[Hashable, StageTraces] = {}

    def of(
        self,
        ops: Sequence[str],
        inputs: Sequence[str],
        outputs: Sequence[str],
        *,
        returned: Collection[str] | None = None,
        segments: Sequence[Sequence[str]] = (),
        split: bool = False,
    ) -> StageTraces:
        """The traces of a stage.

        Args:
            ops: their names, in the order in which they run, those of the loss included.
            outputs: the values that it hands on; the loss need not be among them.
            returned: the outputs for which gradients come back; by default all that need one.
            segments: names of consecutive ops that are recomputed in the backward.

        Raises:
            ModelError: naming the op that cannot run.
        """
        ends = tuple(inputs), tuple(outputs), None if returned is None else frozenset(returned)
        key = tuple(ops), ends, tuple(map(tuple, segments)), split
        if key not in self._known:
            part = self._part(ops, inputs, outputs, returned, segments)
            self._known[key] = self._performed(part, split=split)
        return self._known[key]

    def _performed(self, part: GraphPart, *, split: bool) -> StageTraces:
        alone = dataclasses.replace(part, graph=part.graph.only(part.ops))
        with contextlib.nullcontext() if self.on_host else cuda_autocast(part.graph.precision):
            return record(alone, self._value, split=split)

    def _part(
        self,
        ops: Sequence[str],
        inputs: Sequence[str],
        outputs: Sequence[str],
        returned: Collection[str] | None,
        segments: Sequence[Sequence[str]],
    ) -> GraphPart:
        graph = self.graph
        values = graph.values
        loss = graph.loss.value if graph.loss is not None else None
        if loss is not None and not any(loss in graph.op_of[name].outputs for name in ops):
            loss = None
        handed = tuple(name for name in outputs if name != loss)
        if returned is None:
            returned = [name for name in handed if values[name].requires_grad]
        position = {name: index for index, name in enumerate(ops)}
        writes = effects(graph).state_writes if graph.loss is not None else {}
        written = [n for name in ops for n in writes.get(name, ())]
        seen = self._observed.ops
        part = GraphPart(
            graph=graph,
            ops=tuple(graph.op_of[name] for name in ops),
            inputs=tuple(inputs),
            outputs=handed,
            returned=tuple(name for name in handed if name in returned),
            segments=tuple(_range([position[name] for name in segment]) for segment in segments),
            writes=tuple(
                dict.fromkeys(name for name in written if not graph.state[name].requires_grad)
            ),
            loss=loss,
            draws=any(name in seen and seen[name].drawn for name in ops),
        )
        return dataclasses.replace(part, calls=_calls(part, self._call_sizes))

    def _value(self, name: str) -> Any:
        seen = self._observed.values[name]
        form = seen.form
        if form is None:
            return seen.plain
        with self._mode:
            made = torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device="cpu")
        return made.requires_grad_(self._trains(name))

    def _trains(self, name: str) -> bool:
        return self.graph.loss is not None and self.graph.values[name].requires_grad

    @cached_property
    def _call_sizes(self) -> Mapping[Turn, int]:
        return Counter(turns_around(self.graph.ops))

    @cached_property
    def _observed(self) -> ObservedRun:
        return observed(self.graph, self.batch_size)


def _range(positions: Sequence[int]) -> range:
    found = range(positions[0], positions[-1] + 1)
    if list(positions) != list(found):
        raise ValueError("the ops of a segment do not stand in a row")
    return found


# --- calls of modules -----------------------------------------------------------------------------


def _calls(part: GraphPart, sizes: Mapping[Turn, int]) -> tuple[range, ...]:
    """For every call of a module that is written as one, the positions of its ops.

    Args:
        sizes: of every call of a module, how many ops of the whole graph are in it.
    """
    graph = part.graph
    if not graph.module_classes:
        return ()
    here = Counter(turns_around(part.ops))
    parted = {call for call, count in here.items() if count < sizes[call]}
    modules = dict.fromkeys(op.call.module for op in part.ops if isinstance(op.call, ModuleCall))
    contents = Contents(graph, tuple(modules), part.states)
    paths = [path for path in graph.module_classes if path in contents.holders]
    methods = Methods(contents, list(_bodies(part)), paths, parted)
    (found,) = find_blocks([methods], ShapeReads(graph, shape_values(graph)))
    place = {op.name: position for position, op in enumerate(part.ops)}
    calls = (call for parts in found.bodies for call in calls_in(parts))
    places = ([place[op.name] for op in call.ops] for call in calls)
    return tuple(range(ops[0], ops[-1] + 1) for ops in places)


def _bodies(part: GraphPart) -> Iterator[Body]:
    """The methods of a stage: `forward`, and one for each segment, which `forward` calls."""
    forward: list[Op] = []
    for step in part.steps:
        if isinstance(step, range):
            taken, given = part.ends(step)
            method = FunctionCall(checkpoint, tuple(map(Ref, taken)))
            forward.append(Op(f"segment {step.start}", method, given))
            yield Body(part.ops[step.start : step.stop], given)
        else:
            forward.append(part.ops[step])
    yield Body(tuple(forward), part.results)
