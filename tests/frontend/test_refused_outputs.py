"""Outputs that micro-batches cannot give are refused by what they are, at the model's own lines."""

import inspect

import pytest
import torch
from torch import Tensor, nn

from gpipe_compiler.compile import trace
from gpipe_compiler.errors import ModelError


class Rounded(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer, self.dtype = nn.Linear(6, 5), dtype

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.dtype is torch.qint8:
            return torch.quantize_per_tensor(y, 0.1, 0, self.dtype)
        return y.to(self.dtype)


class Answer:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Answer:
        return Answer(self.layer(x))


def refusal(model: nn.Module, **options: object) -> ModelError:
    with pytest.raises(ModelError) as caught:
        trace(model, torch.randn(8, 6), **options)
    location = caught.value.location
    assert location is not None
    assert location.line == inspect.getsourcelines(type(model).forward)[1]
    return caught.value


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.qint8])
def test_types_without_ops(dtype: torch.dtype) -> None:
    error = refusal(Rounded(dtype), training=False)

    assert f"returns a tensor of {dtype}" in error.problem
    assert ".dequantize()" in error.hint


def test_an_object_of_a_plain_class() -> None:
    def loss(output: Answer, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output.logits, target)

    error = refusal(Plain(), target=torch.randint(0, 5, (8,)), loss_fn=loss)

    assert "returns Answer, which is no tensor, tuple, dict or dataclass" in error.problem
    assert "@dataclasses.dataclass" in error.hint


def test_an_object_of_a_plain_class_in_inference() -> None:
    """None would stand in its place."""
    error = refusal(Plain(), training=False)

    assert "returns Answer, which is no tensor, tuple, dict or dataclass" in error.problem


class Sparse(Plain):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.layer(x).relu().to_sparse()


def test_a_sparse_tensor() -> None:
    error = refusal(Sparse(), training=False)

    assert "layout torch.sparse_coo" in error.problem
    assert ".to_dense()" in error.hint
