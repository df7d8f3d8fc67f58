"""A pipeline of ops that each keep their result, and a count of the tensors that live."""

from __future__ import annotations

import torch
from tiny_pipelines import MSE, TARGET, WIDTH, X, cross, spec_of
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpipe_compiler.runtime.spec import Leaf, StageSpec


class Tanhs(nn.Module):
    """A row of ops that each keep their result, and a count of the forwards."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.forwards = 0

    def forward(self, x):
        self.forwards += 1
        for _ in range(8):
            x = torch.tanh(x * self.scale)
        return x

    def loss(self, y, target):
        return F.mse_loss(y, target)


def tanh_spec(stages, **more):
    names = ["x", *(f"v{s}" for s in range(stages))]
    specs = [
        StageSpec(
            Tanhs,
            (names[s],),
            (names[s + 1],),
            {"scale": f"scale{s}"},
            (names[s + 1], "target") if s == stages - 1 else (),
        )
        for s in range(stages)
    ]
    crossings = [cross(f"v{s}", s, (s + 1,)) for s in range(stages - 1)]
    if stages > 1:
        crossings.append(cross("target", 0, (stages - 1,), gradient=False))
    return spec_of(specs, crossings, [X, TARGET], Leaf(names[-1]), MSE, **more)


class Living(TorchDispatchMode):
    """The most activations that live at a time, among tensors of one micro-batch's size."""

    def __init__(self, samples):
        super().__init__()
        self.shape = (samples, WIDTH)
        self.made = {}
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.shape == self.shape:
                reference = StorageWeakRef(tensor.untyped_storage())
                self.made[reference.cdata] = reference
        self.made = {key: item for key, item in self.made.items() if not item.expired()}
        self.most = max(self.most, len(self.made))
        return result
