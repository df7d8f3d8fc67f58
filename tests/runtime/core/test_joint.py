"""Exact BatchNorm, compared with the plain model run once on the whole mini-batch."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import forked
import pytest
import torch
from joint_pipeline import F64, RATE, STEPS, joint_data, joint_spec, trained
from stateful_pipeline import stateful_data, stateful_spec
from tiny_pipelines import WIDTH, X, cross, data_for, norm_spec, reference, spec_of, states
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from gpipe_compiler.runtime.core.full_batch import joint_stages
from gpipe_compiler.runtime.core.pipeline import Pipeline
from gpipe_compiler.runtime.errors import PipelineError, StageError, UsageError
from gpipe_compiler.runtime.spec import (
    BatchNorm,
    Leaf,
    LossSpec,
    LossTerm,
    Reduction,
    Remat,
    StageSpec,
)

SCRIPT = Path(__file__).parents[1] / "joint_pipeline.py"
TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}


def close(expected, actual, what=None):
    torch.testing.assert_close(actual, expected, **TOLERANCE, msg=what)


def snapshot(pipe):
    return {name: tensor.clone() for name, tensor in pipe.state_dict().items()}


def outputs_of(pieces):
    return pieces["y"], pieces["across"], pieces["gain"], pieces["b"]


def check_steps(spec, batches, *, outputs=None, seed=6, **choices):
    """Every step's loss, gradients, outputs and state are those of a plain loop of its own."""
    with Pipeline(spec, None, seed=seed, **choices) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=RATE)
        state = snapshot(pipe)
        for step, (x, target) in enumerate(batches):
            optimizer.zero_grad()
            loss, found = pipe.step_with_outputs(x, target)
            values = {"x": x, "target": target}
            expected, gradients, pieces, buffers = reference(
                spec, state, [values], seed=seed, step=step
            )
            close(expected, loss)
            for name, parameter in pipe.named_parameters():
                if parameter.requires_grad:
                    close(gradients[name], parameter.grad, name)
            if outputs is not None:
                for mine, plain in zip(outputs(found), outputs_of(pieces[0]), strict=True):
                    close(plain, mine)
            trained_names = {n for n, p in pipe.named_parameters() if p.requires_grad}
            for name in trained_names:
                state[name] = state[name] - RATE * gradients[name]
            state.update(buffers)
            optimizer.step()
            now = pipe.state_dict()
            assert now.keys() == state.keys()
            for name, tensor in now.items():
                close(state[name], tensor, name)
        return state


def joint_outputs(found):
    across, (gain, b) = found["rest"]
    return found["y"], across, gain, b


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("samples", [2, 3, 8, 11])
@pytest.mark.parametrize("normed", [(1,), (0, 1), (1, 3), (0, 1, 3)])
@pytest.mark.parametrize("remat", ["none", "full"])
def test_steps_equal_the_plain_model_on_the_whole_batch(remat, normed, samples, workers):
    """Batches that divide, that do not, and that are smaller than the micro-batches."""
    batches = [joint_data(samples, seed) for seed in range(STEPS)]
    state = check_steps(
        joint_spec(normed),
        batches,
        outputs=joint_outputs,
        devices=["cpu"] * workers,
        remat=remat,
    )

    assert state["model.s1.bn.num_batches_tracked"] == STEPS


@pytest.mark.parametrize("reduction", list(Reduction))
@pytest.mark.parametrize("ignoring", [False, True])
@pytest.mark.parametrize("normed", [(1,), (1, 3)])
@pytest.mark.parametrize("workers", [1, 4])
def test_losses(workers, normed, ignoring, reduction):
    """Sums, means over samples and over labels that count, made by a joint stage or not."""
    spec = joint_spec(normed, reduction, ignoring=ignoring and reduction is Reduction.MEAN)
    batches = [joint_data(11, seed, ignoring=ignoring) for seed in range(2)]

    check_steps(spec, batches, devices=["cpu"] * workers)


@pytest.mark.parametrize("normed", [(1,), (1, 3)])
def test_a_batch_in_which_nothing_counts(normed):
    """The loss is nan as the plain model's, and nothing else is."""
    x, target = joint_data(8)
    with Pipeline(joint_spec(normed, ignoring=True), None) as pipe:
        loss = pipe.step(x, torch.full_like(target, -100))

        assert loss.isnan()
        for _, parameter in pipe.named_parameters():
            assert parameter.grad is None or parameter.grad.isfinite().all()


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("remat", list(Remat))
@pytest.mark.parametrize("samples", [12, 13])
def test_dropout_and_running_averages(samples, remat, workers):
    """Masks are those of the whole mini-batch, whatever the stages; tied weights beside them."""
    spec = stateful_spec(microbatches=5, batchnorm=BatchNorm.EXACT)
    batches = [tuple(stateful_data(samples, seed)) for seed in range(STEPS)]

    state = check_steps(spec, batches, devices=["cpu"] * workers, remat=remat)

    assert state["model.steps"] == STEPS


