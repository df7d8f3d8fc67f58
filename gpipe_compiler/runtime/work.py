"""What the command does with a pipeline: train it, run it, time it."""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch

from .comparison import flat_tensors
from .data import example_call, named_input
from .errors import PipelineError, UsageError
from .hooks import UserHooks
from .inputs import batch_of, bind
from .pipeline import Pipeline
from .weights import Weights, load_file, save_file, save_weights
from .wiring import inputs_for, most_work


class OptimizerKind(Enum):
    """The optimizers of the command, by the name a user types."""

    SGD = "sgd"
    MOMENTUM = "momentum"
    ADAM = "adam"
    ADAMW = "adamw"


DEFAULT_RATES: Mapping[OptimizerKind, float] = {
    OptimizerKind.SGD: 0.01,
    OptimizerKind.MOMENTUM: 0.01,
    OptimizerKind.ADAM: 1e-3,
    OptimizerKind.ADAMW: 1e-3,
}

WARM_UP = 3


@dataclass(frozen=True, slots=True)
class Options:
    """The options of the command that concern its work.

    Attributes:
        optimizer: None for the user's own, or plain SGD where there is none.
        samples: the batch size of the example data; None for that it was compiled with.
    """

    steps: int
    rate: float | None
    optimizer: OptimizerKind | None
    samples: int | None
    load: Path | None
    save: Path | None
    input: Path | None
    output: Path | None


def load_weights(pipe: Pipeline, path: Path) -> None:
    """Take over weights that `--save` has written: a folder with an index, or one file."""
    if path.is_dir():
        weights = Weights.open(path)
        pipe.load_state_dict(weights.load(weights.files, torch.device("cpu")))
    else:
        pipe.load_state_dict(load_file(path))


def train(pipe: Pipeline, directory: Path, hooks: UserHooks, options: Options) -> None:
    """Train for some steps on the user's data, or else on the example batch over and over."""
    pipe.train()
    optimizer = _optimizer(pipe, hooks, options)
    batches = _batches(pipe, directory, hooks, options)
    progress = _Progress(options.steps, quiet=pipe.rank != 0)
    for step, (inputs, target, samples) in zip(range(1, options.steps + 1), batches, strict=False):
        pipe.zero_grad()
        loss = pipe.step(inputs, target)
        optimizer.step()
        progress.tell(step, float(loss), samples)
    if options.save is not None:
        save(pipe, options.save)


def save(pipe: Pipeline, path: Path) -> None:
    """Write the weights under the model's names: one file, or a folder with an index."""
    state = pipe.gather_state_dict()
    if pipe.rank != 0:
        return
    if path.suffix == ".safetensors":
        save_file(state, path)
    else:
        save_weights(state, path)
    print(f"weights saved to {path}")


def infer(pipe: Pipeline, directory: Path, options: Options) -> None:
    """Run the model on the tensors of a file, or else on the example."""
    pipe.eval()
    inputs: object = None
    if pipe.rank == 0:
        inputs = _inputs(pipe, directory, options)[0]
    outputs = flat_tensors(pipe(inputs))
    if pipe.rank != 0:
        return
    for name, tensor in outputs.items():
        print(f"{name}: {'x'.join(map(str, tensor.shape)) or 'scalar'} {_dtype(tensor)}")
    if options.output is not None:
        save_file(outputs, options.output)
        print(f"outputs saved to {options.output}")


def bench(pipe: Pipeline, directory: Path, options: Options) -> None:
    """Time steps (or inference, where there is no loss) on the example batch."""
    inputs, target = _inputs(pipe, directory, options) if pipe.rank == 0 else (None, None)
    samples = _samples(pipe, inputs, target) if pipe.rank == 0 else 0

    def once() -> None:
        if pipe.spec.loss is None:
            pipe(inputs)
        else:
            pipe.zero_grad()
            pipe.step(inputs, target).item()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    seconds = []
    for _ in range(WARM_UP + options.steps):
        start = time.perf_counter()
        once()
        seconds.append(time.perf_counter() - start)
    if pipe.rank != 0:
        return
    measured = seconds[WARM_UP:]
    median = statistics.median(measured)
    what = "inference" if pipe.spec.loss is None else "step"
    print(
        f"{what}: median {_time(median)} of {len(measured)}, fastest {_time(min(measured))}, "
        f"{samples / median:.1f} samples/s"
    )
    predicted = _predicted(pipe, directory, samples)
    if predicted is not None:
        print(f"predicted {_time(predicted)}: {median / predicted:.2f} times that was measured")


def _inputs(pipe: Pipeline, directory: Path, options: Options) -> tuple[object, object]:
    if options.input is not None:
        return named_input(pipe.spec, options.input)
    return example_call(pipe.spec, directory, options.samples)


