"""A pipeline has its parameters and buffers in the order in which the model registers them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from gpipe_compiler.compile import CompileOptions
from gpipe_compiler.compile import compile as compile_subject
from gpipe_compiler.frontend.subject import Subject

DIM = 6


class Block(nn.Module):
    """Registers in another order than it uses, and, where asked, in a third; one of its layers has
    got its weight after its bias."""

    def __init__(self, *, late: bool) -> None:
        super().__init__()
        if late:
            self.norm = nn.LayerNorm(DIM)
        self.down, self.up = nn.Linear(8, DIM), nn.Linear(DIM, 8)
        if not late:
            self.norm = nn.LayerNorm(DIM)
        del self.up.weight
        self.up.weight = nn.Parameter(torch.rand(8, DIM))
        self.unread = nn.Parameter(torch.ones(2))
        self.scale = nn.Parameter(torch.rand(DIM))
        self.register_buffer("level", torch.zeros(()))
        self.register_buffer("shift", torch.rand(DIM))

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.relu(self.up(self.norm(x)))) * self.scale
        return x + y + self.get_buffer("shift") + self.get_buffer("level")


class Net(nn.Module):
    """Ends with what it registers first, and ties a weight of its last layer to its first."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(DIM, 5)
        self.later = nn.ModuleList(Block(late=False) for _ in range(3))
        self.blocks = nn.ModuleList(Block(late=index % 2 > 0) for index in range(4))
        self.unused = nn.Linear(2, 2)
        self.embedding = nn.Linear(DIM, 5)
        self.head.weight = self.embedding.weight
        self.last = nn.Parameter(torch.rand(5))
        self.first = nn.Parameter(torch.rand(DIM))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first + self.embedding(x).sum(-1, keepdim=True)
        for block in self.blocks:
            x = block(x)
        for block in reversed(self.later):
            x = block(x)
        return self.head(x) * self.last


def loss_fn(output: Tensor) -> Tensor:
    return output.square().mean()


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_what_goes_by_the_order_of_parameters_is_right(
    tmp_path: Path, load: Callable[[Path], ModuleType], stages: int
) -> None:
    """Pairs with the model's own, and the state of an optimizer of the plain model."""
    torch.manual_seed(0)
    model = Net()
    example = torch.rand(8, DIM)
    subject = Subject("net", copy.deepcopy(model), (example,), loss_fn=loss_fn)
    options = CompileOptions(stages=stages, microbatches=2, cut_inside=0.0)
    compile_subject(subject, options, tmp_path / "package")
    pipe = load(tmp_path / "package").Pipeline()

    for kind in ("named_parameters", "named_buffers"):
        own, others = dict(getattr(model, kind)()), dict(getattr(pipe, kind)())
        assert list(own) == list(others)
        assert all(torch.equal(own[name], others[name]) for name in own)

    plain = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    loss_fn(model(example)).backward()
    plain.step()
    moved = torch.optim.SGD(pipe.parameters(), 0.1, momentum=0.9)
    pipe.load_state_dict(model.state_dict())
    moved.load_state_dict(copy.deepcopy(plain.state_dict()))
    plain.zero_grad()
    loss_fn(model(example)).backward()
    plain.step()
    pipe.train().step(example)
    moved.step()

    for own, other in zip(model.parameters(), pipe.parameters(), strict=True):
        torch.testing.assert_close(other, own)
