"""Plans whose stages recompute in segments, as many as are asked for."""

from __future__ import annotations

import dataclasses

from gpipe_compiler.passes.effects import effects
from gpipe_compiler.passes.remat import stage_problem
from gpipe_compiler.passes.remat.problem import uniform
from gpipe_compiler.passes.saved_tensors import saved_tensors
from gpipe_compiler.plan import Plan
from gpipe_compiler.runtime.spec import Remat


def in_segments(plan: Plan, count: int) -> Plan:
    """The plan with all ops of every stage in about so many segments of equally many ops."""
    graph = plan.graph
    assert graph is not None
    found, saved = effects(graph), saved_tensors(graph)
    stages = []
    for stage in plan.stages:
        nothing = dict.fromkeys(stage.ops, 0.0)
        problem = stage_problem(graph, found, saved, nothing, stage.ops)
        segments = uniform(problem, count) if len(problem.places) > 1 else []
        names = tuple(stage.ops[start:stop] for start, stop in segments)
        stages.append(dataclasses.replace(stage, remat=Remat.SEGMENTS, segments=names))
    return dataclasses.replace(plan, stages=tuple(stages))