def test_masks_do_not_depend_on_the_number_of_stages():
    """One stage and two give the same run."""
    x, _, _ = data_for("norm", 8)
    found = []
    for stages in (1, 2):
        spec = norm_spec(stages, batchnorm=BatchNorm.EXACT)
        mixing = tuple(dataclasses.replace(stage, mixes=True) for stage in spec.stages)
        with Pipeline(dataclasses.replace(spec, stages=mixing), None, seed=5) as pipe:
            losses = [pipe.step(x) for _ in range(2)]
            found.append((losses, snapshot(pipe)))

    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-6)


def test_which_stages_are_joint():
    """Those that mix or write; all of them as soon as something is random; none by themselves."""
    plain, mixing = StageSpec(nn.Identity, (), ()), StageSpec(nn.Identity, (), (), mixes=True)
    writing = StageSpec(nn.Identity, (), (), writes=("count",))
    counting = StageSpec(nn.Identity, (), (), writes=("count",), once=("count",))
    random = StageSpec(nn.Identity, (), (), random_ops=(0,))

    assert joint_stages((plain, mixing, counting, writing)) == {1, 3}
    assert joint_stages((plain, mixing, random)) == {0, 1, 2}
    assert joint_stages((plain, random)) == frozenset()
    assert joint_stages((plain, random), replicas=2) == frozenset()
    with pytest.raises(UsageError, match=r"each of 2 replicas[\s\S]*--batchnorm deferred"):
        joint_stages((plain, mixing), replicas=2)


def test_other_stages_stay_pipelined():
    """A joint stage runs once a step, the others once for each micro-batch."""
    calls = Counter()
    x, target = joint_data(8)
    with Pipeline(joint_spec((1,)), None) as pipe:
        for index, module in pipe.stages.items():
            module.register_forward_pre_hook(lambda *_, index=index: calls.update([index]))
        pipe.step(x, target)
        assert calls == {0: 4, 1: 1, 2: 4, 3: 4}
        calls.clear()
        pipe.eval().step(x, target)
        assert calls == {0: 4, 1: 4, 2: 4, 3: 4}


@pytest.mark.parametrize(("workers", "expected"), [(4, {0: 7, 1: 1, 2: 7, 3: 7}), (1, None)])
def test_what_is_recomputed(workers, expected):
    """A joint stage alone on its device goes straight back; else another one's work comes between.

    On four devices only the last micro-batch of stages 0, 2 and 3 is not computed twice.
    """
    calls = Counter()
    x, target = joint_data(8)
    with Pipeline(joint_spec((1,)), None, devices=["cpu"] * workers, remat="full") as pipe:
        for index, module in pipe.stages.items():
            module.register_forward_pre_hook(lambda *_, index=index: calls.update([index]))
        pipe.step(x, target)

    assert calls == (expected or {0: 8, 1: 2, 2: 7, 3: 7})


@pytest.mark.parametrize("samples", [8, 11])
def test_evaluation_mode_and_forwards_alone(samples):
    """In training mode forwards are those of the whole batch; in evaluation mode none is joint."""
    spec = joint_spec((1, 3))
    x, target = joint_data(samples)
    values = {"x": x, "target": target}
    with Pipeline(spec, None) as pipe:
        for call in (lambda: pipe(x), lambda: pipe.evaluate_with_outputs(x, target)[1]):
            state = snapshot(pipe)
            found = call()
            _, _, pieces, buffers = reference(spec, state, [values])
            for mine, plain in zip(joint_outputs(found), outputs_of(pieces[0]), strict=True):
                close(plain, mine)
            for name, buffer in pipe.named_buffers():
                close(buffers[name], buffer)
        state = snapshot(pipe)
        pipe.eval()
        loss, found = pipe.step_with_outputs(x, target)
        expected, gradients, pieces, _ = reference(spec, state, [values], train=False)
        close(expected, loss)
        close(pieces[0]["y"], found["y"])
        for name, parameter in pipe.named_parameters():
            close(gradients[name], parameter.grad, name)
        for name, buffer in pipe.named_buffers():
            assert torch.equal(state[name], buffer)


def test_mini_batches_accumulate():
    """Two steps of half the weight are the mean of two plain steps."""
    spec = joint_spec((1, 3))
    with Pipeline(spec, None) as pipe:
        state = snapshot(pipe)
        sums = {}
        for seed in range(2):
            x, target = joint_data(7, seed)
            pipe.step(x, target, weight=0.5)
            _, gradients, _, buffers = reference(spec, state, [{"x": x, "target": target}])
            state.update(buffers)
            sums = {name: sums.get(name, 0) + g / 2 for name, g in gradients.items()}

        for name, parameter in pipe.named_parameters():
            close(sums[name], parameter.grad, name)


def test_1f1b_is_refused():
    """At once, with the way out; a single micro-batch goes through any schedule."""
    with pytest.raises(UsageError, match=r"1f1b[\s\S]*--schedule gpipe") as raised:
        Pipeline(joint_spec(), None, schedule="1f1b")
    assert raised.value.exit_code == 2
    check_steps(joint_spec(), [joint_data(4)], schedule="1f1b", microbatches=1)


