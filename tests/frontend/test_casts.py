"""A package computes in every precision as the model does under plain autocast.

The truth is the model itself, called on the whole batch under `torch.autocast`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gpipe_compiler.compile import CompileOptions, trace
from gpipe_compiler.compile import compile as compile_
from gpipe_compiler.frontend import tracing
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.ir import FunctionCall, MethodCall, Ref
from gpipe_compiler.ir.interpret import Interpreter
from gpipe_compiler.runtime.spec import Precision

TYPES = {Precision.FP32: None, Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}
DIM = 8


class Llama(nn.Module):
    """As in LlamaRMSNorm."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(DIM) + 0.5)

    def forward(self, hidden):
        input_dtype = hidden.dtype
        hidden = hidden.to(torch.float32)
        hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * hidden.to(input_dtype)


class Gemma(Llama):
    """As in GemmaRMSNorm."""

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (y * (1.0 + self.weight.float())).type_as(x)


class T5(Llama):
    """As in T5LayerNorm."""

    def forward(self, x):
        variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + 1e-6)
        if self.weight.dtype in [torch.float16, torch.bfloat16]:
            x = x.to(self.weight.dtype)
        return self.weight * x


class Limits(nn.Module):
    """Masks by the smallest number of its input's type."""

    def forward(self, x):
        x = x.masked_fill(x > 0.5, torch.finfo(x.dtype).min)
        return x.softmax(-1) + torch.full((DIM,), torch.finfo(x.dtype).eps, dtype=x.dtype)


class Constants(nn.Module):
    """Makes tensors of its input's type from numbers."""

    def forward(self, x):
        ones = torch.ones(DIM, dtype=x.dtype) + x.new_tensor([1 / 3])
        limit = torch.tensor(torch.finfo(x.dtype).eps, dtype=x.dtype)
        return torch.where(x > 0, x * ones, limit) + torch.where(x > 0.1, x, 1 / 3)


class Spellings(nn.Module):
    """Casts in all words that torch has for them."""

    def forward(self, x):
        a = x.float() * x.to(dtype=torch.float32)
        b = x.type(torch.float32) / (2 + x.to(a))
        c = torch.as_tensor(x, dtype=torch.float32).exp().to(x)
        return (a + b).to(x.dtype, copy=True) + c + x.double().sin().type_as(x)


class Off(nn.Module):
    """Turns autocast off, and on again inside."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            y = x.float() @ self.inner.weight
            with torch.autocast("cpu", dtype=torch.bfloat16):
                z = self.inner(y)
            y = y + z.float()
        return y.to(x.dtype)


class Residual(nn.Module):
    """Reads what a cast leaves as it was, beside the cast."""

    def forward(self, x):
        y = x.float()
        y = y + 1e-3
        return x + y, x.half().float()


class Rows(nn.Module):
    """A block of one of these, between layers that compute in 16 bits."""

    def __init__(self, block):
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.block = block
        self.second = nn.Linear(DIM, DIM)
        self.last = nn.Linear(DIM, 4)

    def forward(self, x):
        out = self.block(self.first(x))
        out = sum(out) if isinstance(out, tuple) else out
        return self.last(F.gelu(self.second(out)) + out)


class Clamped(nn.Module):
    """As T5's blocks: another program in fp16."""

    def forward(self, x):
        if x.dtype == torch.float16:
            x = x.clamp(-0.125, 0.125)
        return x


class Asking(nn.Module):
    """As `maybe_autocast` of Hugging Face's rotary embeddings."""

    def forward(self, x):
        on = torch.is_autocast_enabled("cpu")
        with torch.autocast("cpu", enabled=False) if on else contextlib.nullcontext():
            y = x.float() @ torch.eye(DIM).mul(1 / 3)
        return y.to(x.dtype)


class Branching(nn.Module):
    """Another program under autocast."""

    def forward(self, x):
        return x * 2 if torch.is_autocast_enabled("cpu") else x


def rows(block):
    torch.manual_seed(0)
    return Rows(block())


def subject_of(model):
    torch.manual_seed(1)
    return Subject("m", model, (torch.randn(8, DIM),), target=torch.randn(8, 4), loss_fn=F.mse_loss)


def truth(model, x, precision):
    dtype = TYPES[precision]
    around = torch.autocast("cpu", dtype) if dtype else contextlib.nullcontext()
    with torch.no_grad(), around:
        return model.eval()(x)


