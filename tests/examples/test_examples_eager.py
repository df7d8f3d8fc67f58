"""The example models are what they claim to be, before any compiler sees them."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from small_examples import SMALL, Small, load, loss_of
from torch import Tensor
from torch.utils._pytree import tree_map

every_example = pytest.mark.parametrize("small", SMALL, ids=str)


@every_example
def test_every_parameter_gets_a_gradient(small: Small) -> None:
    example = small.load()
    model = example.build_model(**small.model)

    loss_of(example, model, *small.batch()).backward()

    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    assert all(p.grad.isfinite().all() for p in model.parameters())


@every_example
def test_the_loss_of_one_batch_falls(small: Small) -> None:
    example = small.load()
    model = example.build_model(**small.model)
    inputs, target = small.batch()
    optimizer = example.make_optimizer(model.parameters())
    if small.learning_rate is not None:
        optimizer.param_groups[0]["lr"] = small.learning_rate

    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = loss_of(example, model, inputs, target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    assert sum(losses[-3:]) < sum(losses[:3])


@every_example
def test_training_data_have_the_form_of_the_example_inputs(small: Small) -> None:
    example = small.load()
    target = example.example_target() if hasattr(example, "example_target") else None
    batches = list(itertools.islice(example.train_data(), 2))
    leaves = tree_map(
        lambda leaf: (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf,
        [(example.example_inputs(), target), *batches],
    )

    assert leaves[0] == leaves[1]
    assert leaves[0] == leaves[2]


@every_example
def test_every_build_is_the_same(small: Small) -> None:
    example = small.load()
    first = example.build_model(**small.model).state_dict()
    torch.rand(1)
    second = example.build_model(**small.model).state_dict()

    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("resnet50", 25_557_032),
        ("alexnet", 61_100_840),
        ("transformer_1_3b", 1_313_722_368),
    ],
)
def test_published_sizes(name: str, parameters: int) -> None:
    with torch.device("meta"):
        model = load(name).build_model()

    assert parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("layers", "filters", "parameters"),
    [
        (18, 208, 81_505_540),
        (18, 256, 122_470_120),
        (18, 416, 319_024_120),
        (18, 544, 542_734_840),
        (36, 544, 1_055_832_376),
        (72, 512, 1_844_858_344),
    ],
)
def test_published_sizes_of_amoebanet_d(layers: int, filters: int, parameters: int) -> None:
    with torch.device("meta"):
        model = load("amoebanet").amoebanet_d(layers, filters)

    assert len(model) == layers + 6
    assert parameters == sum(p.numel() for p in model.parameters())


def test_published_size_of_amoebanet_b() -> None:
    with torch.device("meta"):
        model = load("amoebanet").amoebanet_b(18, 512)

    assert sum(p.numel() for p in model.parameters()) == 557_294_088


def test_the_large_transformer_takes_no_memory_and_ties_its_embedding() -> None:
    model = load("transformer_1_3b").build_model()

    assert all(p.is_meta for p in model.parameters())
    assert model.scores.weight is model.tokens.weight


def test_digits_are_learnt_by_the_plain_loop() -> None:
    """The truth that the four-stage pipeline is compared with."""
    digits = load("mlp_digits")
    model = digits.build_model()
    optimizer = digits.make_optimizer(model.parameters())
    for _ in range(digits.EPOCHS):
        for pixels, labels in digits.train_data():
            optimizer.zero_grad()
            digits.loss_fn(model(pixels), labels).backward()
            optimizer.step()
    pixels, labels = digits.test_set()

    assert (model(pixels).argmax(dim=1) == labels).float().mean() > 0.95


def test_the_mask_of_the_inputs_example_hides_padding() -> None:
    """What stands under the padding makes no difference."""
    example = load("inputs")
    model = example.build_model()
    (document,), kwargs = example.example_inputs()
    changed = copy.deepcopy(document)
    changed["words"][kwargs["padding"]] += 100.0

    torch.testing.assert_close(model(document, **kwargs), model(changed, **kwargs))
