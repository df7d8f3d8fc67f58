"""What each stage needs and makes, worked out once from the spec."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ..schedule.actions import Action, Compute, Phase, Send
from ..schedule.joint import Joint, waiting
from ..schedule.lowering import first_targets
from ..spec import Crossing, Joined, Leaf, PipelineSpec, StageSpec, Structure
from .full_batch import BatchDims, batch_dims
from .nest import items_of
from .request import RunRequest


@dataclass(frozen=True, slots=True)
class Need:
    """A value that a stage reads: from the caller, an earlier stage here, or another device.

    `sender` is the source of the transfer that brings it, None for a value that is made here;
    `via` the stage that the transfer is addressed to.
    """

    value: str
    gradient: bool
    sender: int | None
    via: int


@dataclass(frozen=True, slots=True)
class GradientPart:
    """A summand of a value's gradient: from `stage`, which is on this device or is `remote`.

    A remote part is already the sum over the stages of its device.
    """

    stage: int
    remote: bool


@dataclass(frozen=True, slots=True)
class StageWiring:
    """A stage's connections to the rest of the pipeline.

    Attributes:
        needs: forward's arguments in order, then what only `loss` reads.
        arguments: how many of `needs` forward takes.
        returned: for each output with a gradient, its summands in the order of summation.
        joint: for a stage that takes all micro-batches as one, how its values are joined.
        split: whether the schedule has its backward in two parts.
        wanted: for the first stage, the inputs of the pipeline whose gradients the caller wants.
    """

    index: int
    spec: StageSpec
    needs: tuple[Need, ...]
    arguments: int
    returned: tuple[tuple[str, tuple[GradientPart, ...]], ...]
    makes_loss: bool
    joint: BatchDims | None = None
    split: bool = False
    wanted: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ActionStep:
    """An action, and what the device has to know to take it.

    The actions of a joint stage are one step, where the last of them stands.

    Attributes:
        drops: the values, with their micro-batches, that the device is done with afterwards.
        waits: for a forward, whether another micro-batch comes before its backward.
    """

    action: Action
    drops: tuple[tuple[str, int], ...]
    waits: bool = False


def wire(
    spec: PipelineSpec,
    placement: Sequence[int],
    work: RunRequest,
    joint: Collection[int] = (),
    split: Collection[int] = (),
    wanted: frozenset[str] = frozenset(),
    held: frozenset[str] = frozenset(),
    unfrozen: int | None = None,
) -> tuple[StageWiring, ...]:
    """The wiring of every stage; see `crossings_for`."""
    crossings = {c.value: c for c in crossings_for(spec, work, wanted, held, unfrozen)}
    dims = batch_dims(spec, output_leaves(spec.outputs))
    loss = spec.loss if work.makes_loss else None
    wired = []
    for index, own in enumerate(spec.stages):
        separate = loss is not None and loss.separate and index == len(spec.stages) - 1
        known = {*own.inputs, *own.outputs}
        only_loss = [name for name in own.loss_inputs if separate and name not in known]
        asked = frozenset() if index else wanted
        names = [*own.inputs, *dict.fromkeys(only_loss)]
        stage = StageWiring(
            index=index,
            spec=own,
            needs=tuple(_need(name, index, placement, crossings, asked) for name in names),
            arguments=len(own.inputs),
            returned=tuple(
                (crossing.value, _parts(crossing, placement))
                for crossing in crossings.values()
                if crossing.source == index and crossing.gradient
            ),
            makes_loss=loss is not None and (separate or loss.value in own.outputs),
            joint=dims if index in joint else None,
            split=index in split,
            wanted=asked,
        )
        wired.append(stage)
    return tuple(wired)


def crossings_for(
    spec: PipelineSpec,
    work: RunRequest,
    wanted: frozenset[str] = frozenset(),
    held: frozenset[str] = frozenset(),
    unfrozen: int | None = None,
) -> tuple[Crossing, ...]:
    """The boundary values that are sent: inference does without those that serve only the loss.

    Args:
        wanted: inputs whose gradients come back, through all that may follow from them.
        held: inputs that are where they are read, from an earlier call.
        unfrozen: the first stage that trains what was not trained as it was compiled: gradients
            come back through all that may follow from it.
    """
    if work is RunRequest.TRAIN:
        inputs = {source.name for source in spec.inputs} - wanted
        first = 0 if wanted else len(spec.stages) if unfrozen is None else unfrozen
        return tuple(
            dataclasses.replace(crossing, gradient=True)
            if crossing.source >= first
            and (crossing.dtype.is_floating_point or crossing.dtype.is_complex)
            and crossing.value not in inputs
            else crossing
            for crossing in spec.crossings
        )
    kept = []
    for crossing in spec.crossings:
        targets = tuple(
            t
            for t in crossing.targets
            if work.makes_loss or crossing.value in spec.stages[t].inputs
        )
        if targets and crossing.value not in held:
            kept.append(dataclasses.replace(crossing, targets=targets, gradient=False))
    return tuple(kept)


def most_work(spec: PipelineSpec) -> RunRequest:
    """The work that reads the most: training, where there is a loss."""
    return RunRequest.INFER if spec.loss is None else RunRequest.TRAIN


def inputs_for(spec: PipelineSpec, work: RunRequest) -> frozenset[str]:
    """The inputs of the pipeline that some stage reads, or the weight of the loss."""
    read = {name for stage in spec.stages for name in stage.inputs}
    if work.makes_loss and spec.loss is not None:
        if spec.loss.separate:
            read.update(spec.stages[-1].loss_inputs)
        if spec.loss.weight is not None:
            read.update(spec.loss.weight.inputs)
    return frozenset(source.name for source in spec.inputs if source.name in read)


def output_leaves(structure: Structure) -> tuple[Leaf, ...]:
    """Every leaf of the structure that the pipeline returns, each value once.

    In place of one that has terms, there are these.
    """
    found: dict[str, Leaf] = {}
    for _, leaf in items_of(structure, Leaf):
        names = [name for term in leaf.terms for name in (term.value, term.weight) if name]
        for part in [Leaf(name, None, Joined.STACKED) for name in names] or [leaf]:
            found.setdefault(part.value, part)
    return tuple(found.values())


def makers(spec: PipelineSpec) -> dict[str, int]:
    """The stage that makes each value; inputs of the pipeline count as made by stage 0."""
    table = {source.name: 0 for source in spec.inputs}
    for index, stage in enumerate(spec.stages):
        for name in stage.outputs:
            table.setdefault(name, index)
    if spec.loss is not None and spec.loss.separate:
        table.setdefault(spec.loss.value, len(spec.stages) - 1)
    return table


def steps_of(program: Sequence[Action], wiring: Sequence[StageWiring]) -> tuple[ActionStep, ...]:
    """A device's program with the place at which every value is let go."""
    order = [action for action in program if isinstance(action, Compute)]
    stages = [stage.index for stage in wiring if stage.joint is not None]
    joint = Joint.of(stages, [order])
    drops = _drops(program, wiring, joint)
    waits = waiting(order, stages)
    return tuple(
        ActionStep(
            action,
            drops.get(position, ()),
            isinstance(action, Compute)
            and action.phase is Phase.FORWARD
            and (action.stage, action.microbatch) in waits,
        )
        for position, action in enumerate(program)
        if not isinstance(action, Compute) or joint.completed(action)
    )


