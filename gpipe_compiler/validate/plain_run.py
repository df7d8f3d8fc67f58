"""The plain model on one mini-batch: in one piece, or micro-batch by micro-batch."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from gpipe_compiler.frontend.entry import Entry
from gpipe_compiler.frontend.recompute import activations_kept
from gpipe_compiler.frontend.signature import Signature
from gpipe_compiler.frontend.state import state_restored
from gpipe_compiler.ir import Graph
from gpipe_compiler.ir.interpret import Interpreter
from gpipe_compiler.passes.batch_rules import taken_together, takes_several
from gpipe_compiler.passes.cross_sample_ops import mixing_ops
from gpipe_compiler.plan import Plan
from gpipe_compiler.runtime.core.inputs import even_sizes
from gpipe_compiler.runtime.core.precision import autocast, layers_by_ops
from gpipe_compiler.runtime.spec import Precision
from gpipe_compiler.runtime.train.comparison import ComparedKind, Tensors, flat_tensors
from gpipe_compiler.runtime.train.plain_stages import LOSS_SCALE
from gpipe_compiler.validate.draws import Draws, DrawsOfAll, DrawsOfOne
from gpipe_compiler.validate.loss_splitting import loss_shares
from gpipe_compiler.validate.second_batch import OtherBatch


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """A mini-batch.

    Attributes:
        sizes: samples in each micro-batch.
    """

    inputs: tuple[torch.Tensor, ...]
    sizes: tuple[int, ...]

    def parts(self, signature: Signature) -> list[tuple[torch.Tensor, ...]]:
        ends = [*accumulate(self.sizes)]
        return [
            tuple(
                source.part(tensor, end - size, size).clone()
                for source, tensor in zip(signature.inputs, self.inputs, strict=True)
            )
            for size, end in zip(self.sizes, ends, strict=True)
        ]

    def whole(self) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.clone() for tensor in self.inputs)


def batch_of(plan: Plan, signature: Signature, other: OtherBatch | None = None) -> MiniBatch:
    """A mini-batch as the plan's package splits it, in a single replica; the example by default."""
    inputs = signature.samples(plan.batch_size) if other is None else other.inputs
    most = plan.microbatches if other is None else other.microbatches
    pairs = zip(signature.inputs, inputs, strict=True)
    samples = next((s.samples(t) for s, t in pairs if s.batched), plan.batch_size)
    count = max(1, min(most, samples // least_samples(plan)))
    group = taken_together(plan.known_graph).samples
    return MiniBatch(tuple(inputs), even_sizes(samples, count, group))


def least_samples(plan: Plan) -> int:
    """The samples that each micro-batch of the plan's package has at least."""
    several = takes_several(plan.known_graph) or mixing_ops(plan.known_graph)
    least = 2 if plan.microbatch_size > 1 and several else 1
    return max(least, taken_together(plan.known_graph).samples)


Shares: TypeAlias = Sequence[tuple[float, ...]]
"""For each micro-batch, the weights of its loss's terms."""


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A call of the model.

    Attributes:
        shares: the weights of the terms of its loss in those of the mini-batch.
        terms: computes these terms, where there are several; the model only returns their sum.
    """

    inputs: tuple[torch.Tensor, ...]
    around: contextlib.AbstractContextManager[object]
    shares: tuple[float, ...] = (1.0,)
    terms: Callable[[Entry, Precision], tuple[torch.Tensor, ...]] | None = None


def shares_of(entry: Entry, plan: Plan, batch: MiniBatch) -> Shares:
    """The weights of the micro-batches' losses; () where the mini-batch has one."""
    graph = plan.known_graph
    if graph.loss is not None and graph.loss.over_batch:
        return ()
    names = [source.name for source in entry.signature.inputs]
    parts = batch.parts(entry.signature)
    states = {**graph.tensors, **dict(entry.model.named_buffers())}
    named = [dict(zip(names, part, strict=True)) for part in parts]
    return loss_shares(graph, states, named, batch.sizes)


def one_by_one(
    batch: MiniBatch, signature: Signature, draws: Draws, shares: Shares
) -> list[ModelCall]:
    return [
        ModelCall(
            part, DrawsOfOne(draws, microbatch) if draws.numbers else contextlib.nullcontext(), own
        )
        for microbatch, (part, own) in enumerate(
            zip(batch.parts(signature), shares or [(1.0,)] * len(batch.sizes), strict=True)
        )
    ]


def with_terms(calls: Sequence[ModelCall], graph: Graph, draws: Draws) -> list[ModelCall]:
    """The calls of micro-batches, with the terms of their losses where there are several."""
    if graph.loss is None or not graph.loss.of_parts:
        return list(calls)
    return [
        dataclasses.replace(
            call, terms=functools.partial(_terms, graph, call, draws.seeded(number))
        )
        for number, call in enumerate(calls)
    ]


def _terms(
    graph: Graph,
    call: ModelCall,
    seeded: contextlib.AbstractContextManager[object],
    entry: Entry,
    precision: Precision,
) -> tuple[torch.Tensor, ...]:
    """The terms of a micro-batch's loss, by the graph. Buffers stay as they are; once only."""
    model = entry.model
    states = {**graph.tensors, **dict(model.named_parameters())}
    states |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    interpreter = Interpreter(graph, states, training=entry.training).prepare()
    names = (source.name for source in entry.signature.inputs)
    inputs = {name: t.clone() for name, t in zip(names, call.inputs, strict=True)}
    assert graph.loss is not None
    terms = [term.value for term in graph.loss.summands]
    with activations_kept(), seeded, autocast(precision, device_of(model)):
        values = interpreter.run(inputs, keep=terms)
    return tuple(values[name] for name in terms)


def all_at_once(
    batch: MiniBatch, draws: Draws, calls: Sequence[ModelCall], *, inner: bool
) -> ModelCall:
    """A call for all micro-batches, with the random numbers that theirs draw.

    Args:
        calls: for each of them; that for the first has been made.
    """
    made = {
        size: call.around.calls
        for size, call in zip(batch.sizes, calls, strict=True)
        if isinstance(call.around, DrawsOfOne) and (call.around.calls or call is calls[0])
    }
    if not made:
        return ModelCall(batch.whole(), contextlib.nullcontext())
    if len(batch.sizes) == 1:
        return ModelCall(batch.whole(), draws.of_model())
    return ModelCall(batch.whole(), DrawsOfAll(draws, made, batch.sizes, inner=inner))


def flattened(call: ModelCall) -> bool:
    """Whether in a call that was made the batch was flattened with another dimension."""
    return isinstance(call.around, DrawsOfAll) and call.around.flattened


def device_of(model: nn.Module) -> torch.device:
    return next((tensor.device for tensor in model.parameters()), torch.device("cpu"))


@dataclass(frozen=True, slots=True)
class Outputs:
    """What one call of the model gives; copies, for the next call may overwrite the originals."""

    loss: torch.Tensor | None
    terms: tuple[torch.Tensor, ...]
    outputs: Mapping[str, torch.Tensor]


@torch.no_grad()
def evaluate(
    entry: Entry,
    calls: Sequence[ModelCall],
    precision: Precision,
    once: Collection[str] = (),
) -> list[Outputs]:
    """What each call gives, without gradients; the state is afterwards what it was."""
    begin = _beginning(entry.model, once)
    found = []
    with state_restored(entry.model), _as_planned(precision):
        for call in calls:
            begin()
            terms = call.terms(entry, precision) if call.terms else ()
            if terms:
                begin()  # they are computed from what forward makes, which writes
            found.append(_evaluated(entry, call, precision, terms))
    return found


def _as_planned(precision: Precision) -> contextlib.AbstractContextManager[None]:
    """Under autocast the model computes as on the devices of a plan: torch's kernels of encoder
    layers are those of a CPU alone."""
    return contextlib.nullcontext() if precision is Precision.FP32 else layers_by_ops()


def _beginning(model: nn.Module, names: Collection[str]) -> Callable[[], None]:
    """Makes some of the model's state what it is now."""
    before = {name: item.detach().clone() for name, item in _state(model).items() if name in names}

    @torch.no_grad()
    def begin() -> None:
        state = _state(model) if before else {}  # a forward may have assigned other tensors
        for name, tensor in before.items():
            state[name].copy_(tensor)

    return begin


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _evaluated(
    entry: Entry, call: ModelCall, precision: Precision, terms: tuple[torch.Tensor, ...]
) -> Outputs:
    with call.around, autocast(precision, device_of(entry.model)):
        leaves = entry(*call.inputs)
    loss = leaves.pop(0).clone() if entry.has_loss else None
    tensors = flat_tensors(entry.outputs(leaves))
    outputs = {name: tensor.clone() for name, tensor in tensors.items()}
    return Outputs(loss, terms or (() if loss is None else (loss,)), outputs)


def train_step(
    entry: Entry,
    calls: Sequence[ModelCall],
    precision: Precision,
    once: Collection[str] = (),
    *,
    written: Collection[str] = (),
    deferred: bool = False,
) -> Tensors:
    """Loss, gradients, buffers and weights of one step of plain PyTorch.

    A term whose share is 0 may be nan, and does not count.

    Args:
        written: what forward writes to; weights therein are compared though frozen.
        once: the state that all calls change once: each begins with it as it is now.
        deferred: whether running statistics change once, by those of all calls.
    """
    statistics = MiniBatchStatistics(entry.model)
    scale = LOSS_SCALE if precision is Precision.FP16 else 1.0
    trainable = {
        name: tensor for name, tensor in entry.model.named_parameters() if tensor.requires_grad
    }
    gradients: dict[str, torch.Tensor] = {}
    losses = []
    begin = _beginning(entry.model, once)
    for call in calls:
        begin()
        terms = call.terms(entry, precision) if call.terms else ()
        if terms:
            begin()  # they are computed from what forward makes, which writes
        with contextlib.ExitStack() as around:
            around.enter_context(activations_kept())
            around.enter_context(call.around)
            around.enter_context(statistics.microbatch() if deferred else contextlib.nullcontext())
            around.enter_context(autocast(precision, device_of(entry.model)))
            around.enter_context(_as_planned(precision))
            returned = entry(*call.inputs)[0]
        pairs = zip(terms or (returned,), call.shares, strict=True)
        weighted = [term.reshape(()) * share for term, share in pairs if share]
        if not weighted:
            continue
        loss = torch.stack(weighted).sum()
        losses.append(loss.detach())
        for name, gradient in _gradients(loss * scale, trainable).items():
            gradients[name] = gradients[name] + gradient if name in gradients else gradient
    if deferred:
        statistics.commit()
    gradients = {name: gradient / scale for name, gradient in gradients.items()}
    parameters = entry.model.named_parameters()
    weights = trainable | {name: tensor for name, tensor in parameters if name in written}
    return {
        ComparedKind.LOSS: {"loss": torch.stack(losses).sum() if losses else torch.zeros(())},
        ComparedKind.GRADIENT: gradients,
        ComparedKind.BUFFER: dict(entry.model.named_buffers()),
        ComparedKind.WEIGHT: {
            name: tensor.detach() - gradients[name] if name in gradients else tensor.detach()
            for name, tensor in weights.items()
        },
    }


def _gradients(
    loss: torch.Tensor, parameters: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    if not loss.requires_grad:
        return {}
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {
        name: gradient
        for name, gradient in zip(parameters, found, strict=True)
        if gradient is not None
    }


# --- deferred BatchNorm: running statistics of the mini-batch, once a step ------------------------

_SIGNATURE = inspect.signature(F.batch_norm)
_COUNTER = "num_batches_tracked"


class MiniBatchStatistics:
    """Running statistics that change once, by those of all micro-batches put together.

    While micro-batches run, what every BatchNorm is given is kept, and its running statistics stay
    as they are. At the end torch's own BatchNorm runs once on all that was kept.
    """

    def __init__(self, model: nn.Module) -> None:
        buffers = dict(model.named_buffers())
        self._buffers = {id(buffer) for buffer in buffers.values()}
        self._counters = [b for name, b in buffers.items() if name.split(".")[-1] == _COUNTER]
        self._seen: list[list[Mapping[str, Any]]] = []

    @contextlib.contextmanager
    def microbatch(self) -> Iterator[None]:
        """Around the model's call on one micro-batch; the first of them alone is counted."""
        before = [counter.clone() for counter in self._counters]
        watch = _Inputs(self._buffers)
        with watch:
            yield
        if self._seen:
            for counter, value in zip(self._counters, before, strict=True):
                counter.copy_(value)
        self._seen.append(watch.calls)

    @torch.no_grad()
    def commit(self) -> None:
        """After the last micro-batch: every BatchNorm takes the mini-batch's statistics."""
        for calls in zip(*self._seen, strict=True):
            first = calls[0]
            F.batch_norm(
                torch.cat([call["input"] for call in calls]),
                first["running_mean"],
                first["running_var"],
                training=True,
                momentum=first["momentum"],
                eps=first["eps"],
            )


class _Inputs(TorchFunctionMode):
    """Keeps what every BatchNorm with running statistics is called with."""

    def __init__(self, buffers: set[int]) -> None:
        super().__init__()
        self._buffers = buffers
        self.calls: list[Mapping[str, Any]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one function of torch; a BatchNorm on copies of its running statistics."""
        kwargs = kwargs or {}
        if func is not F.batch_norm:
            return func(*args, **kwargs)
        bound = _SIGNATURE.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        if not given["training"] or id(given["running_mean"]) not in self._buffers:
            return func(*args, **kwargs)
        self.calls.append({**given, "input": given["input"].detach().clone()})
        copies = {name: given[name].clone() for name in ("running_mean", "running_var")}
        return func(**{**given, **copies})
