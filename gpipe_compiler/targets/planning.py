"""The plan that the options ask for: of the settings given, or of the best that are found."""

from __future__ import annotations

import dataclasses

from gpipe_compiler.codegen.package import Progress
from gpipe_compiler.ir import Graph
from gpipe_compiler.options import Auto, CompileOptions
from gpipe_compiler.passes.pipeline import PassPipeline
from gpipe_compiler.plan import Plan
from gpipe_compiler.plan.pareto import Frontier
from gpipe_compiler.planner.memory_advice import refuse_too_large
from gpipe_compiler.planner.planner import Planner
from gpipe_compiler.planner.search import explore
from gpipe_compiler.planner.search_space import SearchSpace
from gpipe_compiler.planner.without_pipeline import without_pipeline

MOST_IN_PLAN = 40
"""Settings beside those on the frontier that go into a plan's JSON."""


def planner_of(graph: Graph, options: CompileOptions) -> Planner:
    """What plans a traced graph, with the passes that the options ask for."""
    pipeline = PassPipeline().asked(options.print_after, options.pass_options)
    return Planner(
        graph,
        options.cluster,
        options.measured,
        options.constraints,
        pipeline=pipeline,
        calibration=options.calibration,
    )


def plan_as_asked(
    planner: Planner, options: CompileOptions, progress: Progress
) -> tuple[Plan, Frontier | None]:
    """The plan, and the settings that it was chosen from where these are not all given.

    Raises:
        DoesNotFitError: when nothing fits the devices, and that is asked or explored.
        PlanError, UsageError: when there can be no plan.
    """
    stages, microbatches = options.stages, options.microbatches
    if not (
        isinstance(stages, Auto)
        or isinstance(microbatches, Auto)
        or isinstance(options.schedule, Auto)
    ):
        choice = planner.choose(stages, microbatches, options)
        made = planner.plan(choice, options)
        if options.must_fit:
            refuse_too_large(planner, made, options, choice)
        return _compared(planner, made, options, progress), None
    wish = SearchSpace.of(options)
    found = explore(planner, wish, options, seconds=options.search_s, progress=progress)
    frontier = found.frontier
    if not found.fits:
        progress("looking for settings nearby that fit")
        nearest = frontier.points[0].choice
        refuse_too_large(planner, found.plan, options, nearest, wish.free, len(frontier.points))
    plan = dataclasses.replace(found.plan, frontier=frontier.shortened(MOST_IN_PLAN))
    return _compared(planner, plan, options, progress), frontier


def _compared(planner: Planner, plan: Plan, options: CompileOptions, progress: Progress) -> Plan:
    """The plan, with what its devices would do without a pipeline, and what it is calibrated by."""
    progress("comparing with plain training" if plan.training else "comparing with one device")
    known = options.calibration
    return dataclasses.replace(
        plan,
        whole=without_pipeline(planner, plan, options),
        calibration=(1.0, 1.0) if known is None else (known.forward, known.backward),
    )
