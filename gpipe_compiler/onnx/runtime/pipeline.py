"""The pipeline as its user sees it: arrays in, arrays out; and calls that follow one another."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnxruntime

from ...runtime.errors import PipelineError, UsageError
from ...runtime.limits import refuse_alone, refuse_untried
from .arrays import array_of, random_arrays, value_of
from .batches import batch_size, join, sizes_of, split
from .devices import parse_devices
from .distributed import World, rank_here
from .flow import AHEAD, Flow
from .spec import OnnxPipelineSpec
from .stage import OnnxStage, SessionChoice, Turn, Values
from .travelling import StoppedError

_T = TypeVar("_T")

Outputs = dict[str, Any]
"""Arrays by name; sequences and maps are lists and dictionaries of Python."""


class OnnxPipeline:
    """The stages: in this process, a thread for each; under torchrun, a process for each device.

        pipe = Pipeline()
        outputs = pipe({"images": images})        # numpy arrays by the model's own names
        for outputs in pipe.stream(requests):     # one after another through the stages
            ...

    Under torchrun every rank makes one. Rank 0 calls it; the others `serve()` until it closes.

    Args:
        spec: of the package.
        folder: of the package.
        devices: `cpu,cuda:0`: one for each device of the pipeline, or one for all; as planned
            unless given.
        threads: of each stage's ops, for all or one by one; one unless given, as the stages share
            the processor.
        cpus: for each stage, the processors that its threads run on; empty for any.
        provider_options: of ONNX Runtime's providers, for all stages or one by one.
        custom_ops: libraries of custom operators that the model needs.
        configure: called with the number of each stage and the options of its session, to change
            them.

    Raises:
        UsageError: for devices, processors and libraries that are not there.
        StageError: when ONNX Runtime refuses a stage.
    """

    def __init__(
        self,
        spec: OnnxPipelineSpec,
        folder: Path,
        *,
        devices: str | Sequence[str] | None = None,
        threads: int | Sequence[int] = 1,
        cpus: Sequence[Collection[int]] = (),
        provider_options: Mapping[str, str] | Sequence[Mapping[str, str]] = (),
        custom_ops: Sequence[Path] = (),
        configure: Callable[[int, onnxruntime.SessionOptions], object] | None = None,
    ) -> None:
        missing = [str(library) for library in custom_ops if not library.is_file()]
        if missing:
            raise UsageError(f"there is no library {', '.join(missing)}")
        count = len(spec.stages)
        options = [provider_options] if isinstance(provider_options, Mapping) else provider_options
        each_threads = _each("threads", [threads] if isinstance(threads, int) else threads, count)
        each_cpus = _each("cpus", cpus or [()] * count, count)
        each_options = _each("provider_options", options or [{}], count)
        self.spec = spec
        devices = spec.devices if devices is None else devices
        text = devices if isinstance(devices, str) else ",".join(devices)
        self.devices = parse_devices(text, len(spec.devices))
        self._world = World(len(spec.devices)) if rank_here() is not None else None
        self.stages: dict[int, OnnxStage] = {}
        for index, stage in enumerate(spec.stages):
            device = spec.placement[index]
            if self._world is None or device == self._world.rank:
                choice = SessionChoice(
                    self.devices[device],
                    each_threads[index],
                    frozenset(each_cpus[index]),
                    each_options[index],
                    tuple(custom_ops),
                    configure and functools.partial(configure, index),
                )
                self.stages[index] = OnnxStage(index, stage, folder, choice, spec.state_of(index))
        self._flow: Flow | None = Flow(spec, self.stages, self._world)

    @property
    def rank(self) -> int:
        """This process's number; 0 where there is but one."""
        return 0 if self._world is None else self._world.rank

    @property
    def broken(self) -> bool:
        """Whether another rank is gone, so that no call can be answered any more."""
        return self._flow is not None and self._flow.broken

    def serve(self) -> None:
        """Runs the stages of this rank until rank 0 closes its pipeline; for the other ranks.

        Raises:
            PipelineError: when another rank is gone.
        """
        if self._flow is not None and self.rank:
            self._flow.wait()

    def close(self) -> None:
        """Takes no more calls; under torchrun, waits for those on their way and leaves the others.

        Needed on rank 0 of several, as the others wait for it.
        """
        flow, self._flow = self._flow, None
        if flow is None:
            return
        if self.rank == 0:
            flow.close()
            if self._world is None and any(stage.profiled for stage in self.stages.values()):
                flow.wait()  # until it is written
        if self._world is not None:
            with contextlib.suppress(PipelineError):  # whose calls have raised it
                if self.rank == 0:
                    flow.wait()
            self._world.close()

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
        stopped = threading.Event()
        parts = self._send(self._parts(inputs, microbatches), stopped)
        try:
            return self._outputs(parts)
        except BaseException:  # Ctrl-C: what has not begun is not wanted
            stopped.set()
            raise

    async def acall(
        self, inputs: Mapping[str, np.ndarray], *, microbatches: int | None = None
    ) -> Outputs:
        """What `submit` gives, in a program of asyncio, the rest of which runs meanwhile.

        Raises:
            UsageError, StageError: as for a call.
        """
        submit = functools.partial(self.submit, inputs, microbatches=microbatches)
        return await asyncio.wrap_future(await asyncio.to_thread(submit))

    def submit(
        self, inputs: Mapping[str, np.ndarray], *, microbatches: int | None = None
    ) -> Future[Outputs]:
        """The same, later: waits only until the first stage has room for it.

        It goes through the stages in one piece unless a number of micro-batches is given, or the
        model takes batches of one size: what keeps the stages busy are other calls. Calls from
        several threads follow one another. The arrays are the caller's again at once.
        What is raised later, `result()` raises; what `cancel()` ends is not run any further. What
        is to be done with a result may call the pipeline again, but not wait for a future of it.

        Raises:
            UsageError: for inputs that do not fit.
        """
        own = {n: a.copy() if isinstance(a, np.ndarray) else a for n, a in inputs.items()}
        if microbatches is None and not self.spec.fixed:
            microbatches = 1
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

    def one(self, values: Values, turn: Turn) -> Values:
        """The outputs of one micro-batch, as ONNX Runtime has them; for a session."""
        return self._running().submit(0, values, threading.Event(), turn).result()

    def forget(self, session: int) -> None:
        """Lets go of what the stages hold of a session, with the next call."""
        if self._flow is not None:
            self._flow.forget(session)

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
        if self._flow is None:
            raise UsageError("the pipeline is closed")
        if self.rank:
            raise UsageError(
                f"this is rank {self.rank}: rank 0 calls the pipeline",
                hint="call serve() on the other ranks: `if pipe.rank: pipe.serve()`",
            )
        return self._flow

    def _outputs(self, parts: Sequence[Future[Values]]) -> Outputs:
        """What the micro-batches come to; waits for all of them, and raises what one has raised."""
        errors = [error for part in parts if (error := part.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, StoppedError)):
            raise error
        results = (part.result() for part in parts)
        return self._joined([{n: array_of(v) for n, v in found.items()} for found in results])

    def _joined(self, results: Sequence[Outputs]) -> Outputs:
        return join({output.name: output.batch_dim for output in self.spec.outputs}, results)


