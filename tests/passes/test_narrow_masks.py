"""Masks of attention that are the same for all samples are made once; all others stay as wide."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe_compiler.compile import trace
from gpipe_compiler.ir import FunctionCall, Graph
from gpipe_compiler.ir.interpret import Interpreter
from gpipe_compiler.options import LossChoice
from gpipe_compiler.passes.pass_setting import PassSetting
from gpipe_compiler.passes.pipeline import transform

LEAST = torch.finfo(torch.float32).min
HEADS = 2


def rows(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1], device=x.device)


def everywhere(x: Tensor) -> Tensor:
    """True, for every sample."""
    row = rows(x)[None, None, :, None]
    return (row >= 0).expand(x.shape[0], -1, x.shape[1], x.shape[1])


def causal(x: Tensor) -> Tensor:
    lower = rows(x)[None, None, None, :] <= rows(x)[None, None, :, None]
    return lower.expand(x.shape[0], -1, x.shape[1], x.shape[1])


def chosen(mask: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, bias: torch.where(mask(x), bias, LEAST).contiguous()


ONCE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "all, and a bias": chosen(everywhere),
    "never left out, and a bias": lambda x, bias: torch.where(~everywhere(x), LEAST, bias)
    .contiguous(),
    "causal, and a bias": chosen(causal),
    "a bias of every sample": lambda x, bias: bias.expand(x.shape[0], -1, -1, -1),
    "a sum": lambda x, bias: bias + torch.where(causal(x), 0.0, LEAST),
    "filled": lambda x, bias: bias.expand(x.shape[0], -1, -1, -1).masked_fill(~causal(x), LEAST),
}  # fmt: skip
PER_SAMPLE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "of the data": chosen(lambda x: causal(x) & (x[..., :1] < 9.0)[:, None]),
    "bias of the data": lambda x, bias: torch.where(causal(x), bias * x[:, :1, None, :1], LEAST),
}


class Biased(nn.Module):
    """Attention with a learned bias of the positions, as in T5."""

    def __init__(
        self, mask: Callable[[Tensor, Tensor], Tensor], length: int, *, reads: bool = False
    ) -> None:
        super().__init__()
        self.mask, self.reads = mask, reads
        self.q, self.v = nn.Linear(8, 8), nn.Linear(8, 8)
        self.table = nn.Parameter(torch.randn(length, length, HEADS))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        bias = (self.table * 1.5).permute(2, 0, 1).unsqueeze(0)
        mask = self.mask(x, bias)
        for _ in range(2):
            q = self.q(x).view(batch, length, HEADS, 4).transpose(1, 2)
            v = self.v(x).view(batch, length, HEADS, 4).transpose(1, 2)
            x = F.scaled_dot_product_attention(q, q, v, attn_mask=mask)
            x = x.transpose(1, 2).reshape(batch, length, 8)
        return x + mask.clamp(-1, 1).mean((1, 2))[:, :, None] if self.reads else x


def masks(graph: Graph) -> set[tuple[int, ...]]:
    """The shapes of the masks of attention."""
    return {
        graph.values[op.call.kwargs["attn_mask"].name].shape
        for op in graph.ops
        if isinstance(op.call, FunctionCall) and op.call.function is F.scaled_dot_product_attention
    }


def simplified(model: Biased, length: int) -> Graph:
    x = torch.randn(4, length, 8)
    return transform(trace(model, (x,), loss=LossChoice.SUM_OF_SQUARES), PassSetting(2))


def same_as_model(graph: Graph, model: Biased, batch: int, length: int) -> None:
    x = torch.randn(batch, length, 8)
    expected = model(x)
    expected.square().sum().backward()
    tensors = {
        name: tensor.detach().clone().requires_grad_(graph.state[name].requires_grad)
        for name, tensor in graph.tensors.items()
    }
    values = Interpreter(graph, tensors).run({"x": x})
    assert graph.loss is not None
    values[graph.loss.value].backward()
    torch.testing.assert_close(values[graph.output_values[0]], expected)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(tensors[name].grad, parameter.grad)


@pytest.mark.parametrize("name", ONCE)
def test_a_mask_that_all_samples_share_is_made_once(name: str) -> None:
    model = Biased(ONCE[name], 6)
    graph = simplified(model, 6)

    assert masks(graph) == {(1, HEADS, 6, 6)}
    for batch in (1, 3):
        model.zero_grad()
        same_as_model(graph, model, batch, 6)


@pytest.mark.parametrize("name", ["all, and a bias", "never left out, and a bias"])
def test_a_choice_that_positions_make_everywhere_goes(name: str) -> None:
    graph = simplified(Biased(ONCE[name], 6), 6)

    words = ("where", "arange", "expand", "ge", "invert")
    assert not [op.name for op in graph.ops if op.name.startswith(words)]


@pytest.mark.parametrize("name", PER_SAMPLE)
def test_a_mask_of_its_own_for_every_sample_stays(name: str) -> None:
    model = Biased(PER_SAMPLE[name], 6)
    graph = simplified(model, 6)

    assert masks(graph) == {(2, HEADS, 6, 6)}
    same_as_model(graph, model, 3, 6)


def test_a_mask_that_others_read_stays() -> None:
    model = Biased(ONCE["causal, and a bias"], 6, reads=True)
    graph = simplified(model, 6)

    assert masks(graph) == {(2, HEADS, 6, 6)}
    same_as_model(graph, model, 3, 6)
