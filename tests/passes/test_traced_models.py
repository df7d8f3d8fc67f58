"""The passes on graphs of traced models, compared with eager runs of these graphs."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gpipe_compiler.cluster import BUILT_IN
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.frontend.tracing import trace
from gpipe_compiler.ir import Graph, ValueKind
from gpipe_compiler.passes.atoms import atoms
from gpipe_compiler.passes.cost import roofline
from gpipe_compiler.passes.duplicate import duplicable
from gpipe_compiler.passes.effects import effects
from gpipe_compiler.passes.measure import measure
from gpipe_compiler.passes.saved_tensors import saved_tensors
from gpipe_compiler.passes.shapes import annotate


class Residual(nn.Module):
    """BatchNorm and in-place activations around a shortcut, and functional dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.conv = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(4, 3)

    def forward(self, image):
        h = self.relu(self.norm(self.stem(image)))
        h = self.relu(self.norm(self.conv(h)) + h)
        h = F.dropout(h.mean((2, 3)), 0.25, self.training)
        return self.head(h)


class Attention(nn.Module):
    """A causal mask built from sizes, heads made by views, and weights tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.qkv = nn.Linear(8, 24)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens):
        batch, length = tokens.shape
        h = self.words(tokens)
        q, k, v = self.qkv(h).view(batch, length, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
        scores = (q @ k.transpose(-2, -1)).masked_fill(~mask, float("-inf")).softmax(-1)
        h = h + (scores @ v).transpose(1, 2).reshape(batch, length, 8)
        return self.head(self.norm(h))


def subject(model: str) -> Subject:
    torch.manual_seed(0)
    if model == "residual":
        image, target = torch.randn(4, 3, 6, 6), torch.tensor([0, 1, 2, 0])
        return Subject(model, Residual(), (image,), target=target, loss_fn=F.cross_entropy)
    tokens = torch.randint(0, 11, (4, 5))
    return Subject(
        model,
        Attention(),
        (tokens,),
        target=tokens,
        loss_fn=lambda out, target: F.cross_entropy(out.flatten(0, 1), target.flatten()),
    )


@pytest.fixture(
    scope="module",
    params=["residual", "attention"],
)
def traced(request) -> tuple[str, Graph]:
    return request.param, trace(subject(request.param))


def test_descriptions_and_saved_bytes_equal_the_eager_run(traced, eager):
    _, graph = traced
    graph = annotate(graph, 2)
    run = eager(graph, 2)
    own = {tensor.untyped_storage().data_ptr() for tensor in run.states.values()}
    kept = {}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        truth = run.run()

    for name, tensor in truth.items():
        value = graph.values[name]
        if value.kind is ValueKind.TENSOR:
            described = (value.shape, value.dtype, value.requires_grad)
            assert described == (tuple(tensor.shape), tensor.dtype, tensor.requires_grad), name
            assert value.splittable, name
    names = [op.name for op in graph.ops]
    assert saved_tensors(graph).saved_bytes(names) == sum(s.nbytes() for s in kept.values())


def test_costs_are_those_counted_by_hand(traced):
    model, graph = traced
    batch = 2
    costs = roofline(annotate(graph, batch), BUILT_IN["v100"].device)
    forward = sum(cost.flops for cost in costs.ops.values())
    if model == "residual":
        assert forward == 2 * batch * (36 * 4 * 9 * (3 + 4) + 4 * 3)
    else:
        projections, products = 5 * 8 * (24 + 11), 2 * 2 * 5 * 5 * 4
        assert forward == 2 * batch * (projections + products)


def test_what_is_bound_and_what_is_copied(traced):
    model, graph = traced
    graph = annotate(graph, 2)
    found_effects = effects(graph)
    copied = duplicable(graph, found_effects)
    found = atoms(graph, found_effects, copied)
    loss = graph.producer[graph.loss.value].name

    assert loss in found.last_stage
    if model == "residual":
        # the normalisation is shared, so all between its two calls stays together
        (group,) = (g for g in found.groups if len(g) > 2)
        assert not copied
        assert {"norm.running_mean", "norm.running_var"} <= found_effects.written_states
        assert sum("norm" in name for name in group) >= 2
    else:
        assert any("tril" in name or "ones" in name for name in copied)
        assert not found_effects.written_states
        assert all(name in found.last_stage for group in found.groups for name in group)


def test_every_op_can_be_measured(traced):
    _, graph = traced
    costs = measure(
        annotate(graph, 2), BUILT_IN["v100"].device, torch.device("cpu"), budget_s=0.002
    )

    assert not costs.estimated
    assert any(cost.forward_s > 0 for cost in costs.ops.values())
    assert any(cost.backward_s > 0 for cost in costs.ops.values())
