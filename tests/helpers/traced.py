"""Graphs of models, as tests ask for them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from gpipe_compiler.frontend.recorded import record_mode
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.frontend.tracing import trace
from gpipe_compiler.ir import Graph
from gpipe_compiler.runtime.spec import Precision


def trace_mode(subject: Subject, training: bool, precision: Precision = Precision.FP32) -> Graph:
    """The model's graph in one mode, as it is recorded."""
    recorded = record_mode(subject, training, precision)
    return recorded.graph(recorded.free_among(recorded.free))


def graph_of(compute: Callable[..., object], *inputs: Tensor) -> Graph:
    """That of a model without weights whose forward is a function."""

    class Model(nn.Module):
        def forward(self, *given: Tensor) -> object:
            return compute(*given)

    return trace(Subject("model", Model(), inputs, training=False))
