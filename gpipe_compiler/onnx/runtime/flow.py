"""Micro-batches that flow through the stages: a thread for each, and links between processes.

They follow one another in one order through all stages, from rank 0 and back to it. Nobody waits
for a later stage but to hand on, so it cannot hang.
"""

from __future__ import annotations

import copy
import itertools
import queue
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeAlias

from ...runtime.errors import PipelineError, UsageError
from .arrays import array_of
from .distributed import Link, World
from .spec import OnnxPipelineSpec
from .stage import OnnxStage, Turn, Values
from .travelling import Microbatch, StoppedError

AHEAD = 2
"""Micro-batches that may wait for a stage: enough to keep it busy, without filling the memory."""

_ALIVE_S = 60.0
"""How often ranks that have nothing to do hear of rank 0: well within the timeout of messages."""

_Queue: TypeAlias = "queue.Queue[Microbatch | None]"
_Finished: TypeAlias = "queue.SimpleQueue[Callable[[], None] | None]"


@dataclass(eq=False)
class _Sent:
    """What rank 0 waits for.

    Attributes:
        left: set when nothing comes back any more.
        error: why; None where the pipeline was closed.
    """

    waiting: dict[int, Future[Values]] = field(default_factory=dict)
    left: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    finished: _Finished = field(default_factory=queue.SimpleQueue)

    def arrived(self, given: Microbatch | None) -> None:
        """Takes what the last stage has handed on; None ends it."""
        if given is None:
            self.end(None)
        elif (done := self.waiting.pop(given.key, None)) is not None:
            if given.error is None:
                done.set_result(given.outputs)
            else:
                done.set_exception(given.error)

    def end(self, error: BaseException | None) -> None:
        """Nothing comes back any more: what is waited for raises the error."""
        self.error = self.error or error
        self.left.set()
        while self.waiting:
            _, done = self.waiting.popitem()
            done.set_exception(self.error or UsageError("the pipeline is closed"))
        self.finished.put(None)


class Flow:
    """The stages of this process, each in a thread that ends when nobody holds the flow.

    Within a process values are handed over without a copy.

    Args:
        stages: those of this process, by number.
        world: the processes; None where there is but this one.
    """

    def __init__(
        self, spec: OnnxPipelineSpec, stages: Mapping[int, OnnxStage], world: World | None
    ) -> None:
        self._outputs = frozenset(output.name for output in spec.outputs)
        self._sending = threading.Lock()
        self._keys = itertools.count()
        self._ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._sent = sent = _Sent()
        rank = 0 if world is None else world.rank
        count = len(spec.stages)
        places = [0, *(spec.placement if world is not None else [0] * count), 0]
        queues: dict[int, _Queue] = {}
        tasks: list[tuple[str, Callable[..., None], tuple[object, ...]]] = []
        for hop, (source, target) in enumerate(itertools.pairwise(places)):
            if rank in (source, target) and (hop < count or source != target):
                queues[hop] = queue.Queue(AHEAD)
            if world is not None and source != target:
                link = Link(world, source, target, hop)
                if rank == source:
                    tasks.append((f"to rank {target}", _send, (link, queues[hop], sent)))
                elif rank == target:
                    put = queues[hop].put if hop < count else sent.arrived
                    tasks.append((f"from rank {source}", _receive, (link, put, sent)))
        devices = [threading.Lock() for _ in spec.devices]
        last = last_uses(spec)
        for index, stage in stages.items():
            hand_on = queues[index + 1].put if index + 1 in queues else sent.arrived
            lock = devices[spec.placement[index]]
            # None of these hold the flow itself, or it would never be let go.
            arguments = (stage, lock, queues[index], hand_on, self._outputs, last)
            tasks.append((f"stage {index}", _work, arguments))
        if rank == 0:
            tasks.append(("finished calls", _finish, (sent.finished,)))
        self._threads = [
            threading.Thread(target=task, args=arguments, name=name, daemon=True)
            for name, task, arguments in tasks
        ]
        for thread in self._threads:
            thread.start()
        self._head = queues.get(0)
        if rank == 0 and self._head is not None:
            self._end = weakref.finalize(self, self._head.put, None)
            self._end.atexit = False  # the threads end with the process
            if world is not None:
                threading.Thread(target=_stay, args=(weakref.ref(self), sent), daemon=True).start()

    def close(self) -> None:
        """Takes nothing more; what is on its way goes on to its end."""
        with self._sending:  # behind the None nobody would take anything
            self._end()

    def wait(self) -> None:
        """Waits until nothing is on its way any more, and the threads are done.

        Raises:
            PipelineError: where another rank is gone.
        """
        for thread in set(self._threads) - {threading.current_thread()}:
            while thread.is_alive() and self._sent.error is None:
                thread.join(_LOOK_S)
        if self._sent.error is not None:
            raise self._sent.error

    @property
    def broken(self) -> bool:
        """Whether another rank is gone."""
        return self._sent.error is not None

    def finish(self, work: Callable[[], None]) -> None:
        """Does something in a thread of its own, in which no stage runs that it might wait for."""
        self._sent.finished.put(work)

    def submit(
        self,
        number: int,
        values: Mapping[str, object],
        stopped: threading.Event,
        turn: Turn | None = None,
    ) -> Future[Values]:
        """The outputs of a micro-batch, once they are there; waits until there is room for it.

        The future raises StageError where a stage fails, StoppedError where the call is stopped
        before, and PipelineError where a rank is gone.

        Args:
            turn: of the session that the call is of.

        Raises:
            UsageError: when it is closed.
            PipelineError: when a rank is gone.
        """
        # Copies, as an input that is handed back outlives the value that looks into it.
        outputs = {n: copy.copy(array_of(v)) for n, v in values.items() if n in self._outputs}
        done = Future[Values]()
        self._put(Microbatch(number, dict(values), outputs, turn, stopped=stopped), done)
        return done

    def forget(self, session: int) -> None:
        """What stages hold of a session is let go of with the next micro-batch. Does not wait."""
        self._ended.put(session)

    def _put(self, given: Microbatch, done: Future[Values] | None) -> None:
        with self._sending:
            if self._sent.error is not None:
                raise self._sent.error
            if self._head is None or not self._end.alive or self._sent.left.is_set():
                raise UsageError("the pipeline is closed")
            given.key = next(self._keys)
            given.ended = tuple(self._ended.get() for _ in range(self._ended.qsize()))
            if done is not None:
                self._sent.waiting[given.key] = done
                if self._sent.left.is_set():  # since it was looked at
                    self._sent.end(None)
            while True:
                try:
                    self._head.put(given, timeout=_LOOK_S)
                    return
                except queue.Full:
                    if self._sent.error is not None:
                        raise self._sent.error from None

    def stay(self) -> None:
        """Lets all ranks know that this one is there."""
        self._put(Microbatch(0, {}, {}, idle=True), None)


