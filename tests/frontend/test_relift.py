"""Module calls that are put back together, and those that must not be."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from gpipe_compiler.frontend.exported import trace_export
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.ir import ModuleCall, RegionCall
from gpipe_compiler.options import LossChoice

X = torch.randn(4, 6)


def module_calls(graph):
    return [op.call.module for op in graph.ops if isinstance(op.call, ModuleCall)]


class One(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, *inputs):
        return self.layer(*inputs)


SERIES = torch.randn(4, 3, 7)
IMAGE = torch.randn(4, 4, 8, 8)

LAYERS = {
    "linear": (lambda: nn.Linear(6, 3), X),
    "bilinear": (lambda: nn.Bilinear(6, 6, 3), X, X),
    "conv1d": (lambda: nn.Conv1d(3, 4, 3, padding="same", padding_mode="circular"), SERIES),
    "conv2d": (lambda: nn.Conv2d(4, 4, 3, stride=2, groups=2, bias=False), IMAGE),
    "conv transpose": (lambda: nn.ConvTranspose2d(4, 2, 2, stride=2), IMAGE),
    "batch norm": (lambda: nn.BatchNorm2d(4), IMAGE),
    "batch norm without statistics": (
        lambda: nn.BatchNorm2d(4, track_running_stats=False),
        IMAGE,
    ),
    "instance norm": (lambda: nn.InstanceNorm2d(4, track_running_stats=True), IMAGE),
    "group norm": (lambda: nn.GroupNorm(2, 4), IMAGE),
    "layer norm": (lambda: nn.LayerNorm(6, bias=False), X),
    "rms norm": (lambda: nn.RMSNorm(6), X),
    "local response norm": (lambda: nn.LocalResponseNorm(2), IMAGE),
    "embedding": (lambda: nn.Embedding(5, 3, padding_idx=1), torch.randint(0, 5, (4, 2))),
    "embedding bag": (lambda: nn.EmbeddingBag(5, 3), torch.randint(0, 5, (4, 2))),
    "dropout": (lambda: nn.Dropout(0.3), X),
    "dropout 2d": (lambda: nn.Dropout2d(0.3), IMAGE),
    "alpha dropout": (lambda: nn.AlphaDropout(0.3), X),
    "rrelu": (nn.RReLU, X),
    "prelu": (lambda: nn.PReLU(4), IMAGE),
    "gelu": (lambda: nn.GELU("tanh"), X),
    "softmax": (lambda: nn.Softmax(dim=-1), X),
    "max pool": (lambda: nn.MaxPool2d(2), IMAGE),
    "adaptive pool": (lambda: nn.AdaptiveAvgPool2d(1), IMAGE),
    "upsample": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), IMAGE),
    "pad": (lambda: nn.ReflectionPad2d(1), IMAGE),
    "flatten": (nn.Flatten, IMAGE),
    "unflatten": (lambda: nn.Unflatten(1, (2, 3)), X),
    "pixel shuffle": (lambda: nn.PixelShuffle(2), IMAGE),
    "lstm": (lambda: nn.LSTM(7, 5, batch_first=True, proj_size=2), SERIES),
    "gru": (lambda: nn.GRU(7, 5, 2, dropout=0.3, bidirectional=True, batch_first=True), SERIES),
    "gru cell": (lambda: nn.GRUCell(6, 5), X),
    "cosine": (nn.CosineSimilarity, X, X),
}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", LAYERS)
def test_layer_is_called_again_and_computes_the_same(name, training, same_as_eager):
    make, *inputs = LAYERS[name]
    subject = Subject("m", One(make()), tuple(inputs), loss=LossChoice.SUM_OF_SQUARES)
    graph = trace_export(subject, training)

    same_as_eager(graph, subject, training)
    assert module_calls(graph) == ["layer"]


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.again = self.fc
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.relu(self.again(self.relu(self.fc(x))))


def test_shared_module_is_one_module_with_several_calls(same_as_eager):
    subject = Subject("m", Shared(), (X,), loss=LossChoice.SUM_OF_SQUARES)
    graph = trace_export(subject, True)

    same_as_eager(graph, subject, True)
    assert module_calls(graph) == ["fc", "relu", "fc", "relu"]
    assert sorted(graph.modules) == ["fc", "relu"]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, dropout=0.2, batch_first=True)

    def forward(self, x, memory, mask):
        y, weights = self.attention(
            x, key=memory, value=memory, key_padding_mask=mask, average_attn_weights=False
        )
        return y, weights


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_attention_keeps_the_arguments_of_its_call(training, same_as_eager):
    mask = torch.arange(5).expand(4, 5) > 3
    subject = Subject(
        "m",
        Attention(),
        (torch.randn(4, 3, 6), torch.randn(4, 5, 6), mask),
        loss=LossChoice.SUM_OF_SQUARES,
    )
    graph = trace_export(subject, training)

    same_as_eager(graph, subject, training)
    assert module_calls(graph) == ["attention"]
    (op,) = [op for op in graph.ops if isinstance(op.call, ModuleCall)]
    assert op.call.kwargs["average_attn_weights"] is False
    assert sorted(op.call.kwargs) == ["average_attn_weights", "key", "key_padding_mask", "value"]


class Regions(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        with torch.no_grad():
            y = self.norm(self.fc(x))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = self.fc(y)
        return self.fc(x) + z.float()


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_layers_in_regions_are_called_there(training, same_as_eager):
    subject = Subject("m", Regions(), (X,), loss=LossChoice.SUM_OF_SQUARES)
    graph = trace_export(subject, training)

    same_as_eager(graph, subject, training)
    inside = [
        inner.call.module
        for op in graph.ops
        if isinstance(op.call, RegionCall)
        for inner in op.call.body.ops
        if isinstance(inner.call, ModuleCall)
    ]
    assert inside == ["fc", "norm", "fc"]
    assert module_calls(graph) == ["fc"]


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def with_hook():
    layer = nn.Linear(6, 6)
    layer.register_forward_hook(lambda module, args, output: output + 1)
    return layer


def with_own_forward():
    layer = nn.Linear(6, 6)
    layer.forward = lambda x: F.linear(x, layer.weight) * 3
    return layer


OTHERS = {
    "subclass": lambda: Doubled(6, 6),
    "hook": with_hook,
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(6, 6)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_plain_layer_is_written_out(name, same_as_eager):
    subject = Subject("m", One(OTHERS[name]()), (X,), loss=LossChoice.SUM_OF_SQUARES)
    graph = trace_export(subject, True)

    same_as_eager(graph, subject, True)
    assert module_calls(graph) == []


class Meddling(nn.Module):
    """Reads a weight that a layer uses, and uses a layer's weight otherwise."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return F.linear(self.drop(self.fc(x)), self.fc.weight.t()) * self.fc.bias.sum()


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_weight_may_be_read_outside_of_its_layer(training, same_as_eager):
    subject = Subject("m", Meddling(), (X,), loss=LossChoice.SUM_OF_SQUARES)
    graph = trace_export(subject, training)

    same_as_eager(graph, subject, training)
    assert module_calls(graph) == ["fc", "drop"]


class Frozen(nn.Module):
    """A layer that stays in eval mode whatever the model does."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.fc = nn.Linear(6, 6)

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x):
        return self.fc(self.norm(x))


def test_frozen_layer_does_not_follow_the_mode(same_as_eager):
    subject = Subject("m", Frozen(), (X,), loss=LossChoice.SUM_OF_SQUARES)
    graph = trace_export(subject, True)

    same_as_eager(graph, subject, True)
    assert module_calls(graph) == ["fc"]


def test_hooks_are_gone_and_the_model_is_untouched():
    model = Shared().eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trace_export(Subject("m", model, (X,), loss=LossChoice.SUM_OF_SQUARES), True)

    assert not model.training
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
