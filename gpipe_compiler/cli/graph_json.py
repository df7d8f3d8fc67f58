"""`gpipe-compile graph.json`: a plan for a graph from elsewhere, printed."""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path

from gpipe_compiler.cli.asked import cluster_asked, options_given, schedule_of, typed
from gpipe_compiler.errors import UsageError
from gpipe_compiler.graph_json.file import read_graph
from gpipe_compiler.graph_json.plan import BarePlan, plan_graph
from gpipe_compiler.graph_json.stages import DEFAULT_LINK, BareSetting
from gpipe_compiler.options import Auto, Objective
from gpipe_compiler.runtime.core.typed import MOST_MICROBATCHES
from gpipe_compiler.runtime.spec import ScheduleKind
from gpipe_compiler.runtime.wording import listed

MICROBATCHES_PER_STAGE = 4
"""Where nobody says how many micro-batches there are."""

_UNDERSTOOD = frozenset(
    {"model", "stages", "microbatches", "schedule", "objective", "mode", "bandwidth", "latency"}
    | {"memory", "devices", "cluster", "dry_run", "json", "prove"}
)
"""Options that mean something for a bare graph."""

_COMMAND = "words"
"""The command itself, which is kept beside its options."""


def is_graph(model: str) -> bool:
    """Whether MODEL of the command names a graph, and no program."""
    return model.endswith(".json")


def plan_file(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> BarePlan:
    """The plan that the command asks for.

    Args:
        parser: that made the arguments; it knows their defaults.

    Raises:
        UsageError: for options that say something about a model, of which a graph has none.
    """
    others = (name for name in vars(arguments) if name not in _UNDERSTOOD | {_COMMAND})
    given = options_given(arguments, parser, others)
    if given:
        understood = sorted(map(typed, _UNDERSTOOD - {"model"}))
        raise UsageError(
            f"a graph in a JSON file takes no {listed(given, 'nor')}: it is planned, and is no "
            "model that could be constrained by its modules, trained or emitted",
            hint=f"give a model.py; or of a graph only {listed(understood)}",
        )
    if arguments.stages is None:
        raise UsageError("how many stages?", hint="--stages 4")
    asked = (arguments.stages, arguments.microbatches, schedule_of(arguments))
    auto = [
        f"{option} auto"
        for option, value in zip(("--stages", "--microbatches", "--schedule"), asked, strict=True)
        if value is Auto.AUTO
    ]
    if auto:
        raise UsageError(
            f"a graph in a JSON file takes no {listed(auto, 'nor')}: the best settings are looked "
            "for among the plans of a model",
            hint="say which are to be planned, one after the other: --stages 4 --schedule 1f1b",
        )
    if arguments.microbatches is not None and arguments.microbatches > MOST_MICROBATCHES:
        raise UsageError(
            f"{arguments.microbatches:,} micro-batches are more than there can be: "
            f"{MOST_MICROBATCHES:,}"
        )
    link = dataclasses.replace(
        DEFAULT_LINK,
        bandwidth=arguments.bandwidth or DEFAULT_LINK.bandwidth,
        latency_s=arguments.latency or DEFAULT_LINK.latency_s,
    )
    is_asked = bool(options_given(arguments, parser, ("devices", "cluster")))
    graph = read_graph(Path(arguments.model))
    setting = BareSetting(
        arguments.stages,
        arguments.microbatches or MICROBATCHES_PER_STAGE * min(arguments.stages, len(graph.ops)),
        ScheduleKind(arguments.schedule),
        Objective(arguments.objective),
        None if arguments.mode == "train" else False,
        link,
        math.inf if arguments.memory is None else arguments.memory,
        cluster_asked(arguments) if is_asked else None,
        prove=arguments.prove,
    )
    return plan_graph(graph, setting)
