"""Published speed-ups of pipelines beside those that the simulator expects, row by row.

    python benchmarks/paper_tables.py [--quick] [TABLE ...]

- torchgpipe's speed benchmark: AmoebaNet-D (18, 256) on eight P40s, in samples a second (README
  and main.py of its `benchmarks/amoebanetd-speed`, which tell batch sizes and balances).
- GPipe's Table 2 (arXiv 1811.06965): AmoebaNet-D (18, 256) and Transformer-48 on TPUs. It tells
  neither batch sizes nor cuts.
- GPipe's breakdown of a step, beside ours.

"theirs" is the published cut (where none is, consecutive cells or layers of least bottleneck),
simulated as it ran: see `Recompute`. "ours" is what this compiler chooses on the same devices
under the same schedule, recomputing as often; its gain is over their cut on our runtime. `--quick`
leaves it out. Tables are named torchgpipe, amoebanet and transformer; without a name all are made.

Ops are priced by roofline. How well kernels do at a batch size is not in that. One number is
fitted: the share of its roofline that a P40 sustains, so that torchgpipe's first row comes out
right.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

from baselines import balanced, memory, score
from published import TABLES, Recompute, Row, Table
from tables import machine, markdown

from gpipe_compiler.frontend.recorded import trace_mode
from gpipe_compiler.ir import Graph
from gpipe_compiler.passes.cost import roofline
from gpipe_compiler.passes.cut import Cut, cut
from gpipe_compiler.passes.cut.problem import CutProblem
from gpipe_compiler.passes.cut.setting import CutSetting
from gpipe_compiler.passes.shapes import annotate
from gpipe_compiler.planner.cut_problem import CutFacts, problem_of
from gpipe_compiler.runtime.schedule.actions import Compute, Phase
from gpipe_compiler.runtime.spec import ScheduleKind
from gpipe_compiler.simulate.step import Simulation, StageTimes, simulate

REPRODUCED = 0.1
"""A row counts as reproduced when the simulated figure is off by no more."""

BREAKDOWN = (65.6, 22.5, 4.1, 3.2, None, 2.9)
"""GPipe's: per cent of a step's time for computation, recompute, bubble, imbalance, transfers
(which it does not list) and setup."""


@dataclass(frozen=True)
class Priced:
    """The model of a table at one size of micro-batch.

    Attributes:
        units: for every node, the number of the cell or layer that it belongs to.
    """

    problem: CutProblem
    units: tuple[int, ...]

    def faster(self, factor: float) -> Priced:
        """On a device that is so many times as fast."""
        nodes = tuple(
            dataclasses.replace(
                node,
                forward_s=node.forward_s / factor,
                backward_s=node.backward_s / factor,
                weight_s=node.weight_s / factor,
            )
            for node in self.problem.nodes
        )
        return dataclasses.replace(self, problem=dataclasses.replace(self.problem, nodes=nodes))

    def stages(self, sizes: Sequence[int]) -> list[int]:
        """The stage of every node, for so many consecutive units in each."""
        stage_of_unit = [stage for stage, size in enumerate(sizes) for _ in range(size)]
        return [stage_of_unit[unit] for unit in self.units]

    def balance(self, stages: int) -> tuple[int, ...]:
        """Consecutive units whose slowest stage is as fast as possible."""
        seconds = [0.0] * (max(self.units) + 1)
        for unit, node in zip(self.units, self.problem.nodes, strict=True):
            seconds[unit] += node.forward_s + node.backward_s
        return balanced(seconds, stages)


def price(table: Table) -> dict[int, Priced]:
    """The model at every size of micro-batch that the table needs.

    It is traced without a comparison with the model, which the tests of the examples make.
    """
    graph = trace_mode(table.build(), training=True)
    found = {}
    for size in sorted({row.size for row in table.rows}):
        described = annotate(graph, size)
        problem = problem_of(CutFacts.of(described, roofline(described, table.device)))
        found[size] = Priced(problem, units_of(described, problem, table.depth))
    return found


def units_of(graph: Graph, problem: CutProblem, depth: int) -> tuple[int, ...]:
    """For every node, the number of the cell or layer that it belongs to.

    What belongs to none, as the loss, goes with what comes before it.
    """
    known: dict[str, int] = {}
    found, latest = [], 0
    for node in problem.nodes:
        path = graph.op_of[node.name].module.split(".")
        if path[0] and len(path) >= depth:
            latest = known.setdefault(".".join(path[:depth]), len(known))
        found.append(latest)
    return tuple(found)


def setting_of(table: Table, row: Row) -> CutSetting:
    """GPipe's schedule on equal devices, all of whose stages recompute."""
    setting = CutSetting.equal(ScheduleKind.GPIPE, row.devices, row.microbatches, table.link)
    return dataclasses.replace(setting, recompute=(True,) * row.devices)


