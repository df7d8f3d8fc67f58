"""Outputs of a mini-batch, put together from those of its micro-batches: where that cannot be."""

from __future__ import annotations

from collections.abc import Collection

from gpipe_compiler.errors import ModelError
from gpipe_compiler.plan import Plan


def check_rows(plan: Plan, shape_ops: Collection[str] = ()) -> None:
    """Makes sure that outputs which follow from samples have rows for them.

    Args:
        shape_ops: names of ops that read nothing but the shape of what they are given.

    Raises:
        ModelError: naming those that have none (a mean, a loss), where there are several
            micro-batches.
    """
    graph = plan.graph
    assert graph is not None
    if plan.microbatches == 1:
        return
    varying = {source.name for source in graph.inputs if source.batched}
    for op in graph.ops:
        if not varying.isdisjoint(op.inputs) and op.name not in shape_ops:
            varying.update(op.outputs)
    faulty = [
        f"{name} ({'x'.join(map(str, graph.values[name].shape)) or 'a number'})"
        for name in graph.output_values
        if name in varying and graph.values[name].batch_dim is None
    ]
    if faulty:
        one = "output" if len(faulty) == 1 else "outputs"
        raise ModelError(
            f"the {one} {', '.join(faulty)} of {plan.name} cannot be put together from "
            "micro-batches: there are no rows for the samples of a batch",
            hint="compile with --microbatches 1, or leave it out of what the model returns (a "
            "loss: call the model without labels, see --input)",
        )
