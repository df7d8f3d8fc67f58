"""Which ops of a stage to run again in its backward, for the memory that they keep otherwise."""

from gpipe_compiler.passes.remat.choices import FEW, MANY, choices, choices_of
from gpipe_compiler.passes.remat.problem import RematProblem, SegmentChoice, evaluate
from gpipe_compiler.passes.remat.stage import stage_problem, whole_calls

__all__ = [
    "FEW",
    "MANY",
    "RematProblem",
    "SegmentChoice",
    "choices",
    "choices_of",
    "evaluate",
    "stage_problem",
    "whole_calls",
]
