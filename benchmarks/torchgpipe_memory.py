"""What torchgpipe's memory benchmark reserves, rebuilt event by event on meta tensors.

`benchmarks/amoebanetd-memory` of github.com/kakaobrain/torchgpipe trains AmoebaNet-D for two
iterations (RMSprop, 128 images in 128 micro-batches, gradients never cleared) and tells
`max_memory_cached` of PyTorch 1.3, summed over the devices, less 12 bytes for every parameter.
Here every stage runs once on meta tensors, with all that lives and ends written down
(`StageTrace`); these traces are played as torchgpipe orders them, into a model of the caching
allocator.

What matters beside the network and its balance, by torchgpipe's sources:

- all micro-batches but the last are recomputed; a stage's inputs are kept, its output is not;
- inputs of a stage and the gradient of its output are copied on streams of their own, one for every
  micro-batch, of which PyTorch has 32: what is freed on one of them serves no other;
- its `max_pool_3x3` is an average pool, its ReLU (of PyTorch 1.3) keeps its input for the backward.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from gpipe_compiler.dispatching import DispatchWatch
from gpipe_compiler.ir.arguments import storage_key, tensors_in
from gpipe_compiler.planner.memory.allocator import CachingAllocator, Footprint

sys.path.append(str(Path(__file__).parents[1] / "examples"))

COPY_STREAMS = 32
"""That PyTorch makes on a device; asking for more hands out the same again."""
MICRO_BATCHES = 128
"""And images of a mini-batch."""
IMAGE = (3, 224, 224)
CLASSES = 1000


@dataclass(frozen=True)
class Published:
    """A row of torchgpipe's table, and of GPipe's Table 1.

    Attributes:
        balance: cells of each stage.
        activations_gib: what torchgpipe prints; None where it was out of memory.
        live_gib: what lives of it, as recomputed when torchgpipe was looked into: not published.
        gpipe_gb: parameter memory and activation memory as GPipe prints them.
        micro_batches: of the 128 images.
    """

    name: str
    layers: int
    filters: int
    balance: tuple[int, ...]
    parameters: int
    activations_gib: float | None
    live_gib: float | None
    gpipe_gb: tuple[float, float]
    micro_batches: int = 128


BASELINE = Published("Naive-1", 18, 208, (24,), 81_505_540, None, None, (1.05, 6.26), 1)
PUBLISHED = (
    Published("Pipeline-1", 18, 416, (24,), 319_024_120, 0.91, 0.776, (3.8, 3.46)),
    Published("Pipeline-2", 18, 544, (16, 8), 542_734_840, 3.39, 1.836, (6.45, 8.11)),
    Published("Pipeline-4", 36, 544, (16, 12, 7, 7), 1_055_832_376, 6.91, 3.989, (12.53, 15.21)),
    Published(
        "Pipeline-8",
        72,
        512,
        (23, 16, 11, 6, 6, 5, 5, 6),
        1_844_858_344,
        10.83,
        7.361,
        (24.62, 26.24),
    ),
)


class ReluKeepsInput(TorchFunctionMode):
    """The ReLU of PyTorch 1.3: a threshold, whose derivative is taken by its input."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs what is called, a threshold in place of ReLU."""
        if func is F.relu:
            return torch.threshold(args[0], 0.0, 0.0)
        return func(*args, **(kwargs or {}))


def network(layers: int, filters: int) -> nn.Sequential:
    """AmoebaNet-D as torchgpipe has it, without numbers."""
    import amoebanet as example

    with torch.device("meta"):
        model = example.amoebanet_d(layers, filters, CLASSES)
    model[0] = nn.Sequential(nn.ReLU(), model[0])
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.MaxPool2d) and child.kernel_size == 3:
                average = nn.AvgPool2d(3, child.stride, 1, count_include_pad=False)
                setattr(module, name, average)
    return model


