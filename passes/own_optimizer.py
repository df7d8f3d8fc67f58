"""What the optimizer of the user's file remembers of every parameter, seen on tensors without
memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from gpipe_compiler.ir import Graph, State
from gpipe_compiler.options import OwnOptimizer
from gpipe_compiler.passes.dry_run import tensors_in
from gpipe_compiler.runtime.wording import said


def own_optimizer(graph: Graph, make: Callable[..., object]) -> OwnOptimizer | str:
    """The optimizer after a step on parameters without memory; or why that cannot be."""
    trained = [state for state in graph.state.values() if state.requires_grad]
    parameters = {state.name: _parameter(state) for state in trained}
    try:
        optimizer = make(list(parameters.values()))
        if not isinstance(optimizer, torch.optim.Optimizer):
            return f"it makes {type(optimizer).__name__}, which is no torch.optim.Optimizer"
        optimizer.step()
    except Exception as error:  # noqa: BLE001  # whatever the user's code raises
        return said(error)
    remembered = {
        name: sum(t.numel() * t.element_size() for t in tensors_in(optimizer.state[parameter]))
        for name, parameter in parameters.items()
    }
    whole = sum(state.bytes for state in trained) or 1
    return OwnOptimizer(type(optimizer).__name__, remembered, sum(remembered.values()) / whole)


def _parameter(state: State) -> nn.Parameter:
    parameter = nn.Parameter(torch.empty(state.shape, dtype=state.dtype, device="meta"))
    parameter.grad = torch.empty_like(parameter)
    return parameter
