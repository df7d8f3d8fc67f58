"""How long each op takes, estimated from its arithmetic and its memory traffic.

The roofline model (Williams, Waterman, Patterson, CACM 52(4), 2009): a kernel takes as long as its
arithmetic at the device's full speed, or its reads and writes at full bandwidth, whichever is
longer, and the time to launch it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils.flop_counter import flop_registry

from gpipe_compiler.cluster import Arithmetic, Device
from gpipe_compiler.errors import ModelError
from gpipe_compiler.ir import Graph, Op, called
from gpipe_compiler.ir.arguments import tensors_in
from gpipe_compiler.options import Calibration
from gpipe_compiler.passes.distinct import IsolatedOp, copies, differentiable, distinct
from gpipe_compiler.passes.dry_run import RAISED_BY_OPS
from gpipe_compiler.passes.fakes import HostFakes
from gpipe_compiler.passes.flop_formulas import FURTHER_FORMULAS
from gpipe_compiler.runtime.wording import said

_aten = torch.ops.aten

_ALLOCATIONS = frozenset(
    {
        _aten.empty,
        _aten.empty_like,
        _aten.empty_strided,
        _aten.new_empty,
        _aten.new_empty_strided,
        _aten._unsafe_view,
        _aten._reshape_alias,
        _aten.lift_fresh,
    }
)
"""Kernels that touch no element and are no view by their schema."""

_LOOK_UPS: Mapping[torch._ops.OpOverloadPacket, tuple[int, ...]] = {
    _aten.embedding: (1,),
    _aten.index_select: (2,),
    _aten.gather: (2,),
    _aten.index: (1,),
}
"""Kernels that read only as much of their first argument as they return, with the positions of
their indices."""


_TF32 = frozenset(
    {
        _aten.convolution,
        _aten.convolution_backward,
        _aten.mkldnn_rnn_layer,
        _aten.mkldnn_rnn_layer_backward,
    }
)
"""Kernels that cuDNN runs on a GPU, by default in TF32 where they are in fp32."""


@dataclass(frozen=True, slots=True)
class OpCost:
    """What one op costs at the graph's batch size.

    Attributes:
        forward_s, backward_s: seconds. An op whose results need no gradient has no backward.
        weight_s: the part of `backward_s` that makes the gradients of parameters: what is left of
            it where only the gradients of inputs are made. All of it where no input needs one.
        flops, backward_flops: floating-point operations of matrix products, convolutions and
            attention, a multiply-add counted as two; other arithmetic is not counted.
        bytes, backward_bytes: read and written by all its kernels.
        arithmetic_s: seconds that the operations of both take at the device's peak.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    flops: int = 0
    backward_flops: int = 0
    bytes: int = 0
    backward_bytes: int = 0
    weight_s: float = 0.0
    arithmetic_s: float = 0.0


@dataclass(frozen=True)
class Costs:
    """The cost of every op.

    Attributes:
        ops: by name; ops that do not run in the graph's own mode cost nothing.
        source: how the times were found, in words.
        batch_size: samples that the costs are for.
        estimated: of measured costs, the ops whose times could not be measured and were estimated.
    """

    ops: Mapping[str, OpCost]
    source: str
    batch_size: int
    estimated: frozenset[str] = field(default_factory=frozenset)

    def calibrated(self, calibration: Calibration | None) -> Costs:
        """The same with all times as much longer as a package was measured to take."""
        if calibration is None:
            return self
        forward, backward = calibration.forward, calibration.backward
        ops = {
            name: replace(
                cost,
                forward_s=forward * cost.forward_s,
                backward_s=backward * cost.backward_s,
                weight_s=backward * cost.weight_s,
            )
            for name, cost in self.ops.items()
        }
        return replace(self, ops=ops, source=f"{self.source}; {calibration}")


def roofline(graph: Graph, device: Device) -> Costs:
    """Costs of an annotated graph on a device, without running a kernel; see `rooflines`."""
    return rooflines(graph, [device])[0]


