"""How long each op takes, by running it: each distinct op once, alone, on the real device."""

from __future__ import annotations

import contextlib
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from gpipe_compiler.cluster import Device, is_here, this_machine
from gpipe_compiler.cluster.local import clocked
from gpipe_compiler.ir import FunctionCall, Graph, MethodCall, ModuleCall
from gpipe_compiler.ir.interpret import Interpreter, construct, entered
from gpipe_compiler.passes.cost import Costs, OpCost, differentiate, rooflines, work_of
from gpipe_compiler.passes.distinct import IsolatedOp, copies, differentiable, distinct
from gpipe_compiler.passes.dry_run import map_op
from gpipe_compiler.passes.kernel_times import kernel_times
from gpipe_compiler.runtime.core.devices import gpu_count

REPEATS = 5
"""Timed runs of an op, after one that is not timed; their median counts."""

BUDGET_S = 0.1
"""No further run is started once an op has taken so long, so slow ops run but twice."""

_RAISED_BY_OPS = (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError)


def measure(
    graph: Graph, device: Device, on: torch.device | None = None, *, budget_s: float = BUDGET_S
) -> Costs:
    """Costs of an annotated graph with measured times.

    Every distinct op runs on random tensors of the right shapes, forward and (in a training graph)
    backward, in the number of threads that torch is set to. Parameters are random too, so a model
    on meta can be measured as long as each of its ops fits in memory. FLOPs and bytes are the
    roofline's. An op that cannot run alone (its integers are not just any indices, or it does not
    fit) keeps the roofline's times and is listed in `Costs.estimated`.

    Args:
        device: the description by which the ops that cannot be measured are estimated.
        on: where to run; the first GPU where there is one, else the processor.
        budget_s: seconds after which an op is not repeated.

    Raises:
        ModelError: naming the op that cannot run even on fake tensors.
    """
    if on is None:
        on = torch.device("cuda", 0) if gpu_count() else torch.device("cpu")
    costs = {op.name: OpCost() for op in graph.ops}
    estimated: set[str] = set()
    with _own_random_state(on):
        for isolated, names in distinct(graph):
            cost = work_of(isolated).on(device)
            try:
                forward_s, backward_s, weight_s = _time(
                    isolated, on, budget_s, backward=cost.backward_bytes > 0
                )
                cost = replace(cost, forward_s=forward_s, backward_s=backward_s, weight_s=weight_s)
            except _RAISED_BY_OPS:
                estimated.update(names)
            costs.update((name, cost) for name in names)
    source = f"measured on {on}, {torch.get_num_threads()} threads"
    return Costs(costs, source, graph.batch_size, frozenset(estimated))


def _time(
    isolated: IsolatedOp, on: torch.device, budget_s: float, *, backward: bool
) -> tuple[float, float, float]:
    """Median seconds of the forward, the backward, and what of that makes parameters' gradients."""
    bound = _index_bound(isolated)

    def make(tensor: torch.Tensor) -> torch.Tensor:
        return _random_like(tensor, on, bound)

    def there(value: Any) -> Any:
        return on if isinstance(value, torch.device) else value

    isolated = replace(
        isolated,
        op=map_op(isolated.op, there),
        inputs={name: there(value) for name, value in isolated.inputs.items()},
    )
    call, trained = _ready(isolated, make)
    originals = copies(isolated, isolated.inputs, make).environment
    training = isolated.run.training
    forwards, backwards, of_inputs = list[float](), list[float](), list[float]()
    started = time.perf_counter()
    while len(forwards) <= REPEATS:
        # Anew every time, as the op may write in place.
        arguments = copies(isolated, originals, lambda tensor: tensor.detach().clone())
        with torch.set_grad_enabled(training), isolated.run.autocast(on):
            seconds, returned = clocked(partial(call, arguments.environment), on)
        forwards.append(seconds)
        results = differentiable(returned)
        leaves = (*arguments.leaves, *trained)
        if backward and results and leaves:
            gradients = [torch.ones_like(result) for result in results]
            if trained and arguments.leaves:
                work = partial(differentiate, results, arguments.leaves, gradients, again=True)
                of_inputs.append(clocked(work, on)[0])
            backwards.append(clocked(partial(differentiate, results, leaves, gradients), on)[0])
        del arguments, returned, results
        if len(forwards) > 1 and time.perf_counter() - started > budget_s:
            break
    forward_s, backward_s, inputs_s = (
        statistics.median(row[1:] or [0.0]) for row in (forwards, backwards, of_inputs)
    )
    return forward_s, backward_s, max(0.0, backward_s - inputs_s) if trained else 0.0