def as_run(setting: CutSetting, times: Sequence[StageTimes], how: Recompute) -> Simulation:
    """The step of stages that recompute as the published ones did.

    Args:
        times: `recompute_s` does not count.
    """
    last = setting.microbatches - 1
    if how is Recompute.EARLY:
        # Before its first backward every other stage waits for longer than its forward takes.
        end = times[-1]
        pace = {
            (Compute(len(times) - 1, Phase.BACKWARD, last), False): 1
            + (end.forward_s / end.backward_s)
        }
        again = [dataclasses.replace(t, recompute_s=t.forward_s) for t in times]
        return simulate(setting.orders, again, pace=pace)
    whole = [
        dataclasses.replace(
            t,
            backward_s=t.forward_s + t.backward_s,
            recompute_s=0.0,
            gradient_s=max(0.0, t.gradient_s - (times[stage - 1].forward_s if stage else 0.0)),
        )
        for stage, t in enumerate(times)
    ]
    pace = {
        (Compute(stage, Phase.BACKWARD, last), False): t.backward_s / (t.forward_s + t.backward_s)
        for stage, t in enumerate(times)
        if last
    }
    return simulate(setting.orders, whole, pace=pace)


def sustained(table: Table, priced: Mapping[int, Priced]) -> float:
    """The share of its roofline at which the device makes the first row come out right."""
    if table.first is None:
        return 1.0
    row = table.rows[0]
    low, high = 0.01, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if throughput(table, row, priced[row.size].faster(middle)) < table.first:
            low = middle
        else:
            high = middle
    return high


def throughput(table: Table, row: Row, priced: Priced) -> float:
    """Samples a second of the published cut, as it was run."""
    sizes = row.balance or priced.balance(row.devices)
    setting = setting_of(table, row)
    times = score(priced.problem, priced.stages(sizes), setting).times
    return row.batch / as_run(setting, times, table.recompute).step_s


def recomputed_always(problem: CutProblem) -> CutProblem:
    """The same where even a lone micro-batch is run forward twice."""
    nodes = tuple(
        dataclasses.replace(node, backward_s=node.backward_s + node.forward_s)
        for node in problem.nodes
    )
    return dataclasses.replace(problem, nodes=nodes)


def gained(table: Table, row: Row, priced: Priced) -> tuple[float, Cut]:
    """How much longer their cut takes than ours, both on our runtime, and ours."""
    setting = setting_of(table, row)
    problem = priced.problem
    if row.microbatches == 1:
        problem = recomputed_always(problem)
    theirs = priced.stages(row.balance or priced.balance(row.devices))
    ours = cut(problem, setting)
    return score(problem, theirs, setting).step_s / ours.step_s - 1, ours


def ceiling(row: Row, priced: Priced) -> float:
    """The most that a row can be, if kernels are as fast as in the first row.

    Its stages equal, its transfers free, its recomputing hidden; none of the first row's.
    """
    forward = sum(node.forward_s for node in priced.problem.nodes)
    backward = sum(node.backward_s for node in priced.problem.nodes)
    once = 2 * forward + backward
    slots = (row.microbatches - 1) / row.devices
    return row.microbatches * once / (forward + backward + slots * once)


def verdict(row: Row, simulated: float, most: float, fault: str, beside: str) -> str:
    """Whether a figure is reproduced, and if not why.

    Args:
        fault: why the table's first row cannot be as assumed, if it cannot.
        beside: how the row stands to that of the same M with fewest devices.
    """
    off = simulated / row.published - 1
    if abs(off) <= REPRODUCED:
        return f"reproduced ({off:+.1%})"
    if row.published > most:
        return f"not reproducible: {row.published:.2f} > {most:.2f}, the most for equal kernels"
    why = "; ".join(filter(None, (row.why, fault, beside)))
    return f"{'not reproducible' if fault else 'off'} ({off:+.1%}): {why}"


