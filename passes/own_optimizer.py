"""What the optimizer of the user's file remembers of every parameter, seen on tensors without
memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from gpipe_compiler.ir import Graph, State
from gpipe_compiler.passes.dry_run import tensors_in
from gpipe_compiler.runtime.spec import OptimizerKind
from gpipe_compiler.runtime.wording import said


@dataclass(frozen=True)
class OwnOptimizer:
    """The optimizer that `make_optimizer()` makes.

    Attributes:
        name: of its class.
        remembered: bytes that it keeps of every trained parameter from step to step.
        copies: the same in numbers for each number of a parameter, on average.
    """

    name: str
    remembered: Mapping[str, int] = field(hash=False)
    copies: float

    def __str__(self) -> str:
        return f"{self.name} of make_optimizer(), remembers {self.copies:.3g} times the parameters"


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


AnyOptimizer = OptimizerKind | OwnOptimizer

_COPIES = {
    OptimizerKind.SGD: 0,
    OptimizerKind.MOMENTUM: 1,
    OptimizerKind.ADAM: 2,
    OptimizerKind.ADAMW: 2,
}


def copies_of(optimizer: AnyOptimizer) -> float:
    """How many numbers an optimizer remembers of each number of a parameter, on average."""
    return _COPIES[optimizer] if isinstance(optimizer, OptimizerKind) else optimizer.copies


def remembered_bytes(optimizer: AnyOptimizer, parameter: str, size: int) -> int:
    """Bytes that an optimizer remembers of a parameter of so many."""
    if isinstance(optimizer, OptimizerKind):
        return _COPIES[optimizer] * size
    return optimizer.remembered.get(parameter, 0)
