"""What a plan says of each stage, and what it predicts."""

from __future__ import annotations

from dataclasses import dataclass

from gpipe_compiler.ir import (
    FunctionCall,
    Graph,
    MethodCall,
    ModuleCall,
    Op,
    Value,
    ValueKind,
)
from gpipe_compiler.ir.printing import function_label
from gpipe_compiler.plan.memory_curve import DeviceMemory
from gpipe_compiler.runtime.spec import Remat
from gpipe_compiler.text.units import portable_source


@dataclass(frozen=True, slots=True)
class RematPoint:
    """A way for a stage to recompute that no other one is better than.

    Attributes:
        peak_bytes: of the stage at its peak, with its state.
        recompute_s: seconds of a mini-batch spent running ops again.
        segments: how many; of FULL none.
    """

    remat: Remat
    peak_bytes: int
    recompute_s: float
    segments: int = 0


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a plan.

    Attributes:
        ops: the ops it runs, in order, duplicates included; those that serve only the loss last.
        duplicates: those of `ops` that other stages compute as well, instead of receiving them.
        inputs: inputs of the graph and boundary values that it takes.
        outputs: values that it hands on: to later stages, to the caller, to its own loss.
        state: canonical names of the parameters, buffers and constants that it owns.
        forward_s, backward_s: predicted seconds of one micro-batch.
        receive_bytes: boundary bytes of one micro-batch that it takes from earlier stages.
        gradient_bytes: bytes of gradients that it sends back for them.
        saved_bytes: what autograd keeps for one micro-batch, from its forward (or from running
            that again) to its backward, where nothing runs in segments.
        input_bytes: of all it takes for one micro-batch, which is all that is kept of a
            micro-batch in flight under `Remat.FULL`.
        remat: what is kept between forward and backward.
        written: whether it recomputes nothing but what the model itself checkpoints.
        segments: under `Remat.SEGMENTS`, the ops of each segment, in order; under `Remat.FULL`
            those that the model itself checkpoints, which run again in the second forward too.
        segments_s: predicted seconds of running them again, within the backward of a micro-batch.
        segments_kept_bytes: what is kept of a micro-batch in flight then.
        segments_again_bytes: what it has besides, at most, while its backward is under way.
        frontier: the ways it could recompute, from the fastest to the one that needs the least.
        state_bytes: parameters and buffers, with gradients and what the optimizer remembers.
        weight_s: the part of `backward_s` that makes the gradients of parameters.
        update_s: predicted seconds of reducing gradients over replicas and of the optimizer.
        arithmetic_s: seconds that the products, convolutions and attention of a micro-batch take at
            the peak of the first device of the cluster, forward and backward; what is computed
            again, or in an earlier stage too, is not counted.
    """

    index: int
    ops: tuple[str, ...]
    duplicates: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    state: tuple[str, ...]
    forward_s: float
    backward_s: float
    receive_bytes: int
    gradient_bytes: int
    parameter_bytes: int
    parameter_count: int
    saved_bytes: int
    input_bytes: int = 0
    remat: Remat = Remat.NONE
    state_bytes: int = 0
    weight_s: float = 0.0
    update_s: float = 0.0
    written: bool = True
    segments: tuple[tuple[str, ...], ...] = ()
    segments_s: float = 0.0
    segments_kept_bytes: int = 0
    segments_again_bytes: int = 0
    frontier: tuple[RematPoint, ...] = ()
    arithmetic_s: float = 0.0

    @property
    def microbatch_bytes(self) -> tuple[int, int]:
        """What it keeps of a micro-batch that it will recompute, and has besides when it has."""
        if not self.segments:
            return self.input_bytes, self.saved_bytes
        if self.remat is Remat.FULL:
            return self.input_bytes, self.segments_kept_bytes + self.segments_again_bytes
        return self.segments_kept_bytes, self.segments_again_bytes


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a training step (or one mini-batch of inference) is expected to take.

    Attributes:
        step_s: simulated seconds of one mini-batch.
        bottleneck_s: seconds of one micro-batch on the busiest device, recomputing included.
        bubble: the share of device time spent waiting, 0 to 1.
        lower_bound_s: no plan of this graph with that many stages takes less; of `longest_s`, where
            that was to be short.
            0 where it is not known, as of a plan that does not fit its devices.
        proved: whether the cut, as was asked, is known to be optimal.
        peak_bytes: for every stage, its weights, gradients, optimizer, and what it holds of
            micro-batches, at its peak.
        device_bytes: what the memory of every device of the pipeline has to have, for all its
            stages: of a GPU, what its allocator reserves, and what is kept free (`Device.needed`).
        memory: for every device, what `device_bytes` and `peak_bytes` are made of, where the
            memory traces of its stages were replayed (`memory`). Empty where they are from the
            quick model (`in_flight`), which counts what autograd keeps and no temporaries.
        recompute: the share of device time spent running forwards again, 0 to 1.
        shared_sum_s: seconds of a step in which stages add up gradients of the parameters they
            share.
        threads_s, torchrun_s: what `run.py bench` has measured where the plan was made, in one
            process and under torchrun, without the optimizer. None where it was not run.
        longest_s: seconds of one micro-batch in the longest stage with its transfers, where that
            was to be short (`Objective.BOTTLENECK`); else None.
        anywhere_s: `objective_s` of the best plan found with cuts anywhere; None where no other
            cuts were preferred.
    """

    step_s: float
    bottleneck_s: float
    bubble: float
    lower_bound_s: float
    proved: bool
    peak_bytes: tuple[int, ...]
    recompute: float = 0.0
    shared_sum_s: float = 0.0
    device_bytes: tuple[int, ...] = ()
    threads_s: float | None = None
    torchrun_s: float | None = None
    longest_s: float | None = None
    memory: tuple[DeviceMemory, ...] = ()
    anywhere_s: float | None = None

    @property
    def objective_s(self) -> float:
        """The time that was to be short."""
        return self.step_s if self.longest_s is None else self.longest_s

    @property
    def gap(self) -> float | None:
        """How far the plan may be from the best one, as a share of the lower bound; None where
        that is not known."""
        if self.proved or self.objective_s <= 0:
            return 0.0
        return self.objective_s / self.lower_bound_s - 1 if self.lower_bound_s > 0 else None


