"""The error for a model whose samples depend on each other, with the op in which they meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from gpipe_compiler.errors import ModelError
from gpipe_compiler.frontend.batch_dims import FoundBatch
from gpipe_compiler.frontend.comparable_runs import EvenDraws, with_other_weights
from gpipe_compiler.ir import Graph, Input, Op
from gpipe_compiler.ir.interpret import Interpreter
from gpipe_compiler.plan import Plan
from gpipe_compiler.quiet import quiet
from gpipe_compiler.runtime.train.comparison import ComparedKind, compare
from gpipe_compiler.runtime.train.data import resized

_SAMPLES, _PART = 4, (3, 0)
"""Samples with which the op at fault is looked for, and those that run apart from the others."""


def refuse_mixing(found: FoundBatch, plan: Plan) -> None:
    """Refuses a plan with several micro-batches of samples that depend on each other.

    Raises:
        ModelError: naming the input and its dimension, and the line of the op at fault.
    """
    parts = plan.microbatches * (plan.replicas if plan.training else 1)
    if not found.mixes or parts == 1:
        return
    graph = plan.graph
    assert graph is not None
    op = _first_mixing(graph, found.subject.model)
    first = next(source for source in graph.inputs if source.batched)
    what = "the model" if op is None else op.name
    raise ModelError(
        f"{what} takes the samples of a batch together, if they lie in dimension "
        f"{first.batch_dim} of {first.name}: outputs for some of them are not those rows of the "
        "outputs for all; no other dimension was found along which they are",
        location=None if op is None else op.source,
        hint=f"say with --batch-dim {first.name}=1 which dimension is the batch, and with "
        "--batch-dim NAME=none which inputs all samples share; compile with --microbatches 1; or "
        "accept with --per-microbatch that every micro-batch is taken by itself",
    )


def _first_mixing(graph: Graph, model: nn.Module) -> Op | None:
    """The first op in eval mode that takes rows which are right and makes some that are not.

    None where it cannot be found: on meta, or where the graph does not run on so few samples. What
    the first weights hide is looked for with others.
    """
    if any(tensor.is_meta for tensor in (*graph.tensors.values(), *graph.example.values())):
        return None
    moved = with_other_weights(model)
    for other in ({}, {} if moved is None else dict(moved.named_parameters())):
        try:
            with torch.no_grad(), torch.random.fork_rng(), quiet(), EvenDraws():
                whole, part = (_values(graph, other, rows) for rows in (range(_SAMPLES), _PART))
        except Exception:  # noqa: BLE001  # whatever the user's ops raise
            return None
        op = _root(graph, whole, part)
        if op is not None:
            return op
    return None


def _root(graph: Graph, whole: Mapping[str, Any], part: Mapping[str, Any]) -> Op | None:
    found = [op for op in graph.ops if any(_wrong(graph, n, whole, part) for n in op.outputs)]
    # What takes no samples numbers them: that is wrong only where they are computed with it.
    takes = (op for op in found if any(_is_right(graph, n, whole, part) for n in op.inputs))
    op = next(takes, found[0] if found else None)
    # What it takes that is no rows, such as a mean, was made where samples met.
    while op is not None:
        met = [name for name in op.inputs if _changed(graph, name, whole, part)]
        maker = graph.producer.get(met[0]) if met else None
        if maker is None:
            return op
        op = maker
    return None


def _values(
    graph: Graph, other: Mapping[str, torch.Tensor], rows: Sequence[int]
) -> Mapping[str, Any]:
    """Every value for some of four samples of the example."""

    def some(source: Input) -> torch.Tensor:
        tensor = resized(graph.example[source.name], source.batch_dim, _SAMPLES)
        dim = source.batch_dim
        return tensor.clone() if dim is None else tensor.index_select(dim, torch.tensor(rows))

    tensors = {**graph.tensors, **{name: t for name, t in other.items() if name in graph.tensors}}
    states = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    run = Interpreter(graph, states, training=False)
    return run.run({source.name: some(source) for source in graph.inputs})


def _changed(graph: Graph, name: str, whole: Mapping[str, Any], part: Mapping[str, Any]) -> bool:
    """Whether a value without a batch dimension is another for some of the samples."""
    one, other, known = whole.get(name), part.get(name), graph.values[name]
    if known.batch_dim is not None or not isinstance(one, torch.Tensor):
        return False
    assert isinstance(other, torch.Tensor)
    return one.shape != other.shape or not _same(one, other)


def _wrong(graph: Graph, name: str, whole: Mapping[str, Any], part: Mapping[str, Any]) -> bool:
    """Whether a value for some of the samples is not those rows of what it is for all."""
    one, other, known = whole.get(name), part.get(name), graph.values[name]
    if known.batch_dim is None or not isinstance(one, torch.Tensor):
        return False
    assert isinstance(other, torch.Tensor)
    rows, rest = divmod(one.shape[known.batch_dim], _SAMPLES)
    if rest:
        return False  # one row for several samples: the next values show it
    chosen = [sample * rows + row for sample in _PART for row in range(rows)]
    return not _same(one.index_select(known.batch_dim, torch.tensor(chosen)), other)


def _is_right(graph: Graph, name: str, whole: Mapping[str, Any], part: Mapping[str, Any]) -> bool:
    """Whether a value has samples, which are the same ones among some as among all."""
    has_samples = graph.values[name].batch_dim is not None
    return has_samples and not _wrong(graph, name, whole, part)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    (row,) = compare({ComparedKind.OUTPUT: {"": other}}, {ComparedKind.OUTPUT: {"": one}})
    return row.passed
