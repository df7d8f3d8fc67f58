"""The graph of a function, as that of a model."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.frontend.tracing import trace
from gpipe_compiler.ir import Graph


def graph_of(compute: Callable[..., object], *inputs: Tensor) -> Graph:
    """That of a model without weights whose forward is a function."""

    class Model(nn.Module):
        def forward(self, *given: Tensor) -> object:
            return compute(*given)

    return trace(Subject("model", Model(), inputs, training=False))
