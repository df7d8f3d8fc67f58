"""A chain of a hundred layers, trained in the memory that nine layers took before.

    python benchmarks/chain_memory.py

Measured is what a training step takes beyond the weights: gradients and all that is made from the
first op to the last, by the profiler's record of the host's allocator. The chain of
`examples/deep_chain.py` is trained as it is, with nine layers and with a hundred, and as a package
for a device that has room for the weights of the hundred and what the nine took.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from tables import machine, markdown

from gpipe_compiler.cluster import local_cluster
from gpipe_compiler.compile import CompileOptions
from gpipe_compiler.compile import compile as compile_package
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.options import RematChoice

sys.path.append(str(Path(__file__).parents[1] / "examples"))
sys.path.append(str(Path(__file__).parents[1] / "tests" / "helpers"))
from live_bytes import measured, peak


@dataclass(frozen=True)
class Chain:
    """The sizes of the two chains, and of their batch."""

    few: int = 9
    many: int = 100
    width: int = 32
    batch: int = 1024


@dataclass(frozen=True)
class Step:
    """What a training step takes.

    Attributes:
        weights: bytes.
        beyond: bytes at most, besides the weights and the batch.
        seconds: the shortest of some steps.
    """

    layers: int
    weights: int
    beyond: int
    seconds: float


def measure(
    layers: int, step: Callable[[], object], parameters: Iterable[torch.nn.Parameter]
) -> Step:
    """A step that begins without gradients."""
    trained = list(parameters)

    def clear() -> None:
        for parameter in trained:
            parameter.grad = None

    times = []
    for _ in range(3):
        clear()
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    clear()
    beyond = peak(measured([("step", step)])["step"])
    return Step(layers, sum(parameter.nbytes for parameter in trained), beyond, min(times))


def plain(chain: Chain, layers: int) -> Step:
    """The chain in plain PyTorch."""
    subject = subject_of(chain, layers)
    inputs, loss_fn = subject.args[0], subject.loss_fn
    assert loss_fn is not None
    return measure(
        layers,
        lambda: loss_fn(subject.model(inputs), subject.target).backward(),
        subject.model.parameters(),
    )


def compiled(chain: Chain, memory: int, folder: Path) -> Step:
    """The chain of many layers as a package of one stage, for a device of so many bytes."""
    options = CompileOptions(
        stages=1,
        microbatches=1,
        remat=RematChoice.AUTO,
        cluster=local_cluster().with_memory(memory),
        must_fit=True,
    )
    subject = subject_of(chain, chain.many)
    package = folder / "deep_chain_package"  # the example is imported by the other name
    compile_package(subject, options, package)
    sys.path.insert(0, str(folder))
    pipe = importlib.import_module(package.name).Pipeline()
    sys.path.remove(str(folder))
    inputs, target = subject.args[0], subject.target
    return measure(chain.many, lambda: pipe.step(inputs, target), pipe.parameters())


def subject_of(chain: Chain, layers: int) -> Subject:
    """The example with its call."""
    import deep_chain as example

    return Subject(
        "deep_chain",
        example.build_model(layers, chain.width),
        (example.example_inputs(chain.batch),),
        target=example.example_target(chain.batch),
        loss_fn=example.loss_fn,
    )


def compare(chain: Chain, folder: Path) -> tuple[Step, Step, Step]:
    """Nine layers and a hundred in plain PyTorch, and the hundred compiled."""
    few, many = plain(chain, chain.few), plain(chain, chain.many)
    return few, many, compiled(chain, many.weights + few.beyond, folder)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description="A deep chain in the memory of a short one.")
    parser.add_argument("--layers", type=int, default=Chain.many, help="of the deep chain")
    parser.add_argument("--before", type=int, default=Chain.few, help="layers of the short one")
    arguments = parser.parse_args()
    chain = Chain(arguments.before, arguments.layers)
    with tempfile.TemporaryDirectory() as folder:
        steps = compare(chain, Path(folder))
    names = ("plain", "plain", "compiled, --remat auto")
    rows = [
        (
            name,
            step.layers,
            f"{step.weights / 1e6:.2f}",
            f"{step.beyond / 1e6:.2f}",
            f"{step.seconds * 1e3:.0f}",
        )
        for name, step in zip(names, steps, strict=True)
    ]
    print(machine(), end="\n\n")
    print(markdown(("", "layers", "weights, MB", "beyond them, MB", "ms a step"), rows))


if __name__ == "__main__":
    main()