def _ready(
    isolated: IsolatedOp, make: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[Callable[[Mapping[str, Any]], Any], list[torch.Tensor]]:
    """The op as a function of what it reads, and the parameters that it trains.

    A module is called directly, as an emitted stage does, with its parameters in place: what
    `torch.func.functional_call` adds would show in small ops.
    """
    graph, training = isolated.run.graph, isolated.run.training
    states: dict[str, torch.Tensor] = {
        name: nn.Parameter(make(state)) if state.requires_grad else make(state)
        for name, state in isolated.states.items()
    }
    interpreter = Interpreter(graph, states, training)
    op, call = isolated.op, isolated.op.call
    trained = [state for state in states.values() if state.requires_grad]
    if not isinstance(call, ModuleCall):
        return partial(interpreter.alone, op), trained
    spec = graph.modules[call.module]
    module = construct(spec, training=training)
    for local, name in spec.state.items():
        owner, _, attribute = local.rpartition(".")
        target, state = module.get_submodule(owner), states[name]
        is_parameter = attribute in target._parameters and not isinstance(state, nn.Parameter)
        if is_parameter:
            state = nn.Parameter(state, requires_grad=False)
        setattr(target, attribute, state)

    def run_module(environment: Mapping[str, Any]) -> Any:
        args = interpreter.resolve(call.args, environment)
        kwargs = interpreter.resolve(dict(call.kwargs), environment)
        with entered(op.regions):
            return module(*args, **kwargs)

    return run_module, trained


def _random_like(tensor: torch.Tensor, on: torch.device, bound: int) -> torch.Tensor:
    """A real tensor with the sizes, strides and dtype of a fake one; integers lie in [0, bound)."""
    span = 1 + sum(
        (size - 1) * stride
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        if size
    )
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        # Positive, so that roots and logarithms are defined: slow paths of NaN are not timed.
        flat = torch.rand(span, device=on).add_(0.5).to(tensor.dtype)
    elif tensor.dtype is torch.bool:
        flat = torch.ones(span, dtype=torch.bool, device=on)
    else:
        flat = torch.randint(0, bound, (span,), device=on).to(tensor.dtype)
    return flat.as_strided(tuple(tensor.shape), tensor.stride()).detach()


def _index_bound(isolated: IsolatedOp) -> int:
    """The number of rows or classes that the op's integers choose from; 2 where not known."""
    call = isolated.op.call
    match call:
        case ModuleCall():
            module = isolated.run.graph.modules[call.module].cls.__name__
            if module in ("Embedding", "EmbeddingBag"):
                return max(state.shape[0] for state in isolated.states.values())
            name = {"CrossEntropyLoss": "cross_entropy", "NLLLoss": "nll_loss"}.get(module, "")
        case FunctionCall():
            name = getattr(call.function, "__name__", "").split(".")[0]
        case MethodCall():
            name = call.method
    tensors = [*isolated.inputs.values(), *isolated.states.values()]
    floats = [t for t in tensors if isinstance(t, torch.Tensor) and t.dtype.is_floating_point]
    if name in ("embedding", "embedding_bag") and floats:
        return int(floats[-1].shape[0])
    if name in ("cross_entropy", "nll_loss", "cross_entropy_loss", "nll_loss_nd") and floats:
        scores = floats[0].shape
        return int(scores[1] if len(scores) > 1 else scores[0])
    return 2


@contextlib.contextmanager
def _own_random_state(on: torch.device) -> Iterator[None]:
    """Draws from a generator state of its own, and without the model's warnings."""
    devices = [on] if on.type == "cuda" else []
    with torch.random.fork_rng(devices), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# --- kinds of devices -----------------------------------------------------------------------------


def costs_by_kind(graph: Graph, kinds: Sequence[Device], *, measured: bool) -> list[Costs]:
    """Costs of an annotated graph on each kind of device.

    Args:
        measured: time every distinct op on this machine. On other kinds of devices it is then
            taken to need as much more or less than here as its roofline says.
    """
    if not measured:
        return rooflines(graph, kinds, kernel_times)
    here = next(filter(is_here, kinds), None) or this_machine()
    times = measure(graph, here)
    if all(map(is_here, kinds)):
        return [times] * len(kinds)
    return on_kinds(times, rooflines(graph, [here, *kinds]), kinds)


def on_kinds(times: Costs, estimated: Sequence[Costs], kinds: Sequence[Device]) -> list[Costs]:
    """Times of this machine, on it and on other kinds of devices.

    Args:
        estimated: by the rooflines of this machine and of each kind.
    """
    if all(map(is_here, kinds)):
        return [times] * len(kinds)
    at_home, *elsewhere = estimated
    far = ", ".join(dict.fromkeys(kind.name for kind in kinds if not is_here(kind)))
    source = f"{times.source}; on {far} scaled by rooflines"
    return [
        replace(times if is_here(kind) else scaled(times, at_home, there), source=source)
        for kind, there in zip(kinds, elsewhere, strict=True)
    ]


def scaled(times: Costs, at_home: Costs, there: Costs) -> Costs:
    """Measured times, op by op as much longer or shorter as on the roofline of another device."""

    def ratio(far_s: float, near_s: float) -> float:
        return far_s / near_s if near_s > 0 else 1.0

    ops = {}
    for name, cost in times.ops.items():
        far, near = there.ops[name], at_home.ops[name]
        back = ratio(far.backward_s, near.backward_s)
        ops[name] = replace(
            cost,
            forward_s=cost.forward_s * ratio(far.forward_s, near.forward_s),
            backward_s=cost.backward_s * back,
            weight_s=cost.weight_s * back,
        )
    return replace(times, ops=ops)
