"""A mini-batch in one piece beside its micro-batches: whether, and where, the results depart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from gpipe_compiler.errors import UnsplittableError
from gpipe_compiler.frontend.entry import Entry
from gpipe_compiler.ir import Graph, Op
from gpipe_compiler.ir.arguments import tensors_in
from gpipe_compiler.ir.interpret import Interpreter
from gpipe_compiler.passes.written_once import sample_writers
from gpipe_compiler.runtime.core.outputs import join
from gpipe_compiler.runtime.spec import Leaf
from gpipe_compiler.runtime.train.comparison import RELATIVE, ComparedKind, compare, flat_tensors
from gpipe_compiler.validate.draws import ApartError, Draws
from gpipe_compiler.validate.loss_splitting import Losses
from gpipe_compiler.validate.plain_run import MiniBatch, Outputs, Shares, all_at_once, one_by_one
from gpipe_compiler.validate.rounding import to_type

HINT = (
    "compile with --microbatches 1, or accept with --per-microbatch that every micro-batch is "
    "computed by itself; what writes to buffers or normalises over the batch takes it whole with "
    "--batchnorm exact"
)


@dataclass(frozen=True, eq=False)
class Both:
    """What the model gives for a mini-batch in one piece, and for its micro-batches."""

    whole: Outputs
    parts: Sequence[Outputs]
    sizes: Sequence[int]
    shares: Shares
    rounded: torch.dtype | None

    @property
    def losses(self) -> Losses | None:
        if self.whole.loss is None or not self.shares:
            return None
        terms = tuple(part.terms for part in self.parts)
        return Losses(to_type(self.whole.loss, self.rounded), terms, tuple(self.shares))

    @property
    def unlike(self) -> tuple[str, ...]:
        """The names of the outputs that differ, beyond rounding."""
        if len(self.parts) == 1:
            return ()
        made, whole = (
            {name: to_type(tensor, self.rounded) for name, tensor in outputs.items()}
            for outputs in (joined(self.parts, self.sizes, self.whole), self.whole.outputs)
        )
        rows = compare({ComparedKind.OUTPUT: made}, {ComparedKind.OUTPUT: whole})
        if all(row.passed for row in rows):
            return ()
        return tuple(
            name
            for name in whole
            for row in compare(
                {ComparedKind.OUTPUT: {name: made[name]}},
                {ComparedKind.OUTPUT: {name: whole[name]}},
            )
            if not row.passed
        )

    @property
    def alike(self) -> bool:
        return not self.unlike and (self.losses is None or self.losses.equal)


def joined(
    parts: Sequence[Outputs], sizes: Sequence[int], whole: Outputs
) -> Mapping[str, torch.Tensor]:
    """The outputs for micro-batches as one, along the dimension in which the whole is larger.

    What has no such dimension is that of the whole.
    """
    if not all(whole.outputs.keys() == part.outputs.keys() for part in parts):
        raise UnsplittableError("the model returns another structure for a micro-batch")
    found = {}
    for name, tensor in whole.outputs.items():
        pieces = [part.outputs[name] for part in parts]
        pairs = zip(tensor.shape, pieces[0].shape, strict=False)
        grown = next((dim for dim, (more, few) in enumerate(pairs) if more != few), None)
        found[name] = tensor if grown is None else join(Leaf("", batch_dim=grown), pieces, sizes)
    return found


def where_parted(
    graph: Graph,
    entry: Entry,
    batch: MiniBatch,
    draws: Draws,
    *,
    outputs: Collection[str] = (),
    beside: Collection[str] = (),
) -> Op | None:
    """The op at which results part from those of micro-batches; None where it is not found.

    Args:
        entry: of the model in the mode that it is about.
        outputs: the names of those that differ in eval mode.
        beside: ops that give what they give for micro-batches.
    """
    try:
        return _where(graph, entry, batch, draws, outputs, beside)
    except Exception:  # the graph may call anything, and need not run on another number of samples
        return None


def departure(
    graph: Graph, entry: Entry, batch: MiniBatch, draws: Draws, outputs: Collection[str] = ()
) -> UnsplittableError:
    """The error for results that micro-batches do not give, with the line where they part."""
    what = "a training step" if entry.training else f"the output {' and '.join(outputs)}"
    op = where_parted(graph, entry, batch, draws, outputs=outputs)
    cause = "it takes the samples of a batch together"
    if writer := _writer(graph, op):
        op = writer
        states = ", ".join(sorted(sample_writers(graph)[op.name]))
        cause = f"{op.name} writes to {states} for each micro-batch"
    elif op is not None:
        cause = f"{op.name} gives another result for a micro-batch than for its share of the batch"
    return UnsplittableError(
        f"what the model makes of the mini-batch ({what}) is not what its {len(batch.sizes)} "
        f"micro-batches come to: {cause}",
        location=None if op is None else op.source,
        hint=hint_at(op, HINT),
    )


def drawn_apart(graph: Graph, problem: ApartError) -> UnsplittableError:
    """The error for a draw that is not that of micro-batches put together."""
    op = graph.op_of.get(problem.op)
    return UnsplittableError(
        f"{problem.op or 'an op'} {problem.reason}: what the model draws for the mini-batch is "
        "not what its micro-batches draw",
        location=None if op is None else op.source,
        hint=HINT,
    )


def hint_at(op: Op | None, hint: str) -> str:
    """The way out where an op takes samples together; observers of quantisation can be frozen."""
    if op is None or "_obs_" not in op.name:
        return hint
    return (
        "freeze observers, which take the range of all samples, once they have seen enough: "
        "model.apply(torch.ao.quantization.disable_observer); or compile with --microbatches 1, "
        "or accept with --per-microbatch that every micro-batch is taken by itself"
    )


def _writer(graph: Graph, parted: Op | None) -> Op | None:
    """The op that writes to the state because of which results part; None where none does.

    Args:
        parted: the op at which they do. Where it makes scalars alone, these may be means that are
            put together by their weights.
    """
    written = sample_writers(graph)
    scalars = parted is None or not any(graph.values[name].shape for name in parted.outputs)
    return next((op for op in graph.ops if op.name in written), None) if scalars else None


def _where(
    graph: Graph,
    entry: Entry,
    batch: MiniBatch,
    draws: Draws,
    outputs: Collection[str],
    beside: Collection[str],
) -> Op | None:
    """The first op that takes what agrees with the micro-batches and makes what does not.

    Among those that the outputs, or in training the loss, depend on through such values: samples
    may meet and part again, as where tokens are sorted by what they are sent to.
    """
    calls = one_by_one(batch, entry.signature, draws, ())
    known: defaultdict[str, list[list[torch.Tensor]]] = defaultdict(list)
    parted: set[str] = set()

    def note(op: Op, execute: Callable[[], Any]) -> Any:
        returned = execute()
        known[op.name].append([tensor.detach().clone() for tensor in tensors_in(returned)])
        return returned

    def hold(op: Op, execute: Callable[[], Any]) -> Any:
        returned = execute()
        if op.name in beside and isinstance(returned, torch.Tensor):
            return torch.cat([one for (one,) in known[op.name]])
        for begin, tensors in zip(accumulate(batch.sizes, initial=0), known[op.name], strict=False):
            start = begin / sum(batch.sizes)
            pairs = zip(tensors, tensors_in(returned), strict=False)
            if not all(_share(*pair, start) for pair in pairs):
                parted.add(op.name)
        return returned

    names = [source.name for source in entry.signature.inputs]
    for call in calls:
        with torch.no_grad(), call.around:
            _interpreter(graph, entry).run(dict(zip(names, call.inputs, strict=True)), note)
    whole = all_at_once(batch, draws, calls, inner=False)
    interpreter = _interpreter(graph, entry)
    with torch.no_grad(), whole.around:
        values = interpreter.run(dict(zip(names, whole.inputs, strict=True)), hold)
    returned = flat_tensors(interpreter.resolve(graph.outputs, values))
    ends = {id(returned[name]) for name in outputs}
    pending = [name for name, value in values.items() if id(value) in ends]
    if entry.training:
        pending = [v for op in graph.ops if op.name in graph.loss_only for v in op.inputs]
    return _root(graph, parted, pending)


def _root(graph: Graph, parted: Collection[str], pending: list[str]) -> Op | None:
    """The first of the parted ops, among those that values depend on, none of whose inputs is.

    One that makes a scalar comes last: it may be a mean that is put together by its weight.
    """
    roots, seen = set(), set()
    while pending:
        op = graph.producer.get(pending.pop())
        if op is None or op.name in seen:
            continue
        seen.add(op.name)
        # Scalars are followed in any case: they may agree by chance.
        if op.name not in parted and any(graph.values[name].shape for name in op.outputs):
            continue
        makers = (graph.producer.get(value) for value in op.inputs)
        above = any(maker is not None and maker.name in parted for maker in makers)
        if op.name in parted and not above:
            roots.add(op.name)
        pending.extend(op.inputs)
    found = [op for op in graph.ops if op.name in roots]
    sized = (op for op in found if any(graph.values[name].shape for name in op.outputs))
    return next(sized, found[0] if found else None)


def _interpreter(graph: Graph, entry: Entry) -> Interpreter:
    states = {
        **graph.tensors,
        **dict(entry.model.named_parameters()),
        **dict(entry.model.named_buffers()),
    }
    own: Mapping[str, torch.Tensor] = {n: t.detach().clone() for n, t in states.items()}
    return Interpreter(graph, own, entry.training)


def _share(part: torch.Tensor, whole: torch.Tensor, start: float) -> bool:
    """Whether a tensor is a share of another, in the dimensions in which that is larger.

    Args:
        start: where the share begins, as a part of the whole.
    """
    if part.dim() != whole.dim():
        return True  # nothing can be said
    share = whole
    for dim, size in enumerate(part.shape):
        begin = 0 if size == share.shape[dim] else round(start * share.shape[dim])
        share = share.narrow(dim, begin, max(0, min(size, share.shape[dim] - begin)))
    if share.shape != part.shape:
        return True
    if not part.is_floating_point():
        return torch.equal(part, share)
    largest = share.abs().nan_to_num(0, 0, 0).max().item() if share.numel() else 0.0
    return torch.allclose(part, share, rtol=0, atol=RELATIVE * largest, equal_nan=True)
