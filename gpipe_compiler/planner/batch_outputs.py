"""What micro-batches cannot give of a mini-batch: its outputs put together, or anything but one
piece."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence

from gpipe_compiler.errors import GPipeCompilerError, ModelError
from gpipe_compiler.ir import Graph
from gpipe_compiler.passes.joined_outputs import apart_outputs
from gpipe_compiler.plan import Plan

_LEAST = 4
"""Samples that are tried, so that both micro-batches have two, as BatchNorm needs."""


def refuse_apart(plan: Plan) -> None:
    """Makes sure that a package which only infers can put its outputs together.

    Raises:
        ModelError: naming those that cannot be, and the line of the first.
    """
    graph = plan.graph
    assert graph is not None
    faulty = apart_outputs(graph)
    if plan.microbatches == 1 or plan.training or not faulty:
        return
    maker = graph.producer.get(faulty[0])
    raise ModelError(
        f"the {_outputs(faulty)} of {plan.name} cannot be put together from "
        "micro-batches: it is no sum, mean or extreme over the samples, nor has a row for each",
        location=None if maker is None else maker.source,
        hint="compile with --microbatches 1, or leave it out of what the model returns",
    )


def _outputs(names: Sequence[str]) -> str:
    """`output a`, or `outputs a, b`."""
    return f"output{'s' if len(names) > 1 else ''} {', '.join(names)}"


def check_rows(graph: Graph, shape_ops: Collection[str] = ()) -> None:
    """Makes sure that outputs which follow from samples have rows for them.

    Args:
        shape_ops: names of ops that read nothing but the shape of what they are given.

    Raises:
        ModelError: naming those that have none (a mean, a loss).
    """
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
        raise ModelError(
            f"the {_outputs(faulty)} of {graph.name} cannot be put together from "
            "micro-batches: there are no rows for the samples of a batch",
            hint="compile with --microbatches 1, or leave it out of what the model returns (a "
            "loss: call the model without labels, see --input)",
        )


def in_one_piece(plan: Plan, refuse: Callable[[Plan], None]) -> Plan:
    """The plan whose graph says why its package takes mini-batches whole, where it must.

    It must where a plan with two micro-batches would be refused. Where that is not known, because
    the model does not run on half of its example, nothing is said.

    Args:
        refuse: raises ModelError for a plan with several micro-batches that do
            not give what the mini-batch does.

    Raises:
        ModelError: for a plan with replicas, each of which takes a part.
    """
    if plan.microbatches != 1:
        return plan
    samples = max(_LEAST, plan.batch_size // 2 * 2)
    halved = dataclasses.replace(plan, microbatches=2, batch_size=samples, replicas=1)
    try:
        refuse(halved)
    except ModelError as error:
        if plan.training and plan.replicas > 1:
            raise
        return _because(plan, error)
    except Exception:  # noqa: BLE001  # whatever the user's code raises on another number of samples
        return plan
    return plan


def _because(plan: Plan, error: GPipeCompilerError) -> Plan:
    assert plan.graph is not None
    line = f" ({error.location})" if error.location else ""
    graph = dataclasses.replace(plan.graph, whole_batch=f"{error.problem}{line}")
    return dataclasses.replace(plan, graph=graph)
