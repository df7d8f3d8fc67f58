"""What a package says of its model besides the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from gpipe_compiler.ir import Graph
from gpipe_compiler.onnx.runtime.check import Closeness
from gpipe_compiler.onnx.runtime.values import foreign

QUANTISED = 2e-2
"""How close outputs are where numbers are rounded to integers."""

_STEPS = 4
"""Last places by which outputs of floats of 16 bits may differ."""


@dataclass(frozen=True, slots=True)
class Traits:
    """What a plan does not tell.

    Attributes:
        close: how close the outputs are to those of the whole model.
        fixed: whether the model takes batches of one size only.
        free: the dimensions of each input that may be of any size, without the batch.
    """

    close: Closeness
    fixed: bool = False
    free: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def closeness(graph: Graph, *, quantised: bool) -> Closeness:
    """How close the outputs of stages come to those of the whole model.

    ONNX Runtime computes floats of 16 bits in 32 where it has no kernel for them, and rounds where
    stages end: there, last places differ.
    """
    kinds = {
        name: kind
        for name in graph.output_values
        if foreign(kind := str(graph.values[name].dtype).removeprefix("torch."))
    }
    if quantised:
        return Closeness(QUANTISED, quantised=True, kinds=kinds)
    known = {value.dtype for value in graph.values.values()}
    known.update(state.dtype for state in graph.state.values())
    for dtype in (torch.bfloat16, torch.float16):
        if dtype in known:
            return Closeness(_STEPS * torch.finfo(dtype).eps, kinds=kinds)
    return Closeness(kinds=kinds)
