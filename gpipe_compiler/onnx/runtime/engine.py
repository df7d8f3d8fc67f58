"""Runs the stages of one device on all micro-batches, in the order of the schedule."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

from onnxruntime import OrtValue

from ...runtime.errors import PipelineError
from .spec import OnnxPipelineSpec
from .stage import OnnxStage, Values

Action: TypeAlias = tuple[int, int]
"""Stage and micro-batch."""

_ACTION = re.compile(r"(\d+)F(\d+)")


def orders_for(spec: OnnxPipelineSpec, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """Each device's actions: as planned, or for another number of micro-batches in the same way.

    Every device takes the micro-batches one after another, each through all of its stages. Nobody
    waits for what comes later, so no schedule of this kind can hang.

    Raises:
        PipelineError: when the planned orders cannot be read.
    """
    if microbatches == spec.microbatches and spec.orders:
        return tuple(map(_parse, spec.orders))
    held: list[list[int]] = [[] for _ in spec.devices]
    for stage, device in enumerate(spec.placement):
        held[device].append(stage)
    return tuple(
        tuple((stage, number) for number in range(microbatches) for stage in stages)
        for stages in held
    )


def _parse(order: str) -> tuple[Action, ...]:
    actions = []
    for word in order.split():
        match = _ACTION.fullmatch(word)
        if match is None:
            raise PipelineError(f"schedule.py: {word!r} is no forward of a stage")
        actions.append((int(match[1]), int(match[2])))
    return tuple(actions)


class Links(Protocol):
    """What devices hand to one another."""

    def begin(self, microbatch: int) -> None:
        """Wait until there is room for another micro-batch on its way."""

    def take(self, name: str, microbatch: int, source: int, device: int) -> OrtValue:
        """A value for a device, which the stage `source` has made; waits for it."""

    def send(self, name: str, microbatch: int, value: OrtValue, targets: Sequence[int]) -> None:
        """Hand a value to these stages."""

    def end(self, device: int) -> None:
        """A device is done with another micro-batch."""

    def flush(self) -> None:
        """Wait until all that was sent has gone."""


class OnnxEngine:
    """The stages of one device.

    Args:
        stages: those it holds, by number.
    """

    def __init__(
        self, spec: OnnxPipelineSpec, device: int, stages: Mapping[int, OnnxStage]
    ) -> None:
        self.device = device
        self.stages = stages
        self._sources = {name: source for name, (source, _) in spec.crossings.items()}
        self._away = {
            name: tuple(target for target in targets if target not in stages)
            for name, (_, targets) in spec.crossings.items()
        }
        self._outputs = frozenset(output.name for output in spec.outputs)
        self._last_use = {
            name: index for index in sorted(stages) for name in spec.stages[index].inputs
        }

    def run(
        self, actions: Sequence[Action], inputs: Sequence[Values], links: Links
    ) -> list[Values]:
        """The outputs of the pipeline that are made here, for each micro-batch.

        Args:
            actions: stages and micro-batches, in order.
            inputs: those of the pipeline, for each micro-batch.

        Raises:
            StageError: when a stage fails.
        """
        values = [dict(given) for given in inputs]
        results: list[Values] = [
            {name: value for name, value in given.items() if name in self._outputs}
            for given in inputs
        ]
        # By micro-batch, the places of the first and of the last action on it.
        places = [(number, place) for place, (_, number) in enumerate(actions)]
        first, last = dict(reversed(places)), dict(places)
        for place, (index, number) in enumerate(actions):
            if first[number] == place:
                links.begin(number)
            self._compute(self.stages[index], number, values[number], results[number], links)
            if last[number] == place:
                values[number].clear()
                links.end(self.device)
        links.flush()
        return results

    def _compute(
        self, stage: OnnxStage, number: int, values: Values, results: Values, links: Links
    ) -> None:
        for name in stage.spec.inputs:
            if name not in values:
                values[name] = links.take(name, number, self._sources[name], self.device)
        for name, value in stage.run(number, values).items():
            values[name] = value
            if name in self._outputs:
                results[name] = value
            if self._away.get(name):
                links.send(name, number, value, self._away[name])
        for name in [name for name in values if self._last_use.get(name, -1) <= stage.index]:
            del values[name]


# --- all devices in this process: a thread each, and values that are handed over without a copy ---


AHEAD = 2
"""Micro-batches per device that may be on their way: enough to keep all devices busy, so that a
fast first stage does not fill the memory."""


class StoppedError(PipelineError):
    """Another device has failed, so this one stops."""


class Exchange:
    """What the devices of one run hand to one another; `Links`.

    Args:
        placement: the device of each stage.
    """

    def __init__(self, placement: Sequence[int], devices: int) -> None:
        self._placement = placement
        self._changed = threading.Condition()
        self._values: dict[tuple[str, int, int], OrtValue] = {}
        self._ended = [0] * devices
        self._stopped = False

    def stop(self) -> None:
        """Wake all who wait: nothing more will come."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def begin(self, microbatch: int) -> None:
        """Wait until the slowest device is near enough."""
        with self._changed:
            self._wait(lambda: microbatch < min(self._ended) + AHEAD * len(self._ended))

    def end(self, device: int) -> None:
        """A device is done with another micro-batch."""
        with self._changed:
            self._ended[device] += 1
            self._changed.notify_all()

    def take(self, name: str, microbatch: int, source: int, device: int) -> OrtValue:
        """A value for a device; waits for it."""
        key = name, microbatch, device
        with self._changed:
            self._wait(lambda: key in self._values)
            return self._values.pop(key)

    def send(self, name: str, microbatch: int, value: OrtValue, targets: Sequence[int]) -> None:
        """A value for the devices of these stages."""
        with self._changed:
            for device in {self._placement[target] for target in targets}:
                self._values[name, microbatch, device] = value
            self._changed.notify_all()

    def flush(self) -> None:
        """Nothing is on its way: what is sent is there."""

    def _wait(self, ready: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self._stopped or ready())
        if self._stopped:
            raise StoppedError("another device has failed")


def run_local(
    spec: OnnxPipelineSpec, engines: Mapping[int, OnnxEngine], inputs: Sequence[Values]
) -> list[Values]:
    """The outputs of every micro-batch.

    Args:
        engines: of all devices, by number.

    Raises:
        PipelineError: the first that a device has raised; the others have stopped.
    """
    exchange = Exchange(spec.placement, len(engines))
    orders = orders_for(spec, len(inputs))
    results: dict[int, list[Values]] = {}
    errors: list[BaseException] = []

    def work(device: int, engine: OnnxEngine) -> None:
        try:
            results[device] = engine.run(orders[device], inputs, exchange)
        except StoppedError:
            pass
        except BaseException as error:  # noqa: BLE001  # raised in the caller's thread
            errors.append(error)
            exchange.stop()

    threads = [
        threading.Thread(target=work, args=item, name=f"device {item[0]}", daemon=True)
        for item in engines.items()
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException:  # Ctrl-C: let the devices stop before the caller goes on
        exchange.stop()
        for thread in threads:
            thread.join()
        raise
    if errors:
        raise errors[0]
    return [
        {name: value for found in results.values() for name, value in found[number].items()}
        for number in range(len(inputs))
    ]
