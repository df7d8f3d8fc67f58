"""Whether the pipeline is worth it: against the model in one session with as many threads."""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...runtime.errors import PipelineError
from .arrays import random_arrays
from .pipeline import OnnxPipeline
from .stage import Whole, pinned

WARM_UP = 3

SIZES = (1, 2, 4, 8, 16, 32)
"""Samples of the requests that a server sees."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Of calls of one size.

    Attributes:
        latency_s: of a call by itself, in the median.
        fastest_s: of the same.
        throughput: samples a second, where calls follow one another.
    """

    latency_s: float
    fastest_s: float
    throughput: float


def pipeline_speed(
    pipe: OnnxPipeline,
    inputs: Mapping[str, np.ndarray],
    steps: int,
    microbatches: int | None = None,
) -> Speed:
    """That of calls, and of a stream of them."""
    samples = pipe.samples(inputs)
    seconds = _seconds(lambda: pipe(inputs, microbatches=microbatches), steps)
    start = time.perf_counter()
    for _ in pipe.stream((inputs for _ in range(steps)), microbatches=microbatches):
        pass
    streamed = time.perf_counter() - start
    return Speed(statistics.median(seconds), min(seconds), samples * steps / streamed)


def _seconds(call: Callable[[], object], steps: int) -> list[float]:
    """Of each call, after some that do not count."""
    found = []
    for _ in range(WARM_UP + steps):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return found[WARM_UP:]


def compared(
    pipe: OnnxPipeline,
    model: Path,
    threads: int,
    cpus: frozenset[int],
    steps: int,
    microbatches: int | None,
    custom_ops: tuple[Path, ...],
) -> Iterator[str]:
    """A line for each size of requests that the model takes, and one that says which is better.

    Args:
        model: the whole model.
        threads: of all stages together, which the session has.
        cpus: that it runs on; empty for any.
    """
    whole = Whole(model, threads, custom_ops, cpus=cpus)
    yield f"one session of {threads} threads, {_place(cpus)}, beside the pipeline:"
    yield f"{'samples':>9}{'latency, ms':>22}{'samples/s':>22}"
    yield f"{'':>9}{'session':>11}{'pipeline':>11}{'session':>11}{'pipeline':>11}"
    quicker, more = [], []
    for samples in _sizes(pipe):
        inputs = random_arrays(pipe.spec, samples)
        try:
            mine = pipeline_speed(pipe, inputs, steps, microbatches and min(microbatches, samples))
        except PipelineError as error:
            yield f"{samples:>9}  {error.problem}"
            continue
        with pinned(cpus):  # as this thread computes, too
            seconds = _seconds(functools.partial(whole, inputs), steps)
        one = statistics.median(seconds)
        throughput = samples * steps / sum(seconds)
        yield (
            f"{samples:>9}{one * 1e3:>11.3g}{mine.latency_s * 1e3:>11.3g}"
            f"{throughput:>11.4g}{mine.throughput:>11.4g}"
        )
        quicker.append(one / mine.latency_s)
        more.append(mine.throughput / throughput)
    if more:
        yield (
            f"the pipeline answers {_times(quicker)} as quickly, and takes {_times(more)} as many "
            "samples a second"
        )
        if max(more) < 1 and max(quicker) < 1:
            yield "so it is worth it only where the model does not fit one device"


def _times(ratios: list[float]) -> str:
    low, high = min(ratios), max(ratios)
    return f"{low:.2f} to {high:.2f} times" if high - low >= _TOLD else f"{high:.2f} times"


_TOLD = 0.01
"""What two decimals show."""


def _place(cpus: frozenset[int]) -> str:
    if not cpus:
        return "on any processor"
    return f"on processor{'s' if len(cpus) > 1 else ''} {', '.join(map(str, sorted(cpus)))}"


def _sizes(pipe: OnnxPipeline) -> tuple[int, ...]:
    """Those of requests that the model takes."""
    spec = pipe.spec
    if spec.fixed or all(known.batch_dim is None for known in spec.inputs):
        return (spec.microbatch_size,)
    return SIZES


def spread(stages: int) -> tuple[frozenset[int], ...]:
    """As many processors of this process for each stage; none where there are fewer."""
    here = sorted(os.sched_getaffinity(0))
    each = len(here) // stages
    if not each:
        return ()
    return tuple(frozenset(here[n * each : (n + 1) * each]) for n in range(stages))
