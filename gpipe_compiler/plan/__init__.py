"""The Plan and the values that it is made of."""

from gpipe_compiler.plan.plan import Plan
from gpipe_compiler.plan.stages import Prediction, RematPoint, Stage

__all__ = ["Plan", "Prediction", "RematPoint", "Stage"]
