"""The merged graph does what the model does, in train mode and in eval mode."""

from __future__ import annotations

import operator

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gpipe_compiler.frontend.modes import combine, merge
from gpipe_compiler.frontend.recorded import trace_mode
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.ir import ByMode, FunctionCall, Mode, Ref
from gpipe_compiler.ir.interpret import Interpreter
from gpipe_compiler.options import LossChoice

WIDTH = 4


class DropPath(nn.Module):
    def forward(self, x):
        if not self.training:
            return x
        mask = x.new_empty((x.shape[0], 1)).bernoulli_(0.7)
        return x.div(0.7) * mask


class Layer(nn.Module):
    """One of many layers that treat train and eval mode differently."""

    KINDS = (
        *("linear", "dropout_module", "dropout", "always_dropout", "drop_path", "batch_norm"),
        *("attention", "train_only", "eval_only", "noise", "other_branch", "swap"),
    )

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.5)
        self.drop_path = DropPath()
        self.batch_norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x, skip):
        match self.kind:
            case "linear" | "dropout_module" | "batch_norm":
                name = "dropout" if self.kind == "dropout_module" else self.kind
                return getattr(self, name)(x) + skip
            case "dropout":
                return F.dropout(self.linear(x), 0.3, self.training)
            case "always_dropout":
                return F.dropout(x, 0.3, training=True)
            case "drop_path":
                return x + self.drop_path(self.linear(x))
            case "attention":
                heads = x[:, None]
                return F.scaled_dot_product_attention(
                    heads, heads, heads, dropout_p=0.4 if self.training else 0.0
                )[:, 0]
            case "train_only":
                return self.linear(x) if self.training else x
            case "eval_only":
                return x if self.training else self.linear(x).relu()
            case "noise":
                return x + torch.randn(WIDTH) if self.training else x
            case "other_branch":
                return self.linear(x) * 2 if self.training else self.other(x) + skip
            case _:
                return x - skip if self.training else skip - x


class Toy(nn.Module):
    def __init__(self, kinds):
        super().__init__()
        self.layers = nn.ModuleList(map(Layer, kinds))

    def forward(self, x):
        skip = x
        for layer in self.layers:
            x, skip = layer(x, skip), x
        return x, skip


def merged(model: nn.Module):
    subject = Subject("toy", model, (torch.randn(3, WIDTH),), loss=LossChoice.SUM_OF_SQUARES)
    return merge(trace_mode(subject, True), trace_mode(subject, False))


def run(graph, training, x):
    torch.manual_seed(5)
    tensors = {name: tensor.detach().clone() for name, tensor in graph.tensors.items()}
    interpreter = Interpreter(graph, tensors, training)
    return interpreter.resolve(graph.outputs, interpreter.run({"x": x}))


@settings(max_examples=8, deadline=None)
@given(st.lists(st.sampled_from(Layer.KINDS), min_size=1, max_size=5))
def test_merged_graph_equals_the_eager_model_bitwise_in_both_modes(kinds):
    torch.manual_seed(0)
    model = Toy(kinds)
    x = torch.randn(5, WIDTH)
    graph = merged(model)

    for training in (False, True):
        actual = run(graph, training, x)
        torch.manual_seed(5)
        with torch.no_grad():
            expected = model.train(training)(x)

        assert all(map(torch.equal, expected, actual))


def test_functional_dropout_follows_the_mode():
    graph = merged(Toy(["dropout"]))

    (dropout,) = [op for op in graph.ops if op.name == "dropout"]
    assert ByMode(True, False) == dropout.call.kwargs["training"]
    assert all(op.mode is Mode.ALWAYS for op in graph.ops)


def test_dropout_that_is_always_on_stays_on():
    graph = merged(Toy(["always_dropout"]))

    (dropout,) = [op for op in graph.ops if op.name == "dropout"]
    assert dropout.call.kwargs["training"] is True


def test_attention_dropout_follows_the_mode():
    graph = merged(Toy(["attention"]))

    (attention,) = [op for op in graph.ops if "attention" in op.name]
    assert ByMode(0.4, 0.0) == attention.call.kwargs["dropout_p"]


def test_drop_path_runs_in_train_mode_only():
    graph = merged(Toy(["drop_path"]))

    guarded = [op.call for op in graph.ops if op.mode is Mode.TRAIN]
    assert not [op for op in graph.ops if op.mode is Mode.EVAL]
    assert {"bernoulli_", "new_empty"} <= {getattr(call, "method", "") for call in guarded}
    assert operator.truediv in {getattr(call, "function", None) for call in guarded}


