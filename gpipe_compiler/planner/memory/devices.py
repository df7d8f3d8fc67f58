"""The memory of every device of a pipeline, from the traces of its stages."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from gpipe_compiler.ir import Graph, Op
from gpipe_compiler.options import copies_of
from gpipe_compiler.passes.memory_trace import MemoryTraces
from gpipe_compiler.passes.observe import observed
from gpipe_compiler.passes.written_once import written_once
from gpipe_compiler.plan import Stage
from gpipe_compiler.plan.memory_curve import (
    CATEGORIES,
    Category,
    DeviceMemory,
    MemoryPoint,
    PeakHolder,
)
from gpipe_compiler.planner.memory.allocator import Held, footprint_of
from gpipe_compiler.planner.memory.holders import GRADIENTS, HolderSums, grown, holders_at
from gpipe_compiler.planner.memory.job import DeviceJob, MemoryRun, StageMemory
from gpipe_compiler.planner.memory.layout import Layout
from gpipe_compiler.planner.memory.simulator import MemorySimulator
from gpipe_compiler.planner.memory.storages import ActionDeltas
from gpipe_compiler.planner.memory.update import (
    BlockBytes,
    UpdateBytes,
    block_bytes,
    pieces_of,
    row_bytes,
    update_bytes,
    with_divided_gradients,
)
from gpipe_compiler.runtime.core.request import RunRequest
from gpipe_compiler.runtime.core.wiring import StageWiring, crossings_for, steps_of, wire
from gpipe_compiler.runtime.schedule import lower

MOST_EXPLAINED = 8
"""The fullest devices: their peak is broken down into its holders, and their allocator played."""

MOST_STEPS = 4000
"""Steps of a device up to which it is."""

UPDATE = "update"
"""What the optimizer's step is called among the actions."""

