"""Our cuts of all the examples beside those that others make, on links fast and slow.

    python benchmarks/example_plans.py [--stages 2 4 8] [--full] [NAME ...]

Every example is cut into K stages on V100s with PCIe 3.0 and with 1 GB/s between them, a
micro-batch as large as the example's batch, M = 4 K of them. Ops are priced by roofline; memory is
not limited, so that every baseline counts. What is to be short is the bottleneck stage, and the
simulated step of GPipe and of 1F1B. The baselines are those of `baselines.py`; a ratio is a
baseline's time to ours. The script fails where one is below 1.

`--full` prints every case; without it, per network and baseline, only the summary.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path

from baselines import Row, best_in_a_row, score
from tables import machine, markdown

from gpipe_compiler.cluster import Link, built_in
from gpipe_compiler.cluster.catalogue import PCIE3
from gpipe_compiler.compile import trace_subject
from gpipe_compiler.errors import PlanError
from gpipe_compiler.frontend.source import load
from gpipe_compiler.options import Objective
from gpipe_compiler.passes.cost import roofline
from gpipe_compiler.passes.cut import cut
from gpipe_compiler.passes.cut.problem import CutProblem
from gpipe_compiler.passes.cut.setting import CutSetting
from gpipe_compiler.passes.loss_weight import weigh_loss
from gpipe_compiler.planner.cut_problem import CutFacts, problem_of
from gpipe_compiler.runtime.spec import ScheduleKind

EXAMPLES = Path(__file__).parents[1] / "examples"
NAMES = (
    "mlp_digits",
    "alexnet",
    "resnet50",
    "unet",
    "transformer",
    "gpt2_huggingface",
    "inception",
    "inputs",
    "amoebanet",
    "transformer_1_3b",
    "transformer_l",
)
DEVICE = built_in("v100").device
LINKS = {"12 GB/s": PCIE3, "1 GB/s": Link(1e9, 1e-5)}
AIMS = {
    "bottleneck": (Objective.BOTTLENECK, ScheduleKind.ONE_F_ONE_B),
    "GPipe step": (Objective.STEP, ScheduleKind.GPIPE),
    "1F1B step": (Objective.STEP, ScheduleKind.ONE_F_ONE_B),
}
METHODS = ("parameters", "ops", "blocks", "row")
SLACK = 1e-9
"""Sums of the same times in another order."""


@dataclass(frozen=True)
class Case:
    """One network, cut on one link for one aim.

    Attributes:
        ours_s: the time that was to be short.
        ratios: of every baseline's time to it.
        seconds: of the processor, for our cut.
    """

    network: str
    link: str
    aim: str
    stages: int
    ours_s: float
    ratios: tuple[float, ...]
    gap: float
    seconds: float


def problem(name: str) -> CutProblem:
    """An example as a cut problem, on a V100 at the example's batch."""
    graph = trace_subject(load(str(EXAMPLES / f"{name}.py")))
    graph = weigh_loss(graph)
    return problem_of(CutFacts.of(graph, roofline(graph, DEVICE)))


def cases(name: str, counts: Sequence[int]) -> list[Case]:
    """All cases of one network; of no more stages than it has parts."""
    asked = problem(name)
    found = []
    for stages in counts:
        for link in LINKS:
            for aim in AIMS:
                try:
                    found.append(case(asked, name, link, aim, stages))
                except PlanError as error:
                    print(f"{name}, {stages} stages: {error.problem}", file=sys.stderr)
    return found


def case(asked: CutProblem, name: str, link: str, aim: str, stages: int) -> Case:
    """Ours beside the baselines.

    Raises:
        PlanError: when there are fewer parts than stages.
    """
    objective, kind = AIMS[aim]
    setting = dataclasses.replace(
        CutSetting.equal(kind, stages, 4 * stages, LINKS[link]), objective=objective
    )
    started = time.process_time()
    ours = cut(asked, setting)
    seconds = time.process_time() - started
    row = Row(asked, stages)
    others = [
        score(asked, stage_of, setting).of(objective)
        for stage_of in (row.equal_parameters(), row.equal_ops(), row.blocks())
    ]
    others.append(best_in_a_row(asked, setting).objective_s)
    claimed, counted = ours.objective_s, score(asked, ours.stage_of, setting).of(objective)
    if not math.isclose(claimed, counted, rel_tol=SLACK):
        raise AssertionError(f"{name}: the cut says {claimed} s, its stages add up to {counted} s")
    return Case(
        name,
        link,
        aim,
        stages,
        claimed,
        tuple(other / claimed for other in others),
        ours.gap,
        seconds,
    )


def mean(ratios: Iterable[float]) -> str:
    """The geometric mean, and the largest."""
    known = list(ratios)
    return f"{math.exp(sum(map(math.log, known)) / len(known)):.3f} ({max(known):.2f})"


def summary(found: Sequence[Case]) -> str:
    """For every link, aim and baseline the geometric mean of the ratios, and the largest."""
    lines = []
    for link in LINKS:
        for aim in AIMS:
            own = [case for case in found if (case.link, case.aim) == (link, aim)]
            if own:
                means = [mean(case.ratios[i] for case in own) for i in range(len(METHODS))]
                lines.append((f"{aim}, {link}", *means))
    return markdown(("", *METHODS), lines)


def networks(found: Sequence[Case]) -> str:
    """For every network and number of stages, over links and aims: the ratios, gap and time."""
    lines = []
    for (name, stages), group in groupby(found, key=lambda case: (case.network, case.stages)):
        own = list(group)
        lines.append(
            (
                f"{name}, K={stages}",
                *(mean(case.ratios[i] for case in own) for i in range(len(METHODS))),
                f"{sum(case.gap == 0 for case in own)} of {len(own)}",
                f"{max(case.gap for case in own):.2%}",
                f"{max(case.seconds for case in own):.1f}",
            )
        )
    return markdown(("", *METHODS, "proved", "largest gap", "s"), lines)


def every(found: Sequence[Case]) -> str:
    """All cases."""
    lines = [
        (
            f"{case.network}, K={case.stages}, {case.link}, {case.aim}",
            f"{1e3 * case.ours_s:.4g}",
            *(f"{ratio:.3f}" for ratio in case.ratios),
            f"{case.gap:.2%}",
            f"{case.seconds:.1f}",
        )
        for case in found
    ]
    return markdown(("", "ours, ms", *METHODS, "gap", "s"), lines)


def main() -> None:
    """Measures, prints, and fails where a baseline is better."""
    parser = argparse.ArgumentParser(description="Our cuts of the examples beside others'.")
    parser.add_argument("names", metavar="NAME", nargs="*", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--full", action="store_true", help="print every case")
    arguments = parser.parse_args()
    names = arguments.names or NAMES
    context = get_context("spawn")  # torch does not like to be forked
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=context) as pool:
        each = list(pool.map(cases, names, [arguments.stages] * len(names)))
    found = [case for own in each for case in own]
    print(f"{machine()}\n\n{summary(found)}\n\n{networks(found)}")
    if arguments.full:
        print(f"\n{every(found)}")
    worse = [case for case in found if min(case.ratios) < 1 - SLACK]
    if worse:
        raise SystemExit(f"a baseline is better:\n{every(worse)}")


if __name__ == "__main__":
    main()
