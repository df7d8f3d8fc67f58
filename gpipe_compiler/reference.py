"""What the package of a plan must come to: the model in plain PyTorch, computing as the plan says.

What a package does step by step and stage by stage is done here the long way, by other means, so
that the two can be held against each other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import nn

from gpipe_compiler.batch_statistics import MiniBatchStatistics
from gpipe_compiler.draws import Draws
from gpipe_compiler.errors import ValidationError
from gpipe_compiler.frontend.entry import Entry, make_entry
from gpipe_compiler.frontend.recompute import activations_kept
from gpipe_compiler.frontend.signature import Signature
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.ir import Graph
from gpipe_compiler.ir.interpret import Interpreter
from gpipe_compiler.passes.effects import effects
from gpipe_compiler.passes.mixing import mixing_ops
from gpipe_compiler.plan import Plan
from gpipe_compiler.runtime.comparison import Kind, Tensors, compare, flat_tensors
from gpipe_compiler.runtime.inputs import even_sizes, join
from gpipe_compiler.runtime.spec import BatchNorm, Leaf, Precision
from gpipe_compiler.runtime.stages_in_a_row import LOSS_SCALE
from gpipe_compiler.splitting import Losses, explain, loss_shares, suspected

_LOWER = {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}


@dataclass(frozen=True, slots=True)
class Batch:
    """A mini-batch.

    Attributes:
        inputs: a tensor for each input of the model.
        sizes: samples in each micro-batch.
    """

    inputs: tuple[torch.Tensor, ...]
    sizes: tuple[int, ...]

    def parts(self, signature: Signature) -> list[tuple[torch.Tensor, ...]]:
        """The inputs of every micro-batch, each with memory of its own."""
        ends = [*accumulate(self.sizes)]
        return [
            tuple(
                source.part(tensor, end - size, size).clone()
                for source, tensor in zip(signature.inputs, self.inputs, strict=True)
            )
            for size, end in zip(self.sizes, ends, strict=True)
        ]

    def whole(self) -> tuple[torch.Tensor, ...]:
        """The inputs of all, in memory of their own."""
        return tuple(tensor.clone() for tensor in self.inputs)


def batch_of(
    plan: Plan, signature: Signature, inputs: Sequence[torch.Tensor] | None = None
) -> Batch:
    """A mini-batch as the plan's package splits it, in a single replica.

    Args:
        inputs: a tensor for each input of the signature; those of the example by default.
    """
    if inputs is None:
        inputs = signature.samples(plan.batch_size)
    pairs = zip(signature.inputs, inputs, strict=True)
    samples = next((s.samples(t) for s, t in pairs if s.batched), plan.batch_size)
    count = max(1, min(plan.microbatches, samples // least_samples(plan)))
    return Batch(tuple(inputs), even_sizes(samples, count))


def least_samples(plan: Plan) -> int:
    """The samples that each micro-batch of the plan's package has at least."""
    assert plan.graph is not None
    return 2 if plan.microbatch_size > 1 and mixing_ops(plan.graph) else 1


def reference_of(
    subject: Subject,
    plan: Plan,
    seed: int,
    *,
    inputs: Sequence[torch.Tensor] | None = None,
    per_microbatch: bool = False,
) -> tuple[Tensors, tuple[str, ...]]:
    """What the package of a plan must come to, by the model in plain PyTorch; and notes on it.

    Args:
        inputs: a tensor for each input of the subject's signature; the example by default.

    Raises:
        ValidationError: when micro-batches cannot give the loss of the mini-batch, unless that is
            accepted.
    """
    entry = make_entry(subject, training=False)
    batch = batch_of(plan, entry.signature, inputs)
    shares = _shares(entry, plan, batch) if plan.training else ()
    assert plan.graph is not None
    draws = Draws.of(plan.graph, seed, training=False)
    expected, notes, losses = _evaluate(entry, plan, batch, shares, draws)
    error = None
    if losses is not None and draws.numbers and len(batch.sizes) > 1:
        error = suspected(plan.graph)
    elif losses is not None and not losses.equal:
        error = explain(plan.graph, losses)
    if error is not None:
        if not per_microbatch:
            raise error
        notes = (*notes, f"accepted with --per-microbatch: {error.problem}")
    if plan.training:
        trained = _train_step(make_entry(subject, training=True), plan, batch, shares, seed)
        expected = {**expected, **trained}
    return expected, notes


