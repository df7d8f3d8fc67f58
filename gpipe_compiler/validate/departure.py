"""A mini-batch in one piece beside its micro-batches: whether, and where, the results depart."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from gpipe_compiler.errors import UnsplittableError
from gpipe_compiler.frontend.comparable_runs import double
from gpipe_compiler.frontend.entry import Entry
from gpipe_compiler.ir import Graph, MethodCall, Op
from gpipe_compiler.passes.written_once import sample_writers
from gpipe_compiler.runtime.core.outputs import join
from gpipe_compiler.runtime.spec import Leaf
from gpipe_compiler.runtime.train.comparison import ComparedKind, compare
from gpipe_compiler.validate import loss_splitting
from gpipe_compiler.validate.draws import ApartError
from gpipe_compiler.validate.loss_splitting import Losses
from gpipe_compiler.validate.plain_run import MiniBatch, Outputs, Shares
from gpipe_compiler.validate.rounding import to_type
from gpipe_compiler.validate.some_samples import SomeSamples, first_wrong

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
    graph: Graph, entry: Entry, batch: MiniBatch, beside: Collection[str] = ()
) -> Op | None:
    """The op at which results part from those of micro-batches; None where it is not found.

    Args:
        entry: of the model in the mode that it is about.
        beside: ops that are looked through, as each of them gives what it is given.
    """
    inputs = zip((source.name for source in entry.signature.inputs), batch.inputs, strict=True)
    ops = tuple(_looked_through(op) if op.name in beside else op for op in graph.ops)
    held = {**dict(entry.model.named_parameters()), **dict(entry.model.named_buffers())}
    training = entry.training
    if training:
        held = {name: double(tensor) for name, tensor in {**graph.tensors, **held}.items()}
    given = dataclasses.replace(graph, ops=ops, example=dict(inputs))
    parts = [
        range(end - size, end)
        for size, end in zip(batch.sizes, accumulate(batch.sizes), strict=True)
    ]
    samples = SomeSamples(given, held, sum(batch.sizes), training)
    ends = graph.loss_inputs if training else graph.output_values
    return first_wrong(samples, parts, ends, lacking=not training)


def _looked_through(op: Op) -> Op:
    return dataclasses.replace(op, call=MethodCall("clone", op.call.args[:1]))


def departure(
    graph: Graph, entry: Entry, batch: MiniBatch, outputs: Collection[str] = ()
) -> UnsplittableError:
    """The error for results that micro-batches do not give, with the line where they part."""
    what = "a training step" if entry.training else f"the output {' and '.join(outputs)}"
    op = where_parted(graph, entry, batch)
    cause, hint = "it takes the samples of a batch together", hint_at(op, HINT)
    if writer := _writer(graph, op):
        op = writer
        states = ", ".join(sorted(sample_writers(graph)[op.name]))
        cause, hint = f"{op.name} writes to {states} for each micro-batch", hint_at(op, HINT)
    elif op is not None:
        cause = f"{op.name} gives another result for a micro-batch than for its share of the batch"
    elif entry.training and graph.loss is not None:
        op, hint = graph.producer.get(graph.loss.value), loss_splitting.HINT
        cause += ", in its loss or in a backward"
    return UnsplittableError(
        f"what the model makes of the mini-batch ({what}) is not what its {len(batch.sizes)} "
        f"micro-batches come to: {cause}",
        location=None if op is None else op.source,
        hint=hint,
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
