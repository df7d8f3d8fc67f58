"""The Plan and the values that it is made of."""

from gpipe_compiler.plan.plan import (
    Plan,
    Prediction,
    RematPoint,
    Stage,
)

__all__ = [
    "Plan",
    "Prediction",
    "RematPoint",
    "Stage",
]