def package(model, tmp_path, precision, **options):
    """The emitted package, imported."""
    folder = tmp_path / f"m_{precision.value}"
    chosen = CompileOptions(stages=3, microbatches=1, precision=precision, **options)
    compile_(subject_of(model), chosen, folder)
    name = f"{tmp_path.name}_{folder.name}".replace("-", "_")
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def run(graph, precision, x, name="x"):
    """The graph op by op, in eval mode."""
    dtype = TYPES[precision]
    around = torch.autocast("cpu", dtype) if dtype else contextlib.nullcontext()
    inputs = {name: x, "target": torch.zeros(len(x), 4)}
    with torch.no_grad(), around:
        values = Interpreter(graph, graph.tensors, training=False).run(inputs)
    return values[graph.outputs.name]


BLOCKS = (Llama, Gemma, T5, Limits, Constants, Spellings, Off, Residual, Asking)


@pytest.mark.parametrize("block", BLOCKS)
def test_a_graph_traced_in_fp32_is_the_model_in_every_precision(block):
    model = rows(block)
    graph = tracing.trace(subject_of(model))
    x = torch.randn(6, DIM)

    assert not graph.unlike
    for precision in Precision:
        actual, expected = run(graph, precision, x), truth(model, x, precision)

        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected), precision


@pytest.mark.parametrize("compiled", [Precision.FP32, Precision.BF16])
def test_a_package_runs_in_every_precision(tmp_path, compiled):
    model = Rows(nn.Sequential(Llama(), Off(), Limits()))
    module = package(model, tmp_path, compiled)
    x = torch.randn(8, DIM)

    for precision in Precision:
        actual = module.Pipeline(precision=precision.value)(x)
        expected = truth(model, x, precision)

        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected), precision


def test_casts_stand_where_the_author_wrote_them():
    graph = trace(rows(Gemma), torch.randn(4, DIM), training=False)
    methods = [op.call.method for op in graph.ops if isinstance(op.call, MethodCall)]

    assert methods.count("float") == 2
    assert methods.count("type_as") == 1


def test_a_type_that_is_the_same_in_every_precision_is_a_constant():
    class Same(nn.Module):
        def forward(self, x):
            return x + torch.ones(DIM, dtype=x.dtype)

    graph = trace(Same(), torch.randn(4, DIM), training=False)

    assert not any(
        isinstance(op.call, FunctionCall) and op.call.function is getattr for op in graph.ops
    )


def test_layers_that_are_alike_read_a_type_alike():
    """One norm is given 16 bits under autocast, the other 32 in every precision."""
    model = nn.Sequential(nn.Linear(DIM, DIM), Llama(), Llama())
    graph = trace(model, torch.randn(4, DIM), training=False)
    casts = {1: [], 2: []}
    for op in graph.ops:
        if isinstance(op.call, MethodCall) and op.call.method == "to":
            casts[int(op.module)].append(isinstance(op.call.args[1], Ref))

    assert casts[1] == casts[2] == [False, True]
    x = torch.randn(6, DIM)
    for precision in Precision:
        assert torch.equal(run(graph, precision, x, "input"), truth(model, x, precision))


@pytest.mark.parametrize("compiled", [Precision.FP32, Precision.FP16])
def test_another_program_in_fp16_is_compiled_for_fp16_or_refused_there(tmp_path, compiled):
    model = rows(Clamped)
    module = package(model, tmp_path, compiled)
    x = torch.randn(8, DIM)

    for precision in Precision:
        fits = (precision is Precision.FP16) == (compiled is Precision.FP16)
        if fits:
            actual = module.Pipeline(precision=precision.value)(x)
            assert torch.equal(actual, truth(model, x, precision))
        else:
            with pytest.raises(Exception, match="another program") as caught:
                module.Pipeline(precision=precision.value)
            assert f"--precision {precision.value}" in str(caught.value)


def test_a_branch_on_autocast_is_traced_in_the_precision_asked_for():
    model = rows(Branching)
    plain = tracing.trace(subject_of(model))
    assert set(plain.unlike) == {Precision.BF16, Precision.FP16}
    assert "test_casts.py" in plain.unlike[Precision.BF16]

    lower = tracing.trace(subject_of(model), precision=Precision.BF16)
    assert lower.traced_in is Precision.BF16