def test_stages_that_were_planned_to_take_turns_on_a_device():
    """A package's own orders are for its own BatchNorm; for exact BatchNorm there are others."""
    spec = joint_spec(microbatches=3)
    turns = [f"{s}F{m}" for m in range(3) for s in range(4)]
    turns += [f"{s}B{m}" for m in range(2, -1, -1) for s in range(3, -1, -1)]
    spec = dataclasses.replace(
        spec, batchnorm=BatchNorm.MICRO, orders=(" ".join(turns),), placement=(0, 0, 0, 0)
    )
    check_steps(spec, [joint_data(6)], outputs=joint_outputs, batchnorm="exact")


def test_models_that_mix_nothing_take_any_schedule():
    """Exact BatchNorm asks nothing of them."""
    spec = joint_spec((1,))
    plain = tuple(dataclasses.replace(stage, writes=(), mixes=False) for stage in spec.stages)
    with Pipeline(dataclasses.replace(spec, stages=plain), None, schedule="1f1b") as pipe:
        assert pipe.step(*joint_data(8)).isfinite()


class Pairs(nn.Module):
    """Two samples make one row."""

    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm1d(WIDTH, dtype=F64)

    def forward(self, x):
        return self.bn(x).unflatten(0, (-1, 2)).sum(1)


class Failing(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1 = nn.Linear(WIDTH, WIDTH, dtype=F64)

    def forward(self, h):
        if len(h) > 5:
            raise ValueError("too many")
        return self.l1(h)

    def loss(self, y):
        return y.sum()


def pairs_spec(last_mixes):
    stages = [
        StageSpec(Pairs, ("x",), ("h",), states(Pairs), mixes=True),
        StageSpec(Failing, ("h",), ("y",), states(Failing), ("y",), mixes=last_mixes),
    ]
    loss = LossSpec("loss", (LossTerm(Reduction.SUM),), separate=True)
    crossings = [cross("h", 0, (1,), shape=(1, WIDTH), dtype=F64)]
    return spec_of(stages, crossings, [X], Leaf("y"), loss, batchnorm=BatchNorm.EXACT)


def test_what_was_joined_is_not_held_in_pieces():
    """While a joint stage computes, the pieces of what it received are gone."""
    stages = [
        StageSpec(Failing, ("x",), ("h",), states(Failing)),
        StageSpec(Pairs, ("h",), ("y",), states(Pairs), mixes=True),
    ]
    crossings = [cross("h", 0, (1,), dtype=F64)]
    spec = spec_of(stages, crossings, [X], Leaf("y"), None, batchnorm=BatchNorm.EXACT)
    pieces, held = [], []
    with Pipeline(spec, None, devices=["cpu"]) as pipe:
        pipe.stages[0].register_forward_hook(
            lambda _module, _arguments, out: pieces.append(StorageWeakRef(out.untyped_storage()))
        )
        pipe.stages[1].register_forward_pre_hook(
            lambda *_: held.extend(piece for piece in pieces if not piece.expired())
        )
        pipe.train()
        pipe(torch.randn(8, WIDTH, dtype=F64))

    assert len(pieces) == 4
    assert not held


def test_values_that_do_not_split_are_refused():
    """Five rows of ten samples are no rows for three."""
    with Pipeline(pairs_spec(last_mixes=False), None) as pipe:
        x = torch.randn(10, WIDTH, dtype=F64)
        with pytest.raises(PipelineError, match="h has 5 entries for 10 samples") as raised:
            pipe.step(x)
        assert "3, 3, 2, 2" in str(raised.value)
        assert "number of micro-batches divides" in str(raised.value)
        pipe.step(torch.cat([x, x[:2]])[:8])


def test_an_error_in_a_joint_stage_names_the_mini_batch():
    """There is no micro-batch to blame."""
    with (
        Pipeline(pairs_spec(last_mixes=True), None) as pipe,
        pytest.raises(StageError, match="stage 1, forward of the mini-batch: ValueError: too many"),
    ):
        pipe.step(torch.randn(16, WIDTH, dtype=F64))


def test_processes_do_what_threads_do(tmp_path):
    """Two ranks with two stages each: the same numbers as in one process."""
    done = forked.run([SCRIPT, tmp_path], ranks=2)

    assert done.returncode == 0, done.stderr
    for name, normed in {"middle": (1,), "all": (0, 1, 3)}.items():
        for remat in ("none", "full"):
            found = torch.load(tmp_path / f"{name}-{remat}.pt")
            expected = trained(joint_spec(normed), 11, transport="local", remat=remat)
            assert found.keys() == expected.keys()
            for key, tensor in expected.items():
                close(tensor, found[key], key)
    told = (tmp_path / "differ-1").read_text()
    assert "rank 1 is in evaluation mode, and rank 0 in training mode" in told
