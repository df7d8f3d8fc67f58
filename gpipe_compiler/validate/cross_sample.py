"""The error for a model whose samples depend on each other, with the op in which they meet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gpipe_compiler.errors import ModelError
from gpipe_compiler.frontend.batch_dims import Found
from gpipe_compiler.frontend.even_draws import EvenDraws
from gpipe_compiler.ir import Graph, Input, Op
from gpipe_compiler.ir.interpret import Interpreter
from gpipe_compiler.plan import Plan
from gpipe_compiler.quiet import quiet
from gpipe_compiler.runtime.comparison import Kind, compare
from gpipe_compiler.runtime.data import resized

_SAMPLES, _PART = 4, 2


def refuse_mixing(found: Found, plan: Plan) -> None:
    """Refuses a plan with several micro-batches of samples that depend on each other.

    Raises:
        ModelError: naming the input and its dimension, and the line of the op at fault.
    """
    parts = plan.microbatches * (plan.replicas if plan.training else 1)
    if not found.mixes or parts == 1:
        return
    graph = plan.graph
    assert graph is not None
    op = _first_mixing(graph)
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


def _first_mixing(graph: Graph) -> Op | None:
    """The first op in eval mode whose rows for some samples are not those for all.

    None where it cannot be found: on meta, or where the graph does not run on so few.
    """
    if any(tensor.is_meta for tensor in (*graph.tensors.values(), *graph.example.values())):
        return None
    try:
        with torch.no_grad(), torch.random.fork_rng(), quiet(), EvenDraws():
            whole, part = (_values(graph, samples) for samples in (_SAMPLES, _PART))
    except Exception:  # noqa: BLE001  # whatever the user's ops raise
        return None
    wrong = (op for op in graph.ops if any(_wrong(graph, n, whole, part) for n in op.outputs))
    op = next(wrong, None)
    # What it takes that is no rows, such as a mean, was made where samples met.
    while op is not None:
        met = [name for name in op.inputs if _changed(graph, name, whole, part)]
        maker = graph.producer.get(met[0]) if met else None
        if maker is None:
            return op
        op = maker
    return None


def _values(graph: Graph, samples: int) -> Mapping[str, Any]:
    """Every value for the first of four samples of the example."""

    def first(source: Input) -> torch.Tensor:
        tensor = resized(graph.example[source.name], source.batch_dim, _SAMPLES)
        return source.part(tensor, 0, samples).clone()

    states = {name: tensor.detach().clone() for name, tensor in graph.tensors.items()}
    run = Interpreter(graph, states, training=False)
    return run.run({source.name: first(source) for source in graph.inputs})


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
    rows = one.narrow(known.batch_dim, 0, one.shape[known.batch_dim] * _PART // _SAMPLES)
    assert isinstance(other, torch.Tensor)
    return not _same(rows, other)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    (row,) = compare({Kind.OUTPUT: {"": other}}, {Kind.OUTPUT: {"": one}})
    return row.passed
