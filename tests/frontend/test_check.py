"""A graph that differs from its model in anything is found out."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from gpipe_compiler.errors import ModelError, TraceError
from gpipe_compiler.frontend import check
from gpipe_compiler.frontend.check import differences
from gpipe_compiler.frontend.modes import merge
from gpipe_compiler.frontend.recorded import trace_mode
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.ir import FunctionCall, Graph, Mode, Ref, StateRef
from gpipe_compiler.options import LossChoice


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x, scale):
        self.steps += 1
        y = self.norm(self.linear(x))
        y = F.dropout(y, 0.2, self.training)
        return {"y": y * scale, "z": y + x}


@pytest.fixture
def subject():
    torch.manual_seed(0)
    return Subject(
        "toy",
        Model(),
        (torch.randn(4, 4), torch.rand(4, 4)),
        target=torch.randn(4, 4),
        loss_fn=lambda output, target: F.mse_loss(output["y"], target),
    )


@pytest.fixture
def graph(subject):
    return merge(trace_mode(subject, True), trace_mode(subject, False))


def change(graph: Graph, name: str, **changes: object) -> Graph:
    """The graph with one op changed."""
    ops = [dataclasses.replace(op, **changes) if op.name == name else op for op in graph.ops]
    return graph.replace(ops=tuple(ops))


def test_a_right_graph_has_no_differences(graph, subject):
    assert differences(graph, subject) == []


def test_checking_leaves_the_model_alone(graph, subject):
    state = {name: tensor.clone() for name, tensor in subject.model.state_dict().items()}
    random = torch.get_rng_state()

    differences(graph, subject)

    assert all(torch.equal(state[n], t) for n, t in subject.model.state_dict().items())
    assert all(p.grad is None for p in subject.model.parameters())
    assert torch.equal(random, torch.get_rng_state())


def test_a_wrong_output_is_found(graph, subject):
    wrong = change(
        graph, graph.outputs["z"].name, call=FunctionCall(torch.sub, (Ref("dropout"), Ref("x")))
    )

    assert any("output z is off by" in text for text in differences(wrong, subject))


def test_a_missing_output_is_found(graph, subject):
    wrong = graph.replace(outputs={"y": graph.outputs["y"]})

    assert any("output z is given by the model only" in t for t in differences(wrong, subject))


def insert(graph: Graph, call: FunctionCall, *, reader: FunctionCall, before: str) -> Graph:
    """The graph with a new value `extra`, and the op that follows reading it."""
    place = next(index for index, op in enumerate(graph.ops) if op.name == before)
    follower = graph.ops[place]
    extra = dataclasses.replace(follower, name="extra", result="extra", call=call)
    changed = dataclasses.replace(follower, call=reader)
    return graph.replace(ops=(*graph.ops[:place], extra, changed, *graph.ops[place + 1 :]))


def test_a_wrong_gradient_is_found(graph, subject):
    wrong = insert(
        graph,
        FunctionCall(torch.detach, (Ref("dropout"),)),
        reader=FunctionCall(torch.mul, (Ref("extra"), Ref("scale"))),
        before=graph.outputs["y"].name,
    )

    found = differences(wrong, subject)

    assert any("gradient of linear.weight is None in the graph only" in text for text in found)


def test_a_buffer_that_is_not_written_is_found(graph, subject):
    ops = tuple(op for op in graph.ops if StateRef("steps") not in op.call.args)

    assert any(
        "buffer steps is off by 1" in t for t in differences(graph.replace(ops=ops), subject)
    )


def test_what_goes_wrong_in_eval_mode_only_is_found(graph, subject):
    (dropout,) = [op for op in graph.ops if op.name == "dropout"]
    call = dataclasses.replace(dropout.call, kwargs={"p": 0.2, "training": True})

    found = differences(change(graph, "dropout", call=call), subject)

    assert all("eval mode" in text for text in found)
    assert found


def test_a_graph_that_fixes_the_batch_size_is_found(graph, subject):
    wrong = insert(
        graph,
        FunctionCall(torch.reshape, (Ref("dropout"), (2, 4))),
        reader=FunctionCall(torch.add, (Ref("extra"), Ref("x"))),
        before=graph.outputs["z"].name,
    )

    found = differences(wrong, subject)

    assert any("batch 3: the graph raises RuntimeError" in text for text in found)


def test_state_under_another_name_is_found(graph, subject):
    state = {**graph.state, "other": dataclasses.replace(graph.state["steps"], name="other")}
    tensors = {**graph.tensors, "other": graph.tensors["steps"]}

    found = differences(graph.replace(state=state, tensors=tensors), subject)

    assert "the state other is in the graph only" in found


def test_an_op_that_is_missing_in_one_mode_is_found(graph, subject):
    found = differences(change(graph, "norm", mode=Mode.TRAIN), subject)

    assert any("eval mode, batch 2: the graph raises" in text for text in found)


def test_models_on_meta_are_held_against_shapes():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    subject = Subject("toy", model, (torch.randn(4, 4),), loss=LossChoice.SUM_OF_SQUARES)
    graph = merge(trace_mode(subject, True), trace_mode(subject, False))
    call = FunctionCall(torch.sum, (Ref("linear_0"), 0))
    name = graph.ops[1].name

    assert differences(graph, subject) == []
    assert differences(change(graph, name, call=call), subject)


def test_a_model_that_cannot_be_trained_is_at_fault_itself():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            y = self.linear(x).exp()
            y.mul_(2)
            return y

    subject = Subject("toy", Broken(), (torch.randn(4, 4),), loss=LossChoice.SUM_OF_SQUARES)
    graph = merge(trace_mode(subject, True), trace_mode(subject, False))

    with pytest.raises(ModelError, match="raises RuntimeError in a training step"):
        differences(graph, subject)


class Batches(nn.Module):
    """Takes only some numbers of samples, if told so."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.taken = None

    def forward(self, x):
        if self.taken is not None and x.shape[0] not in self.taken:
            raise ValueError("too many")
        return self.linear(x)