Shares: TypeAlias = Sequence[tuple[float, ...]]
"""For each micro-batch, the weights of its loss's terms."""


def _shares(entry: Entry, plan: Plan, batch: Batch) -> Shares:
    """The weights of the micro-batches' losses."""
    assert plan.graph is not None
    graph = plan.graph
    states = {**graph.tensors, **dict(entry.model.named_buffers())}
    named = [_named(entry, part) for part in batch.parts(entry.signature)]
    return loss_shares(graph, states, named, batch.sizes)


def _named(entry: Entry, part: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    names = [source.name for source in entry.signature.inputs]
    return dict(zip(names, part, strict=True))


def _terms(
    entry: Entry, plan: Plan, part: Sequence[torch.Tensor], draws: Draws, microbatch: int
) -> tuple[torch.Tensor, ...]:
    """The terms of a micro-batch's loss, which the model itself only returns added up.

    Buffers stay as they are.
    """
    assert plan.graph is not None
    model = entry.model
    states = {**plan.graph.tensors, **dict(model.named_parameters())}
    states |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    graph = Interpreter(plan.graph, states, training=entry.training).prepare()
    with (
        activations_kept(),
        draws.seeded(microbatch),
        autocast(plan.precision, device_of(model)),
    ):
        values = graph.run(_named(entry, [tensor.clone() for tensor in part]))
    assert plan.graph.loss is not None
    return tuple(values[term.value] for term in plan.graph.loss.summands)


def autocast(precision: Precision, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Around one call of the model, its loss included."""
    if precision is Precision.FP32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, _LOWER[precision])


def _has_terms(plan: Plan) -> bool:
    return plan.graph is not None and plan.graph.loss is not None and bool(plan.graph.loss.terms)


def takes_whole_batch(plan: Plan) -> bool:
    """Whether exact BatchNorm is that of the model on the mini-batch in one piece.

    Where samples never meet and nothing is written, micro-batches come to the same, each with
    random numbers of its own.
    """
    assert plan.graph is not None
    return plan.batchnorm is BatchNorm.EXACT and _needs_whole_batch(plan.graph)


def _needs_whole_batch(graph: Graph) -> bool:
    return bool(mixing_ops(graph) or effects(graph).state_writes)


def device_of(model: nn.Module) -> torch.device:
    """Where the model stands."""
    return next((tensor.device for tensor in model.parameters()), torch.device("cpu"))


def _evaluate(
    entry: Entry, plan: Plan, batch: Batch, shares: Shares, draws: Draws
) -> tuple[Tensors, tuple[str, ...], Losses | None]:
    """The model's outputs in eval mode, for the whole batch where that equals its parts.

    And the losses of both, where there is a loss.
    """
    with torch.no_grad():
        # Every run starts from the same inputs and buffers: a model may write to both.
        (whole,) = _runs(entry, [batch.whole()], plan, draws)
        parts = [whole]
        if len(batch.sizes) > 1:
            parts = _runs(entry, batch.parts(entry.signature), plan, draws)
    losses = None
    if whole.loss is not None and shares:
        made: list[tuple[torch.Tensor, ...]] = [
            (part.loss,) for part in parts if part.loss is not None
        ]
        if _has_terms(plan):
            with torch.no_grad():
                given = batch.parts(entry.signature)
                made = [_terms(entry, plan, part, draws, m) for m, part in enumerate(given)]
        losses = Losses(whole.loss, tuple(made), tuple(shares))
    outputs = [part.outputs for part in parts]
    if not all(whole.outputs.keys() == output.keys() for output in outputs):
        raise ValidationError("the model returns another structure for a micro-batch")
    joined = {
        name: _join([output[name] for output in outputs], tensor, batch.sizes)
        for name, tensor in whole.outputs.items()
    }
    if draws.numbers:
        return {Kind.OUTPUT: joined}, (), losses
    rows = compare({Kind.OUTPUT: joined}, {Kind.OUTPUT: whole.outputs})
    if all(row.passed for row in rows):
        return {Kind.OUTPUT: whole.outputs}, (), losses
    note = (
        "the outputs of the model for a batch are not those of its micro-batches put together: "
        "it mixes samples, and the package is held against its outputs for the micro-batches"
    )
    return {Kind.OUTPUT: joined}, (note,), losses


@dataclass(frozen=True, slots=True)
class _Run:
    """What one call of the model gives; copies, for the next call may overwrite the originals."""

    loss: torch.Tensor | None
    outputs: Mapping[str, torch.Tensor]


def _runs(
    entry: Entry, calls: Sequence[tuple[torch.Tensor, ...]], plan: Plan, draws: Draws
) -> list[_Run]:
    """One call for each micro-batch; the buffers are afterwards what they were."""
    before = [buffer.clone() for buffer in entry.model.buffers()]
    found = []
    for microbatch, inputs in enumerate(calls):
        with draws.seeded(microbatch):
            found.append(_run(entry, inputs, plan))
    for buffer, content in zip(entry.model.buffers(), before, strict=True):
        buffer.copy_(content)
    return found


def _run(entry: Entry, inputs: Sequence[torch.Tensor], plan: Plan) -> _Run:
    with autocast(plan.precision, device_of(entry.model)):
        leaves = entry(*inputs)
    loss = leaves.pop(0).clone() if entry.has_loss else None
    found = flat_tensors(entry.outputs(leaves))
    return _Run(loss, {name: tensor.clone() for name, tensor in found.items()})


def _join(parts: Sequence[torch.Tensor], whole: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """The outputs for micro-batches as one, along the dimension in which the whole is larger.

    What has no such dimension is that of the whole.
    """
    first = parts[0].shape
    grown = next((d for d, size in enumerate(whole.shape) if first[d] != size), None)
    return whole if grown is None else join(Leaf("", batch_dim=grown), parts, sizes)


def _train_step(entry: Entry, plan: Plan, batch: Batch, shares: Shares, seed: int) -> Tensors:
    """Loss, gradients, buffers and weights of one step of plain PyTorch.

    Args:
        shares: a term of weight 0 may be nan, and does not count.
    """
    parts, whole = batch.parts(entry.signature), takes_whole_batch(plan)
    if whole:
        parts, shares = [batch.whole()], ((1.0,),)
    assert plan.graph is not None
    draws = Draws.of(plan.graph, seed, training=True)
    statistics = MiniBatchStatistics(entry.model)
    deferred = plan.batchnorm is BatchNorm.DEFERRED
    scale = LOSS_SCALE if plan.precision is Precision.FP16 else 1.0
    trainable = {
        name: tensor for name, tensor in entry.model.named_parameters() if tensor.requires_grad
    }
    gradients: dict[str, torch.Tensor] = {}
    losses = []
    for microbatch, part in enumerate(parts):
        terms: tuple[torch.Tensor, ...] = ()
        if _has_terms(plan) and not whole:
            terms = _terms(entry, plan, part, draws, microbatch)
        with contextlib.ExitStack() as around:
            around.enter_context(activations_kept())
            around.enter_context(draws.seeded(microbatch))
            around.enter_context(statistics.microbatch() if deferred else contextlib.nullcontext())
            around.enter_context(autocast(plan.precision, device_of(entry.model)))
            returned = entry(*part)[0]
        pairs = zip(terms or (returned,), shares[microbatch], strict=True)
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
    return {
        Kind.LOSS: {"loss": torch.stack(losses).sum() if losses else torch.zeros(())},
        Kind.GRADIENT: gradients,
        Kind.BUFFER: dict(entry.model.named_buffers()),
        Kind.WEIGHT: {
            name: tensor.detach() - gradients[name] if name in gradients else tensor.detach()
            for name, tensor in trainable.items()
        },
    }


def _gradients(
    loss: torch.Tensor, parameters: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The gradient of each parameter that the loss depends on."""
    if not loss.requires_grad:
        return {}
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {
        name: gradient
        for name, gradient in zip(parameters, found, strict=True)
        if gradient is not None
    }
