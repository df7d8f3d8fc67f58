"""Runs the stages of one process under torchrun on all micro-batches, in the planned order."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from ...runtime.errors import PipelineError
from .distributed import ProcessLinks
from .flow import last_uses
from .spec import OnnxPipelineSpec
from .stage import OnnxStage, Values

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
