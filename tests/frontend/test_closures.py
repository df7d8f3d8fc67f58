"""Hooks and functions that capture modules act on the copy that is traced, never on the model."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.frontend.tracing import trace
from gpipe_compiler.ir.interpret import Interpreter

DIM = 8


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(DIM, DIM)
        self.b = nn.Linear(DIM, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        return self.b(self.a(x))


class Counting(Base):
    """A hook that writes to a buffer of the module that it captured."""

    def __init__(self):
        super().__init__()

        def count(_module, args):
            self.count.add_(1)
            return (args[0] + self.count,)

        self.b.register_forward_pre_hook(count)


class Norm(Base):
    """A lambda that captured a module."""

    def __init__(self):
        super().__init__()
        norm = nn.BatchNorm1d(DIM)
        self.norm = norm
        self.function = lambda x: norm(x) * 2

    def forward(self, x):
        return self.b(self.function(self.a(x)))


class Shared(Base):
    """Two functions that captured one dict."""

    def __init__(self):
        super().__init__()
        kept = {}
        self.a.register_forward_hook(lambda _module, _args, out: kept.__setitem__("a", out))
        self.look = lambda: kept["a"]

    def forward(self, x):
        return self.b(self.a(x) * self.look())


class Partial(Base):
    """A partial of a closure, whose default is a tensor of the module."""

    def __init__(self):
        super().__init__()

        def scale(module, x, *, by=self.count):
            by.add_(1)
            return x * (by + module.count)

        self.function = functools.partial(scale, self)

    def forward(self, x):
        return self.b(self.function(self.a(x)))


class Bound(Base):
    """A hook that is a method of the module."""

    def __init__(self):
        super().__init__()
        self.a.register_forward_hook(self.keep)

    def keep(self, _module, _args, out):
        self.count += out.detach().mean()
        return out + self.count


class Checkpointed(Base):
    """Parts that are recomputed, reentrant or not."""

    def __init__(self, reentrant, in_pieces):
        super().__init__()
        self.parts = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM))
        self.reentrant = reentrant
        self.in_pieces = in_pieces

    def forward(self, x):
        x = self.a(x)
        if self.in_pieces:
            x = checkpoint_sequential(self.parts, 2, x, use_reentrant=self.reentrant)
        else:
            x = checkpoint(self.parts, x, use_reentrant=self.reentrant)
        return self.b(x)


MODELS = {
    "counting": Counting,
    "norm": Norm,
    "shared": Shared,
    "partial": Partial,
    "bound": Bound,
    "reentrant": lambda: Checkpointed(True, False),
    "not reentrant": lambda: Checkpointed(False, False),
    "reentrant pieces": lambda: Checkpointed(True, True),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_graph_trains_as_the_model_does(name):
    """Loss, gradients and buffers after a step, for another batch than the example."""
    torch.manual_seed(0)
    model = MODELS[name]()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    example, target = torch.randn(4, DIM), torch.randn(4, 4)

    graph = trace(Subject("m", model, (example,), target=target, loss_fn=F.mse_loss))

    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[key]), f"tracing changed {key}"
    x, y = torch.randn(6, DIM), torch.randn(6, 4)
    own = {key: t.detach().clone() for key, t in graph.tensors.items()}
    for key, tensor in own.items():
        tensor.requires_grad_(graph.state[key].requires_grad)
    names = [source.name for source in graph.inputs]
    values = Interpreter(graph, own).run(dict(zip(names, (x, y), strict=True)))
    values[graph.loss.value].backward()
    loss = F.mse_loss(model.train()(x), y)
    loss.backward()

    assert torch.equal(values[graph.loss.value], loss)
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(own[key].grad, parameter.grad)
    for key, buffer in model.named_buffers():
        torch.testing.assert_close(own[key], buffer)