@dataclass(frozen=True, slots=True)
class Remedy:
    """Another setting for the same stages on the same devices.

    Attributes:
        change: as on the command line: `--microbatches 16`.
        device_bytes: for every device, its peak, played exactly.
        step_s: simulated seconds of one mini-batch.
    """

    change: str
    device_bytes: tuple[int, ...]
    step_s: float


@dataclass(frozen=True, slots=True)
class WhatIf:
    """What could be done about the memory of a plan."""

    remedies: tuple[Remedy, ...]


# --- notes on ops ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpNote:
    """One op, for people.

    Attributes:
        label: what is called: `Conv2d`, `F.relu`, `.flatten`.
        inputs, outputs: the values it reads and makes.
        types: for every output its type in one micro-batch, such as `8x64x56x56 float32`; "" where
            it is unknown.
        module: path of the module it calls, or in whose forward it stands.
        state: canonical names of the parameters and buffers it reads or writes.
        source: `file:line` of the user's program, by no absolute path; "" where unknown.
    """

    name: str
    label: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    types: tuple[str, ...]
    module: str = ""
    state: tuple[str, ...] = ()
    source: str = ""


def list_ops(graph: Graph, samples: int) -> tuple[OpNote, ...]:
    """A note on every op of a graph, in order, with shapes for a micro-batch of `samples`."""
    return tuple(_note(graph, op, samples) for op in graph.ops)


def _note(graph: Graph, op: Op, samples: int) -> OpNote:
    return OpNote(
        name=op.name,
        label=_label(graph, op),
        inputs=op.inputs,
        outputs=op.outputs,
        types=tuple(
            _type(graph.values[name], samples, graph.batch_size) if name in graph.values else ""
            for name in op.outputs
        ),
        module=op.path,
        state=op.states(graph.modules),
        source=portable_source(str(op.source)) if op.source else "",
    )


def _type(value: Value, samples: int, batch_size: int) -> str:
    if value.kind is not ValueKind.TENSOR:
        return str(value.kind.value)
    sizes = list(value.shape)
    if value.batch_dim is not None:
        sizes[value.batch_dim] = sizes[value.batch_dim] * samples // batch_size
    dtype = str(value.dtype).removeprefix("torch.")
    return f"{'x'.join(map(str, sizes)) or 'scalar'} {dtype}"


def _label(graph: Graph, op: Op) -> str:
    match op.call:
        case ModuleCall(module=path):
            return graph.modules[path].cls.__name__
        case FunctionCall(function=function):
            # As nearly every PyTorch program imports it, and a third as wide.
            return function_label(function).replace("torch.nn.functional.", "F.")
        case MethodCall(method=method):
            return f".{method}"


@dataclass(frozen=True, slots=True)
class WholeModel:
    """What to expect of devices that each hold the whole model, and run it as it is written.

    Attributes:
        devices: which share the mini-batch, as data parallelism does; 1 for no parallelism.
        step_s: seconds of a mini-batch, where all devices compute at a time.
        here_s: the same where the cluster's devices are, which may share places (`Plan.here_s`).
        peak_bytes: of the device that is fullest.
        memory: bytes that this device has.
        problem: why this cannot be, in words, so that the figures mean nothing; "" where it can.
    """

    devices: int
    step_s: float = 0.0
    here_s: float = 0.0
    peak_bytes: int = 0
    memory: int = 0
    problem: str = ""

    @property
    def possible(self) -> bool:
        """Whether it can be, and every device holds what it takes."""
        return not self.problem and self.peak_bytes <= self.memory