_MULTIPLYING = frozenset({"mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "addr"})
"""Kernels of the matrix library."""

_ALWAYS = {
    Category.WEIGHTS: "what micro-batches begin with of what a mini-batch changes once",
    Category.OPTIMIZER: "the optimizer's memory",
    Category.BOUNDARY: "the batch",
    Category.WORKSPACES: "of the matrix library",
}
"""What is there all the time beside parameters and buffers."""

OUTPUTS = "outputs"
"""What it is called that the outputs of micro-batches are put together."""


def device_memories(
    graph: Graph, layout: Layout, memory_traces: MemoryTraces | None = None
) -> tuple[DeviceMemory, ...]:
    """The memory of every device of a pipeline.

    What is reserved is played for the fullest, and taken to be as many times the peak elsewhere.

    Args:
        graph: annotated at the size of a micro-batch.
        memory_traces: of that graph, for stages that have been traced before.

    Raises:
        ModelError: naming an op that cannot run.
    """
    traces = memory_traces or MemoryTraces(graph, on_host=layout.on_host)
    pipeline = SimulatedPipeline.of(graph, layout, traces)
    runs = [grown(job, MemorySimulator(job).run()) for job in pipeline.jobs]
    order = sorted(range(len(runs)), key=lambda device: -runs[device].peak)
    explained = {d for d in order[:MOST_EXPLAINED] if len(pipeline.jobs[d].steps) <= MOST_STEPS}
    memories = [
        pipeline.memory(device, found, holders=device in explained)
        for device, found in enumerate(runs)
    ]
    if layout.on_host:
        if not layout.process:
            return tuple(memories)
        return tuple(
            dataclasses.replace(memory, reserved=memory.peak + pipeline.of_convolutions(device))
            for device, memory in enumerate(memories)
        )
    reserved = {device: pipeline.reserved(device) for device in explained}
    ratios = (size / max(1, memories[device].peak) for device, size in reserved.items())
    most = max(ratios, default=0)
    return tuple(
        dataclasses.replace(memory, reserved=reserved.get(device) or math.ceil(most * memory.peak))
        for device, memory in enumerate(memories)
    )


@dataclass(frozen=True)
class SimulatedPipeline:
    """A pipeline whose stages are traced, ready to be simulated."""

    graph: Graph
    layout: Layout
    jobs: tuple[DeviceJob, ...]

    @classmethod
    def of(cls, graph: Graph, layout: Layout, memory_traces: MemoryTraces) -> SimulatedPipeline:
        """All stages traced, and the programs of all devices."""
        work = RunRequest.TRAIN if graph.loss is not None else RunRequest.INFER
        spec = layout.spec(graph)
        crossings = crossings_for(spec, work)
        if work is RunRequest.TRAIN:
            shared, programs = layout.shared, layout.programs
        else:
            shared = {}
            programs = lower(layout.orders, layout.placement, crossings, shared, layout.joint)
        wiring = wire(spec, layout.placement, work, layout.joint, layout.split)
        stages = [
            _stage_memory(graph, layout, stage, hung, memory_traces)
            for stage, hung in zip(layout.stages, wiring, strict=True)
        ]
        sizes = {c.value: torch.Size(c.example_shape).numel() * c.dtype.itemsize for c in crossings}
        training = graph.loss is not None
        jobs = []
        for device, program in enumerate(programs):
            own = [s for s, holder in enumerate(layout.placement) if holder == device]
            rows: dict[int, int] = {}
            made = frozenset(name for s in own for name in layout.stages[s].outputs)
            if training and layout.replicas > 1:
                trained = {s: layout.trained(graph, [s]).values() for s in own}
                rows = {s: row_bytes(trained[s], layout.division) for s in own}
            jobs.append(
                DeviceJob(
                    steps=steps_of(program, wiring),
                    stages={s: stages[s] for s in own},
                    crossing_bytes=sizes,
                    shared_bytes={name: graph.state[name].bytes for name in shared},
                    row_bytes=rows,
                    microbatches=layout.microbatches,
                    results=frozenset() if training else made.intersection(graph.output_values),
                    joined=0 if training else _joined(graph, made, device, layout.microbatches),
                )
            )
        return cls(graph, layout, tuple(jobs))

    def memory(self, device: int, run: MemoryRun, *, holders: bool) -> DeviceMemory:
        """The memory of a device whose program was simulated.

        Args:
            holders: whether to break the peak down into its holders.
        """
        base = self._base(device)
        fixed = sum(base.values())
        after = dict(zip(CATEGORIES, run.after, strict=True))
        gradients, handed = after[Category.GRADIENTS], after[Category.BOUNDARY]
        further: tuple[MemoryPoint, ...] = ()
        peak, action = run.peak, run.action
        sizes = dict(zip(CATEGORIES, run.sizes, strict=True))
        update = 0
        if self.graph.loss is not None:
            left = self._at_update(device, gradients)
            update = left + self._update(list(self.jobs[device].stages)).temporary
            further = (MemoryPoint(UPDATE, update + fixed, left + fixed),)
        if update > peak:
            peak, action = update, UPDATE
            sizes = dict.fromkeys(CATEGORIES, 0)
            sizes[Category.GRADIENTS] = gradients
            sizes[Category.OPTIMIZER] = update - gradients
        elif (results := handed + self.jobs[device].joined) > peak:
            peak, action = results, OUTPUTS
            sizes = {**dict.fromkeys(CATEGORIES, 0), Category.BOUNDARY: results}
        found = self._holders(device, run, action, sizes) if holders else ()
        sizes = {c: size + base.get(c, 0) for c, size in sizes.items()}
        return DeviceMemory(
            peak=peak + fixed,
            action=action,
            sizes=tuple(sizes.values()),
            points=run.points.above(fixed, *further),
            holders=found,
            stages=tuple(self.jobs[device].stages),
            stage_peaks=tuple(
                run.stage_peaks[stage] + self._state_bytes(stage)
                for stage in self.jobs[device].stages
            )
            if len(self.jobs[device].stages) > 1
            else (peak + fixed,),
        )

    def _holders(
        self, device: int, run: MemoryRun, action: str, sizes: Mapping[Category, int]
    ) -> tuple[PeakHolder, ...]:
        """All that is in memory at the peak of a device, the largest first.

        Args:
            action: during which that is.
            sizes: bytes at that moment, beside what is there all the time.
        """
        sums = HolderSums(self.graph)
        job, base = self.jobs[device], self._base(device)
        trained = self.layout.trained(self.graph, list(job.stages))
        for name in dict.fromkeys(n for s in job.stages for n in self.layout.stages[s].state):
            op = self._readers.get(name, "")
            what = "parameters" if name in trained else "parameters that do not train, and buffers"
            sums.add(what, Category.WEIGHTS, op, self.graph.state[name].bytes)
        for category, what in _ALWAYS.items():
            sums.add(what, category, "", base.get(category, 0) - sums.of(category))
        if action not in (UPDATE, OUTPUTS):
            for holder in holders_at(self.graph, job, run):
                sums.put(holder)
            return sums.holders
        if sum(trained.values()) == sizes[Category.GRADIENTS]:
            for name, size in trained.items():
                sums.add(GRADIENTS, Category.GRADIENTS, self._readers.get(name, ""), size)
        else:
            sums.add(GRADIENTS, Category.GRADIENTS, "", sizes[Category.GRADIENTS])
        sums.add("while the optimizer steps", Category.OPTIMIZER, "", sizes[Category.OPTIMIZER])
        sums.add("outputs of the model", Category.BOUNDARY, "", sizes[Category.BOUNDARY])
        return sums.holders

    @cached_property
    def _readers(self) -> Mapping[str, str]:
        """By the name of a parameter or buffer, the first op that reads it."""
        found: dict[str, str] = {}
        for op in self.graph.ops:
            for name in op.states(self.graph.modules):
                found.setdefault(name, op.name)
        return found

    def reserved(self, device: int) -> int:
        """Bytes that the caching allocator of a GPU takes."""
        job, graph, base = self.jobs[device], self.graph, self._base(device)
        names = {name for stage in job.stages for name in self.layout.stages[stage].state}
        spaces = base[Category.WORKSPACES]
        count = spaces // self.layout.device.workspace if spaces else 0
        trained = self.layout.trained(graph, list(job.stages))
        optimizer = self.layout.optimizer
        held = Held(
            always=(
                *self._weights(list(job.stages)),
                *self._copies(names),
                *(self.layout.device.workspace,) * count,
                base.get(Category.BOUNDARY, 0),
            ),
            remembered=tuple(
                self.layout.division.part_of(size) for size in pieces_of(optimizer, trained)
            ),
            updating=tuple(map(self.layout.division.part_of, trained.values()))
            if copies_of(optimizer) >= 2
            else (),
        )
        return footprint_of(job, held, trains=graph.loss is not None).reserved

    def of_convolutions(self, device: int) -> int:
        """Bytes that convolutions of a host take beside tensors, at most. For a moment oneDNN
        copies what one reads and writes to layouts of its own; and it writes code for each shape
        with windows of more than a point, which stays."""
        most, shapes = 0, set[object]()
        for stage in self.jobs[device].stages:
            times = self.layout.microbatches if stage in self.layout.joint else 1
            for op in map(self.graph.op_of.__getitem__, self.layout.stages[stage].ops):
                if not self._convolves(op):
                    continue
                known = self.graph.values
                values = [known[name] for name in (*op.inputs, *op.outputs) if name in known]
                weights = [self.graph.state[name] for name in op.states(self.graph.modules)]
                moved = times * sum(v.bytes for v in values) + sum(w.bytes for w in weights)
                most = max(most, moved)
                if any(math.prod(weight.shape[2:]) > 1 for weight in weights):
                    shapes.add((*(v.shape for v in values), *(w.shape for w in weights)))
        return most + len(shapes) * self.layout.device.convolution_code

    def _convolves(self, op: Op) -> bool:
        seen = observed(self.graph).ops.get(op.name)
        return seen is not None and any("convolution" in kernel.name for kernel in seen.kernels)

    def _base(self, device: int) -> dict[Category, int]:
        own = list(self.jobs[device].stages)
        names = {name for stage in own for name in self.layout.stages[stage].state}
        found = {
            Category.WEIGHTS: sum(self._weights(own)) + sum(self._copies(names)),
            Category.WORKSPACES: self._workspaces(own),
        }
        if rows := self._blocks(own).rows:
            found[Category.COMMUNICATION] = rows
        if self.graph.loss is not None:
            found[Category.OPTIMIZER] = self._update(own).remembered
        if device == 0:
            found[Category.BOUNDARY] = sum(
                self.graph.values[source.name].bytes
                * (self.layout.microbatches if source.batched else 1)
                for source in self.graph.inputs
            )
        return found

    def _copies(self, names: Collection[str]) -> list[int]:
        """Bytes of what micro-batches begin with in place of what a mini-batch changes once."""
        once = written_once(self.graph) if self.layout.microbatches > 1 else frozenset()
        return [self.graph.state[name].bytes for name in sorted(once.intersection(names))]

    def _blocks(self, stages: Sequence[int]) -> BlockBytes:
        """Of the weights of stages that are gathered block by block."""
        layout = self.layout
        trained = layout.trained(self.graph, stages) if layout.division.always else {}
        own = {name: size for name, size in trained.items() if name not in layout.shared}
        return block_bytes(own, layout.division)

    def _weights(self, stages: Sequence[int]) -> list[int]:
        """Bytes of parameters and buffers: what is whole, what this replica has of what is divided,
        and the largest block of what is gathered block by block."""
        layout, blocks = self.layout, self._blocks(stages)
        names = {name for stage in stages for name in layout.stages[stage].state}
        found = [self.graph.state[name].bytes for name in sorted(names - blocks.names)]
        if layout.division.parts > 1:
            trained = layout.trained(self.graph, stages).values()
            found += [*map(layout.division.part_of, trained), *blocks.gathered]
        return found

    def _at_update(self, device: int, gradients: int) -> int:
        """Bytes beyond what is there all the time as the optimizer begins: gradients, or rows of
        them, where those of weights alone are there."""
        layout, stages = self.layout, list(self.jobs[device].stages)
        if layout.division.parts == 1:
            return gradients
        if layout.division.always:
            blocks = self._blocks(stages)
            return gradients - sum(blocks.gathered) - blocks.rows
        trained = sum(layout.trained(self.graph, stages).values())
        return layout.division.part_of(gradients) - trained

    def _workspaces(self, stages: Sequence[int]) -> int:
        """Of the matrix library, which has one for each thread: backwards have their own."""
        if not self.layout.device.workspace:
            return 0
        ops = observed(self.graph).ops
        names = (name for stage in stages for name in self.layout.stages[stage].ops)
        kernels = (kernel.name for name in names if name in ops for kernel in ops[name].kernels)
        if not any(kernel in _MULTIPLYING for kernel in kernels):
            return 0
        return self.layout.device.workspace * (1 if self.graph.loss is None else 2)

    def _update(self, stages: Sequence[int]) -> UpdateBytes:
        layout = self.layout
        trained = {
            name: layout.division.part_of(size)
            for name, size in layout.trained(self.graph, stages).items()
        }
        return update_bytes(layout.optimizer, trained, on_host=layout.on_host)

    def _state_bytes(self, stage: int) -> int:
        """The weights of a stage and what the optimizer remembers of them."""
        names = self.layout.stages[stage].state
        weights = sum(self._weights([stage])) + sum(self._copies(names))
        return weights + (self._update([stage]).remembered if self.graph.loss is not None else 0)


def _stage_memory(
    graph: Graph, layout: Layout, stage: Stage, wiring: StageWiring, memory_traces: MemoryTraces
) -> StageMemory:
    trains = graph.loss is not None
    if wiring.joint is not None:
        samples = graph.batch_size * layout.microbatches
        memory_traces = MemoryTraces(graph, samples, on_host=layout.on_host)
    traces = memory_traces.of(
        stage.ops,
        stage.inputs,
        stage.outputs,
        returned=[value for value, _ in wiring.returned],
        segments=stage.segments,
        split=stage.index in layout.split,
    )
    if layout.division.always:
        traces = with_divided_gradients(traces, layout.division)
    return StageMemory(wiring, ActionDeltas(traces), stage.remat, trains)


def _joined(graph: Graph, made: Collection[str], device: int, microbatches: int) -> int:
    """Bytes of the outputs of all micro-batches, where these are put together: on the device that
    makes them, one after another but on the first, which gets all."""
    own: list[int] = [0]
    others = 0
    for name in dict.fromkeys(graph.output_values):
        value = graph.values[name]
        batched = value.batch_dim is not None and microbatches > 1
        size = value.bytes * (microbatches if batched else 1)
        if name in made:
            own.append(size if batched else 0)
        elif name in graph.producer:
            others += size
    return max(own) if device else sum(own) + others
