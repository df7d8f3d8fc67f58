"""A drawing of a schedule, for the comments of packages."""

from __future__ import annotations

from gpipe_compiler.runtime.schedule.actions import Orders, split_stages
from gpipe_compiler.runtime.schedule.clock import Needs, timeline


def diagram(orders: Orders, needs: Needs) -> str:
    """A drawing with one column per unit of time.

    Forwards and backwards take one each, and so do both parts of a backward in two parts. A cell
    shows phase and micro-batch, after the stage where devices hold several.
    """
    split = bool(split_stages(orders))
    several = any(len({action.stage for action in order}) > 1 for order in orders)
    rows: list[dict[int, str]] = [{} for _ in orders]
    for timed in timeline(orders, needs, forward=1, backward=2 if split else 1, weight=1):
        action = timed.action
        text = str(action) if several else f"{action.phase.value}{action.microbatch}"
        rows[timed.device][int(timed.start)] = text
    width = max((len(cell) for row in rows for cell in row.values()), default=1) + 1
    lines = []
    for device, row in enumerate(rows):
        cells = [row.get(time, ".").ljust(width) for time in range(max(row, default=-1) + 1)]
        lines.append(f"device {device} | {''.join(cells)}".rstrip())
    return "\n".join(lines)
