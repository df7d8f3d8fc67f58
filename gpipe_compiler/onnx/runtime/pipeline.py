"""The pipeline as its user sees it: arrays in, arrays out; and calls that follow one another."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from ...runtime.errors import UsageError
from ...runtime.limits import refuse_alone, refuse_untried
from .arrays import array_of, random_arrays, value_of
from .batches import batch_size, join, sizes_of, split
from .devices import parse_devices
from .distributed import ProcessLinks, World, gathered, order_for, rank_here, run_device
from .flow import AHEAD, Flow, StoppedError
from .spec import OnnxPipelineSpec
from .stage import OnnxStage, SessionChoice, Values

Outputs = dict[str, Any]
"""Arrays by name; sequences and maps are lists and dictionaries of Python."""


class OnnxPipeline:
    """The stages: in this process, a thread for each; under torchrun, a process for each device.

        pipe = Pipeline()
        outputs = pipe({"images": images})        # numpy arrays by the model's own names
        for outputs in pipe.stream(requests):     # one after another through the stages
            ...

    Under torchrun every rank makes one and calls it alike; all get the outputs.

    Args:
        spec: of the package.
        folder: of the package.
        devices: `cpu,cuda:0`: one for each device of the pipeline, or one for all; as planned
            unless given.
        threads: of each stage's ops, for all or one by one; one unless given, as the stages share
            the processor.
        custom_ops: libraries of custom operators that the model needs.
        configure: called with the number of each stage and the options of its session, to change
            them: affinities, profiling.

    Raises:
        UsageError: for devices and libraries that are not there.
        StageError: when ONNX Runtime refuses a stage.
    """

    def __init__(
        self,
        spec: OnnxPipelineSpec,
        folder: Path,
        *,
        devices: str | Sequence[str] | None = None,
        threads: int | Sequence[int] = 1,
        custom_ops: Sequence[Path] = (),
        configure: Callable[[int, onnxruntime.SessionOptions], object] | None = None,
    ) -> None:
        missing = [str(library) for library in custom_ops if not library.is_file()]
        if missing:
            raise UsageError(f"there is no library {', '.join(missing)}")
        count = len(spec.stages)
        each = [threads] * count if isinstance(threads, int) else list(threads)
        if len(each) != count:
            raise UsageError(f"threads are given for {len(each)} stages, but there are {count}")
        self.spec = spec
        devices = spec.devices if devices is None else devices
        text = devices if isinstance(devices, str) else ",".join(devices)
        self.devices = parse_devices(text, len(spec.devices))
        self._world = World(len(spec.devices)) if rank_here() is not None else None
        self._stages: dict[int, OnnxStage] = {}
        for index, stage in enumerate(spec.stages):
            device = spec.placement[index]
            if self._world is None or device == self._world.rank:
                choice = SessionChoice(self.devices[device], each[index], tuple(custom_ops))
                self._stages[index] = OnnxStage(index, stage, folder, choice, configure)
        stages = list(self._stages.values())
        self._flow = Flow(spec, stages) if self._world is None else None

    @property
    def rank(self) -> int:
        """This process's number; 0 where there is but one."""
        return 0 if self._world is None else self._world.rank

    def close(self) -> None:
        """Leave the other ranks, or let the threads end. Not needed where there are no ranks."""
        if self._world is not None:
            self._world.close()
        if self._flow is not None:
            self._flow.close()
            self._flow = None

    def eval(self) -> OnnxPipeline:
        """The pipeline, which only infers; as a package of torch stages has it."""
        return self

    def __enter__(self) -> OnnxPipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(
        self, inputs: Mapping[str, np.ndarray], *, microbatches: int | None = None
    ) -> Outputs:
        """The outputs of a mini-batch, by name.

        Args:
            microbatches: micro-batches of the planned size unless given.

        Raises:
            UsageError: for inputs that do not fit.
            StageError: when a stage fails.
        """
        given = self._parts(inputs, microbatches)
        if self._world is not None:
            links = ProcessLinks(self.spec, self._world)
            order = order_for(self.spec, self.rank, len(given))
            mine = run_device(self.spec, self._stages, order, given, links)
            return self._joined(gathered(self.spec, self._world, mine))
        stopped = threading.Event()
        parts = self._send(given, stopped)
        try:
            return self._outputs(parts)
        except BaseException:  # Ctrl-C: what has not begun is not wanted
            stopped.set()
            raise

    def submit(
        self, inputs: Mapping[str, np.ndarray], *, microbatches: int | None = None
    ) -> Future[Outputs]:
        """The same, later: waits only until the first stage has room for it.

        Calls from several threads follow one another. The arrays are the caller's again at once.
        What is raised later, `result()` raises; what `cancel()` ends is not run any further. What
        is to be done with a result may call the pipeline again, but not wait for a future of it.

        Raises:
            UsageError: for inputs that do not fit, and under torchrun.
        """
        own = {n: a.copy() if isinstance(a, np.ndarray) else a for n, a in inputs.items()}
        given, flow = self._parts(own, microbatches), self._running()
        done, stopped = Future[Outputs](), threading.Event()
        done.add_done_callback(lambda it: stopped.set() if it.cancelled() else None)
        left, lock = [len(given)], threading.Lock()
        parts: list[Future[Values]] = []

        def finish() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                found = self._outputs(parts)
            except BaseException as error:  # noqa: BLE001  # raised where the future is asked
                done.set_exception(error)
            else:
                done.set_result(found)

        def count(_: object) -> None:
            with lock:
                left[0] -= 1
                if left[0]:
                    return
            flow.finish(finish)

        parts += self._send(given, stopped)
        for part in parts:
            part.add_done_callback(count)
        return done

    def stream(
        self, requests: Iterable[Mapping[str, np.ndarray]], *, microbatches: int | None = None
    ) -> Iterator[Outputs]:
        """The outputs of one call after another, in order; the stages work on several at once.

        Requests are asked for as the stages take them and the outputs are taken.

        Raises:
            UsageError, StageError: as for a call, at its turn.
        """
        waiting: deque[Future[Outputs]] = deque()
        for inputs in requests:
            try:
                waiting.append(self.submit(inputs, microbatches=microbatches))
            except UsageError as error:
                waiting.append(failed := Future[Outputs]())
                failed.set_exception(error)
            if len(waiting) > AHEAD * len(self.spec.stages):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def session(self, state: Mapping[str, np.ndarray] | None = None) -> Session:
        """Calls that hand state from one to the next; see `Session`."""
        return Session(self, state or {})

    def one(self, values: Values) -> Values:
        """The outputs of one micro-batch, as ONNX Runtime has them; for a session."""
        (part,) = self._send([values], threading.Event())
        return part.result()

    def samples(self, inputs: Mapping[str, np.ndarray]) -> int:
        """How many samples a call has.

        Raises:
            UsageError: for inputs that do not fit.
        """
        return batch_size(self.spec, inputs)

    def warm_up(self, calls: int = 1) -> None:
        """Runs random numbers, so that ONNX Runtime has its memory before the first request."""
        samples = self.spec.microbatches * self.spec.microbatch_size
        for seed in range(calls):
            self(random_arrays(self.spec, samples, seed))

    def _parts(self, inputs: Mapping[str, np.ndarray], microbatches: int | None) -> list[Values]:
        """The inputs of each micro-batch."""
        sizes = sizes_of(self.spec, self.samples(inputs), microbatches)
        refuse_alone(self.spec.name, self.spec.alone, sizes)
        refuse_untried(self.spec.name, self.spec.limits, sum(sizes), len(sizes))
        return split(self.spec, inputs, sizes)

    def _send(self, given: Sequence[Values], stopped: threading.Event) -> list[Future[Values]]:
        flow = self._running()
        return [flow.submit(number, part, stopped) for number, part in enumerate(given)]

    def _running(self) -> Flow:
        flow = self._flow
        if flow is None:
            why = "is closed" if self._world is None else "of several processes takes calls alone"
            raise UsageError(f"the pipeline {why}")
        return flow

    def _outputs(self, parts: Sequence[Future[Values]]) -> Outputs:
        """What the micro-batches come to; waits for all of them, and raises what one has raised."""
        errors = [error for part in parts if (error := part.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, StoppedError)):
            raise error
        results = (part.result() for part in parts)
        return self._joined([{n: array_of(v) for n, v in found.items()} for found in results])

    def _joined(self, results: Sequence[Outputs]) -> Outputs:
        return join({output.name: output.batch_dim for output in self.spec.outputs}, results)


