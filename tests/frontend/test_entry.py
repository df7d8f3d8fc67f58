"""The entry finds inputs, outputs and loss of a model whatever they are wrapped in."""

from __future__ import annotations

import collections
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpipe_compiler.errors import ModelError
from gpipe_compiler.frontend.entry import Entry
from gpipe_compiler.frontend.state import isolated, state_table
from gpipe_compiler.frontend.structure import describe, fill, pick, slots
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.ir import Reduction
from gpipe_compiler.options import LossChoice
from gpipe_compiler.runtime.spec import Unreturned


class Anything(nn.Module):
    """Returns what a function makes of its linear layer's output."""

    def __init__(self, returns=lambda y: y):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.returns = returns

    def forward(self, input, batch=None, *rest, flag=True):  # noqa: A002  # the name is the test
        x = input if isinstance(input, torch.Tensor) else input[0]
        return self.returns(self.linear(x))


@dataclasses.dataclass
class Record:
    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    cache: object = None


Pair = collections.namedtuple("Pair", "first second")  # what users write


SQUARES = LossChoice.SUM_OF_SQUARES


def entry(model, *args, target=None, loss_fn=None, training=True, loss=SQUARES, **kwargs):
    loss = loss if loss_fn is None else LossChoice.MODEL
    subject = Subject("toy", model, args, kwargs, target, loss_fn, training, loss)
    return Entry(subject, training)


def names(made):
    return [source.name for source in made.signature.inputs]


def test_inputs_are_named_after_forwards_arguments():
    x = torch.randn(2, 4)
    made = entry(
        Anything(), (x, x), {"image": x, "ids": x}, x, flag=torch.tensor(True),
        target={"a": x, "b": [x]}, loss_fn=lambda o, t: o.sum(),
    )  # fmt: skip

    assert [
        *("input_0", "input_1", "batch_image", "batch_ids", "rest_0", "flag"),
        *("target_a", "target_b_0"),
    ] == names(made)
    assert made.signature.inputs[2].path == ("args", 1, "image")
    assert made.signature.inputs[-1].path == ("target", "b", 0)


def test_a_name_that_python_uses_gets_an_underscore():
    assert names(entry(Anything(), torch.randn(2, 4))) == ["input"]


def test_the_batch_is_dimension_0_that_most_inputs_share():
    x, mask = torch.randn(6, 4), torch.ones(5, 5)
    made = entry(Anything(), x, mask, x, torch.tensor(1.0))

    assert made.signature.batch_size == 6
    assert [source.batched for source in made.signature.inputs] == [True, False, True, False]


@pytest.mark.parametrize(("have", "want"), [(1, 2), (4, 3), (3, 7)])
def test_samples_cut_or_repeat_the_example(have, want):
    x = torch.arange(have * 4.0).view(have, 4)
    (sample,) = entry(Anything(), x).signature.samples(want)

    assert torch.equal(x[torch.arange(want) % have], sample)


@pytest.mark.parametrize(
    ("returns", "structure"),
    [
        (lambda y: y, "o"),
        (lambda y: (y, [y, None], 3), ("o", ["o", None], 3)),
        (lambda y: {"a": y, "b": None}, {"a": "o", "b": None}),
        (lambda y: Pair(y, 1), ("o", 1)),
        (lambda y: Record(logits=y), {"logits": "o"}),
        (
            lambda y: Record(logits=y, cache=object()),
            {"logits": "o", "cache": Unreturned(("cache",), "object")},
        ),
        (lambda y: collections.UserDict(a=y, b=None), {"a": "o", "b": None}),
    ],
)
def test_outputs_become_plain_tuples_lists_and_dicts(returns, structure):
    made = entry(Anything(returns), torch.randn(2, 4), training=False)
    leaves = made(*made.signature.examples)

    assert structure == made.outputs(["o"] * len(leaves))


def test_the_models_own_loss_comes_first_and_is_no_output():
    model = Anything(lambda y: Record(logits=y, loss=y.pow(2).mean()))
    made = entry(model, torch.randn(4, 4), loss=LossChoice.MODEL)
    loss, logits = made(*made.signature.examples)

    assert torch.equal(logits.pow(2).mean(), loss)
    assert made.outputs(["o"]) == {"logits": "o"}


def test_the_sum_of_squares_is_that_of_all_floats():
    made = entry(Anything(lambda y: (y, y.argmax(-1), y * 2)), torch.randn(4, 4))
    loss, y, _, twice = made(*made.signature.examples)

    assert torch.allclose(y.square().sum() + twice.square().sum(), loss)
    assert made.reduction is Reduction.SUM