def _each(what: str, given: Sequence[_T], count: int) -> Sequence[_T]:
    """One for each stage; one stands for all.

    Raises:
        UsageError: for another number of them.
    """
    if len(given) not in (1, count):
        raise UsageError(f"{what} are given for {len(given)} stages, but there are {count}")
    return given if len(given) == count else list(given) * count


def _held(thing: Any, dtype: str) -> Any:
    """What is given to the next call: a value, also where it has come as an array."""
    numeric = isinstance(thing, np.ndarray) and thing.dtype != object
    return value_of(thing, dtype) if numeric else thing


_NUMBERS = itertools.count()
"""Of sessions, so that no two of a process are alike."""


class Session:
    """One conversation, or one stream of sound: what a call gives as state, the next one takes.

        talk = pipe.session({"past": zeros})
        for tokens in ...:
            outputs = talk({"tokens": tokens})   # without the state

    A stage that takes a state and makes the next holds it, where ONNX Runtime has made it; others
    go along with the calls. Each call is one micro-batch and waits for the one before; calls of
    several sessions follow one another through the stages.

    Args:
        state: what the first call takes. A later call that is given some takes that in place of
            what is held.

    Raises:
        UsageError: for state that the model does not have, or was not compiled with.
    """

    def __init__(self, pipe: OnnxPipeline, state: Mapping[str, np.ndarray]) -> None:
        spec = pipe.spec
        self._pipe = pipe
        if not spec.state:
            raise UsageError(f"{spec.name} has no state: compile it with --state PAST=PRESENT")
        names = dict(spec.state)
        unknown = sorted(state.keys() - names.keys())
        if unknown:
            raise UsageError(f"{', '.join(unknown)} is no state: that is {', '.join(names)}")
        self._moving = {n: names[n] for n in names.keys() - spec.held_states.keys()}
        self._held: Values = {}
        self._first = dict(state)
        self._lock = threading.Lock()
        self._turn = Turn(next(_NUMBERS), 0, -1)
        self._end = weakref.finalize(self, pipe.forget, self._turn.session)
        self._end.atexit = False

    def __call__(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The outputs of a call but for the state.

        Raises:
            UsageError: for inputs that do not fit, and state that the first call misses.
            StageError: when a stage fails; the state is then what it was.
        """
        spec = self._pipe.spec
        with self._lock:
            turn, arrays = self._turn, {**self._first, **inputs}
            begun = turn.before >= 0
            batch_size(spec, arrays, dict(spec.state) if begun else ())
            kinds = {source.name: source.dtype for source in spec.inputs}
            given = {n: value_of(np.asarray(a, order="C"), kinds[n]) for n, a in arrays.items()}
            self._turn = dataclasses.replace(turn, call=turn.call + 1)
            found = self._pipe.one({**self._held, **given}, turn)
            self._held = {
                past: _held(found.pop(present), kinds[past])
                for past, present in self._moving.items()
            }
            self._turn = dataclasses.replace(self._turn, before=turn.call)
            self._first = {}
        kept = dict(spec.state).values()
        return {name: array_of(value) for name, value in found.items() if name not in kept}
