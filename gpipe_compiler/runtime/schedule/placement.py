"""Which stages each device holds."""

from __future__ import annotations

from collections.abc import Sequence


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
