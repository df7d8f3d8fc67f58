"""What lives along a model whose values are counted by hand, and where its cuts are drawn."""

from __future__ import annotations

import torch
from torch import nn

from gpipe_compiler.cluster import local_cluster
from gpipe_compiler.compile import plan, trace
from gpipe_compiler.options import Constraints
from gpipe_compiler.report.activations import HEIGHT, WIDTH, activations
from gpipe_compiler.report.html import format_report


class Narrow(nn.Module):
    """Widths 8, 32, 2, 16 and 4, and the first is read again at the last."""

    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.Linear(8, 32)
        self.narrow = nn.Linear(32, 2)
        self.again = nn.Linear(2, 16)
        self.last = nn.Linear(16, 8)

    def forward(self, x):
        return self.last(self.again(self.narrow(self.widen(x)))) + x


def planned(stages):
    graph = trace(Narrow(), torch.randn(4, 8), training=False)
    cuts = Constraints(split_at=("again",)) if stages > 1 else Constraints()
    return plan(graph, stages=stages, microbatches=2, cluster=local_cluster(), constraints=cuts)


def test_bytes_that_live_before_each_op():
    made = planned(2)
    found = activations(made)
    # x lives until the last op: of a micro-batch of 2 samples in 4 bytes, beside each width.
    live = [2 * 4 * width for width in (8, 8 + 32, 8 + 2, 8 + 16, 8 + 8, 8)]
    assert found.most == max(live)
    heights = [float(point.split()[1]) for point in found.curve.split("L ")[1:-1]]
    expected = [HEIGHT * (1 - size / max(live)) for size in live]
    assert len(heights) == len(expected)
    assert all(abs(one - other) < 0.06 for one, other in zip(heights, expected, strict=True))
    (cut,) = found.cuts
    assert (cut.stage, cut.bytes) == (1, live[2])
    assert abs(cut.x - WIDTH * 2 / 5) < 0.1
    assert "Stage 1 begins at 80 B." in " ".join(format_report(made).split())


def test_of_one_stage_there_is_no_cut():
    assert activations(planned(1)).cuts == ()


def test_none_without_a_graph_of_torch(plan):
    assert activations(plan) is None
    assert "Activations" not in format_report(plan)
