"""Processor seconds from a traced graph to its plan, against the number of its ops.

    python benchmarks/planning_time.py [--stages 4] [--schedule gpipe] [OPS ...]

Two nets of about so many ops each: one repeats a layer, in the other no two layers are equal. Each
plan is made in a process of its own. `describe` is what the planner must know of every op (shapes,
effects, costs); `plan` the cut with the memory of all devices; `cut` the search alone, for cuts
anywhere; `peak` the largest resident set, the interpreter and PyTorch included.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import subprocess
import sys
import time

import torch
from tables import machine, markdown
from torch import Tensor, nn

from gpipe_compiler.cluster import Cluster, Link
from gpipe_compiler.cluster.catalogue import DEFAULT_HOST
from gpipe_compiler.compile import trace
from gpipe_compiler.options import Policy
from gpipe_compiler.passes.cut import cut
from gpipe_compiler.planner.cut_problem import problem_of
from gpipe_compiler.planner.planner import Planner
from gpipe_compiler.planner.planning import setting_for
from gpipe_compiler.runtime.spec import OptimizerKind, ScheduleKind

SIZES = (100, 500, 1_000, 5_000, 20_000)
MICROBATCHES = 8
OPS_OF_A_LAYER = 5


class Layer(nn.Module):
    """Two branches and their sum: five ops."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.one = nn.Linear(inputs, outputs)
        self.other = nn.Linear(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The sum."""
        return torch.relu(self.one(x)) + torch.sigmoid(self.other(x))


def net(ops: int, *, repeats: bool) -> nn.Module:
    """A net of about so many ops, on the meta device."""
    layers = max(2, ops // OPS_OF_A_LAYER)
    widths = [64 if repeats else 64 + index for index in range(layers + 1)]
    with torch.device("meta"):
        return nn.Sequential(*(Layer(a, b) for a, b in itertools.pairwise(widths)))


def one(ops: int, stages: int, schedule: ScheduleKind, *, repeats: bool) -> dict[str, float]:
    """The figures of one plan, in this process."""
    model = net(ops, repeats=repeats)
    x = torch.empty(MICROBATCHES * 4, 64, device="meta")
    graph = trace(model, x, target=0, loss_fn=lambda out, _: out.sum())
    cluster = Cluster.of(DEFAULT_HOST, Link(12e9, 1e-6))
    policy = Policy(schedule=schedule)
    planner = Planner(graph, cluster)
    begun = time.process_time()
    prepared = planner.prepare(MICROBATCHES, policy)
    described = time.process_time()
    choice = planner.choose(stages, MICROBATCHES, policy)
    planner.plan(choice, policy)
    planned = time.process_time()
    problem = problem_of(prepared.facts, prepared.costs[1:], OptimizerKind.SGD)
    cut(problem, setting_for(cluster, choice, policy, training=True))
    return {
        "ops": len(prepared.graph.ops),
        "describe": described - begun,
        "plan": planned - described,
        "cut": time.process_time() - planned,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }


def main() -> None:
    """Parses the arguments and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sizes", nargs="*", type=int, metavar="OPS", default=SIZES)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument(
        "--schedule",
        choices=[ScheduleKind.GPIPE.value, ScheduleKind.ONE_F_ONE_B.value],
        default=ScheduleKind.GPIPE.value,
    )
    parser.add_argument("--one", choices=["repeats", "differs"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    schedule = ScheduleKind(arguments.schedule)
    if arguments.one:
        repeats = arguments.one == "repeats"
        print(json.dumps(one(arguments.sizes[0], arguments.stages, schedule, repeats=repeats)))
        return
    rows = []
    for kind in ("repeats", "differs"):
        for size in arguments.sizes:
            options = [
                "--one",
                kind,
                "--stages",
                str(arguments.stages),
                "--schedule",
                schedule.value,
            ]
            command = [sys.executable, __file__, str(size), *options]
            found = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
            figures = [f"{found[name]:.2f}" for name in ("describe", "plan", "cut", "peak")]
            rows.append((kind, f"{found['ops']:,}", *figures))
            print("  ".join(rows[-1]), file=sys.stderr, flush=True)
    print(f"{arguments.stages} stages, {schedule.value}; {machine()}\n")
    print(markdown(("layers", "ops", "describe s", "plan s", "cut s", "peak GB"), rows))


if __name__ == "__main__":
    main()
