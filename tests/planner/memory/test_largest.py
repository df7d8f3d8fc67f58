"""Exact memory of models far larger than this machine, compared with closed formulas."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpipe_compiler.cluster import Cluster, Device, Link
from gpipe_compiler.compile import plan, trace_subject
from gpipe_compiler.frontend.source import load
from gpipe_compiler.options import Policy, RematChoice
from gpipe_compiler.plan import Plan
from gpipe_compiler.plan.memory_curve import CATEGORIES, Category
from gpipe_compiler.planner.memory.devices import UPDATE
from gpipe_compiler.runtime.spec import OptimizerKind, ScheduleKind

EXAMPLES = Path(__file__).parents[3] / "examples"


def planned(example: str, stages: int, microbatches: int) -> Plan:
    """A plan for devices that are no hosts, exact in memory."""
    graph = trace_subject(load(str(EXAMPLES / f"{example}.py")))
    device = Device("device", 1e14, 1e12, 10**13, 1e-6)
    return plan(
        graph,
        stages=stages,
        microbatches=microbatches,
        policy=Policy(
            schedule=ScheduleKind.ONE_F_ONE_B, remat=RematChoice.FULL, optimizer=OptimizerKind.ADAMW
        ),
        cluster=Cluster.of(device, Link(1e11, 1e-6)).sized(stages),
    )


def of(made: Plan, category: Category) -> list[int]:
    """Bytes of each device at its peak that are of a category."""
    place = CATEGORIES.index(category)
    return [memory.sizes[place] for memory in made.prediction.memory]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "stages", "microbatches", "layers", "dim", "sequence", "vocabulary"),
    [
        ("transformer_1_3b", 8, 8, 24, 2048, 1024, 50304),
        ("transformer_1t", 512, 512, 128, 25600, 2048, 51200),
    ],
)
def test_weights_and_optimizer_are_those_of_the_formula(
    example: str,
    stages: int,
    microbatches: int,
    layers: int,
    dim: int,
    sequence: int,
    vocabulary: int,
) -> None:
    """Parameters by arXiv 2104.04473, equation 2, and a last norm; the head is the embedding."""
    made = planned(example, stages, microbatches)

    embedding = vocabulary * dim
    layer = 12 * dim * dim + 13 * dim
    parameters = layers * layer + embedding + sequence * dim + 2 * dim
    # The head is on another device than the embedding, which both hold.
    owned = 4 * (parameters + embedding)
    weights, optimizer = of(made, Category.WEIGHTS), of(made, Category.OPTIMIZER)
    assert sum(weights) == owned
    # All that is no layer is at the ends.
    assert weights[0] >= 4 * (embedding + sequence * dim)
    assert weights[-1] >= 4 * (embedding + 2 * dim)
    assert sum(weights[1:-1]) <= 4 * layers * layer
    for memory, own, remembered in zip(made.prediction.memory, weights, optimizer, strict=True):
        # While Adam steps on a GPU there are the roots of all second moments besides.
        assert remembered == own * (3 if memory.action == UPDATE else 2)
        assert memory.peak >= 5 * own  # with gradients and those roots
