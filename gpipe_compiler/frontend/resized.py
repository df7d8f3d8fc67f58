"""A subject whose example is of the sizes that its plan is asked for."""

from __future__ import annotations

import dataclasses
from typing import Any

from gpipe_compiler.errors import UsageError
from gpipe_compiler.frontend.signature import read_signature
from gpipe_compiler.frontend.subject import Example, Subject
from gpipe_compiler.ir import Graph
from gpipe_compiler.ir.sizes import SMALLEST
from gpipe_compiler.runtime.sizes import Sizes


def resized(subject: Subject, graph: Graph) -> Subject:
    """The subject with its example repeated, or cut, to the sizes of its wish.

    Args:
        graph: as it was traced from the subject.

    Raises:
        UsageError: for a size that is not free, or that the model does not take.
    """
    known = {size.name: size.example for size in graph.sizes}
    wanted = subject.free.at
    for name in sorted(wanted.keys() - known.keys()):
        raise UsageError(
            f"--at {name}={wanted[name]}: the model leaves no size of this name free",
            hint=f"those that it does: {', '.join(known) or 'none'}",
        )
    sizes = {**known, **wanted}
    for name in wanted:
        if sizes[name] < SMALLEST:
            raise UsageError(
                f"--at {name}={sizes[name]}: sizes that are free are at least {SMALLEST}",
                hint="torch computes otherwise where a dimension has one element",
            )
    for demand in graph.requires:
        if not demand.holds(sizes):
            told = ", ".join(f"{name}={size}" for name, size in wanted.items())
            raise UsageError(
                f"--at {told}: the model demands {demand}: {demand.where}",
                hint="ask for sizes for which that holds",
            )
    args, kwargs, target = _call_at(subject, graph, sizes)
    example = subject.example
    if example is not None:
        real = dataclasses.replace(
            subject, args=example.args, kwargs=example.kwargs, target=example.target
        )
        example = Example(*_call_at(real, graph, sizes))
    return dataclasses.replace(subject, args=args, kwargs=kwargs, target=target, example=example)


def _call_at(subject: Subject, graph: Graph, sizes: Sizes) -> tuple[Any, Any, Any]:
    signature = read_signature(subject, on_meta=False).at(graph.inputs, sizes)
    return signature.rebuild(signature.examples)
