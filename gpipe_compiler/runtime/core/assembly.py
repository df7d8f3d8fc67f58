"""The parts of a pipeline that depend on where its stages are and how it trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..spec import PipelineSpec, Precision
from .choices import Manner
from .held import HeldStages
from .reducer import Reducer
from .runners import DistributedRunner, LocalRunner, Runner
from .scaler import PipelineScaler, check_weights
from .team import Team


def make_scaler(spec: PipelineSpec, team: Team, held: HeldStages, manner: Manner) -> PipelineScaler:
    """What scales the loss, in fp16; elsewhere it does nothing.

    It holds no pipeline, whose threads end when it is forgotten.

    Raises:
        UsageError: when that is asked for and weights are in fp16 themselves.
    """
    enabled = manner.precision is Precision.FP16 and spec.loss is not None
    if enabled:
        check_weights(held.modules)
    return PipelineScaler(team.device, enabled=enabled, over_ranks=team.over_ranks)


def make_runner(
    spec: PipelineSpec, team: Team, held: HeldStages, manner: Manner, reducer: Reducer | None
) -> Runner:
    """What executes the schedule: threads of one process, or this one of several."""
    if team.members is None:
        return LocalRunner(spec, held.modules, team.devices, team.placement, manner)
    shared = {item.name: item for item in held.shared}
    return DistributedRunner(spec, held.modules, team.members, shared, manner, reducer)


def make_reducer(
    team: Team, held: HeldStages, owners: Mapping[str, Sequence[int]]
) -> Reducer | None:
    """What averages gradients over replicas; None where there is one.

    Args:
        owners: of each trained parameter that several stages own, these.
    """
    if team.members is None or team.replicas == 1:
        return None
    placed = {
        name: tuple(sorted({team.placement[stage] for stage in stages}))
        for name, stages in owners.items()
    }
    return Reducer(team.members, held.unshared(), held.shared, placed)
