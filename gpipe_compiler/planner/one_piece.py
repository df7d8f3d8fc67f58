"""Why a model that is compiled for one micro-batch is not given by several."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from gpipe_compiler.errors import GPipeCompilerError, ModelError, ValidationError
from gpipe_compiler.plan import Plan

_LEAST = 4
"""Samples that are tried, so that both micro-batches have two, as BatchNorm needs."""


def in_one_piece(plan: Plan, refuse: Callable[[Plan], None]) -> Plan:
    """The plan whose graph says why its package takes mini-batches whole, where it must.

    It must where a plan with two micro-batches would be refused. Where that is not known, because
    the model does not run on half of its example, nothing is said.

    Args:
        refuse: raises ModelError or ValidationError for a plan with several micro-batches that do
            not give what the mini-batch does.

    Raises:
        ModelError, ValidationError: for a plan with replicas, each of which takes a part.
    """
    if plan.microbatches != 1:
        return plan
    samples = max(_LEAST, plan.batch_size // 2 * 2)
    halved = dataclasses.replace(plan, microbatches=2, batch_size=samples, replicas=1)
    try:
        refuse(halved)
    except (ModelError, ValidationError) as error:
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
