"""Runs the stages of one device on all micro-batches, in the order of the schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
        self._makers = {crossing.value: crossing.source for crossing in spec.crossings}
        self._targets = {crossing.value: crossing.targets for crossing in spec.crossings}
        self._kept = frozenset(output.name for output in spec.outputs)
        order = sorted(stages)
        self._last_use = {name: index for index in order for name in spec.stages[index].inputs}

    def run(self, inputs: Sequence[Values], endpoint: Endpoint) -> list[Values]:
        """The outputs of the pipeline that are made here, for each micro-batch.

        Every stage of the device runs a micro-batch before the next one is begun.

        Args:
            inputs: those of the pipeline, for each micro-batch.

        Raises:
            StageError: when a stage fails.
        """
        results: list[Values] = []
        for number, given in enumerate(inputs):
            values = dict(given)
            kept: Values = {name: given[name] for name in self._kept & given.keys()}
            endpoint.begin(number)
            for index in sorted(self.stages):
                stage = self.stages[index]
                for name in stage.spec.inputs:
                    if name not in values:
                        values[name] = endpoint.take(name, number, self._makers[name])
                made = stage.run(number, values)
                for name, value in made.items():
                    values[name] = value
                    if name in self._kept:
                        kept[name] = value
                    away = [t for t in self._targets.get(name, ()) if t not in self.stages]
                    if away:
                        endpoint.send(name, number, value, away)
                for name in [n for n in values if self._last_use.get(n, -1) <= index]:
                    del values[name]
            endpoint.end(number)
            results.append(kept)
        endpoint.flush()
        return results
