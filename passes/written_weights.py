"""Weights that forward writes to, where other calls of the model read them as they were."""

from __future__ import annotations

from gpipe_compiler.errors import ModelError
from gpipe_compiler.ir import Graph, Op, StateKind
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
        for name in sorted(_written_by(graph, op) & kept):
            if graph.state[name].requires_grad:
                raise ModelError(
                    f"{op.name} writes to {name}, which is trained, in every forward: the backward "
                    "of another micro-batch reads it as it was",
                    location=op.source,
                    hint="compile with --microbatches 1; or write to it between steps, in a "
                    "training loop of your own",
                )


def refuse_written_in_eval(graph: Graph) -> None:
    """Holds a graph that is trained to it that its parameters do not change when it is evaluated.

    Raises:
        ModelError: naming the parameter, and the line that writes to it.
    """
    if graph.loss is None or not any(_written_by(graph, op) for op in graph.ops):
        return
    evaluated = observed(graph, training=False).ops
    for op in (op for op in graph.ops if op.name in evaluated):
        written = {storage.name.name for storage in evaluated[op.name].written}
        for name in sorted(_written_by(graph, op) & written):
            raise ModelError(
                f"forward writes to the parameter {name} in eval mode too: every evaluation would "
                "change what is trained",
                location=op.source,
                hint="write to it under `if self.training:`, or between steps, in a training loop "
                "of your own",
            )


def _written_by(graph: Graph, op: Op) -> frozenset[str]:
    """The parameters that an op writes to."""
    written = effects(graph).state_writes.get(op.name, frozenset())
    return frozenset(n for n in written if graph.state[n].kind is StateKind.PARAMETER)