class Recorder(DispatchWatch):
    """Writes down where storages come to life (number, bytes) and end (number, -1)."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[int, int]] = []
        self.numbers: dict[int, int] = {}
        self._ends: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._count = 0

    def know(self, tensors: Sequence[Tensor]) -> None:
        """These were there before: they are not part of what is written down."""
        for tensor in tensors:
            self.numbers[storage_key(tensor)] = -1

    def number(self, tensor: Tensor) -> int:
        """Of the tensor's storage; -1 for one that was there before."""
        return self.numbers[storage_key(tensor)]

    def cut(self) -> tuple[tuple[int, int], ...]:
        """What was written down since the last time."""
        events, self.events = self.events, []
        return tuple(events)

    def saw(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], returned: object
    ) -> None:
        """Looks for new storages in what an op returned."""
        for tensor in tensors_in(returned):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self.numbers:
                number = self._count
                self._count += 1
                self.numbers[key] = number
                self.events.append((number, storage.nbytes()))

                def ended(_: object, key: int = key, number: int = number) -> None:
                    self.events.append((number, -1))
                    del self.numbers[key], self._ends[key]

                self._ends[key] = weakref.ref(storage, ended)


@dataclass(frozen=True)
class Pass:
    """A forward and the backward after it.

    Attributes:
        outputs: numbers of what the stage hands on, as far as it is its own.
        gradients: numbers of the gradients of what it takes.
    """

    forward: tuple[tuple[int, int], ...]
    backward: tuple[tuple[int, int], ...]
    outputs: tuple[int, ...]
    gradients: tuple[int, ...]


@dataclass(frozen=True)
class StageTrace:
    """What a stage does for one micro-batch.

    Attributes:
        takes, hands_on: bytes of its inputs and outputs.
        unkept: the forward of a micro-batch that is recomputed; `outputs` are its own.
        first, last: of the last micro-batch, whose forward keeps what the backward needs, in the
            first iteration and later.
        again: recomputing and the backward of any other micro-batch.
        state: bytes of every parameter and buffer.
        parameters: bytes of every parameter.
    """

    takes: tuple[int, ...]
    hands_on: tuple[int, ...]
    unkept: Pass
    first: Pass
    last: Pass
    again: Pass
    state: tuple[int, ...]
    parameters: tuple[int, ...]


