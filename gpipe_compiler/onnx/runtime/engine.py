"""Runs the stages of one device on all micro-batches, in the order of the schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .schedule import Action
from .spec import PipelineSpec
from .stage import Stage, Values
from .transport import Endpoint


class Engine:
    """The stages of one device.

    Args:
        stages: those it holds, by number.
    """

    def __init__(self, spec: PipelineSpec, stages: Mapping[int, Stage]) -> None:
        self.stages = stages
        self._sources = {crossing.value: crossing.source for crossing in spec.crossings}
        self._away = {
            crossing.value: tuple(t for t in crossing.targets if t not in stages)
            for crossing in spec.crossings
        }
        self._outputs = frozenset(output.name for output in spec.outputs)
        self._last_use = {
            name: index for index in sorted(stages) for name in spec.stages[index].inputs
        }

    def run(
        self, actions: Sequence[Action], inputs: Sequence[Values], endpoint: Endpoint
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
        first, last = _ends(actions)
        for place, (index, number) in enumerate(actions):
            if first[number] == place:
                endpoint.begin(number)
            self._compute(self.stages[index], number, values[number], results[number], endpoint)
            if last[number] == place:
                values[number].clear()
                endpoint.end(number)
        endpoint.flush()
        return results

    def _compute(
        self, stage: Stage, number: int, values: Values, results: Values, endpoint: Endpoint
    ) -> None:
        for name in stage.spec.inputs:
            if name not in values:
                values[name] = endpoint.take(name, number, self._sources[name])
        for name, value in stage.run(number, values).items():
            values[name] = value
            if name in self._outputs:
                results[name] = value
            if self._away.get(name):
                endpoint.send(name, number, value, self._away[name])
        for name in [name for name in values if self._last_use.get(name, -1) <= stage.index]:
            del values[name]


def _ends(actions: Sequence[Action]) -> tuple[dict[int, int], dict[int, int]]:
    """The places of the first and of the last action on each micro-batch."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for place, (_, number) in enumerate(actions):
        first.setdefault(number, place)
        last[number] = place
    return first, last
