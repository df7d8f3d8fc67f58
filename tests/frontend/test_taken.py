"""Models that take some care to be traced, or are refused with the reason."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gpipe_compiler.compile import plan, trace
from gpipe_compiler.errors import ModelError, TraceError
from gpipe_compiler.frontend import tracing
from gpipe_compiler.frontend.check import differences
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.ir.interpret import Interpreter
from gpipe_compiler.runtime.spec import Precision


class Hooked(nn.Module):
    """Hooks into the backward of a value."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x):
        y = self.layer(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: 2 * gradient)
        return y


def test_a_hook_that_draws_is_refused_by_its_line():
    class Noisy(Hooked):
        def forward(self, x):
            y = self.layer(x)
            if y.requires_grad:
                y.register_hook(lambda gradient: gradient * torch.rand_like(gradient))
            return y

    with pytest.raises(TraceError, match="draws random numbers") as caught:
        trace(Noisy(), torch.randn(4, 8), target=torch.randn(4, 4), loss_fn=F.mse_loss)

    assert "test_taken.py" in str(caught.value)
    assert "hand it in" in str(caught.value.hint)


def test_a_hook_on_a_value_is_a_function_of_the_graph():
    graph = trace(Hooked(), torch.randn(4, 8), target=torch.randn(4, 4), loss_fn=F.mse_loss)

    assert len([op for op in graph.ops if "hooked" in op.name]) == 1


def test_where_nothing_is_trained_a_hook_on_a_gradient_does_nothing():
    graph = trace(Hooked(), torch.randn(4, 8), training=False)

    assert [op.name for op in graph.ops] == ["layer"]


@pytest.mark.parametrize("layer", [nn.EmbeddingBag, nn.Embedding])
def test_sparse_gradients_are_planned_for(layer):
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = layer(16, 8, sparse=True)
            self.head = nn.Linear(8, 4)

        def forward(self, x):
            return self.head(self.table(x).reshape(len(x), -1, 8).sum(1))

    graph = trace(
        Tokens(), torch.randint(0, 16, (4, 3)), target=torch.randn(4, 4), loss_fn=F.mse_loss
    )

    assert len(plan(graph, stages=2, microbatches=2).stages) == 2


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_flex_attention_infers_as_torch_computes_it(precision):
    flex = pytest.importorskip("torch.nn.attention.flex_attention")

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.project = nn.Linear(8, 16)
            self.slope = nn.Parameter(torch.randn(2))
            self.mask = flex.create_block_mask(
                lambda b, h, i, j: i >= j, None, None, 6, 6, device="cpu"
            )

        def forward(self, x):
            queries, keys, values = (
                self.project(x).view(-1, 6, 4, 4).transpose(1, 2).split([2, 1, 1], dim=1)
            )
            plain = flex.flex_attention(queries, keys, values, enable_gqa=True)
            return plain + flex.flex_attention(
                queries,
                keys.expand(-1, 2, -1, -1),
                values.expand(-1, 2, -1, -1),
                score_mod=lambda score, b, h, i, j: score + self.slope[h] * (i - j),
                block_mask=self.mask,
            )

    model = Attention().eval()
    subject = Subject("m", model, (torch.randn(4, 6, 8),), training=False)
    graph = tracing.trace(subject, precision=precision)
    x = torch.randn(5, 6, 8)
    around = torch.autocast("cpu", torch.bfloat16, enabled=precision is Precision.BF16)
    with torch.no_grad(), around:
        expected = model(x)
        values = Interpreter(graph, graph.tensors, training=False).run({"x": x})

    assert precision not in graph.unlike
    torch.testing.assert_close(values[graph.outputs.name], expected, rtol=0, atol=1e-6)


def test_observers_need_to_have_seen_a_batch():
    quantization = pytest.importorskip("torch.ao.quantization")
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).train()
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    model = quantization.prepare_qat(model)
    x = torch.randn(4, 8)
    subject = Subject("m", model, (x,), target=torch.randn(4, 4), loss_fn=F.mse_loss)
    with pytest.raises(ModelError, match="gets its size when the model runs") as caught:
        tracing.trace(subject)
    assert "build_model()" in str(caught.value.hint)

    model(x)
    graph = tracing.trace(subject)

    assert differences(graph, subject) == []