class Placed(nn.Module):
    """Asks for the length in both modes, and for the number of samples where it trains."""

    def __init__(self):
        super().__init__()
        self.first, self.drop_path = nn.Linear(WIDTH, WIDTH), DropPath()

    def forward(self, x):
        x = x + torch.arange(x.shape[1])[:, None]
        x = self.first(x)
        return self.drop_path(x.flatten(1)) if self.training else x.flatten(1)


def test_sizes_of_two_dimensions_are_two_sizes():
    """Taken for one, a block reads the length off a tensor for the number of samples."""
    given = (torch.randn(3, 5, WIDTH),)
    subject = Subject("placed", Placed(), given, loss=LossChoice.SUM_OF_SQUARES)
    graph = merge(trace_mode(subject, True), trace_mode(subject, False))

    calls = [op.call for op in graph.ops]
    asked = [call.args[1] for call in calls if getattr(call, "method", "") == "size"]
    assert sorted(asked) == [0, 1], asked


class Branches(nn.Module):
    """Keeps in eval mode, elsewhere in the file, what training makes anew."""

    def __init__(self):
        super().__init__()
        self.biases = nn.Parameter(torch.randn(WIDTH, 2))
        self.kept = {}

    def forward(self, x):
        if self.training:
            bias = self.biases[:, 1]
            noisy = x * 2
        else:
            noisy = x * 3
            self.kept["bias"] = self.biases[:, 1]
            bias = self.kept["bias"]
        return noisy.relu() + bias


def test_what_both_modes_do_at_other_lines_is_one_op():
    model = Branches()
    graph = merged(model)
    x = torch.randn(2, WIDTH)

    assert [op.mode for op in graph.ops].count(Mode.TRAIN) <= 1
    for training in (True, False):
        assert torch.equal(model.train(training)(x), run(graph, training, x))


def test_a_graph_that_is_the_same_in_both_modes_stays_untouched():
    subject = Subject(
        "toy",
        Toy(["linear", "batch_norm", "dropout_module"]),
        (torch.randn(3, 4),),
        loss=LossChoice.SUM_OF_SQUARES,
    )
    train = trace_mode(subject, True)

    assert merge(train, trace_mode(subject, False)) is train


class Returns(nn.Module):
    def __init__(self, in_train, in_eval):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.aux = nn.Linear(WIDTH, WIDTH)
        self.modes = {True: in_train, False: in_eval}

    def forward(self, x):
        return self.modes[self.training](self.linear(x), self.aux(x))


def test_auxiliary_outputs_of_train_mode_are_no_outputs():
    graph = merged(Returns(lambda y, aux: (y, aux), lambda y, aux: y))

    assert Ref("linear") == graph.outputs
    assert graph.left_out.startswith("aux, test_modes.py:")


def test_an_output_that_differs_by_mode_has_one_name():
    model = Returns(lambda y, aux: y, lambda y, aux: y.softmax(-1))
    graph = merged(model)
    x = torch.randn(2, WIDTH)

    assert torch.equal(model.linear(x), run(graph, True, x))
    assert torch.equal(model.linear(x).softmax(-1), run(graph, False, x))
    assert isinstance(graph.op_of[graph.outputs.name].call, FunctionCall)


def test_outputs_that_eval_mode_has_alone():
    model = Returns(lambda y, aux: y, lambda y, aux: (y.relu(), [y, aux]))
    graph = merged(model)
    x = torch.randn(2, WIDTH)

    inner, first = model.linear(x), run(graph, False, x)
    assert torch.equal(inner.relu(), first[0])
    assert torch.equal(inner, first[1][0])
    assert torch.equal(model.aux(x), first[1][1])
    assert graph.left_out.startswith("which is without relu")


def test_arguments_combine_leaf_by_leaf():
    train = ([Ref("a"), 1], {"p": 0.5}, slice(0, 1), True)
    evaluation = ([Ref("b"), 1], {"p": 0.5}, slice(0, 2), 1)

    assert (
        [ByMode(Ref("a"), Ref("b")), 1],
        {"p": 0.5},
        slice(0, ByMode(1, 2)),
        ByMode(True, 1),
    ) == combine(train, evaluation)