def _batches(
    pipe: Pipeline, directory: Path, hooks: UserHooks, options: Options
) -> Iterator[tuple[object, object, int]]:
    """Inputs, target and samples of every step; nothing but the steps on ranks other than 0."""
    if pipe.rank != 0:
        return itertools.repeat((None, None, 0))
    if hooks.train_data is not None and options.input is None:
        return _dividing(pipe, hooks.batches())
    inputs, target = _inputs(pipe, directory, options)
    return itertools.repeat((inputs, target, _samples(pipe, inputs, target)))


def _dividing(
    pipe: Pipeline, batches: Iterable[tuple[object, object]]
) -> Iterator[tuple[object, object, int]]:
    """The batches that divide into micro-batches: the last one of a pass may be short."""
    skipped = 0
    for inputs, target in batches:
        samples = _samples(pipe, inputs, target)
        if samples % pipe.microbatches == 0:
            skipped = 0
            yield inputs, target, samples
            continue
        skipped += 1
        if skipped == 1:
            print(
                f"a batch of {samples} does not divide into {pipe.microbatches} micro-batches; "
                "it is left out",
                file=sys.stderr,
            )
        elif skipped > 2:
            raise UsageError(
                f"batches of {samples} do not divide into {pipe.microbatches} micro-batches",
                hint="choose --microbatches that divide the batch",
            )


def _samples(pipe: Pipeline, inputs: object, target: object) -> int:
    needed = inputs_for(pipe.spec, most_work(pipe.spec))
    batch = batch_of(bind(inputs, target, pipe.spec, needed), pipe.spec)
    return pipe.microbatches * pipe.spec.microbatch_size if batch is None else batch


def _optimizer(pipe: Pipeline, hooks: UserHooks, options: Options) -> torch.optim.Optimizer:
    parameters = [parameter for parameter in pipe.parameters() if parameter.requires_grad]
    if hooks.make_optimizer is not None and options.optimizer is None:
        if options.rate is not None:
            raise UsageError(
                f"make_optimizer() of {hooks.name} sets the learning rate",
                hint="name an --optimizer to use --lr",
            )
        try:
            return hooks.make_optimizer(parameters)
        except Exception as error:  # whatever the user's code raises
            raise PipelineError(
                f"make_optimizer() of {hooks.name} failed: {type(error).__name__}: {error}"
            ) from error
    kind = options.optimizer or OptimizerKind.SGD
    rate = DEFAULT_RATES[kind] if options.rate is None else options.rate
    makers: dict[OptimizerKind, Callable[[], torch.optim.Optimizer]] = {
        OptimizerKind.SGD: lambda: torch.optim.SGD(parameters, lr=rate),
        OptimizerKind.MOMENTUM: lambda: torch.optim.SGD(parameters, lr=rate, momentum=0.9),
        OptimizerKind.ADAM: lambda: torch.optim.Adam(parameters, lr=rate),
        OptimizerKind.ADAMW: lambda: torch.optim.AdamW(parameters, lr=rate),
    }
    return makers[kind]()


def _predicted(pipe: Pipeline, directory: Path, samples: int) -> float | None:
    """The plan's prediction, where this run is the one that was planned."""
    planned = pipe.microbatches == pipe.spec.microbatches and pipe.schedule == pipe.spec.schedule
    if not planned or samples != pipe.microbatches * pipe.spec.microbatch_size:
        return None
    try:
        plan = json.loads((directory / "plan.json").read_text(encoding="utf-8"))
        return float(plan["prediction"]["step_s"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # a package without its plan still runs


class _Progress:
    """One line that is written over on a terminal; elsewhere a line for every tenth."""

    def __init__(self, steps: int, *, quiet: bool) -> None:
        self.steps = steps
        self.quiet = quiet
        self.terminal = sys.stdout.isatty()
        self.every = 1 if self.terminal else max(1, steps // 10)
        self.start = time.perf_counter()
        self.samples = 0

    def tell(self, step: int, loss: float, samples: int) -> None:
        if self.quiet:
            return
        now = time.perf_counter()
        self.samples += samples
        if step != 1 and step != self.steps and step % self.every:
            return
        rate = self.samples / (now - self.start)
        line = f"step {step}/{self.steps}  loss {loss:.6g}  {rate:.1f} samples/s"
        last = "\n" if step == self.steps or not self.terminal else ""
        print(f"\r{line}\033[K" if self.terminal else line, end=last, flush=True)
        if step == 1:
            # The first step warms up, so it is left out of the rate.
            self.start, self.samples = time.perf_counter(), 0


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