@pytest.mark.parametrize(
    ("loss_fn", "reduction"),
    [
        (F.cross_entropy, Reduction.MEAN),
        (nn.CrossEntropyLoss(reduction="sum"), Reduction.SUM),
        (lambda o, t: F.cross_entropy(o, t, reduction="sum") / 4, Reduction.SUM),
        (lambda o, t: F.cross_entropy(o, t) ** 2 + o.std(), Reduction.MEAN),
    ],
)
def test_how_losses_combine_is_found_out(loss_fn, reduction):
    torch.manual_seed(0)
    target = torch.randint(0, 3, (6,))
    made = entry(Anything(), torch.randn(6, 4), target=target, loss_fn=loss_fn)

    assert reduction is made.reduction


@pytest.mark.parametrize(
    "loss_fn",
    [nn.BCELoss(), lambda o, t: (o.log() * t).sum(), lambda o, t: nn.GaussianNLLLoss()(o, t, o)],
)
def test_a_loss_of_probabilities_or_positive_numbers_is_tried_on_some(loss_fn):
    """What the model returns is made up when the loss is first called, to save the forward."""
    model = nn.Sequential(nn.Linear(4, 2), nn.Sigmoid())

    assert entry(model, torch.rand(4, 4), target=torch.rand(4, 2), loss_fn=loss_fn).has_loss


def test_how_losses_combine_is_found_out_for_the_models_own_loss():
    made = entry(
        Anything(lambda y: {"loss": y.square().sum(), "y": y}),
        torch.randn(6, 4),
        loss=LossChoice.MODEL,
    )

    assert made.reduction is Reduction.SUM


@pytest.mark.parametrize(
    ("model", "loss_fn", "problem"),
    [
        (Anything(lambda y: y.argmax(-1)), None, "nothing to train"),
        (Anything(), lambda o, t: o, "where a loss is expected"),
        (Anything(), lambda o, t: o.no_such_thing, "loss_fn raises AttributeError"),
        (Anything(lambda y: y.view(3, 1000)), None, "the model raises RuntimeError"),
        (nn.LazyLinear(3), None, "lazy"),
    ],
)
def test_models_that_cannot_be_trained_say_so(model, loss_fn, problem):
    with pytest.raises(ModelError, match=problem):
        entry(model, torch.randn(4, 4), loss_fn=loss_fn)


def test_inputs_without_a_tensor_are_refused():
    with pytest.raises(ModelError, match="hold no tensor"):
        entry(Anything(), 3)


@pytest.mark.parametrize("share", [True, False])
def test_a_copy_shares_parameters_where_it_may_and_nothing_else(share):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.extra = torch.ones(1)
    copied = isolated(model, share_parameters=share)

    assert (copied[0].weight is model[0].weight) == share
    assert torch.equal(copied[0].weight, model[0].weight)
    assert copied[1].running_mean is not model[1].running_mean
    assert copied.extra is not model.extra


def test_a_copy_has_what_a_call_has_left_in_lists():
    model = nn.Linear(2, 2)
    model.outputs = [model(torch.ones(1, 2))]
    copied = isolated(model)

    assert copied.outputs[0] is not model.outputs[0]
    assert copied.outputs[0].is_leaf
    assert torch.equal(copied.outputs[0], model.outputs[0])


def test_tied_state_is_listed_once_with_its_aliases():
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    table = state_table(model)

    assert list(table.states) == ["a.weight", "a.bias", "b.bias"]
    assert table.states["a.weight"].aliases == ("b.weight",)
    assert table.canonical["b.weight"] == "a.weight"


def test_a_structure_is_taken_apart_and_put_together_again():
    a, b = torch.zeros(1), torch.ones(1)
    output = {"x": (a, 3), "y": [None, b]}
    template = describe(output)

    assert [a, b] == pick(output, template)
    assert slots(template) == [0, 1]
    assert output == fill(template, [a, b])


@pytest.mark.parametrize("reduction", [Reduction.MEAN, Reduction.SUM])
def test_how_losses_combine_is_found_out_for_a_model_on_meta(reduction):
    loss = nn.CrossEntropyLoss(reduction=reduction.value)
    with torch.device("meta"):
        model = Anything()
    made = entry(model, torch.randn(6, 4), target=torch.randint(0, 3, (6,)), loss_fn=loss)

    assert made.reduction is reduction


def test_a_model_that_raises_on_any_batch_is_told_from_one_that_minds_the_size(capfd):
    """Only the latter hears of dimension 0; and torch's own log of the failure is not shown."""

    def eight(y):
        return y.view(8, 3)

    with pytest.raises(ModelError, match=r"on the example inputs: .*mat1 and mat2") as caught:
        entry(nn.Linear(5, 2), torch.randn(8, 4))
    assert "dimension 0" not in caught.value.hint
    with pytest.raises(ModelError, match="on a batch of 4 samples") as caught:
        entry(Anything(eight), torch.randn(8, 4))
    assert "dimension 0" in caught.value.hint
    assert capfd.readouterr() == ("", "")
