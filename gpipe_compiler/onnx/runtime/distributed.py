"""One device per process, under torchrun, on any number of hosts: runs the stages of a process on
all micro-batches, in the planned order. Torch carries the messages.

torch is needed for this alone. Values go through the memory of the processor and gloo.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeAlias

import numpy as np
from onnxruntime import OrtValue

from ...runtime.core.typed import from_environment
from ...runtime.errors import PipelineError, UsageError
from .arrays import array_of, foreign_name, value_of
from .flow import last_uses
from .spec import OnnxPipelineSpec
from .stage import OnnxStage, Values

TIMEOUT_S = 600.0

_HEADER_BYTES = 1024
"""Of the message that says the type and the shape of what comes next."""


def rank_here() -> int | None:
    """This process's number under torchrun; None where it was started by itself."""
    return from_environment("RANK") if "RANK" in os.environ else None


class World:
    """The processes of a run.

    Args:
        count: how many the pipeline needs.

    Raises:
        PipelineError: when another one is gone before all have found each other.
        UsageError: when torch is missing, or there are more or fewer.
    """

    def __init__(self, count: int) -> None:
        self.rank = from_environment("RANK")
        size = from_environment("WORLD_SIZE", 1)
        if size != count:
            raise UsageError(f"the pipeline needs {count} processes, torchrun started {size}")
        try:
            import torch.distributed as dist
        except ImportError as error:
            raise UsageError(
                "torchrun starts this package where torch is installed; it is not here"
            ) from error
        with _told():
            dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
        self._dist = dist

    def broadcast(self, thing: Any, source: int) -> Any:
        """The same thing on all ranks."""
        held = [thing]
        with _told(source):
            self._dist.broadcast_object_list(held, src=source)
        return held[0]

    def send(self, array: np.ndarray, target: int, tag: int) -> Any:
        """Sends an array; the answer is to be waited for."""
        import torch

        with _told(target):
            return self._dist.isend(torch.from_numpy(array), target, tag=tag)

    def receive(self, array: np.ndarray, source: int, tag: int) -> None:
        """Fills an array with what comes."""
        import torch

        with _told(source):
            self._dist.recv(torch.from_numpy(array), source, tag=tag)

    def close(self) -> None:
        """Leave; the others need not wait."""
        self._dist.destroy_process_group()


@contextmanager
def _told(rank: int | None = None) -> Iterator[None]:
    """Says of a message that fails with whom it was exchanged."""
    try:
        yield
    except RuntimeError as error:
        who = "another rank" if rank is None else f"rank {rank}"
        raise PipelineError(f"{who} cannot be reached any more: {error}") from error


class ProcessLinks:
    """What ranks hand to one another. A value goes as its type and shape, then its bytes."""

    def __init__(self, spec: OnnxPipelineSpec, world: World) -> None:
        self._world = world
        self._placement = spec.placement
        self._number = {name: number for number, name in enumerate(spec.crossings)}
        self._pending: list[tuple[Any, np.ndarray]] = []

    def take(self, name: str, source: int) -> OrtValue:
        """A value from the rank of a stage; waits for it."""
        rank, tag = self._placement[source], 2 * self._number[name]
        header = np.zeros(_HEADER_BYTES, dtype=np.uint8)
        self._world.receive(header, rank, tag)
        dtype, shape, foreign = pickle.loads(header.tobytes())  # from a rank of the same run
        array = np.empty(shape, dtype=np.dtype(dtype))
        self._world.receive(array.reshape(-1).view(np.uint8), rank, tag + 1)
        return value_of(array, foreign)

    def send(self, name: str, value: OrtValue, targets: Sequence[int]) -> None:
        """Hand a value to the ranks of these stages; gloo holds back who is far ahead."""
        if not targets:
            return
        array = np.ascontiguousarray(array_of(value)).reshape(value.shape())
        packed = pickle.dumps((array.dtype.str, array.shape, foreign_name(value)))
        header = np.frombuffer(packed.ljust(_HEADER_BYTES), dtype=np.uint8).copy()
        tag, parts = 2 * self._number[name], (header, array.reshape(-1).view(np.uint8))
        for rank in sorted({self._placement[target] for target in targets}):
            for offset, part in enumerate(parts):
                self._pending.append((self._world.send(part, rank, tag + offset), part))
        self._pending = [item for item in self._pending if not item[0].is_completed()]

    def flush(self) -> None:
        """Wait until all that was sent has gone."""
        for work, _ in self._pending:
            with _told():
                work.wait()
        self._pending.clear()


def gathered(
    spec: OnnxPipelineSpec, world: World, results: Sequence[Mapping[str, OrtValue]]
) -> list[dict[str, np.ndarray]]:
    """The outputs of every micro-batch, on all ranks."""
    mine = [{name: array_of(value) for name, value in found.items()} for found in results]
    whole: list[dict[str, np.ndarray]] = [{} for _ in results]
    for rank in range(len(spec.devices)):
        for into, part in zip(whole, world.broadcast(mine, rank), strict=True):
            into.update(part)
    return whole


Action: TypeAlias = tuple[int, int]
"""Stage and micro-batch."""

_ACTION = re.compile(r"(\d+)F(\d+)")


def order_for(spec: OnnxPipelineSpec, device: int, microbatches: int) -> tuple[Action, ...]:
    """A device's actions: as planned, or for another number of micro-batches in the same way.

    Every device takes the micro-batches one after another, each through all of its stages. Nobody
    waits for what comes later, so no schedule of this kind can hang.

    Raises:
        PipelineError: when the planned orders cannot be read.
    """
    if microbatches == spec.microbatches and spec.orders:
        return _parse(spec.orders[device])
    held = [stage for stage, place in enumerate(spec.placement) if place == device]
    return tuple((stage, number) for number in range(microbatches) for stage in held)


def _parse(order: str) -> tuple[Action, ...]:
    actions = []
    for word in order.split():
        match = _ACTION.fullmatch(word)
        if match is None:
            raise PipelineError(f"schedule.py: {word!r} is no forward of a stage")
        actions.append((int(match[1]), int(match[2])))
    return tuple(actions)


def run_device(
    spec: OnnxPipelineSpec,
    stages: Mapping[int, OnnxStage],
    actions: Sequence[Action],
    inputs: Sequence[Values],
    links: ProcessLinks,
) -> list[Values]:
    """The outputs of the pipeline that are made here, for each micro-batch.

    Args:
        stages: those of this process, by number.
        actions: stages and micro-batches, in order.
        inputs: those of the pipeline, for each micro-batch.

    Raises:
        StageError: when a stage fails.
    """
    outputs = frozenset(output.name for output in spec.outputs)
    last = last_uses(spec, stages)
    values = [dict(given) for given in inputs]
    results = [{name: v for name, v in given.items() if name in outputs} for given in inputs]
    for index, number in actions:
        held = values[number]
        for name in spec.stages[index].inputs:
            if name not in held:
                held[name] = links.take(name, spec.crossings[name][0])
        for name, value in stages[index].run(number, held).items():
            held[name] = value
            if name in outputs:
                results[number][name] = value
            _, targets = spec.crossings.get(name, (0, ()))
            links.send(name, value, [target for target in targets if target not in stages])
        for name in [name for name in held if last.get(name, -1) <= index]:
            del held[name]
    links.flush()
    return results
