"""Reads of what was stored, held bit for bit against the model, in 32 bits and in 16."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gpipe_compiler.compile import trace
from gpipe_compiler.ir import Graph, called
from gpipe_compiler.ir.interpret import Interpreter
from gpipe_compiler.passes.atoms import atoms
from gpipe_compiler.passes.duplicate import duplicable
from gpipe_compiler.passes.effects import effects
from gpipe_compiler.passes.shapes import annotate
from gpipe_compiler.passes.stores import read_stores, without_unread_stores

STEPS, WIDTH = 6, 4


class Scan(nn.Module):
    """Fills a tensor step by step, each from what stands in the tensor so far."""

    def __init__(self, fill: Callable[[nn.Linear, Tensor, Tensor, int], None]) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.fill = fill

    def forward(self, x: Tensor) -> Tensor:
        out = x.new_zeros(x.shape)
        out[:, 0] = self.inner(x[:, 0])
        for t in range(1, STEPS):
            self.fill(self.inner, x, out, t)
        return out * 2


def last(inner: nn.Linear, x: Tensor, out: Tensor, t: int) -> None:
    out[:, t] = out[:, t - 1] * 0.5 + inner(x[:, t])


def last_and_cast(inner: nn.Linear, x: Tensor, out: Tensor, t: int) -> None:
    out[:, t] = inner(x[:, t] + out[:, t - 1] * 2)


def half_of_it(inner: nn.Linear, x: Tensor, out: Tensor, t: int) -> None:
    out[:, t] = inner(x[:, t])
    out[:, t, :2] = out[:, t - 1, :2] * 0.5


def overwritten(inner: nn.Linear, x: Tensor, out: Tensor, t: int) -> None:
    out[:, t] = inner(x[:, t])
    out[:, t - 1 : t + 1] = out[:, t].unsqueeze(1) * 0.5


def scaled_in_place(inner: nn.Linear, x: Tensor, out: Tensor, t: int) -> None:
    h = inner(x[:, t]) + out[:, t - 1] * 0.5
    out[:, t] = h
    h.mul_(3)
    out[:, t] += h


def beside_another_form(inner: nn.Linear, x: Tensor, out: Tensor, t: int) -> None:
    now = x[:, t : t + 1].clone().squeeze_(1)
    out[:, t] = out[:, t - 1] * 0.5 + inner(now)


def of_another_form(inner: nn.Linear, x: Tensor, out: Tensor, t: int) -> None:
    out.transpose_(0, 1)
    out[t] = out[t - 1] * 0.5 + inner(x[:, t])
    out.transpose_(0, 1)


FREED = [last, last_and_cast, beside_another_form]
LEFT = [half_of_it, overwritten, scaled_in_place, of_another_form]


@pytest.mark.parametrize("fill", [*FREED, *LEFT])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_no_bit_changes(
    fill: Callable[[nn.Linear, Tensor, Tensor, int], None], precision: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = Scan(fill)
    graph = traced(model)
    changed = read_stores(graph)
    assert (changed is not graph) or fill in LEFT

    for samples in (2, 6):
        x = torch.randn(samples, STEPS, WIDTH)
        expected = results(graph, model, x, precision)
        for one, other in zip(results(changed, model, x, precision), expected, strict=True):
            assert torch.equal(one, other)
        for one, other in zip(eager(model, x, precision), expected, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("fill", FREED)
def test_steps_are_tied_no_more(fill: Callable[[nn.Linear, Tensor, Tensor, int], None]) -> None:
    """Only the tensor and the stores into it stay together."""
    graph = read_stores(traced(Scan(fill)))
    found = effects(graph)
    groups = atoms(graph, found, duplicable(graph, found)).groups

    tied = {name for group in groups for name in group}
    assert not any(name.startswith(("inner", "add", "mul")) for name in tied)


def traced(model: nn.Module) -> Graph:
    x = torch.randn(4, STEPS, WIDTH)
    graph = trace(model, x, target=x, loss_fn=nn.MSELoss())
    return annotate(graph, 4)


def results(graph: Graph, model: nn.Module, x: Tensor, precision: torch.dtype) -> list[Tensor]:
    states = dict(model.named_parameters())
    with torch.autocast("cpu", precision, enabled=precision is not torch.float32):
        run = Interpreter(graph, states).run({"x": x, "target": torch.ones_like(x)})
    (output,) = (run[name] for name in graph.output_values)
    return with_gradients(model, output)


def eager(model: nn.Module, x: Tensor, precision: torch.dtype) -> list[Tensor]:
    with torch.autocast("cpu", precision, enabled=precision is not torch.float32):
        output = model(x)
    return with_gradients(model, output)


def with_gradients(model: nn.Module, output: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    output.backward(torch.randn_like(output))
    found = [output.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    model.zero_grad()
    return found


class Caching(nn.Module):
    """Keeps what nobody reads, and what is returned; the latter through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.inner(x)
        cache = torch.zeros(x.size(0), 3, WIDTH, dtype=h.dtype, device=h.device)
        kept = torch.zeros(x.shape[0], STEPS, WIDTH)
        cache.copy_(h[:, -3:])
        cache[:, :2].mul_(2.0)
        view = kept[:, 1:]
        view.copy_(h[:, :-1])
        return h * 2, kept


def test_tensors_that_are_only_stored_into_go() -> None:
    torch.manual_seed(0)
    model, x = Caching(), torch.rand(4, STEPS, WIDTH)
    graph = trace(model, (x,), training=False)

    found = without_unread_stores(graph)

    assert sum(called(op.call) == "zeros" for op in found.ops) == 1
    assert len(found.ops) <= len(graph.ops) - 6
    assert {"dtype", "device"}.isdisjoint(op.name for op in found.ops)
    states = {name: tensor.detach() for name, tensor in found.tensors.items()}
    (source,) = found.inputs
    ran = Interpreter(found, states).run({source.name: x})
    torch.testing.assert_close([ran[name] for name in found.ends], list(model(x)))
