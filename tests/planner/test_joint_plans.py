"""Plans for exact BatchNorm: predictions against closed forms, stages against what they hold.

Between two joint stages micro-batches pass the machines (ports and devices) as a flow line: the sum
of the machines' times, and the slowest once more for every further micro-batch. A joint stage ends
one line, computes everything, and begins the next.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gpipe_compiler.cluster import local_cluster
from gpipe_compiler.codegen.schedule import _drawing, _together
from gpipe_compiler.compile import plan, trace
from gpipe_compiler.options import LossChoice, Policy, RematChoice
from gpipe_compiler.plan import Plan
from gpipe_compiler.planner.planner import Planner
from gpipe_compiler.runtime.schedule import gpipe
from gpipe_compiler.runtime.spec import BatchNorm
from gpipe_compiler.simulate.step import StageTimes, recomputed, simulate

M = 4
EXACT = Policy(batchnorm=BatchNorm.EXACT)
SECONDS = st.integers(0, 20).map(lambda tenths: tenths / 10)


def lines_time(machines: Iterable[tuple[float, bool]], microbatches: int) -> float:
    """Seconds of one direction: machines in order, each with whether it takes all at once."""
    total = 0.0
    line: list[float] = []
    for seconds, joint in [*machines, (0.0, True)]:
        if not joint:
            line.append(seconds)
            continue
        total += sum(line) + (microbatches - 1) * max(line, default=0.0) + microbatches * seconds
        line = []
    return total


def joint_time(times: Sequence[StageTimes], joint: Collection[int], microbatches: int) -> float:
    """A step of GPipe, both directions one after the other."""
    forward, backward = [], []
    for index, stage in enumerate(times):
        forward += [(stage.receive_s, False), (stage.forward_s, index in joint)]
        backward += [(stage.gradient_s, False), (stage.backward_s, index in joint)]
    return lines_time(forward, microbatches) + lines_time(reversed(backward), microbatches)


@given(
    st.lists(st.builds(StageTimes, SECONDS, SECONDS, SECONDS, SECONDS), min_size=1, max_size=6),
    st.integers(1, 7),
    st.data(),
)
def test_joint_stages_take_what_the_closed_form_says(
    times: list[StageTimes], microbatches: int, data: st.DataObject
) -> None:
    joint = data.draw(st.sets(st.sampled_from(range(len(times)))))
    orders = gpipe(range(len(times)), microbatches, joint)

    simulation = simulate(orders, times, joint)

    assert simulation.step_s == pytest.approx(joint_time(times, joint, microbatches))
    assert sum(simulation.busy_s) == pytest.approx(
        microbatches * sum(t.forward_s + t.backward_s for t in times)
    )


def test_two_stages_by_hand() -> None:
    """Stage 1 receives for 1 s a micro-batch, computes both in 2 s, and returns what takes 1 s."""
    times = [StageTimes(1.0, 2.0), StageTimes(1.0, 2.0, receive_s=1.0, gradient_s=1.0)]

    simulation = simulate(gpipe((0, 1), 2, {1}), times, {1})

    spans = {
        (span.lane.value, str(span.action)): (span.start_s, span.end_s)
        for span in simulation.timeline
    }
    assert spans["receive", "1F0"] == (1.0, 2.0)
    assert spans["receive", "1F1"] == (2.0, 3.0)
    assert spans["device", "1F0"] == (3.0, 4.0)
    assert spans["device", "1B1"] == (5.0, 7.0)
    assert spans["device", "1B0"] == (7.0, 9.0)
    assert spans["gradient", "1B1"] == (9.0, 10.0)
    assert spans["gradient", "1B0"] == (10.0, 11.0)
    assert spans["device", "0B1"] == (10.0, 12.0)
    assert spans["device", "0B0"] == (12.0, 14.0)
    assert simulation.step_s == 14.0


def test_a_joint_stage_on_its_own_device_recomputes_nothing() -> None:
    """Its backward follows its forward; on a shared device it computes all of it again."""
    alone = gpipe((0, 1), 2, {0})
    shared = gpipe((0, 0), 2, {0})
    times = [StageTimes(1.0, 2.0, recompute_s=1.0), StageTimes(1.0, 2.0)]

    assert {action.stage for action in recomputed(alone, {0})} == {1}
    assert simulate(alone, times, {0}).recompute_s == (0.0, 0.0)
    assert simulate(shared, times, {0}).recompute_s == (2.0,)


class Normed(nn.Module):
    """A BatchNorm in the middle of three equal blocks, and dropout where asked for."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))
        self.middle = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Linear(64, 8))
        self.last = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.middle(self.drop(self.first(x))))
        return found


