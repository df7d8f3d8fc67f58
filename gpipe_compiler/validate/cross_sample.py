"""The error for a model whose samples depend on each other, with the op in which they meet."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from gpipe_compiler.errors import ModelError
from gpipe_compiler.frontend.batch_dims import FoundBatch
from gpipe_compiler.frontend.comparable_runs import MANY, EvenDraws, double, with_other_weights
from gpipe_compiler.frontend.user_code import line_of_forward
from gpipe_compiler.ir import FunctionCall, Graph, Mode, ModuleCall, Op
from gpipe_compiler.passes.batch_gates import first_gate, first_of_batch
from gpipe_compiler.passes.cross_sample_ops import batchnorm_ops, mixing_ops
from gpipe_compiler.passes.effects import effects
from gpipe_compiler.passes.random_ops import random_ops
from gpipe_compiler.plan import Plan
from gpipe_compiler.quiet import quiet
from gpipe_compiler.runtime.spec import BatchNorm
from gpipe_compiler.validate.departure import hint_at
from gpipe_compiler.validate.mixing_backward import function_that_mixes, ops_with_own_backward
from gpipe_compiler.validate.some_samples import (
    PARTS,
    SAMPLES,
    SomeSamples,
    first_numbering,
    first_wrong,
    mixing_among,
    on_meta,
    refuse_numbering_in_loss,
    values_of,
)

ALONE = (
    "compile with --microbatches 1, or accept with --per-microbatch that every micro-batch is "
    "taken by itself"
)

_EMBEDDINGS = F.embedding, F.embedding_bag


def refuse_mixing(found: FoundBatch, plan: Plan) -> None:
    """Refuses a plan with several micro-batches of samples that depend on each other.

    Raises:
        ModelError: naming the input and its dimension, and the line of the op at fault.
    """
    parts = plan.microbatches * (plan.replicas if plan.training else 1)
    graph = plan.known_graph
    if parts == 1:
        return
    op = _first_mixing(graph, found.subject.model) if found.mixes else first_numbering(graph)
    if not found.mixes and op is None:
        _refuse_gates(graph)
        _refuse_branches(graph)
        refuse_numbering_in_loss(graph)
        if plan.training:
            _refuse_mixing_in_training(plan, graph, found.subject.model)
        return
    first = next(source for source in graph.inputs if source.batched)
    what = "the model" if op is None else op.name
    raise ModelError(
        f"{what} takes the samples of a batch together, if they lie in dimension "
        f"{first.batch_dim} of {first.name}: outputs for some of them are not those rows of the "
        "outputs for all; no other dimension was found along which they are",
        location=line_of_forward(found.subject.model) if op is None else op.source,
        hint=hint_at(
            op,
            f"say with --batch-dim {first.name}=1 which dimension is the batch, and with "
            "--batch-dim NAME=none which inputs all samples share; compile with --microbatches 1; "
            "or accept with --per-microbatch that every micro-batch is taken by itself",
        ),
    )


def _refuse_gates(graph: Graph) -> None:
    """Refuses bounds on what is taken over the batch, whatever the example shows."""
    op = first_gate(graph)
    if op is not None:
        raise ModelError(
            f"{op.name} sets a bound to what is taken over the samples of a batch together: a "
            "micro-batch may lie on another side of it than the batch",
            location=op.source,
            hint=ALONE,
        )


def _refuse_branches(graph: Graph) -> None:
    """Refuses branches that may go one way for all micro-batches and another for the batch."""
    op = first_of_batch(graph)
    if op is not None:
        raise ModelError(
            "the model decides by what it computes of the samples of a batch together: "
            "micro-batches may go one way and the batch another",
            location=op.source,
            hint=f"ask it of every sample, as (x > 0).all() does; {ALONE}",
        )


def _refuse_mixing_in_training(plan: Plan, graph: Graph, model: nn.Module) -> None:
    """Refuses what takes samples together in training alone.

    Beside BatchNorm, which hides what follows, and where something writes to buffers, that is left
    to validation; so is what takes the whole mini-batch by `BatchNorm.EXACT`.
    """
    joint = plan.batchnorm is BatchNorm.EXACT and mixing_ops(graph) - graph.loss_only
    if on_meta(graph) or joint:
        return
    _refuse_counted_gradients(graph)
    _refuse_mixing_backward(graph)
    drawn = random_ops(graph)
    if not any(differs_in_training(op) for op in graph.ops if op.name not in drawn):
        return
    if batchnorm_ops(graph, model) or effects(graph).state_writes:
        return
    op = _first_in_training(graph)
    if op is not None:
        raise ModelError(
            f"{op.name} takes the samples of a batch together in training: what it makes of some "
            "of them is not those rows of what it makes of all",
            location=op.source,
            hint=ALONE,
        )


def _refuse_counted_gradients(graph: Graph) -> None:
    """Refuses embeddings whose gradients are divided by how often the mini-batch has each index."""
    for op in graph.ops:
        given: Mapping[str, object] = {}
        if isinstance(op.call, ModuleCall):
            given = graph.modules[op.call.module].kwargs
        elif isinstance(op.call, FunctionCall) and op.call.function in _EMBEDDINGS:
            signature = inspect.signature(op.call.function)
            given = signature.bind(*op.call.args, **op.call.kwargs).arguments
        if given.get("scale_grad_by_freq") is True:
            raise ModelError(
                f"{op.name} divides gradients by how often the samples of a batch together "
                "have each index (scale_grad_by_freq=True)",
                location=op.source,
                hint=ALONE,
            )


def _refuse_mixing_backward(graph: Graph) -> None:
    """Refuses a hook, or a function with a backward of its own, that takes gradients together."""
    owners = list(ops_with_own_backward(graph))
    if not owners:
        return
    wide = {name: double(tensor) for name, tensor in graph.tensors.items()}

    def run(rows: Sequence[int]) -> object:
        with torch.no_grad(), EvenDraws():
            return values_of(graph, wide, rows, SAMPLES, training=True, keep=())

    try:
        with torch.random.fork_rng(), quiet():
            torch.manual_seed(0)
            found = function_that_mixes(run, SAMPLES, PARTS)
    except Exception:  # noqa: BLE001  # whatever the user's ops raise
        return
    if found is None:
        return
    what = "a hook on gradients" if found.is_hook else f"the backward of {found.name}"
    location = next((op.source for op, own in owners if own == found.function), None)
    if found.backward_draws():
        raise ModelError(
            f"{what} draws random numbers, others for a micro-batch than for its share of the "
            "batch",
            location=location,
            hint=f"draw in forward, and keep what was drawn (save_for_backward); or {ALONE}",
        )
    raise ModelError(
        f"{what} takes the samples of a batch together: what it makes of some of their gradients "
        "is not those rows of what it makes of all, or does not add up to it",
        location=location,
        hint=f"{ALONE}; a bound on the gradient of each sample is exact",
    )


def differs_in_training(op: Op) -> bool:
    """Whether an op does something else in training, what it draws and writes apart."""
    return op.mode is not Mode.ALWAYS or op.has_choices


def _first_in_training(graph: Graph) -> Op | None:
    """The first op in training that makes rows which are wrong, of those that the loss takes.

    None where they are right, or where that is not seen: where the graph does not run in 64 bits.
    """
    wide = {name: double(tensor) for name, tensor in graph.tensors.items()}
    samples = SomeSamples(graph, wide, SAMPLES, training=True)
    return first_wrong(samples, PARTS, graph.loss_inputs, lacking=False)


def _first_mixing(graph: Graph, model: nn.Module) -> Op | None:
    """The first op in eval mode that takes rows which are right and makes some that are not.

    None where it cannot be found: on meta, or where the graph does not run on so few samples. What
    the first weights hide is looked for with others.
    """
    if on_meta(graph):
        return None
    moved = with_other_weights(model)
    first: Mapping[str, torch.Tensor] = {}
    others = first if moved is None else dict(moved.named_parameters())
    tried = ((SAMPLES, first), (SAMPLES, others), (MANY, first))
    found = (mixing_among(graph, count, other) for count, other in tried)
    return next((op for op in found if op is not None), None)