def test_a_model_of_even_batches_is_compared_at_two_of_them():
    subject = Subject("toy", Batches(), (torch.randn(4, 4),), training=False)
    right = trace_mode(subject, False)
    call = FunctionCall(torch.reshape, (Ref("x"), (2, 4)))
    wrong = change(right, right.ops[-1].name, call=call)
    subject.model.taken = (2, 4)

    assert differences(right, subject) == []
    assert any("batch 2: output" in text for text in differences(wrong, subject))
    wrong = insert(
        right,
        call,
        reader=dataclasses.replace(right.ops[-1].call, args=(Ref("extra"),)),
        before=right.ops[-1].name,
    )
    assert any("batch 4: the graph raises" in text for text in differences(wrong, subject))


def test_a_model_of_one_batch_size_is_told():
    subject = Subject("toy", Batches(), (torch.randn(1, 4),), training=False)
    graph = trace_mode(subject, False)
    subject.model.taken = (2,)

    with pytest.warns(UserWarning, match=r"no batch of 3 or 4 samples \(ValueError: too") as told:
        assert differences(graph, subject) == []
    assert len(told) == 1


class Assigning(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, x):
        y = self.linear(x)
        self.mean = y.detach().mean(0)
        return y


def test_a_buffer_that_is_assigned_another_shape_is_explained():
    subject = Subject("toy", Assigning(), (torch.randn(4, 4),), loss=LossChoice.SUM_OF_SQUARES)
    graph = merge(trace_mode(subject, True), trace_mode(subject, False))

    with pytest.raises(TraceError, match=r"buffer mean is \(1,\)") as caught:
        differences(graph, subject)

    assert "keep it in no buffer" in caught.value.hint


