"""Whether the loss of a mini-batch is that of its micro-batches put together; and if not, why.

Judged by the plain model in eval mode, without gradients, on the example. There are losses that
micro-batches cannot give: one that compares every sample with every other, a sum of means that are
taken over different things, the root of a mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from gpipe_compiler.errors import ModelError, SourceLocation, UnsplittableError
from gpipe_compiler.ir import Graph, LossTerm, Op, Reduction, ValueKind
from gpipe_compiler.ir.interpret import Interpreter
from gpipe_compiler.passes.cross_sample_ops import mixing_ops
from gpipe_compiler.passes.loss_additivity import first_bent, never_additive
from gpipe_compiler.passes.loss_weight import different_means, uncountable
from gpipe_compiler.passes.unknown_sizes import selection_behind
from gpipe_compiler.plan import Plan
from gpipe_compiler.runtime.core.nest import Path
from gpipe_compiler.runtime.train.comparison import RELATIVE, ROUNDINGS

HINT = (
    "compile with --loss-over batch or --microbatches 1, or accept with --per-microbatch that "
    "every micro-batch has a loss of its own, and the mini-batch their weighted mean"
)


def loss_shares(
    graph: Graph,
    states: Mapping[str, torch.Tensor],
    parts: Sequence[Mapping[str, torch.Tensor]],
    sizes: Sequence[int],
) -> tuple[tuple[float, ...], ...]:
    """For each micro-batch, the weights of its loss's terms in those of the mini-batch.

    Args:
        graph: with a loss, weighed by `passes.loss_weight`.
        states: by canonical name, the buffers and constants that the weight reads.
        parts: for each of the micro-batches the inputs by name.
    """
    assert graph.loss is not None
    columns = [_shares_of(graph, term, states, parts, sizes) for term in graph.loss.summands]
    return tuple(zip(*columns, strict=True))


def _shares_of(
    graph: Graph,
    term: LossTerm,
    states: Mapping[str, torch.Tensor],
    parts: Sequence[Mapping[str, torch.Tensor]],
    sizes: Sequence[int],
) -> tuple[float, ...]:
    weight = term.weight
    if term.reduction is Reduction.SUM:
        return (1.0,) * len(parts)
    if weight is None:
        return tuple(size / sum(sizes) for size in sizes)
    apart = Interpreter(graph.replace(ops=weight.ops), states, training=False)
    with torch.no_grad():
        weights = [float(apart.run(part)[weight.value]) for part in parts]

    def divisor(of: float) -> float:
        return max(of, weight.floor) + weight.offset

    total = sum(weights)
    whole = divisor(total) if total > weight.above else 0.0
    return tuple(divisor(max(item, weight.least)) / whole if whole else 0.0 for item in weights)


@dataclass(frozen=True, slots=True)
class Losses:
    """The loss of a mini-batch, and those of its micro-batches with their shares in it."""

    whole: torch.Tensor
    parts: tuple[tuple[torch.Tensor, ...], ...]
    shares: tuple[tuple[float, ...], ...]

    @property
    def together(self) -> float:
        """The weighted sum over the micro-batches; a term in which nothing counts may be nan."""
        return math.fsum(self._weighted)

    @property
    def equal(self) -> bool:
        """Whether that is the loss of the mini-batch, but for rounding.

        A loss that is not finite shows nothing, and counts as equal.
        """
        return self.within(max(RELATIVE, ROUNDINGS * torch.finfo(self.whole.dtype).eps))

    def within(self, share: float) -> bool:
        """The same, but for a share of the largest among them."""
        whole = float(self.whole)
        if not math.isfinite(whole):
            return True
        if not math.isfinite(self.together):
            return False
        size = max(abs(whole), *map(abs, self._weighted))
        return abs(self.together - whole) <= share * size

    @property
    def _weighted(self) -> list[float]:
        found = [
            float(term) * share
            for terms, shares in zip(self.parts, self.shares, strict=True)
            for term, share in zip(terms, shares, strict=True)
            if share
        ]
        return found or [0.0]


def explain(graph: Graph, losses: Losses, of: str = "the example batch") -> UnsplittableError:
    """The error for a loss that micro-batches do not give, with the line at fault, if found.

    Args:
        of: the batch whose losses they are.
    """
    cause, location = cause_of(graph) or _unknown(graph)
    digits = 12 if losses.within(RELATIVE) else 6
    whole, together = (f"{loss:.{digits}g}" for loss in (float(losses.whole), losses.together))
    return UnsplittableError(
        f"the loss of {of} is {whole}, but that of its "
        f"{len(losses.parts)} micro-batches put together is {together}: {cause}",
        location=location,
        hint=HINT,
    )


def refuse_listed(graph: Graph) -> None:
    """Raises a ModelError where the samples of the batch are the tensors of a list."""
    shapes = [source.example_shape for source in graph.inputs if source.path[0] == "target"]
    targets = {shape[0] for shape in shapes if shape}
    lists: dict[Path, list[int]] = {}
    for source in graph.inputs:
        if source.path[0] != "target" and len(source.path) > 2 and source.example_shape:
            lists.setdefault(source.path[:-1], []).append(source.example_shape[0])
    for sizes in lists.values():
        if len(set(sizes)) > 1 and targets == {len(sizes)}:
            raise ModelError(
                f"the samples of a batch are the {len(sizes)} tensors of a list, of unlike sizes: "
                "micro-batches are parts of a dimension",
                hint="pad them to one size, stack them into a tensor, and pass their sizes as "
                "another; or compile with --microbatches 1, for as many tensors as in the example",
            )


def refuse_unsplit(plan: Plan) -> None:
    """Refuses a plan whose loss is proven to be other than that of its micro-batches together.

    Raises:
        ModelError: naming the line.
    """
    parts = plan.microbatches * plan.replicas
    if plan.graph is None or plan.graph.loss is None or parts == 1 or plan.graph.loss.over_batch:
        return
    found = never_additive(plan.graph)
    if found is not None:
        raise ModelError(
            f"the loss of a mini-batch is not that of its micro-batches put together: {found.what}",
            location=found.op.source,
            hint=HINT,
        )


def cause_of(graph: Graph) -> tuple[str, SourceLocation | None] | None:
    """What in a graph micro-batches may not give, and where; None where nothing is found."""
    assert graph.loss is not None
    needed = graph.ancestors((graph.loss.value,))
    for op in graph.ops:
        unsplit = [name for name in op.outputs if _pairs_samples(graph, name)]
        if op.name in needed and unsplit:
            shape = "x".join(map(str, graph.values[unsplit[0]].shape))
            text = f"{unsplit[0]} (shape {shape} for {graph.batch_size} samples)"
            return f"{text} pairs samples with one another", op.source
    # In eval mode, so that BatchNorm is not among them.
    mixing = mixing_ops(graph.replace(loss=None))
    for op in graph.ops:
        if op.name in needed - graph.loss_only and op.name in mixing and not _is_scalar(graph, op):
            return f"{op.name} takes the samples of a batch together", op.source
    different = different_means(graph)
    if different:
        text = "it adds up means that are taken over different numbers of things"
        return text, different[-1].source
    return None


def _unknown(graph: Graph) -> tuple[str, SourceLocation | None]:
    assert graph.loss is not None
    bent = first_bent(graph) or uncountable(graph)
    if bent is not None:
        return bent.what, bent.op.source
    kind = "sum" if graph.loss.reduction is Reduction.SUM else "mean"
    maker = graph.producer.get(graph.loss.value)
    return f"it is no {kind} over samples", maker.source if maker is not None else None


def _pairs_samples(graph: Graph, value: str) -> bool:
    known = graph.values.get(value)
    return (
        known is not None
        and known.kind is ValueKind.TENSOR
        and not known.splittable
        and known.shape != ()
        and selection_behind(graph, value) is None
    )


def _is_scalar(graph: Graph, op: Op) -> bool:
    return all(not graph.values[name].shape for name in op.outputs)
