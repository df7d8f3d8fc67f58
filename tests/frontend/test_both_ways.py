"""Models that leave layers out as Python decides by a draw: traced both ways, or refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe_compiler.errors import TraceError
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.frontend.tracing import trace
from gpipe_compiler.ir import ByMode, Graph, Mode, Op
from gpipe_compiler.ir.interpret import Interpreter
from gpipe_compiler.ir.left_out import may_leave_out, with_all_layers


class Layers(nn.Module):
    """Three layers, and a head."""

    def __init__(self, make: Callable[[], nn.Module] = lambda: nn.Linear(6, 6)) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(3))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.one(layer, x)
        return self.head(x)

    def one(self, layer: nn.Module, x: Tensor) -> Tensor:
        raise NotImplementedError


class Skips(Layers):
    def one(self, layer: nn.Module, x: Tensor) -> Tensor:
        if self.training and torch.rand([]) < 0.5:
            return x
        return x + layer(x).tanh()


class RunsAbove(Layers):
    def one(self, layer: nn.Module, x: Tensor) -> Tensor:
        if not self.training or torch.rand(()) > 0.3:
            x = F.dropout(layer(x).relu(), 0.2, self.training)
        return x


class ByItem(Layers):
    def one(self, layer: nn.Module, x: Tensor) -> Tensor:
        skip = self.training and torch.rand(1).item() < 0.5
        return x if skip else layer(x)


class InEvalToo(Layers):
    def one(self, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x) if torch.rand(1) < 0.5 else x


class OneDraw(Layers):
    def forward(self, x: Tensor) -> Tensor:
        chances = torch.empty(3).uniform_()
        for index, layer in enumerate(self.layers):
            if not self.training or chances[index] > 0.3:
                x = layer(x)
        return self.head(x)


class OneLayer(Layers):
    """One layer, three times."""

    def one(self, layer: nn.Module, x: Tensor) -> Tensor:
        if self.training and torch.rand([]) < 0.5:
            return x
        return self.layers[0](x).relu()


class TwoStreams(Layers):
    """Of what a layer makes two values are read, and left out they change places."""

    def forward(self, x: Tensor) -> Tensor:
        y = 2 * x
        for layer in self.layers:
            if self.training and torch.rand([]) < 0.5:
                x, y = y, x
            else:
                x, y = layer(x).relu(), layer(y)
        return self.head(x + y)


def subject_of(model: nn.Module) -> Subject:
    torch.manual_seed(0)
    x, target = torch.randn(8, 6), torch.randint(3, (8,))
    return Subject("layers", model, (x,), target=target, loss_fn=F.cross_entropy)


def choices_of(graph: Graph) -> list[Op]:
    return [op for op in graph.ops if may_leave_out(op.call)]


@pytest.mark.parametrize(
    ("made", "count"),
    [(Skips, 3), (RunsAbove, 3), (ByItem, 3), (OneDraw, 3), (OneLayer, 3), (TwoStreams, 6)],
)
def test_both_ways_are_found(made: type[Layers], count: int) -> None:
    graph = trace(subject_of(made()))

    found = choices_of(graph)
    assert len(found) == count
    for op in found:
        left_out, *_ = op.call.args
        assert op.mode is Mode.ALWAYS
        assert isinstance(left_out, ByMode)
        assert left_out.evaluation is False
    labels = {op.layer for op in found}
    assert labels == {"0", "1", "2"}
    # Every layer is a stretch of ops, with what may leave it out at its end.
    runs = [op.layer for op in graph.ops if op.layer]
    assert runs == sorted(runs)


def test_a_draw_decides_in_eval_mode_too() -> None:
    graph = trace(subject_of(InEvalToo()))

    assert graph.keeps
    assert not any(isinstance(op.call.args[0], ByMode) for op in choices_of(graph))


def test_what_decides_is_drawn_on_the_cpu() -> None:
    """Python would wait for a GPU."""
    graph = trace(subject_of(Skips()))

    drawn = [op for op in graph.ops if op.name.startswith("rand")]
    assert len(drawn) == 3
    assert all(op.call.kwargs["device"] == "cpu" for op in drawn)


@pytest.mark.parametrize("left_out", [(), (0,), (1,), (0, 2), (0, 1, 2)])
def test_the_graph_does_what_the_model_does(left_out: tuple[int, ...]) -> None:
    model = Skips()
    subject = subject_of(model)
    graph = trace(subject)
    ops = iter(range(3))

    def told(op: Op) -> Op:
        if not may_leave_out(op.call):
            return op
        answer = torch.tensor(next(ops) in left_out)
        call = dataclasses.replace(op.call, args=(answer, *op.call.args[1:]))
        return dataclasses.replace(op, call=call)

    forced = graph.replace(ops=tuple(map(told, graph.ops)))
    inputs = {"x": subject.args[0], "target": subject.target}
    states = dict(model.named_parameters())
    values = Interpreter(forced, states).run(inputs)
    x = subject.args[0]
    for index, layer in enumerate(model.layers):
        if index not in left_out:
            x = x + layer(x).tanh()
    expected = F.cross_entropy(model.head(x), subject.target)

    torch.testing.assert_close(values[graph.loss.value], expected)
    own = torch.autograd.grad(values[graph.loss.value], list(states.values()), allow_unused=True)
    theirs = torch.autograd.grad(expected, list(states.values()), allow_unused=True)
    assert [g is None for g in own] == [g is None for g in theirs]
    for gradient, other in zip(own, theirs, strict=True):
        if gradient is not None:
            torch.testing.assert_close(gradient, other)


def test_all_layers_run_where_that_is_asked_for() -> None:
    graph = trace(subject_of(Skips()))

    assert [op.call.args[0] for op in choices_of(with_all_layers(graph))] == [False] * 3


# --- refused --------------------------------------------------------------------------------------


class Scales(Layers):
    def one(self, layer: nn.Module, x: Tensor) -> Tensor:
        if self.training and torch.rand([]) < 0.5:
            return 2 * x
        return layer(x)


class Collects(Layers):
    def forward(self, x: Tensor) -> Tensor:
        found = []
        for layer in self.layers:
            if self.training and torch.rand([]) < 0.5:
                continue
            x = layer(x)
            found.append(x)
        return self.head(x + sum(found))


class Counts(Layers):
    def forward(self, x: Tensor) -> Tensor:
        run = 0
        for layer in self.layers:
            if self.training and torch.rand([]) < 0.5:
                continue
            x, run = layer(x), run + 1
        return self.head(x) / (1 + run)


class Normalises(Skips):
    def __init__(self) -> None:
        super().__init__(lambda: nn.BatchNorm1d(6))


class WritesLater(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = 2 * x
        for layer in self.layers:
            if self.training and torch.rand([]) < 0.5:
                continue
            x = layer(x)
        x.mul_(2)
        return self.head(x)


class Nested(Layers):
    def one(self, layer: nn.Module, x: Tensor) -> Tensor:
        if self.training and torch.rand([]) < 0.5:
            return x
        if self.training and torch.rand([]) < 0.5:
            x = x.tanh()
        return layer(x)


class BySample(Layers):
    def one(self, layer: nn.Module, x: Tensor) -> Tensor:
        if self.training and torch.rand(len(x))[0] < 0.5:
            return x
        return layer(x)


class OtherType(Layers):
    def one(self, layer: nn.Module, x: Tensor) -> Tensor:
        if self.training and torch.rand([]) < 0.5:
            return x
        return layer(x.float()).double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.one(layer, x)
        return self.head(x.float())


class GivesGradient(Layers):
    """Left out, the gradient goes on; the layer ends it."""

    def one(self, layer: nn.Module, x: Tensor) -> Tensor:
        x = self.head(x).repeat(1, 2)
        if self.training and torch.rand([]) < 0.5:
            return x
        return layer(x).detach()


class DrawsNumber(Layers):
    def one(self, layer: nn.Module, x: Tensor) -> Tensor:
        if self.training and torch.rand([]) < 0.5:
            return x
        return layer(x) * float(torch.rand([]))


class ComputesWithItem(Layers):
    def forward(self, x: Tensor) -> Tensor:
        count = int(3 * torch.rand([]).item())
        for layer in self.layers[:count]:
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (Scales, "runs something else instead|more than a layer"),
        (Collects, "more than a layer"),
        (Counts, "more than a layer"),
        (Normalises, "writes to a buffer"),
        (WritesLater, "written to in place"),
        (Nested, "runs something else instead"),
        (BySample, "as LayerDrop does: a stage"),
        (OtherType, "another shape or type|more than a layer"),
        (GivesGradient, "another shape or type"),
        (DrawsNumber, "as LayerDrop does: a stage"),
        (ComputesWithItem, "as LayerDrop does: a stage"),
    ],
)
def test_what_is_more_than_a_layer_is_refused(made: type[Layers], why: str) -> None:
    with pytest.raises(TraceError, match=why) as refused:
        trace(subject_of(made()))
    error = refused.value
    assert "draws numbers by torch to decide in Python what it runs" in error.problem
    assert "layerdrop=0.0" in (error.hint or "")
    assert error.location is not None
    assert "torch.rand" in error.location.code
