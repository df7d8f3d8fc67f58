"""Weights that forward writes to, while backwards of other micro-batches keep them as they were."""

from __future__ import annotations

from gpipe_compiler.errors import ModelError
from gpipe_compiler.ir import Graph
from gpipe_compiler.passes.effects import effects
from gpipe_compiler.passes.observe import observed


def refuse_written_weights(graph: Graph) -> None:
    """Holds an annotated graph that is trained on several micro-batches to it that no forward
    changes what the backward of another reads.

    Raises:
        ModelError: naming the weight, and the line that writes to it.
    """
    kept = {item.name.name for op in observed(graph).ops.values() for item in op.saved if item.own}
    for op in graph.ops if graph.loss is not None else ():
        written = effects(graph).state_writes.get(op.name, frozenset())
        for name in sorted(written & kept):
            if graph.state[name].requires_grad:
                raise ModelError(
                    f"{op.name} writes to {name}, which is trained, in every forward: the backward "
                    "of another micro-batch reads it as it was",
                    location=op.source,
                    hint="compile with --microbatches 1; or write to it between steps, in a "
                    "training loop of your own",
                )