class Checkpointing(nn.Module):
    """Plain torch would run the BatchNorm again in the backward, and count its samples twice."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.2))

    def forward(self, x):
        return checkpoint(self.layers, x, use_reentrant=False)


def test_what_the_model_checkpoints_runs_once():
    subject = Subject("toy", Checkpointing(), (torch.randn(4, 4),), loss=LossChoice.SUM_OF_SQUARES)
    graph = merge(trace_mode(subject, True), trace_mode(subject, False))

    assert differences(graph, subject) == []


class ShiftedScores(nn.Module):
    """Two biases that no output depends on, but for rounding: before a softmax, a BatchNorm."""

    def __init__(self, small: float = 0.0) -> None:
        super().__init__()
        self.scores, self.rows = nn.Linear(4, 6), nn.Linear(6, 3, bias=False)
        self.shift = nn.Parameter(torch.randn(1))
        self.small = nn.Parameter(torch.ones(()))
        self.factor = small
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        h = (self.scores(x) + self.shift).softmax(-1)
        return self.norm(self.rows(h)) + self.factor * self.small * x[:, :1]


def test_gradients_that_are_rounding_alone_may_differ(monkeypatch):
    """In another order of sums nothing is left of them that is equal."""
    torch.manual_seed(0)
    subject = Subject(
        "toy", ShiftedScores(), (torch.randn(4, 4),), target=torch.randn(4, 3), loss_fn=F.mse_loss
    )
    graph = merge(trace_mode(subject, True), trace_mode(subject, False))
    run = check.run_graph

    def noisy(*args, **options):
        found = run(*args, **options)
        shift = found.results["gradient of shift"]
        if shift is None:  # eval mode has no backward
            return found
        largest = max(
            float(t.abs().max()) for n, t in found.results.items() if n.startswith("gradient")
        )
        shift.fill_(5 * torch.finfo(shift.dtype).eps * largest)
        return found

    monkeypatch.setattr(check, "run_graph", noisy)

    assert differences(graph, subject) == []


def test_a_small_gradient_is_no_rounding():
    """A term of a millionth that a graph has twice is found in double precision."""
    torch.manual_seed(0)
    model = ShiftedScores(1e-7)
    subject = Subject(
        "toy", model, (torch.randn(4, 4),), target=torch.randn(4, 3), loss_fn=F.mse_loss
    )
    graph = merge(trace_mode(subject, True), trace_mode(subject, False))
    (op,) = [op for op in graph.ops if StateRef("small") in getattr(op.call, "args", ())]
    twice = FunctionCall(op.call.function, (2e-7, StateRef("small")))

    found = differences(change(graph, op.name, call=twice), subject)

    assert any("gradient of small" in text for text in found)


class Scaled(nn.Module):
    """A weight before a normalisation, in 32 bits as RMSNorm casts: its gradient is a sum whose
    terms cancel but for a few thousandths."""

    def __init__(self, order=(0, 1, 2), share=0.0):
        super().__init__()
        self.scale, self.order, self.share = nn.Parameter(torch.tensor(1.3)), order, share
        self.last = nn.Linear(16, 3)

    def forward(self, x):
        scale = self.scale + self.share * (self.scale - self.scale.detach())
        y = F.rms_norm((scale * x).to(torch.float32), (16,), eps=1e-3)
        terms = [y * 0.1, y.tanh(), y.sigmoid()]
        products = {place: terms[place] * y for place in self.order}
        return self.last(products[0] + products[1] + products[2])


def scaled(**settings):
    torch.manual_seed(0)
    x, target = torch.randn(64, 16), torch.randint(3, (64,))
    return Subject("scaled", Scaled(**settings), (x,), target=target, loss_fn=F.cross_entropy)


def test_gradients_that_are_summed_in_another_order_are_no_difference():
    same = merge(*(trace_mode(scaled(order=(2, 0, 1)), mode) for mode in (True, False)))

    assert differences(same, scaled()) == []


def test_a_gradient_that_is_off_by_less_than_others_round_is_found():
    wrong = merge(*(trace_mode(scaled(share=1e-3), mode) for mode in (True, False)))

    found = differences(wrong, scaled())

    assert found
    assert all("gradient of scale is off by" in text for text in found)
