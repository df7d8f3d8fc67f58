"""Graphs that are traced: names, lines, state, and what the model writes in place."""

from __future__ import annotations

import operator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpipe_compiler.frontend.recorded import trace_mode
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.ir import FunctionCall, MethodCall, ModuleCall, Ref, StateKind
from gpipe_compiler.options import LossChoice


def subject(model, *args, **kwargs):
    return Subject("toy", model, args, kwargs, loss=LossChoice.SUM_OF_SQUARES)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.relu(self.bn(self.conv(x)) + x)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.layer1 = nn.Sequential(Block(4), Block(4))
        self.fc = nn.Linear(4, 5)

    def forward(self, x):
        x = self.layer1(self.stem(x))
        return self.fc(x.mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 6, batch_first=True, num_layers=2, dropout=0.3)
        self.attend = nn.MultiheadAttention(6, 2, dropout=0.2, batch_first=True)

    def forward(self, x, hidden=None):
        out, (_, c) = self.lstm(x, hidden)
        mixed, _ = self.attend(out, out, out)
        return mixed + out, c


class Inplace(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("average", torch.zeros(4))
        self.mask = torch.tensor([1.0, 0.0, 1.0, 1.0])

    def forward(self, x):
        x = self.linear(x)
        half = x[:, :2]
        half *= 2
        x[:, 3] = 1
        x.add_(self.mask)
        x += torch.arange(4)
        if self.training:
            self.steps += 1
            self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        return x - self.average


class Split(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(6, 12)

    def forward(self, x):
        q, k, v = self.qkv(x).split(4, dim=-1)
        best = v.max(dim=-1)
        values, indices = (q @ k.transpose(1, 2)).topk(2, dim=-1)
        return torch.cat(x.chunk(2, dim=1), 1), best.values + values.sum(-1), indices


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("position", torch.randn(5, 4), persistent=False)

    def forward(self, ids, mask=None, *, scale=1.0):
        x = self.embed(ids) * scale + self.position[: ids.shape[1]]
        if mask is not None:
            x = x * mask[..., None]
        return {"logits": self.head(x), "hidden": x, "cache": None}


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        for _ in range(3):
            x = self.linear(x).relu()
        return x


class Assigned(nn.Module):
    """What forward assigns to buffers: of the same shape, and within a region."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("most", torch.zeros(4))

    def forward(self, x):
        x = self.linear(x)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            with torch.no_grad():
                self.most = torch.maximum(self.most, x.amax(0))
        return (x - self.mean) / (1 + self.most)


ids = torch.randint(0, 7, (3, 5))
MODELS = {
    "mlp": lambda: subject(
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 2)), torch.randn(3, 4)
    ),
    "resnet": lambda: subject(ResNet(), torch.randn(3, 3, 8, 8)),
    "recurrent": lambda: subject(Recurrent(), torch.randn(3, 5, 4)),
    "inplace": lambda: subject(Inplace(), torch.randn(3, 4)),
    "assigned": lambda: subject(Assigned(), torch.randn(3, 4)),
    "split": lambda: subject(Split(), torch.randn(3, 4, 6)),
    "tied": lambda: subject(Tied(), ids),
    "kwargs": lambda: subject(Tied(), ids, mask=torch.ones(3, 5), scale=2.0),
    "shared": lambda: subject(Shared(), torch.randn(3, 4)),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_graph_equals_the_eager_model_bitwise(name, training, same_as_eager):
    torch.manual_seed(0)
    subject = MODELS[name]()

    same_as_eager(trace_mode(subject, training), subject, training)


@pytest.mark.parametrize("name", MODELS)
def test_tracing_leaves_the_model_and_the_random_numbers_alone(name):
    torch.manual_seed(0)
    subject = MODELS[name]()
    model = subject.model
    random = torch.get_rng_state()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    objects = {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    flags = [module.training for module in model.modules()]
    attributes = {path: dict(vars(module)) for path, module in model.named_modules()}

    trace_mode(subject, False)
    trace_mode(subject, True)

    assert all(torch.equal(state[n], t) for n, t in model.state_dict().items())
    assert objects == {n: id(t) for n, t in model.state_dict(keep_vars=True).items()}
    assert flags == [module.training for module in model.modules()]
    assert attributes == {path: dict(vars(module)) for path, module in model.named_modules()}
    assert torch.equal(random, torch.get_rng_state())


def test_ops_are_named_after_module_paths_and_functions():
    graph = trace_mode(MODELS["resnet"](), True)

    assert [
        *("stem", "layer1_0_conv", "layer1_0_bn", "add", "layer1_0_relu"),
        *("layer1_1_conv", "layer1_1_bn", "add_1", "layer1_1_relu", "mean", "fc"),
        *("square", "loss"),
    ] == [op.name for op in graph.ops]


def test_every_op_of_the_model_knows_its_line_and_module():
    graph = trace_mode(MODELS["resnet"](), True)
    add = graph.op_of["add"]
    lines = Path(__file__).read_text().splitlines()

    assert add.source is not None
    assert __file__ == add.source.file
    assert "self.bn(self.conv(x)) + x" in lines[add.source.line - 1]
    assert add.module == "layer1.0"
    assert graph.op_of["layer1_0_conv"].module == "layer1.0"
    assert all(op.source is not None for op in graph.ops if op.name not in ("square", "loss"))


def test_multi_output_ops_are_unpacked_under_the_names_of_the_model():
    graph = trace_mode(MODELS["split"](), False)

    assert [op.result for op in graph.ops if op.name == "split"] == [("q", "k", "v")]
    assert ("values", "indices") in [op.result for op in graph.ops]
    assert ("max_1", None) in [op.result for op in graph.ops] or ("max_", None) in [
        op.result for op in graph.ops
    ]
    assert not [op for op in graph.ops if op.name.startswith("item")]
    assert "lstm" in trace_mode(MODELS["recurrent"](), True).op_of


def test_a_single_size_is_asked_for_alone():
    class Model(nn.Module):
        def forward(self, x):
            b, t, _ = x.shape
            return x.view(b, -1) + x.shape[-1], x.reshape(x.size(0) * t, -1)

    graph = trace_mode(subject(Model(), torch.randn(2, 3, 4)), False)
    calls = [op.call for op in graph.ops]

    assert MethodCall("size", (Ref("x"), 0)) in calls
    assert not [call for call in calls if isinstance(call, FunctionCall) and "shape" in call.args]


def test_state_has_the_models_names_and_tied_ones_are_aliases():
    graph = trace_mode(MODELS["tied"](), True)

    assert {"embed.weight", "position"} == set(graph.state)
    assert graph.state["embed.weight"].aliases == ("head.weight",)
    assert dict(graph.modules["head"].state) == {"weight": "embed.weight"}
    assert graph.state["position"].persistent is False


def test_a_tensor_that_the_model_closes_over_is_a_constant():
    graph = trace_mode(MODELS["inplace"](), True)

    assert StateKind.CONSTANT is graph.state["mask"].kind
    assert graph.tensors["mask"].tolist() == [1.0, 0.0, 1.0, 1.0]


def test_what_forward_creates_is_created_anew():
    graph = trace_mode(MODELS["inplace"](), True)

    assert [16] not in [list(s.shape) for s in graph.state.values()]
    made = [op.call for op in graph.ops if isinstance(op.call, FunctionCall)]
    assert [call.args for call in made if call.function is torch.arange] == [(4,)]


def test_writes_in_place_stay_and_dead_ops_go():
    class Model(nn.Module):
        def forward(self, x):
            y = x * 2
            (x + 1).relu()
            y.add_(1)
            y[0] = 0
            return y

    graph = trace_mode(subject(Model(), torch.randn(2, 3)), False)

    assert [op.name for op in graph.ops[:3]] == ["mul", "add", "setitem"]
    assert graph.ops[2].result is None
    assert operator.setitem is graph.ops[2].call.function


def test_a_shared_module_is_one_module_called_often():
    graph = trace_mode(MODELS["shared"](), False)

    assert list(graph.modules) == ["linear"]
    assert sum(isinstance(op.call, ModuleCall) for op in graph.ops) == 3


def test_functional_dropout_keeps_its_flag_and_no_defaults():
    class Model(nn.Module):
        def forward(self, x):
            return F.dropout(x, 0.3, self.training)

    graph = trace_mode(subject(Model(), torch.randn(3, 4)), False)

    assert dict(graph.op_of["dropout"].call.kwargs) == {"p": 0.3, "training": False}