_LOOK_S = 0.1
"""How long is waited before looking whether a rank is gone."""


def _stay(flow: weakref.ref[Flow], sent: _Sent) -> None:
    while not sent.left.wait(_ALIVE_S):
        found = flow()
        if found is None:
            return
        try:
            found.stay()
        except PipelineError:
            return
        del found


def _finish(finished: _Finished) -> None:
    while (work := finished.get()) is not None:
        work()
        del work


def _send(link: Link, waiting: _Queue, sent: _Sent) -> None:
    """Hands what a queue has to another rank, until None comes."""
    try:
        while (given := waiting.get()) is not None:
            link.send(given)
            del given
        link.send(None)
    except BaseException as error:  # noqa: BLE001  # raised where somebody waits
        sent.end(error)


def _receive(link: Link, put: Callable[[Microbatch | None], None], sent: _Sent) -> None:
    """Takes what another rank hands on, until None comes."""
    try:
        while (given := link.receive()) is not None:
            put(given)
            del given
    except BaseException as error:  # noqa: BLE001  # as above
        sent.end(error)  # and no None follows, which would say that all went well
    else:
        put(None)


def last_uses(spec: OnnxPipelineSpec) -> Mapping[str, int]:
    """By value, the last stage that takes it."""
    return {name: index for index, stage in enumerate(spec.stages) for name in stage.inputs}


def _work(
    stage: OnnxStage,
    device: threading.Lock,
    waiting: _Queue,
    hand_on: Callable[[Microbatch | None], None],
    outputs: frozenset[str],
    last: Mapping[str, int],
) -> None:
    """Runs a stage on what comes, and hands it on, until None comes."""
    with stage.working():
        while (given := waiting.get()) is not None:
            stage.forget(given.ended)
            if given.stopped.is_set() and given.error is None:
                given.fail(StoppedError("another micro-batch has failed"))
            if given.error is None and not given.idle:
                with device:
                    _run(stage, given, outputs, last)
            hand_on(given)
            del given  # or it would be held until the next one comes
    hand_on(None)


def _run(
    stage: OnnxStage, given: Microbatch, outputs: frozenset[str], last: Mapping[str, int]
) -> None:
    """Adds what a stage makes of a micro-batch, and lets go of what no later one takes."""
    try:
        made = stage.run(given.number, given.values, given.turn)
    except BaseException as error:  # noqa: BLE001  # raised where the future is asked
        given.stopped.set()
        given.fail(error)
        return
    own = frozenset() if given.turn is None else stage.state
    given.outputs.update((n, value) for n, value in made.items() if n in outputs and n not in own)
    given.values.update(made)
    for name in [name for name in given.values if last.get(name, -1) <= stage.index]:
        del given.values[name]
