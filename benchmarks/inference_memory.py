"""What a static plan of memory could save a forward-only stage on the host.

    python benchmarks/inference_memory.py [NAME ...]

Every example as a package of one stage without a loss. In a process of its own, one thread, after
a warm-up: the most that torch's allocator gives out in a forward, beside the most that lives at a
time (`buffers.Activations`). Then the peak of the whole process, and the page
faults and processor time of a forward: as the system's malloc works, and as `run.py` has it, which
keeps what is freed (`runtime/train/process.py`). An arena could save the same faults, and no more.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from buffers import Activations
from tables import machine, markdown
from torch.utils._pytree import tree_map

from gpipe_compiler.compile import CompileOptions
from gpipe_compiler.compile import compile as compile_package
from gpipe_compiler.frontend.source import load
from gpipe_compiler.passes.memory_trace import MemoryTraces
from gpipe_compiler.runtime.train.process import keep_memory

sys.path.append(str(Path(__file__).parents[1] / "tests" / "helpers"))
from live_bytes import measured, peak

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
MODELS = {"resnet50": 8, "inception": 32, "unet": 8, "amoebanet": 8, "transformer": 8}
"""Examples and the batch size at which each runs."""

ROUNDS = 9
MB = 1e6


def resized(batch: int) -> Any:
    """Makes examples so many samples large."""

    def resize(leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        times = -(-batch // leaf.shape[0])
        return leaf.repeat(times, *[1] * (leaf.dim() - 1))[:batch]

    return lambda tree: tree_map(resize, tree)


def row(name: str, batch: int, folder: Path) -> list[str]:
    """The figures of one example."""
    subject = load(str(EXAMPLES / f"{name}.py"), input_specs=[], training=False)
    size = resized(batch)
    subject = dataclasses.replace(
        subject, args=size(subject.args), kwargs=size(dict(subject.kwargs))
    )
    made = compile_package(subject, CompileOptions(1, 1, validate=False), folder / name)
    graph = made.plan.graph
    assert graph is not None
    names, inputs = [op.name for op in graph.ops], [source.name for source in graph.inputs]
    traces = MemoryTraces(graph).of(names, inputs, graph.output_values)
    alive = Activations.of(traces, training=False).alive
    torch.save((subject.args, dict(subject.kwargs)), folder / f"{name}.pt")
    usual, kept = (child(name, folder, words) for words in ([], ["--keep"]))
    return [
        name,
        str(batch),
        f"{alive / MB:.1f}",
        f"{usual['allocated'] / MB:.1f}",
        *(f"{one['highest'] / MB:.0f}" for one in (usual, kept)),
        *(f"{one['faults']:,.0f}" for one in (usual, kept)),
        *(f"{one['seconds'] * 1e3:.1f}" for one in (usual, kept)),
    ]


def child(name: str, folder: Path, words: Sequence[str]) -> dict[str, float]:
    """What a process tells that runs the package."""
    command = [sys.executable, __file__, "--run", name, "--folder", str(folder), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def run(name: str, folder: Path) -> dict[str, float]:
    """The figures of this process."""
    torch.set_num_threads(1)
    sys.path.insert(0, str(folder))
    pipe = importlib.import_module(name).Pipeline()
    batch = torch.load(folder / f"{name}.pt", weights_only=False)
    stage = next(iter(pipe.stages.values()))
    received: list[torch.Tensor] = []
    stage.register_forward_pre_hook(lambda _, args: received.extend(args))
    pipe(batch)
    inputs = tuple(received)
    received.clear()

    def forward() -> None:
        with torch.no_grad():
            stage(*inputs)
        received.clear()

    seconds, faults = [], []
    for _ in range(ROUNDS):
        before, pages = time_s(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        forward()
        seconds.append(time_s() - before)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - pages)
    highest = status("VmHWM")
    allocated = peak(measured([("forward", forward)])["forward"])
    pipe.close()
    return {
        "allocated": allocated,
        "highest": highest,
        "seconds": statistics.median(seconds),
        "faults": statistics.median(faults),
    }


def time_s() -> float:
    """Processor seconds of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def status(key: str) -> int:
    """Bytes that the system tells of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) * 1024


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", default=list(MODELS), help="examples (default: all)")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--keep", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    if arguments.run:
        if arguments.keep:
            keep_memory()
        print(json.dumps(run(arguments.run, arguments.folder)))
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = [row(name, MODELS.get(name, 8), Path(folder)) for name in arguments.names]
    figures = ("batch", "lives, MB", "given out, MB")
    both = ("process, MB", "kept", "page faults", "kept", "ms", "kept")
    print(f"{machine()}\n\n{markdown(('', *figures, *both), rows)}")


if __name__ == "__main__":
    main()
