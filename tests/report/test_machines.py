"""What reports say of unequal devices, against the plan made by hand."""

from __future__ import annotations

import dataclasses

import pytest

from gpipe_compiler.cluster import Cluster, Device, Link
from gpipe_compiler.plan import Plan
from gpipe_compiler.report.facts import device_bytes, headline, machines
from gpipe_compiler.report.text import prediction_rows

BIG = Device("big", 1e9, 1e9, 10 * 2**20, 1e-6)
SMALL = Device("small", 1e9, 1e9, 2048, 1e-6)
CLUSTER = Cluster(
    (SMALL, BIG, BIG, SMALL), Link(1e6, 0.0, "cable"), Link(1e3, 0.0), hosts=(0, 0, 1, 1)
)


@pytest.fixture
def mixed(plan: Plan) -> Plan:
    """Stages 0 to 2 on the devices 1, 0 and 3: big, small, small."""
    return dataclasses.replace(plan, cluster=CLUSTER, slots=(1, 0, 3))


def memory(plan: Plan) -> str:
    return dict(prediction_rows(plan))["peak memory"]


def test_the_headline_names_the_devices_that_are_used(mixed: Plan) -> None:
    said = "1 host of 1 x big and 1 x small, 1 host of 1 x small, cable 1 MB/s, network 1 kB/s"

    assert machines(mixed) == said
    assert f"in 3 stages on {said}: gpipe" in headline(mixed).plain


def test_the_fullest_device_is_the_one_with_least_to_spare(mixed: Plan) -> None:
    """Stage 1 needs 3000 of 2048 bytes; stage 0 needs more than stage 2, but of far more."""
    assert memory(mixed) == (
        "2.93 KiB on the small of rank 1 with 2 KiB: too much for stage 1, by 952 B"
    )
    smaller = dataclasses.replace(mixed.prediction, peak_bytes=(2000, 900, 1000))
    fitting = dataclasses.replace(mixed, prediction=smaller)
    assert memory(fitting) == "0.977 KiB on the small of rank 2 with 2 KiB"


def test_stages_that_share_a_device_add_up(plan: Plan) -> None:
    """Ranks 0 and 1 run stages 0, 2 and 1: 2000 + 1000 and 3000 bytes."""
    shared = dataclasses.replace(
        plan,
        placement=(0, 1, 0),
        orders=plan.orders[:2],
        cluster=Cluster.of(dataclasses.replace(BIG, memory=2900), Link(1e6, 0.0)),
    )

    assert device_bytes(shared) == (3000, 3000)
    assert "too much for devices 0, 1, by 100 B at most" in memory(shared)
    counted = dataclasses.replace(shared.prediction, device_bytes=(2950, 2800))
    assert "2.88 KiB on a device of 2.83 KiB: too much for device 0, by 50 B" in memory(
        dataclasses.replace(shared, prediction=counted)
    )
