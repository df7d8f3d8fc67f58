"""Micro-batches that flow through the stages in this process, a thread for each stage."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeAlias

from ...runtime.errors import PipelineError, UsageError
from .spec import OnnxPipelineSpec
from .stage import OnnxStage, Values

AHEAD = 2
"""Micro-batches that may wait for a stage: enough to keep it busy, without filling the memory."""


class StoppedError(PipelineError):
    """Nothing of the call is wanted any more."""


@dataclass(eq=False)
class Microbatch:
    """A micro-batch on its way, with the values that later stages take.

    Attributes:
        number: in its call.
        stopped: set where nothing of its call is wanted any more.
    """

    number: int
    values: Values
    stopped: threading.Event
    outputs: Values = field(default_factory=dict)
    done: Future[Values] = field(default_factory=Future)


_Queue: TypeAlias = "queue.Queue[Microbatch | None]"
_Finished: TypeAlias = "queue.SimpleQueue[Callable[[], None] | None]"


class Flow:
    """The stages, each in a thread that ends when nobody holds the flow.

    Values are handed over without a copy. Nobody waits for a later stage but to hand on, so it
    cannot hang.
    """

    def __init__(self, spec: OnnxPipelineSpec, stages: Sequence[OnnxStage]) -> None:
        self._outputs = frozenset(output.name for output in spec.outputs)
        self._queues: list[_Queue] = [queue.Queue(AHEAD) for _ in stages]
        self._finished: _Finished = queue.SimpleQueue()
        self._sending = threading.Lock()
        devices = [threading.Lock() for _ in spec.devices]
        last = last_uses(spec, range(len(stages)))
        for index, stage in enumerate(stages):
            own = self._queues[index : index + 2]
            lock = devices[spec.placement[index]]
            # None of these hold the flow itself, or it would never be let go.
            arguments = (stage, lock, own, self._finished, self._outputs, last)
            threading.Thread(
                target=_work, args=arguments, name=f"stage {index}", daemon=True
            ).start()
        threading.Thread(
            target=_finish, args=(self._finished,), name="finished calls", daemon=True
        ).start()
        self._end = weakref.finalize(self, self._queues[0].put, None)
        self._end.atexit = False  # the threads end with the process

    def close(self) -> None:
        """Takes nothing more; what is on its way goes on to its end."""
        with self._sending:  # behind the None nobody would take anything
            self._end()

    def finish(self, work: Callable[[], None]) -> None:
        """Does something in a thread of its own, in which no stage runs that it might wait for."""
        self._finished.put(work)

    def submit(self, number: int, values: Values, stopped: threading.Event) -> Future[Values]:
        """The outputs of a micro-batch, once they are there; waits until there is room for it.

        The future raises StageError where a stage fails, and StoppedError where the call is
        stopped before.

        Raises:
            UsageError: when it is closed.
        """
        outputs = {name: value for name, value in values.items() if name in self._outputs}
        sent = Microbatch(number, dict(values), stopped, outputs)
        with self._sending:
            if not self._end.alive:
                raise UsageError("the pipeline is closed")
            self._queues[0].put(sent)
        return sent.done


def _finish(finished: _Finished) -> None:
    while (work := finished.get()) is not None:
        work()
        del work


def last_uses(spec: OnnxPipelineSpec, stages: Iterable[int]) -> Mapping[str, int]:
    """By value, the last of some stages that takes it."""
    return {name: index for index in sorted(stages) for name in spec.stages[index].inputs}


def _work(
    stage: OnnxStage,
    device: threading.Lock,
    queues: Sequence[_Queue],
    finished: _Finished,
    outputs: frozenset[str],
    last: Mapping[str, int],
) -> None:
    """Runs a stage on what comes, and hands it on, until None comes."""
    while (given := queues[0].get()) is not None:
        if given.stopped.is_set():
            given.done.set_exception(StoppedError("another micro-batch has failed"))
            continue
        try:
            with device:
                made = stage.run(given.number, given.values)
        except BaseException as error:  # noqa: BLE001  # raised where the future is asked
            given.stopped.set()
            given.done.set_exception(error)
            continue
        given.outputs.update((name, value) for name, value in made.items() if name in outputs)
        given.values.update(made)
        for name in [name for name in given.values if last.get(name, -1) <= stage.index]:
            del given.values[name]
        if len(queues) > 1:
            queues[1].put(given)
        else:
            given.done.set_result(given.outputs)
        del given, made  # or they would be held until the next one comes
    (queues[1] if len(queues) > 1 else finished).put(None)
