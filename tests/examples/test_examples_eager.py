"""The example models are what they claim to be, before any compiler sees them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

Load = Callable[[str], ModuleType]


@dataclass(frozen=True)
class Small:
    """An example at a size for tests: keyword arguments of its functions."""

    name: str
    model: dict[str, int] = field(default_factory=dict)
    inputs: dict[str, int] = field(default_factory=dict)
    target: dict[str, int] = field(default_factory=dict)
    learning_rate: float | None = None


SMALL = [
    Small("mlp_digits", {"hidden": 32}),
    Small("alexnet", {"classes": 10, "width": 8}, {"image": 64}, {"classes": 10}, 1e-3),
    Small("resnet50", {"classes": 10, "width": 8}, {"image": 32}, {"classes": 10}),
    Small("unet", {"depth": 3, "width": 8}, {"image": 32}, {"image": 32}),
    Small("transformer", {"dim": 32, "layers": 2}, {"sequence": 16}, {"sequence": 16}),
    Small("gpt2_huggingface", {"dim": 32, "layers": 2}, {"sequence": 16}),
    Small("inception", {"width": 8}),
    Small("inputs"),
]


def call(model: nn.Module, inputs: object) -> object:
    """The forms that `example_inputs` may take."""
    match inputs:
        case Tensor():
            return model(inputs)
        case dict():
            return model(**inputs)
        case (tuple() as args, dict() as kwargs):
            return model(*args, **kwargs)
        case tuple():
            return model(*inputs)
    raise TypeError(f"no inputs: {type(inputs)}")


def loss_of(example: ModuleType, model: nn.Module, inputs: object, target: object) -> Tensor:
    output = call(model, inputs)
    if hasattr(example, "loss_fn"):
        return example.loss_fn(output, target)
    return output.loss


def one_batch(example: ModuleType, small: Small) -> tuple[object, object]:
    target = None
    if hasattr(example, "example_target"):
        target = example.example_target(**small.target)
    return example.example_inputs(**small.inputs), target


@pytest.mark.parametrize("small", SMALL, ids=lambda small: small.name)
def test_every_parameter_gets_a_gradient(load_example: Load, small: Small) -> None:
    if small.name == "gpt2_huggingface":
        pytest.importorskip("transformers")
    example = load_example(small.name)
    model = example.build_model(**small.model)

    loss_of(example, model, *one_batch(example, small)).backward()

    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("small", SMALL, ids=lambda small: small.name)
def test_the_loss_of_one_batch_falls(load_example: Load, small: Small) -> None:
    if small.name == "gpt2_huggingface":
        pytest.importorskip("transformers")
    example = load_example(small.name)
    model = example.build_model(**small.model)
    inputs, target = one_batch(example, small)
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


@pytest.mark.parametrize("name", [small.name for small in SMALL])
def test_training_data_have_the_form_of_the_example_inputs(load_example: Load, name: str) -> None:
    if name == "gpt2_huggingface":
        pytest.importorskip("transformers")
    example = load_example(name)
    target = example.example_target() if hasattr(example, "example_target") else None
    batches = list(itertools.islice(example.train_data(), 2))
    leaves = torch.utils._pytree.tree_map(
        lambda leaf: (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf,
        [(example.example_inputs(), target), *batches],
    )

    assert leaves[0] == leaves[1]
    assert leaves[0] == leaves[2]


@pytest.mark.parametrize("name", [small.name for small in SMALL])
def test_every_build_is_the_same(load_example: Load, name: str) -> None:
    if name == "gpt2_huggingface":
        pytest.importorskip("transformers")
    example = load_example(name)
    small = next(small for small in SMALL if small.name == name)
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
def test_published_sizes(load_example: Load, name: str, parameters: int) -> None:
    with torch.device("meta"):
        model = load_example(name).build_model()

    assert parameters == sum(p.numel() for p in model.parameters())


def test_the_large_transformer_takes_no_memory_and_ties_its_embedding(load_example: Load) -> None:
    model = load_example("transformer_1_3b").build_model()

    assert all(p.is_meta for p in model.parameters())
    assert model.scores.weight is model.tokens.weight


def test_digits_are_learnt_by_the_plain_loop(load_example: Load) -> None:
    """The truth that the four-stage pipeline is held against."""
    digits = load_example("mlp_digits")
    model = digits.build_model()
    optimizer = digits.make_optimizer(model.parameters())
    for pixels, labels in digits.train_data():
        optimizer.zero_grad()
        digits.loss_fn(model(pixels), labels).backward()
        optimizer.step()
    pixels, labels = digits.test_set()

    assert (model(pixels).argmax(dim=1) == labels).float().mean() > 0.95


def test_the_mask_of_the_inputs_example_hides_padding(load_example: Load) -> None:
    """What stands under the padding makes no difference."""
    example = load_example("inputs")
    model = example.build_model()
    (document,), kwargs = example.example_inputs()
    changed = copy.deepcopy(document)
    changed["words"][kwargs["padding"]] += 100.0

    torch.testing.assert_close(model(document, **kwargs), model(changed, **kwargs))