class Session:
    """One conversation, or one stream of sound: what a call gives as state, the next one takes.

        talk = pipe.session({"past": zeros})
        for tokens in ...:
            outputs = talk({"tokens": tokens})   # without the state

    State stays where ONNX Runtime has made it, and is not copied. Each call is one micro-batch and
    waits for the one before; calls of several sessions follow one another through the stages.

    Args:
        state: what the first call takes. A later call that is given some takes that in place of
            what is held.

    Raises:
        UsageError: for state that the model does not have, or was not compiled with.
    """

    def __init__(self, pipe: OnnxPipeline, state: Mapping[str, np.ndarray]) -> None:
        self._pipe = pipe
        self._next = dict(pipe.spec.state)
        if not self._next:
            raise UsageError(f"{pipe.spec.name} has no state: compile it with --state PAST=PRESENT")
        unknown = sorted(state.keys() - self._next.keys())
        if unknown:
            raise UsageError(f"{', '.join(unknown)} is no state: that is {', '.join(self._next)}")
        self._held: Values = {}
        self._first = dict(state)
        self._lock = threading.Lock()

    def __call__(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The outputs of a call but for the state.

        Raises:
            UsageError: for inputs that do not fit, and state that the first call misses.
            StageError: when a stage fails; the state is then what it was.
        """
        spec = self._pipe.spec
        with self._lock:
            arrays = {**self._first, **inputs}
            batch_size(spec, arrays, self._held)
            kinds = {source.name: source.dtype for source in spec.inputs}
            given = {n: value_of(np.asarray(a, order="C"), kinds[n]) for n, a in arrays.items()}
            found = self._pipe.one({**self._held, **given})
            self._held = {past: found[present] for past, present in self._next.items()}
            self._first = {}
        kept = self._next.values()
        return {name: array_of(value) for name, value in found.items() if name not in kept}
