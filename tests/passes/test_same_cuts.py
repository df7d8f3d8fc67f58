"""Cuts are the same on every processor, and the best on one of any speed."""

from __future__ import annotations

import itertools
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cuts_of_ties import cuts
from torch import nn

from gpipe_compiler.cluster import local
from gpipe_compiler.compile import plan, trace
from gpipe_compiler.passes.cost import rooflines
from gpipe_compiler.passes.kernel_times import kernel_times

X86 = platform.machine() in ("x86_64", "AMD64")
PROCESSORS = [
    {"OPENBLAS_CORETYPE": "Nehalem", "NPY_DISABLE_CPU_FEATURES": "AVX2 FMA3 AVX512F AVX512_SKX"},
    {"OPENBLAS_CORETYPE": "Haswell", "NPY_DISABLE_CPU_FEATURES": "AVX512F AVX512_SKX"},
]


@pytest.mark.skipif(not X86, reason="the kernels of other processors are chosen so on x86 alone")
def test_cuts_do_not_depend_on_the_kernels_of_a_processor() -> None:
    """As other processors add up, and take another of several equal numbers for the least."""
    script = Path(__file__).with_name("cuts_of_ties.py")
    others = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(script)],
            env={**os.environ, **words},
            stdout=subprocess.PIPE,
            text=True,
        )
        for words in PROCESSORS
    ]
    own = cuts()
    for other in others:
        assert other.communicate(timeout=500)[0].splitlines() == own


@pytest.mark.parametrize("speed", [0.2, 1.0, 5.0])
def test_a_plan_is_the_best_whatever_the_speed_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, speed: float
) -> None:
    """Of all cuts of a chain, by the closed form of inference; it tells the speed it is for."""
    measure = local.best_seconds
    monkeypatch.setattr(local, "best_seconds", lambda *given: measure(*given) / speed)
    torch.manual_seed(0)
    widths = [8, 64, 256, 16, 128, 8, 32]
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    graph = trace(nn.Sequential(*layers), torch.randn(64, 8), training=False)
    cluster = local.local_cluster()

    made = plan(graph, stages=2, microbatches=4, cluster=cluster)

    assert made.graph is not None
    assert made.devices[0].flops == cluster.devices[0].flops
    (costs,) = rooflines(made.graph, cluster.devices[:1], kernel_times)
    order = [op.name for op in made.graph.ops]
    steps = []
    for place in range(1, len(order)):
        sent = made.graph.op_of[order[place - 1]].outputs[0]
        moved = cluster.link.seconds(made.graph.values[sent].bytes)
        stages = [
            sum(costs.ops[name].forward_s for name in part)
            for part in (order[:place], order[place:])
        ]
        steps.append(sum(stages) + moved + 3 * max(*stages, moved))
    assert made.prediction.step_s == pytest.approx(min(steps), rel=1e-6)
