"""Which encoder layers torch computes as one kernel is told as torch does it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from gpipe_compiler.compile import trace

SMALL = (8, 2, 16)


class Frozen(nn.Module):
    """An encoder that stays in eval mode and is not trained, before a layer that is."""

    def __init__(self, *, frozen: bool = True) -> None:
        super().__init__()
        self.body = nn.TransformerEncoderLayer(*SMALL, batch_first=True)
        self.body.requires_grad_(not frozen)
        self.head = nn.Linear(8, 3)

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.body.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def kernel_is_called(model: nn.Module, x: Tensor) -> bool:
    calls: list[Any] = []
    name = "_transformer_encoder_layer_fwd"
    with mock.patch.object(torch, name, lambda *args: calls.append(args) or args[0]):
        model(x)
    return bool(calls)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm_first": True, "activation": "gelu"},
        {"batch_first": False},
        {"bias": False},
        {"activation": nn.functional.silu},
        {"nhead": 1},
    ],
)
@pytest.mark.parametrize("hooked", [False, True])
def test_in_eval_mode(options: dict[str, Any], *, hooked: bool) -> None:
    settings = {"d_model": 8, "nhead": 2, "dim_feedforward": 16, "batch_first": True, **options}
    model = nn.Sequential(nn.TransformerEncoderLayer(**settings), nn.Linear(8, 3))
    if hooked:
        model[0].norm1.register_forward_hook(lambda *_: None)
    x = torch.randn(4, 5, 8)
    dims = {"input": 0 if settings["batch_first"] else 1}
    graph = trace(model, (x,), training=False, batch_dims=dims)

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert bool(graph.fused) is kernel_is_called(model.eval(), x)
    assert set(graph.fused) <= {False}


@pytest.mark.parametrize("frozen", [True, False])
def test_in_training(*, frozen: bool) -> None:
    """Only where nothing needs a gradient."""
    x = torch.randn(4, 5, 8)
    graph = trace(Frozen(frozen=frozen), (x,), loss_fn=lambda y, _: y.square().mean())

    assert set(graph.fused) == ({False, True} if frozen else {False})
    assert kernel_is_called(Frozen(frozen=frozen).train(), x) is frozen
    assert "body, test_encoders.py" in graph.fused[False]


def test_not_where_torch_is_told_not_to() -> None:
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        graph = trace(Frozen(), (torch.randn(4, 5, 8),), training=False)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)

    assert not graph.fused
