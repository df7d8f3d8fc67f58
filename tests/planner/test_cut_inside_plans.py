"""Plans of models with modules: which of them lie in several stages, and what that costs."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gpipe_compiler.cluster import DEFAULT_HOST, Cluster, Link
from gpipe_compiler.compile import plan, trace_subject
from gpipe_compiler.errors import UsageError
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.ir import Graph
from gpipe_compiler.options import Constraints, Policy, RematChoice
from gpipe_compiler.plan import Plan
from gpipe_compiler.report.text import format_plan
from gpipe_compiler.runtime.spec import ScheduleKind

CLUSTER = Cluster.of(DEFAULT_HOST, Link(12e9, 1e-6))


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = (self.q(x) @ self.k(x).transpose(1, 2)).softmax(-1)
        return self.out(weight @ self.v(x))


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = Attention(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


class Decoder(nn.Module):
    """Layers whose work divides evenly, but for a small head."""

    def __init__(self, layers: int, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Down(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.one, self.two = (
            nn.Conv2d(before, after, 3, padding=1),
            nn.Conv2d(after, after, 3, padding=1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.two(F.relu(self.one(x))))


class UNet(nn.Module):
    """Every way down is read again on the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([Down(3, 8), Down(8, 16)])
        self.middle = Down(16, 16)
        self.up = nn.ModuleList([Down(32, 8), Down(16, 8)])
        self.head = nn.Conv2d(8, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), skips.pop()], 1))
        return self.head(x)


def mean_square(output: object, target: object) -> torch.Tensor:
    assert isinstance(output, torch.Tensor)
    assert isinstance(target, torch.Tensor)
    return F.mse_loss(output, target)


def traced(model: nn.Module, x: torch.Tensor) -> Graph:
    loss = (model(x) * 0).detach()
    subject = Subject("net", model, (x,), {}, loss, mean_square, True)
    return trace_subject(subject)


@pytest.fixture(scope="module")
def decoder() -> Graph:
    return traced(Decoder(8), torch.randn(16, 32, 64))


def divided(made: Plan) -> set[str]:
    """The calls of layers and blocks whose ops lie in several stages, by the ops themselves."""
    assert made.graph is not None
    stages: dict[str, set[int]] = {}
    for stage in made.stages:
        for name in set(stage.ops) - set(stage.duplicates):
            parts = made.graph.op_of[name].module.split(".")
            for end in range(2, len(parts) + 1):
                stages.setdefault(".".join(parts[:end]), set()).add(stage.index)
    return {path for path, held in stages.items() if len(held) > 1}


@pytest.mark.parametrize("schedule", [ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B])
def test_layers_that_divide_evenly_stay_whole(decoder: Graph, schedule: ScheduleKind) -> None:
    policy = Policy(schedule=schedule)

    made = plan(decoder, stages=4, microbatches=8, policy=policy, cluster=CLUSTER)
    anywhere = plan(
        decoder,
        stages=4,
        microbatches=8,
        policy=dataclasses.replace(policy, cut_inside=0.0),
        cluster=CLUSTER,
    )

    assert not divided(made)
    assert not made.opened
    assert made.prediction.step_s <= anywhere.prediction.step_s * 1.03
    assert made.prediction.anywhere_s == anywhere.prediction.step_s
    assert made.prediction.lower_bound_s <= anywhere.prediction.step_s
    assert anywhere.prediction.anywhere_s is None
    assert Plan.from_json(made.to_json()).prediction.anywhere_s == anywhere.prediction.step_s
    assert "modules cut" in format_plan(made)
    assert "modules cut" not in str(anywhere)


def test_a_small_share_opens_what_it_must(decoder: Graph) -> None:
    """Seven stages of eight layers: whole layers would make one stage twice as long as others."""
    made = plan(decoder, stages=7, microbatches=8, cluster=CLUSTER)

    assert divided(made)
    assert {path for path in divided(made) if path.count(".") == 1} == {
        path for path in made.opened if path.count(".") == 1
    }
    assert made.prediction.anywhere_s is not None
    assert made.prediction.step_s <= made.prediction.anywhere_s * 1.03


def test_a_unet_is_cut_between_its_blocks() -> None:
    graph = traced(UNet(), torch.randn(8, 3, 16, 16))

    made = plan(graph, stages=2, microbatches=4, policy=Policy(cut_inside=0.5), cluster=CLUSTER)

    assert not divided(made)


def test_what_is_asked_of_the_stages_comes_first(decoder: Graph) -> None:
    asked = Constraints(split_at=("layers.4.mlp",))

    made = plan(decoder, stages=2, microbatches=8, constraints=asked, cluster=CLUSTER)

    assert {"layers.4"} == {path for path in divided(made) if path.count(".") == 1}


def test_memory_comes_first() -> None:
    """Where cuts anywhere fit, so does what is taken, and it takes at most the share longer."""
    graph = traced(Decoder(3, 16), torch.randn(8, 8, 16))
    policy = Policy(schedule=ScheduleKind.ONE_F_ONE_B, remat=RematChoice.AUTO)
    anywhere = dataclasses.replace(policy, cut_inside=0.0)

    def planned(policy: Policy, memory: int) -> Plan:
        cluster = Cluster.of(dataclasses.replace(DEFAULT_HOST, memory=memory), CLUSTER.link)
        return plan(graph, stages=2, microbatches=4, policy=policy, cluster=cluster)

    most = max(planned(anywhere, 10**12).prediction.device_bytes)
    for memory in (int(most * 0.9), int(most * 0.6)):
        best, made = planned(anywhere, memory), planned(policy, memory)
        over = [
            sum(max(0, size - memory) for size in one.prediction.device_bytes)
            for one in (best, made)
        ]
        assert over[1] <= over[0]
        assert made.prediction.step_s <= best.prediction.step_s * (1.03 + 1e-9)


def test_no_share_is_refused() -> None:
    with pytest.raises(UsageError, match="--cut-inside -1 is no share"):
        Policy(cut_inside=-1)


def calls_again(made: Plan) -> list[set[str]]:
    """Of every segment the modules all of whose ops it holds, and that hold all of its ops."""
    graph = made.graph
    assert graph is not None
    cheap = {name for stage in made.stages for name in stage.duplicates}
    inside: dict[str, set[str]] = {}
    for op in graph.ops:
        parts = op.module.split(".")
        for end in range(1, len(parts) + 1):
            inside.setdefault(".".join(parts[:end]), set()).add(op.name)
    return [
        {path for path, ops in inside.items() if ops - cheap == set(segment) - cheap}
        for stage in made.stages
        for segment in stage.segments
    ]


def test_whole_layers_run_again(decoder: Graph) -> None:
    policy = Policy(schedule=ScheduleKind.ONE_F_ONE_B, remat=RematChoice.AUTO)

    def planned(memory: float) -> Plan:
        cluster = Cluster.of(dataclasses.replace(DEFAULT_HOST, memory=int(memory)), CLUSTER.link)
        return plan(decoder, stages=2, microbatches=4, policy=policy, cluster=cluster)

    most = max(planned(1e12).prediction.device_bytes)
    made = planned(most * 0.6)
    again = calls_again(made)

    assert max(made.prediction.device_bytes) <= most * 0.6
    assert again
    assert all(any(re.fullmatch(r"layers\.\d", path) for path in paths) for paths in again)
