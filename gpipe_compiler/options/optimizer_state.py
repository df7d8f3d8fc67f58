"""What optimizers remember of every parameter from step to step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gpipe_compiler.runtime.spec import OptimizerKind


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
