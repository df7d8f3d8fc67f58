"""Processor seconds of each phase of a compile, and how much memory it takes.

    python benchmarks/compile_time.py [--stages 4] [--no-validate] [--json] [NAME|FILE.py ...]
    python benchmarks/compile_time.py equal:1000 unequal:1000    # nets of so many ops

`equal` nets repeat a layer; in `unequal` ones no two layers are equal. Each compile runs in a
process of its own, with the command's own defaults. A phase is the time in the functions of
`PHASES`, without that in the functions of other phases which they call, and with that of processes
which they start. Beside it stands what plain PyTorch takes for the forwards and steps that are
compared: they are part of the compile, and no faster compiler saves them. "run the graph" and "run
the package" hold as many forwards and steps of what is compared with it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gpipe_compiler.cli.main import let_threads_sleep
from gpipe_compiler.no_gc import importing
from gpipe_compiler.runtime.train.process import keep_memory
from gpipe_compiler.validate.launching import Launch, spare

EXAMPLES = Path(__file__).parents[1] / "examples"
NETWORKS = Path(__file__).parent / "networks"
NAMES = ("resnet50", "gpt2_huggingface", "inception", "unet", "llama_8", "llama_12")

PHASES = {
    "load the model": ("gpipe_compiler.frontend.source:load",),
    "find the batch": ("gpipe_compiler.frontend.batch_dims:find_batch_dims",),
    "trace": ("gpipe_compiler.frontend.tracing:_in_both_modes",),
    "hold the graph": ("gpipe_compiler.frontend.check:differences",),
    "run the graph": ("gpipe_compiler.frontend.run_results:run_graph",),
    "plain PyTorch": (
        "gpipe_compiler.frontend.batch_proof:Proof._run",
        "gpipe_compiler.frontend.run_results:run_model",
        "gpipe_compiler.validate.plain_run:evaluate",
        "gpipe_compiler.validate.plain_run:train_step",
    ),
    "describe": ("gpipe_compiler.planner.planner:Planner.prepare",),
    "plan": ("gpipe_compiler.planner.planner:Planner.plan",),
    "write": ("gpipe_compiler.codegen.package:write_package",),
    "reference": ("gpipe_compiler.validate.reference:reference_of",),
    "run the package": ("gpipe_compiler.validate.package:run_check",),
}
"""Where each phase is: functions as `module:name`, and methods as `module:Class.name`."""

REST = "imports and all else"


class Clock:
    """Processor seconds by phase: of this process and of those that it has waited for."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter({REST: _processor_s()})
        self._open = [REST]
        self._since = _processor_s()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts what is run inside, but for further phases in it."""
        self._settle()
        self._open.append(name)
        try:
            yield
        finally:
            self._settle()
            self._open.pop()

    def _settle(self) -> None:
        reached = _processor_s()
        self.seconds[self._open[-1]] += reached - self._since
        self._since = reached

    def watch(self, name: str, place: str) -> None:
        """Counts a function's time to a phase, wherever it has been imported to."""
        home, _, path = place.partition(":")
        owner: Any = importlib.import_module(home)
        *outer, last = path.split(".")
        for part in outer:
            owner = getattr(owner, part)
        plain: Callable[..., Any] = getattr(owner, last)

        @functools.wraps(plain)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return plain(*args, **kwargs)

        setattr(owner, last, timed)
        for module in [m for n, m in sys.modules.items() if n.startswith("gpipe_compiler")]:
            if vars(module).get(last) is plain:
                setattr(module, last, timed)


def _processor_s() -> float:
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def one(name: str, stages: int, validate: bool) -> dict[str, float]:
    """The phases of one compile, in this process; its dry runs and peak memory beside them."""
    clock = Clock()
    keep_memory()
    let_threads_sleep(measured=False)
    with spare() as launch:
        return _phases(clock, name, stages, validate, launch)


def _phases(
    clock: Clock, name: str, stages: int, validate: bool, launch: Launch
) -> dict[str, float]:
    with importing():
        from gpipe_compiler.compile import CompileOptions
        from gpipe_compiler.compile import compile as compile_package
        from gpipe_compiler.frontend import source
        from gpipe_compiler.passes.dry_run import DryRun

    for phase, places in PHASES.items():
        for place in places:
            clock.watch(phase, place)
    runs = Counter[str]()
    plain_run = DryRun.run

    def counted(self: DryRun, *args: Any) -> Any:
        runs["all"] += 1
        return plain_run(self, *args)

    DryRun.run = counted  # type: ignore[method-assign]  # counted in this process alone
    started = time.perf_counter()
    with clock.phase("load the model"):
        subject = made_of(name) if ":" in name else source.load(file_of(name))
    options = CompileOptions(stages=stages, validate=validate)
    with tempfile.TemporaryDirectory() as folder:
        compile_package(subject, options, Path(folder) / "package", launch=launch)
    with clock.phase(REST):
        pass
    return {
        **{phase: clock.seconds[phase] for phase in (REST, *PHASES)},
        "all": sum(clock.seconds.values()),
        "wall clock": time.perf_counter() - started,
        "dry runs": runs["all"],
        "peak MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    }


def made_of(name: str) -> Any:
    """The subject of a net of so many ops: `equal:OPS` or `unequal:OPS`."""
    import torch
    from networks import layers

    from gpipe_compiler.frontend.subject import Subject

    kind, _, ops = name.partition(":")
    net = layers.net(int(ops), repeats=kind == "equal")
    first, last = net.layers[0].in_features, net.layers[-1].out_features
    inputs, target = torch.randn(layers.SAMPLES, first), torch.randn(layers.SAMPLES, last)
    return Subject(kind, net, (inputs,), target=target, loss_fn=torch.nn.functional.mse_loss)


def file_of(name: str) -> str:
    """The file of a name: of an example, of a network here, or the file itself."""
    found = [folder / f"{name}.py" for folder in (EXAMPLES, NETWORKS)]
    return str(next((path for path in found if path.exists()), Path(name)))


def measured(name: str, arguments: argparse.Namespace) -> dict[str, float]:
    """The phases of a compile in a process of its own; nothing where it fails."""
    command = [sys.executable, __file__, "--one", name, "--stages", str(arguments.stages)]
    if not arguments.validate:
        command.append("--no-validate")
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        last = (result.stderr.strip().splitlines() or ["no message"])[-1]
        print(f"{name} failed: {last}", file=sys.stderr)
        return {}
    found: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Parses the arguments and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--no-validate", dest="validate", action="store_false")
    parser.add_argument("--json", action="store_true", help="the figures alone")
    parser.add_argument("--one", metavar="NAME", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(one(arguments.one, arguments.stages, arguments.validate)))
        return
    found = {name: measured(name, arguments) for name in arguments.names or NAMES}
    found = {name: phases for name, phases in found.items() if phases}
    if arguments.json:
        print(json.dumps(found, indent=1))
        return
    from tables import machine, markdown  # which import torch

    rows = [
        (phase, *(f"{phases[phase]:.1f}" for phases in found.values()))
        for phase in next(iter(found.values()), {})
    ]
    print(f"{arguments.stages} stages, processor seconds; {machine()}\n")
    print(markdown(("phase", *(Path(name).stem for name in found)), rows))


if __name__ == "__main__":
    main()
