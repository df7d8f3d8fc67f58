"""What a graph requires of the values of tensors: that branches of the model go as recorded."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch._subclasses import FakeTensor

from gpipe_compiler.errors import SourceLocation
from gpipe_compiler.ir.ops import FunctionCall, Op
from gpipe_compiler.runtime.core import required


def require(condition: torch.Tensor, line: str) -> None:
    """Refuses values for which a condition does not hold; a condition without numbers holds.

    Args:
        line: the user's, that decides.

    Raises:
        BranchError: naming it.
    """
    if not isinstance(condition, FakeTensor) and not condition.is_meta:
        required.require(condition, line)


def is_requirement(op: Op) -> bool:
    """Whether an op only requires something of values."""
    return isinstance(op.call, FunctionCall) and op.call.function is require


def required_lines(ops: Iterable[Op]) -> dict[str, SourceLocation | None]:
    """The user's lines by which ops decide, as their requirements name them."""
    return {str(op.leaves[-1]): op.source for op in ops if is_requirement(op)}
