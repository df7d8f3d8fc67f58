"""Which stages each device holds."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence


def stages_of(placement: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """For every device, the stages it holds, in order.

    Raises:
        ValueError: unless devices count up from 0 and each holds a stage.
    """
    if not placement:
        raise ValueError("a pipeline has at least one stage")
    held: dict[int, list[int]] = {}
    for stage, device in enumerate(placement):
        held.setdefault(device, []).append(stage)
    if sorted(held) != list(range(len(held))):
        raise ValueError(
            f"placement {shown(placement)}: devices count up from 0, each with a stage"
        )
    return tuple(tuple(held[device]) for device in range(len(held)))


def consecutive_stages_of(placement: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """`stages_of` where the first stages are on device 0, the next ones on device 1, and so on.

    Raises:
        ValueError: for any other placement.
    """
    held = stages_of(placement)
    if list(placement) != sorted(placement):
        raise ValueError(
            f"placement {shown(placement)}: in this schedule devices hold consecutive stages"
        )
    return held


def in_blocks(stages: int, devices: int) -> tuple[int, ...]:
    """As many consecutive stages on every device.

    Raises:
        ValueError: when that cannot be, saying what is needed; so do the other placements.
    """
    if stages % devices:
        raise ValueError(
            f"a multiple of the devices: {stages} stages do not go on {devices} devices, "
            f"{_near(stages, devices, 1)} would"
        )
    return tuple(stage * devices // stages for stage in range(stages))


def in_rounds(stages: int, devices: int) -> tuple[int, ...]:
    """Dealt out to the devices in turn, two rounds or more."""
    if stages % devices or stages < 2 * devices:
        raise ValueError(
            f"a multiple of the devices, twice as many or more: {stages} stages do not go on "
            f"{devices} devices, {_near(stages, devices, 2)} would"
        )
    return tuple(stage % devices for stage in range(stages))


def in_v(stages: int, devices: int) -> tuple[int, ...]:
    """One stage on every device from the first to the last, and one on the way back."""
    if stages != 2 * devices:
        raise ValueError(
            f"two stages a device: {stages} stages do not go on {devices} devices, "
            f"{2 * devices} would"
        )
    return (*range(devices), *reversed(range(devices)))


def _near(stages: int, devices: int, least: int) -> str:
    """The multiples of the devices next to the number of stages, from `least` times them up."""
    below = stages // devices
    if below < least:
        return str(least * devices)
    return f"{below * devices} or {(below + 1) * devices}"


def check_microbatches(microbatches: int) -> None:
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


def shown(placement: Sequence[int]) -> str:
    """A placement for a message, of bounded length."""
    most = 32
    dots = ", ..." if len(placement) > most else ""
    return f"({', '.join(map(str, placement[:most]))}{dots})"
