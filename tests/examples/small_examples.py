"""The examples at sizes for tests, and how a test loads and calls them."""

from __future__ import annotations

import enum
import importlib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pytest
from torch import Tensor, nn
from torch.utils._pytree import tree_map

EXAMPLES = Path(__file__).parents[2] / "examples"


class Size(enum.Enum):
    """The more of it, the fewer pipelines of an example are trained every time."""

    SMALL = enum.auto()
    LARGER = enum.auto()
    WIDE = enum.auto()


@dataclass(frozen=True)
class Small:
    """An example at a size for tests.

    Attributes:
        model, inputs, target: keyword arguments of its functions.
        learning_rate: that suits the small model, None for the example's own.
        fp32_loss: whether it computes its loss in fp32, whatever its weights are.
        needs: a package that is not always installed.
        size: how long it takes to trace, to cut and to train.
    """

    name: str
    model: dict[str, int] = field(default_factory=dict)
    inputs: dict[str, int] = field(default_factory=dict)
    target: dict[str, int] = field(default_factory=dict)
    learning_rate: float | None = None
    fp32_loss: bool = False
    needs: str = "torch"
    size: Size = Size.SMALL

    def __str__(self) -> str:
        return self.name

    def load(self) -> ModuleType:
        """The example; its neighbours can be imported, as under `python <file>`.

        Skips the test when what it needs is not installed.
        """
        pytest.importorskip(self.needs)
        return load(self.name)

    def batch(self) -> tuple[object, object]:
        """Example inputs and target."""
        example = self.load()
        target = None
        if hasattr(example, "example_target"):
            target = example.example_target(**self.target)
        return example.example_inputs(**self.inputs), target


def load(name: str) -> ModuleType:
    """`examples/<name>.py` as a module, loaded once."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    return importlib.import_module(name)


SMALL = (
    Small("mlp_digits", {"hidden": 32}, needs="sklearn"),
    Small("alexnet", {"classes": 10, "width": 8}, {"image": 64}, {"classes": 10}, 1e-3),
    Small("resnet50", {"classes": 10, "width": 8}, {"batch": 8, "image": 64},
          {"batch": 8, "classes": 10}, size=Size.LARGER),
    Small("unet", {"depth": 3, "width": 8}, {"image": 32}, {"image": 32}, size=Size.LARGER),
    Small("transformer", {"dim": 32, "layers": 4}, {"sequence": 16}, {"sequence": 16}),
    Small("gpt2_huggingface", {"dim": 32, "layers": 2}, {"sequence": 16}, fp32_loss=True,
          needs="transformers", size=Size.LARGER),
    Small("inception", {"width": 8}, size=Size.LARGER),
    Small("amoebanet", {"layers": 3, "filters": 16}, size=Size.WIDE),
    Small("deep_chain", {"layers": 6, "width": 8}, {"batch": 16}, {"batch": 16}),
    Small("inputs"),
)  # fmt: skip


def call(model: nn.Module, inputs: object) -> object:
    """The model's output for inputs in any of the forms that `example_inputs` may have."""
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
    """What training minimises."""
    output = call(model, inputs)
    if hasattr(example, "loss_fn"):
        return example.loss_fn(output, target)
    return output.loss


def split(nest: object, parts: int) -> list[object]:
    """A nest of batched tensors as `parts` nests of micro-batches."""

    def part(index: int) -> object:
        return tree_map(
            lambda leaf: leaf.chunk(parts)[index] if isinstance(leaf, Tensor) else leaf, nest
        )

    return [part(index) for index in range(parts)]