def report(
    table: Table, priced: Mapping[int, Priced], cuts: Mapping[Row, tuple[float, Cut]]
) -> str:
    """The table in Markdown."""
    share = sustained(table, priced)
    lines, fault = [], ""
    reached = [throughput(table, row, priced[row.size].faster(share)) for row in table.rows]
    first = {row.microbatches: (row, reached[i]) for i, row in reversed([*enumerate(table.rows)])}
    for row, figure in zip(table.rows, reached, strict=True):
        here = priced[row.size].faster(share)
        cells = row.balance or here.balance(row.devices)
        setting = setting_of(table, row)
        held = max(memory(here.problem, here.stages(cells), setting))
        if row is table.rows[0] and held > table.device.memory:
            fault = f"the first row would need {held / 1e9:.0f} GB, so its batch was smaller"
        base, at_base = first[row.microbatches]
        beside = (
            f"to K={base.devices} of M={row.microbatches}: published "
            f"{row.published / base.published:.2f}, simulated {figure / at_base:.2f}"
        ) * (base is not row)
        gain, ours = cuts.get(row, (None, None))
        simulated = figure / reached[0]
        lines.append(
            (
                row.name,
                f"{row.published:.2f}",
                f"{simulated:.2f}",
                verdict(row, simulated, ceiling(row, here), fault, beside),
                f"{held / 1e9:.1f}",
                "" if gain is None else f"{round(gain, 3) + 0.0:+.1%}",
                "" if ours is None else "yes" if ours.proved else f"gap {ours.gap:.1%}",
            )
        )
    header = ("", "published", "theirs, simulated", "", "GB", "ours gains", "proved")
    title = f"### {table.title}"
    if table.first is not None:
        title += f"\n\nThe device sustains {share:.1%} of its roofline, by the first row."
    return f"{title}\n\n{markdown(header, lines)}\n"


def breakdown(table: Table, row: Row, priced: Priced) -> tuple[float, ...]:
    """Shares of all devices' time in a step of their cut.

    Computation; recompute; bubble (what equal stages without transfers would wait); imbalance (how
    much longer the step is for unequal stages); transfers (how much longer it is with them). They
    add up to 1.
    """
    setting = setting_of(table, row)
    stages = priced.stages(row.balance or priced.balance(row.devices))
    times = score(priced.problem, stages, setting).times
    alone = [dataclasses.replace(t, receive_s=0.0, gradient_s=0.0) for t in times]
    mean = StageTimes(
        sum(t.forward_s for t in times) / len(times), sum(t.backward_s for t in times) / len(times)
    )
    step, unmoved, equal = (
        as_run(setting, each, table.recompute).step_s
        for each in (times, alone, [mean] * len(times))
    )
    done = row.microbatches * (mean.forward_s + mean.backward_s) / step
    again = row.microbatches * mean.forward_s / step
    if table.recompute is Recompute.LATE and row.microbatches > 1:
        again -= mean.forward_s / step
    return (
        done,
        again,
        equal / step - done - again,
        (unmoved - equal) / step,
        (step - unmoved) / step,
    )


def breakdowns(table: Table, priced: Mapping[int, Priced]) -> str:
    """GPipe's breakdown beside that of every row with most micro-batches."""
    header = ("", "computation", "recompute", "bubble", "imbalance", "transfers", "setup")
    lines: list[tuple[str, ...]] = [
        ("GPipe", *("" if share is None else f"{share}%" for share in BREAKDOWN))
    ]
    most = max(row.microbatches for row in table.rows)
    for row in table.rows:
        if row.microbatches == most:
            shares = breakdown(table, row, priced[row.size])
            lines.append((f"ours, {row.name}", *(f"{share:.1%}" for share in shares), ""))
    return f"### A step's time, {table.title}\n\n{markdown(header, lines)}\n"


def _gained(job: tuple[Table, Row, Priced]) -> tuple[float, Cut]:
    return gained(*job)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Published speed-ups beside simulated ones.")
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"of {', '.join(TABLES)}")
    parser.add_argument("--quick", action="store_true", help="leave out what our cuts gain")
    parser.add_argument(
        "--jobs",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="processes that work side by side (default: one for every core)",
    )
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.tables) - set(TABLES))
    if unknown:
        parser.error(f"there is no table {', '.join(unknown)}; there are {', '.join(TABLES)}")
    return arguments


def main() -> None:
    """Prints the tables that are asked for."""
    arguments = _arguments()
    tables = [table for name, table in TABLES.items() if name in (arguments.tables or TABLES)]
    context = get_context("spawn")  # torch does not like to be forked
    with ProcessPoolExecutor(arguments.jobs, mp_context=context) as pool:
        known = list(pool.map(price, tables))
        jobs = [
            (table, row, priced[row.size].faster(sustained(table, priced)))
            for table, priced in zip(tables, known, strict=True)
            for row in table.rows
            if not arguments.quick
        ]
        cuts = list(pool.map(_gained, jobs))
    print(machine(), end="\n\n")
    for table, priced in zip(tables, known, strict=True):
        own = {job[1]: found for job, found in zip(jobs, cuts, strict=True) if job[0] is table}
        print(report(table, priced, own))
        if table is TABLES["amoebanet"]:
            print(breakdowns(table, priced))


if __name__ == "__main__":
    main()
