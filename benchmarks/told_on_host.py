"""What plans tell of this machine's processor over what was measured: step time, process memory.

    python benchmarks/told.py --host [--measured] [NAME ...]

For every model a package of one stage and two micro-batches is made and trained for a few steps, by
SGD, on one thread. Then it is made again for just the memory that it is said to need.

    step       told by default and, with --measured, from timed ops; over the median of the steps in
               seconds of the processor, so that other work on the machine does not count
    process    told over the most that was resident (VmHWM), and the same where memory is tight:
               below 1 the promise is broken

Needs `pip install --no-deps torchvision timm transformers` for all of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import foreign  # noqa: F401  # makes torchvision load beside a torch for the processor
import torch
from foreign.model import foreign as foreign_model
from one_stage import NETWORKS
from tables import machine, markdown

from gpipe_compiler.cluster import Cluster, local_cluster
from gpipe_compiler.compile import trace_subject
from gpipe_compiler.errors import GPipeCompilerError
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.ir import Graph
from gpipe_compiler.options import Policy
from gpipe_compiler.plan import Plan
from gpipe_compiler.planner.planner import Planner
from gpipe_compiler.targets.torch_stages import emit

FOREIGN = (
    *("torchvision:mobilenet_v3_small", "torchvision:shufflenet_v2_x0_5"),
    *("torchvision:densenet121", "torchvision:squeezenet1_1", "torchvision:mnasnet0_5"),
    *("torchvision:googlenet",),
    *("torchvision:regnet_y_400mf", "torchvision:efficientnet_b0", "torchvision:vgg11"),
    *("timm:test_convnext", "timm:test_efficientnet", "timm:deit_tiny_patch16_224"),
    *("timm:mobilevit_xxs", "timm:gmlp_ti16_224", "timm:inception_next_atto"),
    *("timm:poolformerv2_s12", "timm:fasternet_t0", "timm:ghostnet_050", "timm:levit_128s"),
    *("timm:hgnetv2_b0",),
)
MICROBATCHES, STEPS = 2, 5

CHILD = """
import importlib, runpy, sys, time, types
from pathlib import Path
folder, batch = Path(sys.argv[1]), sys.argv[2]
package = runpy.run_path(str(folder / "run.py"), run_name="loaded")["load_package"]()
command = importlib.import_module(package.__name__ + ".runtime.train.command")
told = importlib.import_module(package.__name__ + ".runtime.train.told")
process = importlib.import_module(package.__name__ + ".runtime.train.process")
import torch
torch.set_num_threads(1)
give_back = told.planned_to_give_back(folder)
process.give_back_memory() if give_back else process.keep_memory()
call, target = torch.load(batch, weights_only=False)
with package.Pipeline() as pipe:
    optimizer = torch.optim.SGD(pipe.parameters(), lr=1e-3)
    for _ in range(int(sys.argv[3])):
        start = time.process_time()
        pipe.step(call, target)
        optimizer.step()
        optimizer.zero_grad()
        print("step", time.process_time() - start)
print("most", process.resident())
"""
"""Trains as `run.py train` does, and tells what it took."""


def subject_of(name: str) -> Subject:
    """A network of `one_stage.py`, or a foreign model."""
    torch.manual_seed(0)
    if ":" not in name:
        return NETWORKS[name].subject(name.replace(" ", "_"))
    known = foreign_model(name)
    inputs = known.inputs(known.samples)
    args = () if isinstance(inputs, dict) else (inputs,)
    kwargs = inputs if isinstance(inputs, dict) else {}
    target = known.target(known.samples) if known.target else None
    return Subject(re.sub(r"\W", "_", name), known.build(), args, kwargs, target, known.loss)


def planned(graph: Graph, cluster: Cluster, *, measured: bool = False) -> Plan:
    """One stage of it."""
    planner = Planner(graph, cluster, measured=measured)
    return planner.plan(planner.choose(1, MICROBATCHES, Policy()), Policy())


def trained(plan: Plan, subject: Subject, folder: Path, name: str) -> tuple[float, int]:
    """Seconds of a step, and the most resident bytes of a process that trains the package."""
    emit(plan, folder / name)
    batch = folder / "batch.pt"
    torch.save(((subject.args, dict(subject.kwargs)), subject.target), batch)
    command = [sys.executable, "-c", CHILD, str(folder / name), str(batch), str(STEPS)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    steps = [float(found) for found in re.findall(r"step (\S+)", done.stdout)]
    return statistics.median(steps[1:]), int(done.stdout.split("most ")[1])


def most(plan: Plan) -> int:
    """Bytes of its process, as told."""
    assert plan.process is not None, "no process was measured: this is no Linux"
    return plan.process.base + sum(plan.process.tensors)


def row_of(name: str, folder: Path, *, measured: bool) -> tuple[list[str], list[float]]:
    """The cells of a model, and its ratios: by default, measured, process, tight."""
    subject = subject_of(name)
    graph = trace_subject(subject)
    cluster = local_cluster()
    plan = planned(graph, cluster)
    step_s, resident = trained(plan, subject, folder, "wide")
    device = cluster.devices[0]
    needed = dataclasses.replace(device, memory=plan.prediction.device_bytes[0])
    tight = planned(graph, Cluster.of(needed, cluster.link))
    _, tight_resident = trained(tight, subject, folder, "tight")
    timed_s = planned(graph, cluster, measured=True).prediction.step_s if measured else 0.0
    ratios = [plan.prediction.step_s / step_s, timed_s / step_s]
    ratios += [most(plan) / resident, most(tight) / tight_resident]
    cells = [name, f"{1e3 * step_s:.1f}", f"{ratios[0]:.2f}"]
    cells += [f"{ratios[1]:.2f}" if measured else "", f"{resident / 1e6:.0f}", f"{ratios[2]:.2f}"]
    return [*cells, f"{tight_resident / 1e6:.0f}", f"{ratios[3]:.2f}"], ratios


def main(argv: Sequence[str]) -> int:
    """Prints the table; 1 where a process took more than was told."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--measured", action="store_true", help="time the ops, too")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows, found = [], []
    for name in given.names or (*NETWORKS, *FOREIGN):
        with tempfile.TemporaryDirectory(prefix="gpipe-told-") as folder:
            try:
                cells, ratios = row_of(name, Path(folder), measured=given.measured)
            except (GPipeCompilerError, KeyError, ImportError) as error:
                print(f"{name}: {error}", file=sys.stderr, flush=True)
                continue
        rows.append(tuple(cells))
        found.append(ratios)
        print("  ".join(cells), file=sys.stderr, flush=True)
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    print(f"{machine()}; load {load}\n")
    figures = ("step ms", "told", "timed", "process MB", "told", "tight MB", "told")
    print(markdown(("model", *figures), rows))
    columns = zip(*found, strict=True)
    for what, column in zip(("step", "timed", "process", "tight"), columns, strict=True):
        near = sum(0.75 <= ratio <= 1.25 for ratio in column)
        print(
            f"{what}: {statistics.median(column):.2f} in the median, {min(column):.2f} to "
            f"{max(column):.2f}; {near} of {len(column)} within 25%"
        )
    return int(any(ratio < 1 for ratios in found for ratio in ratios[2:]))
