"""Which stages each device holds."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence


def stages_of(placement: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """For every device, the stages it holds, in order.

    Args:
        placement: the device of each stage.

    Raises:
        ValueError: unless devices count up from 0 and each holds consecutive stages.
    """
    if not placement:
        raise ValueError("a pipeline has at least one stage")
    devices = sorted(set(placement))
    if devices != list(range(len(devices))) or list(placement) != sorted(placement):
        raise ValueError(
            f"placement {tuple(placement)}: devices count up from 0 and hold consecutive stages"
        )
    return tuple(
        tuple(stage for stage, holder in enumerate(placement) if holder == device)
        for device in devices
    )


def check_microbatches(microbatches: int) -> None:
    """Raise ValueError unless there is at least one micro-batch."""
    if microbatches < 1:
        raise ValueError(f"{microbatches} micro-batches: at least one is needed")


def runs_of(stages: Iterable[int], joint: Collection[int]) -> tuple[tuple[int, ...], ...]:
    """A device's stages in runs that a micro-batch passes at one go, in order.

    A joint stage is a run of its own: it waits for all micro-batches, and the next stage for it.
    """
    runs: list[list[int]] = []
    for stage in stages:
        if not runs or stage in joint or runs[-1][-1] in joint:
            runs.append([])
        runs[-1].append(stage)
    return tuple(map(tuple, runs))
