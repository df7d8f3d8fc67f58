"""Costs on several kinds of devices, against costs on each alone and rooflines worked by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpipe_compiler import trace
from gpipe_compiler.cluster import Device
from gpipe_compiler.ir import Graph
from gpipe_compiler.options import LossChoice
from gpipe_compiler.passes import measure as measuring
from gpipe_compiler.passes.cost import Costs, OpCost, roofline, rooflines
from gpipe_compiler.passes.dry_run import DryRun
from gpipe_compiler.passes.shapes import annotate
from gpipe_compiler.runtime.spec import Precision

ENDLESS = float("inf")
SLOW = Device("slow", 1e9, 1e8, 10**9, 1e-5)
FAST = Device("fast", 1e12, 1e11, 10**9, 1e-6, half_flops=4e12)
HERE = Device("here", 1e10, ENDLESS, 10**9, 0.0)
BATCH = 4


@pytest.fixture(scope="module")
def graph() -> Graph:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10))
    return annotate(trace(model, torch.ones(BATCH, 3, 8, 8), loss=LossChoice.SUM_OF_SQUARES), BATCH)


def op(graph: Graph, word: str) -> str:
    """The one op with this word in its name."""
    (name,) = [op.name for op in graph.ops if word in op.name]
    return name


class TestRooflines:
    def test_each_is_as_on_that_device_alone(self, graph: Graph) -> None:
        together = rooflines(graph, [SLOW, FAST, SLOW])

        assert together == [roofline(graph, device) for device in (SLOW, FAST, SLOW)]
        slow, fast = (sum(c.forward_s for c in costs.ops.values()) for costs in together[:2])
        assert slow > fast > 0
        assert [costs.source for costs in together[:2]] == ["roofline on slow", "roofline on fast"]

    def test_the_model_is_not_run_again(
        self, graph: Graph, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As annotating it has seen all that is asked."""
        runs: list[Graph] = []
        monkeypatch.setattr(DryRun, "run", lambda self, *_: runs.append(self.graph))

        rooflines(graph, [SLOW, FAST, HERE])

        assert not runs

    def test_convolutions_run_in_tf32_and_products_do_not(self, graph: Graph) -> None:
        """As PyTorch has it by default: only cuDNN may compute fp32 in TF32."""
        device = Device("unit", 1.0, ENDLESS, 1, 0.0, tf32_flops=8.0)
        costs = roofline(graph, device).ops

        convolution = 2 * BATCH * 4 * 6 * 6 * 3 * 3 * 3
        assert costs[op(graph, "0")].forward_s == convolution / 8
        assert costs[op(graph, "0")].backward_s == convolution / 8
        assert costs[op(graph, "3")].forward_s == 2 * BATCH * 4 * 36 * 10

    @pytest.mark.parametrize(
        ("precision", "times"), [(Precision.FP32, 1), (Precision.FP16, 16), (Precision.BF16, 2)]
    )
    def test_16_bits_have_a_speed_each(self, precision: Precision, times: int) -> None:
        """As on GPUs before Ampere, whose tensor cores know fp16 but not bf16."""
        device = Device("unit", 1.0, ENDLESS, 1, 0.0, half_flops=16.0, bf16_flops=2.0)
        traced = trace(nn.Linear(8, 16), torch.ones(BATCH, 8), loss=LossChoice.SUM_OF_SQUARES)

        costs = roofline(annotate(traced, BATCH, precision), device).ops

        assert max(c.forward_s for c in costs.values()) == 2 * BATCH * 8 * 16 / times


class TestMeasured:
    @pytest.fixture(autouse=True)
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """This machine is called "here", and every op takes it 1, 2 and half a second."""

        def measure(graph: Graph, device: Device) -> Costs:
            assert device == HERE
            ops = {op.name: OpCost(1.0, 2.0, weight_s=0.5) for op in graph.ops}
            return Costs(ops, "measured here", graph.batch_size)

        monkeypatch.setattr(measuring, "measure", measure)
        monkeypatch.setattr(measuring, "this_machine", lambda: HERE)
        monkeypatch.setattr(measuring, "is_here", lambda device: device.name == "here")

    def test_times_hold_on_this_machine(self, graph: Graph) -> None:
        (costs,) = measuring.costs_by_kind(graph, [HERE], measured=True)

        assert costs.source == "measured here"
        assert {cost.forward_s for cost in costs.ops.values()} == {1.0}

    def test_times_elsewhere_are_scaled_by_rooflines(self, graph: Graph) -> None:
        """Without launches and traffic, a product takes ten times as long at a tenth the speed."""
        tenth = Device("tenth", 1e9, ENDLESS, 1, 0.0)

        near, far = measuring.costs_by_kind(graph, [HERE, tenth], measured=True)

        product = op(graph, "3")
        assert near.ops[product] == OpCost(1.0, 2.0, weight_s=0.5)
        assert far.ops[product].forward_s == pytest.approx(10.0)
        assert far.ops[product].backward_s == pytest.approx(20.0)
        assert far.ops[product].weight_s == pytest.approx(5.0)
        free = op(graph, "1")  # ReLU: no arithmetic that counts, so nothing to scale by
        assert far.ops[free] == near.ops[free]
        assert near.source == far.source == "measured here; on tenth scaled by rooflines"

    def test_this_machine_need_not_be_among_them(self, graph: Graph) -> None:
        (costs,) = measuring.costs_by_kind(graph, [SLOW], measured=True)

        ratio = (
            roofline(graph, SLOW).ops[op(graph, "3")].forward_s
            / roofline(graph, HERE).ops[op(graph, "3")].forward_s
        )
        assert costs.ops[op(graph, "3")].forward_s == pytest.approx(ratio)

    def test_estimates_are_not_measured(self, graph: Graph) -> None:
        assert measuring.costs_by_kind(graph, [SLOW, FAST], measured=False) == rooflines(
            graph, [SLOW, FAST]
        )