def planned(model: nn.Module, policy: Policy, microbatches: int = M) -> Plan:
    """With memory as the search has it."""
    planner = Planner(
        trace(model, torch.randn(16, 8), loss=LossChoice.SUM_OF_SQUARES), local_cluster()
    )
    choice = planner.choose(3, microbatches, policy)
    return planner.plan(choice, policy, exact_memory=False)


def test_the_stage_with_batchnorm_is_joint() -> None:
    made = planned(Normed(), EXACT)
    assert made.graph is not None
    holder = [s.index for s in made.stages if "middle.1.running_mean" in s.state]

    assert list(made.joint) == holder
    assert Plan.from_json(made.to_json()) == dataclasses.replace(made, graph=None)
    pipelined = planned(Normed(), Policy())
    assert pipelined.joint == ()
    assert made.prediction.step_s > pipelined.prediction.step_s
    assert not made.prediction.proved
    assert made.prediction.lower_bound_s <= made.prediction.step_s
    assert len(_drawing(made)[0]) > len(_drawing(pipelined)[0])
    assert f"Stage {holder[0]} takes all micro-batches as one" in " ".join(_together(made))
    assert _together(pipelined) == []


def test_with_dropout_every_stage_is() -> None:
    assert planned(Normed(0.1), EXACT).joint == (0, 1, 2)


def test_one_micro_batch_is_the_mini_batch() -> None:
    assert planned(Normed(), EXACT, microbatches=1).joint == ()


def test_older_plans_have_nothing_joint() -> None:
    text = planned(Normed(), Policy()).to_json()

    assert Plan.from_json(text.replace('"joint": [],', "")).joint == ()


def test_a_joint_stage_holds_the_mini_batch_whole() -> None:
    """Recomputing, too; the others keep what they received, and one micro-batch whole.

    The last micro-batch does not wait, but is there whole when the others are not yet.
    """
    made = planned(Normed(), dataclasses.replace(EXACT, remat=RematChoice.FULL))
    for stage, peak in zip(made.stages, made.prediction.peak_bytes, strict=True):
        whole = M * stage.saved_bytes
        if stage.index not in made.joint:
            whole = (M - 1) * stage.input_bytes + stage.saved_bytes
        assert made.graph is not None
        states = [made.graph.state[name] for name in stage.state]
        fixed = sum(s.bytes * (2 if s.requires_grad else 1) for s in states)
        assert peak == fixed + whole


@pytest.mark.parametrize("remat", [RematChoice.NONE, RematChoice.FULL])
def test_a_device_takes_a_joint_stage_apart_from_its_others(remat: RematChoice) -> None:
    """All micro-batches through the stages before it, then through it, then through the rest.

    A single device never waits: its step is the sum of what it computes.
    """
    graph = trace(Normed(), torch.randn(16, 8), loss=LossChoice.SUM_OF_SQUARES)
    alone = local_cluster()
    alone = dataclasses.replace(alone, endless=False)
    policy = dataclasses.replace(EXACT, remat=remat)

    made = plan(graph, stages=3, microbatches=M, policy=policy, cluster=alone)

    assert set(made.placement) == {0}
    order = [str(action) for action in made.orders[0]]
    (joint,) = made.joint
    whole = [f"{joint}F{m}" for m in range(M)]
    start = order.index(whole[0])
    assert order[start : start + M] == whole
    work = sum(M * (s.forward_s + s.backward_s) for s in made.stages)
    again = made.prediction.recompute * made.prediction.step_s
    assert (again > 0) == (remat is RematChoice.FULL)
    update = sum(s.update_s for s in made.stages)
    assert made.prediction.step_s == pytest.approx(work + again + update)
