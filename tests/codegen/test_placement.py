"""Packages whose devices hold several stages: what is written of it, and that it runs so.

The truth is the model itself, and the plan that the package is written from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from gpipe_compiler.plan import Plan
from gpipe_compiler.runtime.schedule import forward_only, orders_for
from gpipe_compiler.runtime.schedule.actions import parse_order
from gpipe_compiler.runtime.spec import ScheduleKind
from gpipe_compiler.targets.torch_stages import emit

PLACEMENT = (0, 1, 1, 0)


def test_a_placement_is_written_and_followed(
    planned: Callable[..., Plan], load: Callable[[Path], ModuleType], tmp_path: Path
) -> None:
    """Down two devices and up again, the second GPU of the machine first."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).eval()
    x = torch.rand(4, 4)
    plan = planned(model, x, count=4)
    orders = forward_only(PLACEMENT, plan.microbatches)
    plan = dataclasses.replace(plan, placement=PLACEMENT, slots=(1, 0), orders=orders)
    package = load(emit(plan, tmp_path / "package"))

    assert package.SPEC.placement == PLACEMENT
    assert package.SPEC.device_order == (1, 0)
    assert "device 1 | .   1F0 2F0 1F1 2F1" in (tmp_path / "package" / "schedule.py").read_text()
    assert "nproc-per-node 2 " in (tmp_path / "package" / "README.md").read_text()
    with package.Pipeline() as pipe:
        assert pipe.placement == PLACEMENT
        torch.testing.assert_close(pipe(x), model(x))


def test_the_usual_placement_is_not_written(planned: Callable[..., Plan], tmp_path: Path) -> None:
    """One stage on each device, in order: that is what is understood."""
    plan = planned(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.rand(4, 4), count=2)
    plan = dataclasses.replace(plan, placement=(0, 1), slots=(0, 1))
    text = (emit(plan, tmp_path / "package") / "schedule.py").read_text()

    assert "placement" not in text
    assert "device_order" not in text


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("microbatches", [1, 4, 16])
def test_orders_are_those_of_their_devices_however_long(
    planned: Callable[..., Plan],
    load: Callable[[Path], ModuleType],
    tmp_path: Path,
    devices: int,
    microbatches: int,
) -> None:
    """Over several lines where they are long; those of a single device are still one order."""
    plan = planned(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.rand(4, 4), count=2)
    placement = (0, devices - 1)
    orders = orders_for(ScheduleKind.GPIPE, placement, microbatches)
    slots = tuple(range(devices))
    plan = dataclasses.replace(plan, placement=placement, slots=slots, orders=orders)
    package = load(emit(plan, tmp_path / "package"))

    assert tuple(parse_order(order) for order in package.SPEC.orders) == orders
