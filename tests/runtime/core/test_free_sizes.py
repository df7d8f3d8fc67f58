"""Pipelines on batches of any size, compared with the plain model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import forked
import pytest
import torch
from sized_pipelines import BROKEN, MOST_TOKENS, Plain, sized_batch, sized_spec, split_in
from tiny_pipelines import SAMPLES, data_for, norm_spec

from gpipe_compiler.runtime.core.pipeline import Pipeline
from gpipe_compiler.runtime.errors import StageError, UsageError
from gpipe_compiler.runtime.spec import Size
from gpipe_compiler.runtime.train.evaluation import evaluate
from gpipe_compiler.runtime.train.hooks import UserHooks

SIZES = ((8, 4), (1, 2), (13, 6), (5, 4), (40, 2))
RANKS = Path(__file__).parents[1] / "sized_ranks.py"


def close(found, expected, name=""):
    say = f"{name}: {{}}".format
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=say)


def check_gradients(pipe, expected):
    for name, parameter in pipe.named_parameters():
        close(parameter.grad, expected[name], name)


@pytest.mark.parametrize(
    ("schedule", "remat"),
    [("gpipe", "none"), ("1f1b", "full"), ("zb-h1", "none"), ("gpipe", "full")],
)
def test_sizes_vary_from_step_to_step(schedule, remat):
    """Training with dropout, evaluation and inference, each at five sizes."""
    with Pipeline(sized_spec(), None, schedule=schedule, remat=remat) as pipe:
        plain = Plain(pipe.spec, pipe.state_dict())
        for step, (tokens, items) in enumerate(SIZES):
            inputs, target = sized_batch(3, tokens, items, seed=step)
            pipe.zero_grad()
            loss, found = pipe.train().step_with_outputs(inputs, target)
            parts = split_in(2, inputs, target)
            expected, gradients, outputs = plain.step(parts, step=step)
            close(loss, expected)
            check_gradients(pipe, gradients)
            close(found["logits"], torch.cat(outputs))
            assert (found["tokens"], found["cells"]) == (tokens, 3 * tokens * items)

            pipe.eval()
            expected, _, (logits,) = plain.step([(inputs, target)], training=False)
            close(pipe.evaluate(inputs, target), expected)
            close(pipe(inputs)["logits"], logits)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_micro_batches_of_sizes_of_their_own(schedule):
    """A list of them: the mean is over all tokens, and what is returned is a list."""
    sizes = [(4, 8, 4), (1, 3, 2), (2, 13, 6)]
    batches = [sized_batch(*size, seed=m) for m, size in enumerate(sizes)]
    inputs, targets = map(list, zip(*batches, strict=True))
    with Pipeline(sized_spec(), None, schedule=schedule) as pipe:
        plain = Plain(pipe.spec, pipe.state_dict())
        loss, found = pipe.step_with_outputs(inputs, targets)
        expected, gradients, outputs = plain.step(batches)
        close(loss, expected)
        check_gradients(pipe, gradients)
        for size, one, logits in zip(sizes, found, outputs, strict=True):
            close(one["logits"], logits)
            assert (one["tokens"], one["cells"]) == (size[1], size[0] * size[1] * size[2])

        pipe.eval()
        expected, _, outputs = plain.step(batches, training=False)
        close(pipe.evaluate(inputs, targets), expected)
        for one, logits in zip(pipe(inputs), outputs, strict=True):
            close(one["logits"], logits)


def test_gradients_of_listed_inputs():
    """Each tensor that wants its gradient gets it, and no other."""
    batches = [sized_batch(2, 6, 4, seed=1), sized_batch(1, 9, 2, seed=2)]
    masks = [inputs[0][1] for inputs, _ in batches]
    masks[1].requires_grad_()
    inputs, targets = map(list, zip(*batches, strict=True))
    with Pipeline(sized_spec(), None) as pipe:
        pipe.step(inputs, targets)
        found, masks[1].grad = masks[1].grad, None
        Plain(pipe.spec, pipe.state_dict()).step(batches)

        close(found, masks[1].grad)
        assert masks[0].grad is None


def test_evaluation_over_batches_of_any_size_is_as_of_one():
    batches = [sized_batch(*size, seed=7) for size in ((2, 3, 2), (5, 40, 4), (1, 1, 2))]
    with Pipeline(sized_spec(), None) as pipe:
        plain = Plain(pipe.spec, pipe.state_dict())
        found = evaluate(pipe, UserHooks("model.py", eval_data=lambda: batches))

        assert found.loss == pytest.approx(float(plain.step(batches, training=False)[0]), rel=1e-6)


def refused(pipe, inputs, target, *said):
    with pytest.raises(UsageError) as error:
        pipe.step(inputs, target)
    for words in said:
        assert words in str(error.value)


def test_a_size_that_the_model_does_not_take_is_refused():
    """With the size, what holds and the line; the steps before and after are not touched."""
    inputs, target = sized_batch(2, 6, 4)
    with Pipeline(sized_spec(), None) as pipe:
        loss = pipe.step(inputs, target)
        where = "(dimension 1 of positional argument 0)"
        refused(
            pipe,
            *sized_batch(2, MOST_TOKENS + 1, 4),
            f"ids.1 <= {MOST_TOKENS}, and ids.1 is {MOST_TOKENS + 1} {where}: model.py:12:",
        )
        refused(pipe, *sized_batch(2, 6, 3), "memory.1 divisible by 2", "is 3", "model.py:30:")
        refused(
            *(pipe, inputs, sized_batch(2, 5, 4)[1]),
            "target has shape 2x5, the model was compiled for batch x ids.1, and ids.1 is 6",
        )
        refused(
            pipe,
            [inputs, sized_batch(2, 6, 3)[0]],
            [target, target],
            "micro-batch 1: tiny demands memory.1 divisible by 2",
        )
        refused(pipe, [inputs], target, "a list of 1 micro-batches, and the target is a tensor 2x6")
        refused(pipe, [], [], "the list of micro-batches is empty")
        pipe.rewind()

        assert torch.equal(pipe.step(inputs, target), loss)


def test_after_a_step_that_failed_another_size_works():
    with Pipeline(sized_spec(), None) as pipe:
        plain = Plain(pipe.spec, pipe.state_dict())
        with pytest.raises(StageError, match=r"stage 1, forward of micro-batch 0.*seven tokens"):
            pipe.step(*sized_batch(4, BROKEN, 4))
        pipe.zero_grad()
        batch = sized_batch(4, 30, 2)
        loss = pipe.step(*batch)
        expected, gradients, _ = plain.step(split_in(2, *batch))

        close(loss, expected)
        check_gradients(pipe, gradients)


def test_where_a_size_is_not_known_from_its_own_input_another_tells_it():
    """One that is not passed, as the target in inference."""
    spec = sized_spec()
    moved = Size("ids.1", of=("target", 1), example=8)
    inputs = tuple(
        dataclasses.replace(source, shape=(SAMPLES, moved)) if source.name != "memory" else source
        for source in spec.inputs
    )
    batch, _ = sized_batch(2, 6, 4)
    with Pipeline(dataclasses.replace(spec, inputs=inputs), None) as pipe:
        assert pipe.eval()(batch)["tokens"] == 6


def test_joined_micro_batches_must_be_of_the_same_sizes():
    """Exact BatchNorm is over all of them at once."""
    spec = norm_spec()
    stages = tuple(dataclasses.replace(stage, mixes=True) for stage in spec.stages)
    spec = dataclasses.replace(spec, stages=stages)
    x, _, _ = data_for("norm", 4)
    length = Size("x.1", of=("x", 1), example=6)
    inputs = (dataclasses.replace(spec.inputs[0], shape=(SAMPLES, length)),)
    with Pipeline(dataclasses.replace(spec, inputs=inputs), None, batchnorm="exact") as pipe:
        with pytest.raises(UsageError, match=r"stage 0 takes all micro-batches as one, for exact"):
            pipe.step([x, x[:, :5]])
        joined = pipe.step([x[:2], x[2:]])
        pipe.rewind()

    with Pipeline(spec, None, batchnorm="exact") as pipe:
        close(joined, pipe.step(x))


def test_where_it_is_not_known_what_the_loss_is_a_mean_over_sizes_must_agree():
    spec = sized_spec()
    term = dataclasses.replace(spec.loss.terms[0], per_sample=None)
    spec = dataclasses.replace(spec, loss=dataclasses.replace(spec.loss, terms=(term,)))
    batches = [sized_batch(2, 6, 4), sized_batch(2, 9, 4)]
    inputs, targets = map(list, zip(*batches, strict=True))
    with Pipeline(spec, None) as pipe:
        refused(pipe, inputs, targets, "how many things its loss is a mean over is not known")
        assert len(pipe(inputs)) == 2
        pipe.step([inputs[0]] * 2, [targets[0]] * 2)
        pipe.step(inputs[1], targets[1])


def test_a_list_is_the_argument_of_a_model_that_takes_one():
    spec = sized_spec()
    paths = {"ids": ("args", 0, 0), "mask": ("args", 0, 1)}
    inputs = tuple(
        dataclasses.replace(source, path=paths.get(source.name, source.path))
        for source in spec.inputs
    )
    ((ids, mask), kwargs), target = sized_batch(2, 6, 4)
    with Pipeline(spec, None) as pipe:
        loss = pipe.step(((ids, mask), kwargs), target)
    with Pipeline(dataclasses.replace(spec, inputs=inputs), None) as pipe:
        assert torch.equal(pipe.step((([ids, mask],), kwargs), target), loss)
        with pytest.raises(UsageError, match="memory"):
            pipe.step([ids, mask], target)


def ranks(count, what, directory, **variables):
    done = forked.run([RANKS, what, directory], ranks=count, **variables)
    assert done.returncode == 0, done.stderr
    return [torch.load(directory / f"{what}-{rank}.pt") for rank in range(count)]


def check_pairs(found):
    for name, (actual, expected) in found.items():
        close(actual, expected, name)


@pytest.mark.parametrize("by_socket", [True, False])
def test_processes_take_any_size(by_socket, tmp_path):
    """Three ranks, between which messages grow and shrink, in shared memory and by gloo."""
    directory = tmp_path if by_socket else tmp_path / "-".join(["far"] * 30)
    directory.mkdir(exist_ok=True)
    first, *others = ranks(3, "trained", directory, TMPDIR=str(directory))

    check_pairs(first["pairs"])
    assert "ids.1 <= 600, and ids.1 is 601" in first["refused"]
    for other in others:
        assert "rank 0 refused its inputs: tiny demands ids.1 <= 600" in other["refused"]


def test_no_message_is_added_for_sizes(tmp_path):
    """A step sends as many messages, whether all its sizes are those of the step before."""
    for found in ranks(2, "counted", tmp_path):
        same, other, listed = found["messages"]
        assert same == other == listed > 0


def test_replicas_of_different_sizes(tmp_path):
    """Each with batches of its own, and with its share of a list."""
    for found in ranks(2, "replicas", tmp_path):
        check_pairs(found["pairs"])
