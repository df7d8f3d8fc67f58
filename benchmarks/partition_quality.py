"""How good the planner's cuts of operator graphs are, beside those that others make.

    python benchmarks/partition_quality.py [--stages 2 4 8] [--objective bottleneck] [NAME ...]
    python benchmarks/partition_quality.py --objective step --schedule 1f1b

The graphs are those of `graphs.py`. Each is cut into at most K stages on a link of 12 GB/s, of
1 GB/s, and one that takes no time, with 8 micro-batches. Beside our cut stand

    parameters   the same number of parameters in every stage
    ops          the same number of ops in every stage
    blocks       torchgpipe's block partition of the times (Barany and Grinberg)
    row          the best cut of the ops in a row, over several topological orders

of `baselines.py`. A ratio is the baseline's bottleneck (or step) to ours: below 1 it would be
better. Seconds are those of one process's processor, so that other work on the machine does not
count. `gap` is how far ours may be above the least possible, as far as is known; `--prove` finds
out more. The script fails where a ratio is below 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from baselines import Row, best_in_a_row, score
from graphs import GRAPHS
from tables import machine, markdown

from gpipe_compiler.cluster import Link
from gpipe_compiler.errors import PlanError
from gpipe_compiler.graph_json.file import BareGraph
from gpipe_compiler.graph_json.plan import plan_graph
from gpipe_compiler.graph_json.stages import BareSetting
from gpipe_compiler.options import Objective
from gpipe_compiler.passes.cut.setting import CutSetting
from gpipe_compiler.runtime.spec import ScheduleKind

LINKS = {"12 GB/s": Link(12e9, 0.0), "1 GB/s": Link(1e9, 0.0), "compute only": Link(1e18, 0.0)}
METHODS = ("parameters", "ops", "blocks", "row")
MICROBATCHES = 8
SLACK = 1e-9
"""Sums of the same times in another order."""


@dataclass(frozen=True)
class Case:
    """One graph on one link into at most so many stages."""

    graph: str
    link: str
    stages: int
    ratios: tuple[float, ...]
    gap: float
    used: int
    seconds: float


def measure(
    graph: BareGraph,
    link: str,
    stages: int,
    objective: Objective,
    schedule: ScheduleKind,
    *,
    prove: bool,
) -> Case:
    """Ours beside the baselines."""
    started = time.process_time()
    ours = plan_graph(
        graph,
        BareSetting(stages, MICROBATCHES, schedule, objective, link=LINKS[link], prove=prove),
    )
    seconds = time.process_time() - started
    others = tuple(
        value / ours.value_s
        for value in _baselines(graph, LINKS[link], stages, objective, schedule)
    )
    return Case(graph.name, link, stages, others, ours.gap, len(ours.stages), seconds)


def _baselines(
    graph: BareGraph, link: Link, stages: int, objective: Objective, schedule: ScheduleKind
) -> Iterator[float]:
    problem = graph.problem(training=True)
    setting = CutSetting.equal(schedule, stages, MICROBATCHES, link)
    setting = dataclasses.replace(setting, objective=objective)
    row = Row(problem, stages)
    for stage_of in (row.equal_parameters(), row.equal_ops(), row.blocks()):
        yield score(problem, stage_of, setting).of(objective)
    try:
        yield best_in_a_row(problem, setting).objective_s
    except PlanError:  # fewer ops than stages
        yield math.inf


def summary(cases: Sequence[Case]) -> str:
    """For every link and method the geometric mean of the ratios, and the worst."""
    rows = []
    for index, method in enumerate(METHODS):
        cells = []
        for link in dict.fromkeys(case.link for case in cases):
            ratios = [case.ratios[index] for case in cases if case.link == link]
            ratios = [ratio for ratio in ratios if math.isfinite(ratio)]
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            cells.append(f"{mean:.3f} ({max(ratios):.2f})")
        rows.append([method, *cells])
    return markdown(["method", *dict.fromkeys(case.link for case in cases)], rows)


def table(cases: Sequence[Case]) -> str:
    """Every case."""
    rows = [
        [
            case.graph,
            case.link,
            case.stages,
            case.used,
            *(f"{ratio:.3f}" for ratio in case.ratios),
            f"{100 * case.gap:.2f}%",
            f"{case.seconds:.1f}",
        ]
        for case in cases
    ]
    return markdown(["graph", "link", "K", "stages", *METHODS, "gap", "s"], rows)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description="Our cuts beside those that others make.")
    parser.add_argument("names", metavar="NAME", nargs="*", choices=[*GRAPHS, []])
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--link", choices=list(LINKS), nargs="+", default=list(LINKS))
    parser.add_argument(
        "--objective",
        choices=[objective.value for objective in Objective],
        default=Objective.BOTTLENECK.value,
    )
    parser.add_argument(
        "--schedule",
        choices=[ScheduleKind.GPIPE.value, ScheduleKind.ONE_F_ONE_B.value],
        default=ScheduleKind.GPIPE.value,
        help="whose step counts",
    )
    parser.add_argument("--prove", action="store_true", help="look for a proof of each cut")
    arguments = parser.parse_args()
    cases = []
    for name in arguments.names or GRAPHS:
        graph = GRAPHS[name]()
        for link in arguments.link:
            for stages in arguments.stages:
                case = measure(
                    graph,
                    link,
                    stages,
                    Objective(arguments.objective),
                    ScheduleKind(arguments.schedule),
                    prove=arguments.prove,
                )
                cases.append(case)
                print(table([case]).splitlines()[-1], flush=True)
    worse = [case for case in cases if min(case.ratios) < 1 - SLACK]
    print(f"\n{machine()}\n\n{summary(cases)}\n\n{table(cases)}")
    if worse:
        raise SystemExit(f"a baseline is better:\n{table(worse)}")


if __name__ == "__main__":
    main()