def record(stage: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[StageTrace, tuple[Tensor, ...]]:
    """The memory trace of a stage on the meta device, and what it hands on."""
    recorder = Recorder()
    recorder.know([*stage.parameters(), *stage.buffers(), *inputs])
    with recorder:
        outputs = _run(stage, inputs)
        unkept = Pass(recorder.cut(), (), _own(recorder, outputs), ())
        given = tuple(torch.empty_like(output) for output in outputs)
        del outputs
        recorder.cut()
        first = _forward_backward(recorder, stage, inputs, given, recomputed=False)
        last = _forward_backward(recorder, stage, inputs, given, recomputed=False)
        again = _forward_backward(recorder, stage, inputs, given, recomputed=True)
    parameters = tuple(parameter.nbytes for parameter in stage.parameters())
    buffers = tuple(buffer.nbytes for buffer in stage.buffers())
    trace = StageTrace(
        tuple(tensor.nbytes for tensor in inputs),
        tuple(tensor.nbytes for tensor in given),
        unkept,
        first,
        last,
        again,
        parameters + buffers,
        parameters,
    )
    return trace, tuple(tensor.detach() for tensor in given)


def _forward_backward(
    recorder: Recorder,
    stage: nn.Module,
    inputs: tuple[Tensor, ...],
    given: tuple[Tensor, ...],
    *,
    recomputed: bool,
) -> Pass:
    """A pass with autograd, from `given` gradients of the outputs.

    A stage that recomputes holds its outputs until its backward has ended.
    """
    leaves = tuple(tensor.detach().requires_grad_(_differentiable(tensor)) for tensor in inputs)
    outputs = _run(stage, leaves, grad=True)
    made = _own(recorder, outputs)
    edges = [get_gradient_edge(output) for output in outputs]
    if not recomputed:
        del outputs
    forward = recorder.cut()
    torch.autograd.backward(edges, given)
    del edges
    if recomputed:
        del outputs
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    found = Pass(forward, recorder.cut(), made, _own(recorder, gradients))
    del leaves, gradients
    recorder.cut()
    return found


def _run(stage: nn.Module, inputs: tuple[Tensor, ...], *, grad: bool = False) -> tuple[Tensor, ...]:
    """Calls a sequence of cells: all but the first take both outputs of the one before."""
    with torch.set_grad_enabled(grad):
        returned = stage(inputs[0] if len(inputs) == 1 else inputs)
    return returned if isinstance(returned, tuple) else (returned,)


def _own(recorder: Recorder, tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """Numbers of the storages that were made here."""
    return tuple(number for number in map(recorder.number, tensors) if number >= 0)


def _differentiable(tensor: Tensor) -> bool:
    """Whether a stage's input needs a gradient: the images do not."""
    return tensor.shape[1:] != IMAGE


@dataclass(frozen=True)
class Place:
    """Where a stage stands: only the first takes images, only the last makes the loss."""

    first: bool
    last: bool


def play(trace: StageTrace, place: Place, micro_batches: int, *, streams: bool = True) -> Footprint:
    """What the device of a stage holds over two iterations.

    Args:
        streams: copies have streams of their own.
    """
    allocator = CachingAllocator()
    for size in trace.state:
        allocator.allocate(size)
    if place.first:
        allocator.allocate(micro_batches * sum(trace.takes))
    player = _Player(allocator, trace, place, micro_batches, streams)
    player.iterate(trace.first)
    for size in trace.parameters:
        allocator.allocate(size)
    player.step()
    player.iterate(trace.last)
    player.step()
    return allocator.footprint


@dataclass
class _Player:
    """Plays iterations of one stage."""

    allocator: CachingAllocator
    trace: StageTrace
    place: Place
    micro_batches: int
    streams: bool

    def iterate(self, last: Pass) -> None:
        """All forwards and backwards; `last` is that of the last micro-batch."""
        inputs, outputs = [], []
        for index in range(self.micro_batches - 1):
            inputs.append(self._copied(index, () if self.place.first else self.trace.takes))
            blocks: dict[int, int] = {}
            self._play(self.trace.unkept.forward, blocks)
            made = [blocks[number] for number in self.trace.unkept.outputs]
            if self.place.last:
                outputs += made
            else:
                self._free(made)
        index = self.micro_batches - 1
        inputs.append(self._copied(index, () if self.place.first else self.trace.takes))
        kept: dict[int, int] = {}
        self._play(last.forward, kept)
        gathered = [self.allocator.allocate(self._gathered()) for _ in range(3)]
        for index in reversed(range(self.micro_batches)):
            arrived = self._copied(index, () if self.place.last else self.trace.hands_on)
            done, blocks = (self.trace.again, {}) if kept is None else (last, kept)
            if done is self.trace.again:
                self._play(done.forward, blocks)
            self._play(done.backward, blocks)
            kept = None
            self._free([blocks[number] for number in done.gradients])
            self._free(arrived)
            self._free(inputs.pop())
        self._free(gathered + outputs)

    def step(self) -> None:
        """RMSprop's: the root of a parameter's mean square is let go when the next one is made."""
        before = 0
        for size in self.trace.parameters:
            root = self.allocator.allocate(size)
            self.allocator.free(before)
            before = root
        self.allocator.free(before)

    def _gathered(self) -> int:
        """Bytes of the outputs of all micro-batches, of their probabilities and gradients."""
        return MICRO_BATCHES * 4 * CLASSES if self.place.last else 0

    def _copied(self, index: int, sizes: Sequence[int]) -> list[int]:
        stream = 1 + index % COPY_STREAMS if self.streams else 0
        return [self.allocator.allocate(size, stream) for size in sizes]

    def _play(self, events: Sequence[tuple[int, int]], blocks: dict[int, int]) -> None:
        for number, size in events:
            if size >= 0:
                blocks[number] = self.allocator.allocate(size)
            else:
                self.allocator.free(blocks[number])

    def _free(self, addresses: Iterable[int]) -> None:
        for address in addresses:
            self.allocator.free(address)


def stages(model: nn.Sequential, balance: Sequence[int]) -> list[nn.Sequential]:
    """So many consecutive cells for every stage."""
    ends = [sum(balance[: number + 1]) for number in range(len(balance))]
    cells = list(model)
    return [
        nn.Sequential(*cells[end - count : end]) for end, count in zip(ends, balance, strict=True)
    ]


def footprints(
    row: Published, *, streams: bool = True, relu_keeps_input: bool = True
) -> list[Footprint]:
    """What every device holds."""
    model = network(row.layers, row.filters)
    samples = MICRO_BATCHES // row.micro_batches
    passed: tuple[Tensor, ...] = (torch.empty(samples, *IMAGE, device="meta"),)
    found = []
    with ReluKeepsInput() if relu_keeps_input else nullcontext():
        for number, stage in enumerate(stages(model, row.balance)):
            trace, passed = record(stage, passed)
            place = Place(number == 0, number == len(row.balance) - 1)
            found.append(play(trace, place, row.micro_batches, streams=streams))
    return found