def rooflines(graph: Graph, devices: Sequence[Device], clocks: Clocks | None = None) -> list[Costs]:
    """Costs of an annotated graph on each of several devices, without running a kernel.

    Kernels are seen once, as the host dispatches them on fake tensors, and priced for every device;
    in train mode with their backward when the graph has a loss.
    """
    tables = [{op.name: OpCost() for op in graph.ops} for _ in devices]
    known = [clocks(device) if clocks else None for device in devices]
    for isolated, names in distinct(graph):
        work = work_of(isolated)
        for costs, device, clock in zip(tables, devices, known, strict=True):
            cost = work.on(device, clock)
            costs.update((name, cost) for name in names)
    return [
        Costs(
            costs, f"{'kernel times' if clock else 'roofline'} on {device.name}", graph.batch_size
        )
        for costs, device, clock in zip(tables, devices, known, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class KernelCost:
    """What one kernel does: floating-point operations, bytes read and written.

    Attributes:
        name: torch's, of a convolution with its kind; "" where it does not matter.
    """

    flops: int
    bytes: int
    arithmetic: Arithmetic
    name: str = ""

    def ideal_s(self, device: Device) -> float:
        """By the roofline of a device, launched already."""
        return max(self.arithmetic_s(device), self.bytes / device.memory_bandwidth)

    def arithmetic_s(self, device: Device) -> float:
        """Seconds of its operations at the device's peak."""
        return self.flops / device.speed(self.arithmetic)

    def seconds(self, device: Device) -> float:
        """By the roofline of a device."""
        return device.launch_s + self.ideal_s(device)


class KernelClock(Protocol):
    """Knows better than a roofline how long kernels take."""

    def seconds(self, kernel: KernelCost) -> float:
        """Of one kernel."""


Clocks = Callable[[Device], KernelClock | None]
"""Gives what is known of the kernels of a device beyond its roofline; None where nothing is."""


@dataclass(frozen=True, slots=True)
class OpKernels:
    """The kernels of one op.

    Attributes:
        of_inputs: those of a backward that makes only the gradients of inputs.
        trains: whether the op has parameters that train.
    """

    forward: tuple[KernelCost, ...]
    backward: tuple[KernelCost, ...]
    of_inputs: tuple[KernelCost, ...]
    trains: bool

    def on(self, device: Device, clock: KernelClock | None = None) -> OpCost:
        """What it costs on a device, by its roofline or by what is known better."""

        def seconds(kernel: KernelCost) -> float:
            return kernel.seconds(device) if clock is None else clock.seconds(kernel)

        forward_s, backward_s, inputs_s = (
            sum(map(seconds, kernels)) for kernels in (self.forward, self.backward, self.of_inputs)
        )
        return OpCost(
            forward_s,
            backward_s,
            sum(kernel.flops for kernel in self.forward),
            sum(kernel.flops for kernel in self.backward),
            sum(kernel.bytes for kernel in self.forward),
            sum(kernel.bytes for kernel in self.backward),
            weight_s=max(0.0, backward_s - inputs_s) if self.trains else 0.0,
            arithmetic_s=sum(k.arithmetic_s(device) for k in (*self.forward, *self.backward)),
        )


def work_of(isolated: IsolatedOp) -> OpKernels:
    run = isolated.run
    fakes = run.mode
    assert isinstance(fakes, HostFakes)
    forward, backward, of_inputs = (KernelCount() for _ in range(3))
    with fakes, torch.set_grad_enabled(run.training):
        arguments = copies(isolated, isolated.inputs, _like)
        with run.autocast(), fakes.watched(forward.saw):
            returned = run.interpreter.alone(isolated.op, arguments.environment)
        results = differentiable(returned)
        trained = [state for state in isolated.states.values() if state.requires_grad]
        leaves = (*arguments.leaves, *trained)
        if results and leaves:
            gradients = [
                _like(result) if result.is_contiguous() else torch.empty_like(result)
                for result in results
            ]
            try:
                if trained and arguments.leaves:
                    with fakes.watched(of_inputs.saw):
                        differentiate(results, arguments.leaves, gradients, again=True)
                with fakes.watched(backward.saw):
                    differentiate(results, leaves, gradients)
            except RAISED_BY_OPS as error:
                raise _unplannable_backward(isolated.op, error) from error
    return OpKernels(
        tuple(forward.kernels),
        (*backward.kernels, *(map(_added, trained) if backward.kernels else ())),
        tuple(of_inputs.kernels),
        trains=bool(trained),
    )


def _added(parameter: torch.Tensor) -> KernelCost:
    """What adds a gradient to that of the micro-batches before."""
    return KernelCost(0, 3 * parameter.nbytes, Arithmetic.FP32, torch.add.__name__)


def _unplannable_backward(op: Op, error: Exception) -> ModelError:
    if isinstance(error, DataDependentOutputException):
        why = "takes Python values from tensors"
        hint = "compute with tensors in it: torch.where or clamp in place of if, max and float()"
    else:
        why = f"does not run on tensors without numbers: {said(error)}"
        hint = "register for each operator that it calls what it returns, by register_fake"
    return ModelError(
        f"the backward of {called(op.call) or op.name} cannot be planned: it {why}",
        location=op.source,
        hint=hint,
    )


def differentiate(
    results: Sequence[torch.Tensor],
    leaves: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    *,
    again: bool = False,
) -> None:
    """Run the backward of an op, as far as these leaves need it, and drop what it makes.

    Args:
        again: keep the graph for another backward.
    """
    torch.autograd.grad(results, leaves, gradients, retain_graph=again, allow_unused=True)


class KernelCount:
    """Counts the arithmetic and the traffic of kernels."""

    def __init__(self) -> None:
        self.kernels: list[KernelCost] = []

    def saw(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], returned: object
    ) -> None:
        kind = _kind_of(func)
        if not kind.counts:
            return
        given, written = tensors_in(args), tensors_in(returned)
        flops = int(kind.formula(*args, **kwargs, out_val=returned)) if kind.formula else 0
        if kind.indices is None:
            read = [*given, *tensors_in(kwargs)]
        else:
            read = tensors_in([args[place] for place in kind.indices if place < len(args)])
        self.kernels.append(
            KernelCost(
                flops,
                _traffic(read, written, looked_up=kind.indices is not None),
                _arithmetic(kind, (*given, *written)),
                _name(func, args),
            )
        )


@dataclass(frozen=True, slots=True)
class _Kind:
    """What is asked of every call of a kernel.

    Attributes:
        counts: whether it is more than a view or an allocation.
        formula: torch's own, or ours, for its floating-point operations.
        indices: of a look-up, the positions of its indices.
        tf32: whether cuDNN runs it.
    """

    counts: bool
    formula: Callable[..., int] | None
    indices: tuple[int, ...] | None
    tf32: bool


@cache
def _kind_of(func: Any) -> _Kind:
    packet = func.overloadpacket
    returns = func._schema.returns
    is_view = bool(returns) and all(
        result.alias_info is not None and not result.alias_info.is_write for result in returns
    )
    return _Kind(
        packet not in _ALLOCATIONS and not is_view,
        FURTHER_FORMULAS.get(packet) or flop_registry.get(packet),
        _LOOK_UPS.get(packet),
        packet in _TF32,
    )


def _name(func: Any, args: Sequence[Any]) -> str:
    """That of a kernel; where it writes in place, that of the one that does not. What tells of its
    speed beyond its arithmetic and its traffic follows, the most important first."""
    name = str(func.overloadpacket.__name__).rstrip("_")
    match name:
        case "convolution" | "convolution_backward":
            return f"{name} {_kind_of_convolution(*args[name.endswith('backward') :][:9])}"
        case "mm" | "addmm":
            one, other = tensors_in(args)[-2:]
            sizes = (*one.shape, other.shape[-1])
            return f"{name}, few rows" if min(sizes) <= _FEW_ROWS else name
        case "max_pool2d_with_indices":
            return f"{name}, wide windows" if max(args[1]) > _POOLED else name
        case _:
            return name


def _kind_of_convolution(x: torch.Tensor, weight: torch.Tensor, *settings: Any) -> str:
    """Of points or windows, with few channels or few positions, or of groups of channels."""
    *_, transposed, _, groups = settings
    channels, own, *window = weight.shape
    if transposed:
        return "transposed"
    wide = math.prod(window) > _WINDOW
    if groups > 1:
        return ("depthwise" if own == 1 else "grouped") + (", wide windows" if wide else "")
    kind = "of points" if math.prod(window) == 1 else "of windows"
    few = next((most for most in _CHANNELS if min(own, channels) <= most), None)
    kind += "" if few is None else f", at most {few} channels"
    positions = x.shape[0] * math.prod(x.shape[2:])
    return f"{kind}, few positions" if positions <= _FEW_POSITIONS else kind


_CHANNELS = (4, 16, 32)
"""Numbers of channels, in or out, up to which convolutions run at speeds of their own."""

_FEW_ROWS, _FEW_POSITIONS = 16, 128
"""Rows of a product, and pixels of all images, up to which reading the weights takes longest."""

_POOLED, _WINDOW = 2, 9
"""The side of windows that most often pool, and pixels of those that convolve each channel."""


def _arithmetic(kind: _Kind, tensors: Sequence[torch.Tensor]) -> Arithmetic:
    dtypes = {tensor.dtype for tensor in tensors}
    if dtypes and dtypes <= {torch.bfloat16, torch.float16}:
        return Arithmetic.BF16 if torch.bfloat16 in dtypes else Arithmetic.FP16
    return Arithmetic.TF32 if kind.tf32 else Arithmetic.FP32


def _traffic(
    read: Sequence[torch.Tensor], written: Sequence[torch.Tensor], *, looked_up: bool
) -> int:
    """Bytes that a kernel reads and writes; one that looks up reads what it writes, and indices."""
    made = sum(map(_elements_bytes, written))
    if looked_up:
        return 2 * made + sum(map(_elements_bytes, read))
    return made + sum(map(_elements_bytes, {id(tensor): tensor for tensor in read}.values()))


def _elements_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the distinct elements: an expanded dimension is read once."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride or not size else 1
    return count * tensor.element_size()


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """A new one on the host."""
    return torch.empty_strided(
        tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="cpu"
    )
