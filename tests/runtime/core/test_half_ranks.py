"""Precision, scaling and clipping over two processes: the plain loop of torch, in all bits.

The plain loop is torch.autocast, torch.amp.GradScaler and torch.nn.utils.clip_grad_norm_ on one
model. Replicas average gradients over processes, so that they come close to it only.
"""

from __future__ import annotations

from pathlib import Path

import forked
import pytest
import torch
from half_pipelines import PlainLoop, half_data, half_spec, parts_of, picking_spec
from half_ranks import CASES, CLIP, OVERFLOWS, SCALE, STEPS
from tiny_pipelines import data_for, tied_spec

from gpipe_compiler.runtime.core.pipeline import Pipeline

RANKS = Path(__file__).parents[1] / "half_ranks.py"


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What each of the two ranks has seen in each case: one launch for all."""
    directory = tmp_path_factory.mktemp("half")
    done = forked.run([RANKS, directory], ranks=2)
    assert done.returncode == 0, done.stderr
    return {
        name: [torch.load(directory / f"{name}-{rank}.pt") for rank in range(2)] for name in CASES
    }


def plain_run(before, precision):
    """The loop that a user of torch writes."""
    loop = PlainLoop(half_spec(), before, precision)
    optimizer = torch.optim.Adam(loop.parameters.values(), lr=0.01)
    enabled = precision == "fp16"
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=2, enabled=enabled)
    found = {"losses": [], "norms": [], "scales": []}
    step = 0
    if enabled:
        weight = loop.parameters["model.half0.l0.weight"]
        weight.register_hook(lambda g: torch.full_like(g, torch.inf) if step == OVERFLOWS else g)
    for step in range(STEPS):
        optimizer.zero_grad()
        found["losses"].append(loop.step(parts_of(half_data(8, step), 4), scaler.scale))
        scaler.unscale_(optimizer)
        found["norms"].append(torch.nn.utils.clip_grad_norm_(loop.parameters.values(), CLIP))
        scaler.step(optimizer)
        scaler.update()
        found["scales"].append(scaler.get_scale())
    return found, loop.weights()


def same(one, other):
    return torch.equal(one, other) or bool(one.isnan() & other.isnan())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_two_processes_are_the_plain_loop(seen, precision):
    """Also where a gradient of rank 0 alone overflows: both skip, and then go on."""
    ranks = seen[precision]
    expected, weights = plain_run(ranks[0]["before"], precision)
    for rank in ranks:
        assert rank["scales"] == expected["scales"]
        assert all(map(same, rank["norms"], expected["norms"]))
        for loss, plain in zip(rank["losses"], expected["losses"], strict=True):
            torch.testing.assert_close(loss, plain, rtol=1e-6, atol=0)
        skipped = precision == "fp16"
        assert rank["same"] == [skipped and step == OVERFLOWS for step in range(STEPS)]
    assert all(torch.equal(ranks[0]["after"][name], weights[name]) for name in weights)
    assert torch.equal(ranks[0]["evaluated"], ranks[1]["evaluated"])
    if precision == "fp16":
        assert expected["scales"] == [SCALE, SCALE / 2, SCALE / 2, SCALE]


@pytest.mark.parametrize("case", ["replicas", "optimizer", "full"])
def test_two_replicas_decide_together(seen, case):
    """An overflow in one replica: both skip; scales and norms are the same bits on both."""
    ranks = seen[case]
    expected, weights = plain_run(ranks[0]["before"], "fp16")
    for rank in ranks:
        assert rank["scales"] == expected["scales"]
        assert rank["same"] == [step == OVERFLOWS for step in range(STEPS)]
        assert all(map(same, rank["norms"], ranks[0]["norms"]))
        for norm, plain in zip(rank["norms"], expected["norms"], strict=True):
            torch.testing.assert_close(norm, plain, rtol=1e-5, atol=0, equal_nan=True)
    for name, weight in weights.items():
        torch.testing.assert_close(ranks[0]["after"][name], weight, rtol=1e-3, atol=1e-4)


def test_tied_weights_are_clipped_once(seen):
    """Its norm counts once, and its copies on both ranks are the same bits afterwards."""
    ranks = seen["tied"]
    inputs, target, _ = data_for("tied", 8)
    data = inputs["batch"]["tokens"], target["labels"]
    spec = tied_spec()
    with Pipeline(spec, None, devices=["cpu"]) as pipe:
        loop = PlainLoop(spec, pipe.state_dict())
    loop.step(parts_of(data, 4, ("tokens", "labels")))
    parameters = loop.parameters.values()
    norm = torch.nn.utils.clip_grad_norm_(parameters, CLIP)
    assert norm > CLIP
    torch.optim.SGD(parameters, lr=1.0).step()

    for rank in ranks:
        torch.testing.assert_close(rank["norm"], norm, rtol=1e-6, atol=0)
        torch.testing.assert_close(rank["again"], torch.tensor(CLIP), rtol=1e-4, atol=0)
        assert "the norm of the gradients is" in rank["refused"]
    assert torch.equal(ranks[0]["norm"], ranks[1]["norm"])
    assert torch.equal(ranks[0]["tied"], ranks[1]["tied"])
    for name, weight in loop.weights().items():
        torch.testing.assert_close(ranks[0]["after"][name], weight, rtol=1e-5, atol=1e-6)


def test_types_are_those_of_the_run_and_not_of_the_plan(seen):
    """In another precision than planned, call after call, of stages that need numbers."""
    x = half_data(8)[0]
    with Pipeline(picking_spec(), None, devices=["cpu"]) as pipe:
        expected = {"fp32": pipe.eval()(x)}
    with Pipeline(picking_spec(), None, devices=["cpu"], precision="bf16") as pipe:
        expected["bf16"] = pipe.eval()(x)
    assert not torch.equal(expected["fp32"], expected["bf16"])

    for (_, precision), calls in seen["planned otherwise"][0].items():
        assert all(torch.equal(found, expected[precision]) for found in calls)
