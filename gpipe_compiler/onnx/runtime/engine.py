"""Runs the stages of one device on all micro-batches, in the order of the schedule."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
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