def last_backwards(steps: Sequence[ActionStep]) -> dict[int, int]:
    """The stage whose last backward stands at each of these places in a program."""
    places = {
        step.action.stage: place
        for place, step in enumerate(steps)
        if isinstance(step.action, Compute) and step.action.phase is not Phase.FORWARD
    }
    return {place: stage for stage, place in places.items()}


def _drops(
    program: Sequence[Action], wiring: Sequence[StageWiring], joint: Joint
) -> dict[int, tuple[tuple[str, int], ...]]:
    """The values, with their micro-batches, that are used for the last time at each position."""
    last: dict[tuple[str, int], int] = {}
    for position, action in enumerate(program):
        if isinstance(action, Compute) and action.phase is Phase.FORWARD:
            stage = wiring[action.stage]
            names = [*(need.value for need in stage.needs), *stage.spec.outputs]
            microbatches = joint.completed(action)
        elif isinstance(action, Send) and not action.transfer.gradient:
            names = [action.transfer.value]
            microbatches = (action.transfer.microbatch,)
        else:
            continue
        last.update({(name, m): position for name in names for m in microbatches})
    drops: dict[int, list[tuple[str, int]]] = {}
    for value, position in last.items():
        drops.setdefault(position, []).append(value)
    return {position: tuple(values) for position, values in drops.items()}


def _need(
    name: str,
    stage: int,
    placement: Sequence[int],
    crossings: Mapping[str, Crossing],
    wanted: Collection[str],
) -> Need:
    """A value that a stage reads; of inputs that are wanted, the caller is given the gradients."""
    crossing = crossings.get(name)
    if crossing is None or stage not in crossing.targets:
        return Need(name, gradient=name in wanted, sender=None, via=stage)
    here = placement[stage]
    if placement[crossing.source] == here:
        return Need(name, crossing.gradient, sender=None, via=stage)
    via = next(t for t in first_targets(crossing, placement) if placement[t] == here)
    return Need(name, crossing.gradient, sender=crossing.source, via=via)


def _parts(crossing: Crossing, placement: Sequence[int]) -> tuple[GradientPart, ...]:
    """Summands from the last stage to the first, the order of autograd in the plain model.

    Those of another device stand together in the place of its first stage.
    """
    home = placement[crossing.source]
    firsts = set(first_targets(crossing, placement))
    parts = []
    for target in sorted(crossing.targets, reverse=True):
        if placement[target] == home:
            parts.append(GradientPart(target, remote=False))
        elif target in firsts:
            parts.append(GradientPart(target, remote=True))
    return tuple(parts)
