"""Clipping over stages is torch.nn.utils.clip_grad_norm_ on the plain model, to the same bits.

The plain model has its parameters in the order of the stages, each once.
"""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace

import pytest
import torch
from half_pipelines import PlainLoop
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_pipelines import SPECS, WIDTH, X, cross, data_for, spec_of, states
from torch import nn

from gpipe_compiler.runtime.core.gradients import clip_gradients, first_stages
from gpipe_compiler.runtime.core.pipeline import Pipeline
from gpipe_compiler.runtime.errors import AgreedError
from gpipe_compiler.runtime.spec import Leaf, LossSpec, LossTerm, Reduction, StageSpec

pytestmark = pytest.mark.usefixtures("one_thread")

NORMS = [2.0, 1.0, 3.0, math.inf, -math.inf]


def plain_clip(parameters, *arguments):
    return torch.nn.utils.clip_grad_norm_(parameters.values(), *arguments)


@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("name", ["skip", "tied"])
def test_gradients_of_a_step_are_clipped_as_the_plain_ones(name, devices, norm_type):
    """The tied embedding of three stages counts once; its copies stay equal after a step."""
    spec = SPECS[name]()
    inputs, target, _ = data_for(name, 8)
    with Pipeline(spec, None, devices=["cpu"] * devices) as pipe:
        loop = PlainLoop(spec, pipe.state_dict())
        pipe.step(inputs, target)
        for parameter, (_, ours) in zip(
            loop.parameters.values(), pipe.named_parameters(), strict=True
        ):
            parameter.grad = ours.grad.clone()
        before = {n: p.grad.clone() for n, p in loop.parameters.items()}
        most = 0.5 * float(plain_clip(loop.parameters, math.inf, norm_type))

        total = pipe.clip_grad_norm_(most, norm_type)

        assert torch.equal(total, plain_clip(loop.parameters, most, norm_type))
        for own, parameter in pipe.named_parameters():
            assert torch.equal(parameter.grad, loop.parameters[own].grad), own
            assert norm_type < 0 or not torch.equal(parameter.grad, before[own])
        torch.optim.SGD(pipe.parameters(), lr=1.0).step()
        if name == "tied":
            pipe.step(inputs, target)  # brings copies on other devices up to date
            copies = [
                parameter
                for index, module in pipe.stages.items()
                for own, parameter in module.named_parameters()
                if spec.stages[index].state[own] == "emb.weight"
            ]
            assert len(copies) == 3
            assert all(torch.equal(copy, copies[0]) for copy in copies)


DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])
GRADIENT = st.tuples(
    DTYPES,
    st.lists(st.integers(1, 4), max_size=2),
    st.sampled_from([None, 0.0, 1e-3, 1.0, 1e3, math.inf, math.nan]),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(GRADIENT, st.integers(0, 2)), min_size=1, max_size=6),
    st.sampled_from(NORMS),
    st.sampled_from([0.0, 0.1, 1.0, 1e4]),
    st.integers(0, 1000),
)
def test_any_gradients_over_any_ranks(made, norm_type, most, seed):
    """Types, sizes and numbers of all kinds, spread over three ranks; none at all on some."""
    torch.manual_seed(seed)
    parameters = {}
    for number, ((dtype, shape, size), _) in enumerate(made):
        parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
        if size is not None:
            parameter.grad = (torch.randn(shape) * size).to(dtype)
        parameters[f"p{number}"] = parameter
    # torch sums the norms type by type.
    kinds = list(dict.fromkeys(p.dtype for p in parameters.values()))
    names = sorted(parameters, key=lambda name: kinds.index(parameters[name].dtype))
    owners = {name: made[int(name[1:])][1] for name in names}
    ranks = [
        {n: nn.Parameter(p.detach().clone()) for n, p in parameters.items() if owners[n] == rank}
        for rank in range(3)
    ]
    for held in ranks:
        for name, parameter in held.items():
            if parameters[name].grad is not None:
                parameter.grad = parameters[name].grad.clone()

    totals = run_ranks(ranks, names, most, norm_type)

    expected = plain_clip({name: parameters[name] for name in names}, most, norm_type)
    for total in totals:
        assert total.dtype == expected.dtype
        if len(kinds) == 1:
            torch.testing.assert_close(total, expected, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(total, expected, rtol=1e-6, atol=0, equal_nan=True)
        torch.testing.assert_close(total, totals[0], rtol=0, atol=0, equal_nan=True)
    for held in ranks:
        for name, parameter in held.items():
            if parameter.grad is not None:
                eps = torch.finfo(parameter.dtype).eps
                torch.testing.assert_close(
                    parameter.grad,
                    parameters[name].grad,
                    rtol=2 * max(eps, 1e-7),
                    atol=0,
                    equal_nan=True,
                )


def run_ranks(ranks, names, most, norm_type, **more):
    """Clips on each rank; sums over ranks by running them together on threads."""
    barrier = threading.Barrier(len(ranks))
    slots = [None] * len(ranks)
    totals = [None] * len(ranks)

    def run(rank):
        def over_ranks(tensor, what):
            assert what
            slots[rank] = tensor
            barrier.wait(20)
            total = slots[0]
            for other in slots[1:]:
                total = total + other
            barrier.wait(20)
            return total

        world = SimpleNamespace(rank=rank, device=torch.device("cpu"), sum=over_ranks)
        contributes = {name: name in ranks[rank] for name in names}
        try:
            totals[rank] = clip_gradients(
                ranks[rank], contributes, world, most, norm_type, error_if_nonfinite=False
            )
        except AgreedError as error:
            totals[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return totals


class Frozen0(nn.Module):
    def __init__(self):
        super().__init__()
        self.l0 = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x):
        return self.l0(x)


class Frozen1(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1 = nn.Linear(WIDTH, WIDTH)

    def forward(self, h):
        return self.l1(h)

    def loss(self, y):
        return y.pow(2).mean()


def test_frozen_parameters_do_not_count():
    """They have no gradients; a pipeline without any has the norm 0, as torch says."""
    stages = [
        StageSpec(Frozen0, ("x",), ("h",), states(Frozen0)),
        StageSpec(Frozen1, ("h",), ("y",), states(Frozen1), ("y",)),
    ]
    loss = LossSpec("loss", (LossTerm(Reduction.MEAN),), separate=True)
    spec = spec_of(stages, [cross("h", 0, (1,), gradient=False)], [X], Leaf("y"), loss)
    with Pipeline(spec, None, devices=["cpu"] * 2) as pipe:
        assert torch.equal(pipe.clip_grad_norm_(1.0), torch.tensor(0.0))
        pipe.step(torch.ones(8, WIDTH))
        found = {n: p.grad.clone() for n, p in pipe.named_parameters() if p.grad is not None}
        assert sorted(found) == ["model.l1.bias", "model.l1.weight"]
        expected = torch.nn.utils.get_total_norm(list(found.values()))
        assert torch.equal(pipe.clip_grad_norm_(1.0), expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_is_an_error_on_request(bad):
    """The gradients are left alone then; otherwise they are scaled by it as torch does."""
    spec = SPECS["skip"]()
    with Pipeline(spec, None, devices=["cpu"] * 4) as pipe:
        pipe.step(*data_for("skip", 8)[:2])
        parameters = dict(pipe.named_parameters())
        parameters["model.l2.bias"].grad[1] = bad
        before = {name: p.grad.clone() for name, p in parameters.items()}
        with pytest.raises(AgreedError, match=f"the norm of the gradients is {bad}"):
            pipe.clip_grad_norm_(1.0, error_if_nonfinite=True)
        for name, parameter in parameters.items():
            torch.testing.assert_close(parameter.grad, before[name], equal_nan=True)
        total = pipe.clip_grad_norm_(1.0)
        assert not total.isfinite()
        assert not parameters["model.l0.weight"].grad.any() or math.isnan(bad)


def test_sparse_gradients_are_refused_on_every_rank():
    """Torch knows no norm of them; nobody waits for the rank that has it."""
    dense, sparse = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3, 2))
    dense.grad = torch.ones(2)
    sparse.grad = torch.ones(3, 2).to_sparse()

    found = run_ranks([{"a": dense}, {"emb": sparse}], ["a", "emb"], 1.0, 2.0)

    assert all("the gradient of emb is sparse" in str(error) for error in found)


@pytest.mark.parametrize("norm_type", NORMS)
def test_gradients_without_entries_do_not_matter(norm_type):
    """Torch has no largest entry of them, so that it refuses them under the norm inf."""
    empty, dense = nn.Parameter(torch.ones(0)), nn.Parameter(torch.ones(3))
    for parameter in (empty, dense):
        parameter.grad = torch.ones_like(parameter)
    expected = torch.nn.utils.get_total_norm([dense.grad], norm_type)
    totals = run_ranks([{"a": empty}, {"b": dense}], ["a", "b"], 9.0, norm_type)
    assert all(torch.equal(total, expected) for total in totals)


def test_each_norm_is_told_by_one_rank():
    """That of a parameter of several stages by the rank with the first of them."""
    found = first_stages(SPECS["tied"]())
    assert found == {"emb.weight": 0, "l1.weight": 1, "l1.bias": 1}
    assert tuple(found) == ("emb.weight", "l1.weight", "l1.bias")
