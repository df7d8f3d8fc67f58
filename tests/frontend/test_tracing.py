"""A graph is taken where it is right; where it is not, the reason is told."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpipe_compiler.errors import TraceError
from gpipe_compiler.frontend import check
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.frontend.tracing import trace
from gpipe_compiler.ir import Mode, ModuleCall, NoGrad, called
from gpipe_compiler.options import LossChoice


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x, mask=None):
        x = F.dropout(self.norm(self.linear(x)), 0.1, self.training)
        return x if mask is None else x * mask


def classes(count, size=4):
    return torch.randint(0, count, (size,))


def test_calls_of_modules_are_found_and_run_in_both_modes():
    subject = Subject("s", Small(), (torch.randn(4, 4),), {}, classes(4), F.cross_entropy)

    graph = trace(subject)

    assert [c.module for c in (op.call for op in graph.ops) if isinstance(c, ModuleCall)] == [
        "linear",
        "norm",
    ]
    assert all(op.mode is Mode.ALWAYS for op in graph.ops)
    assert [source.name for source in graph.inputs] == ["x", "target"]


def test_an_example_of_one_sample_will_do():
    subject = Subject(
        "s", Small(), (torch.randn(1, 4), torch.ones(1, 4)), loss=LossChoice.SUM_OF_SQUARES
    )

    assert trace(subject).batch_size == 1


def test_a_no_grad_region_stays_whole():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.student, self.teacher = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            with torch.no_grad():
                wanted = self.teacher(x) * 2
            return self.student(x) - wanted

    graph = trace(Subject("s", Model(), (torch.randn(4, 4),), loss=LossChoice.SUM_OF_SQUARES))

    inside = [op for op in graph.ops if op.regions]
    assert [called(op.call) or op.path for op in inside] == ["teacher", "mul"]
    assert len({op.regions for op in inside}) == 1
    assert [region.context for region in inside[0].regions] == [NoGrad()]


def test_a_norm_frozen_by_the_model_stays_frozen():
    class Model(Small):
        def train(self, mode=True):
            super().train(mode)
            self.norm.eval()
            return self

    trace(Subject("s", Model(), (torch.randn(4, 4),), loss=LossChoice.SUM_OF_SQUARES))


def test_inference_alone_has_no_loss():
    graph = trace(Subject("s", Small(), (torch.randn(4, 4),), training=False))

    assert graph.loss is None


def test_a_model_on_meta_is_traced_without_memory():
    with torch.device("meta"):
        model = Small()
    graph = trace(Subject("s", model, (torch.randn(4, 4),), {}, classes(4), F.cross_entropy))

    assert all(tensor.is_meta for tensor in graph.tensors.values())


def test_a_branch_that_goes_both_ways_is_refused_with_its_line():
    class Model(nn.Module):
        def forward(self, x):
            if x.sum() > 0:
                return x + 1
            return x - 1

    x = torch.tensor([1.0, 1.0, -10.0, -10.0]).repeat(4, 1).T.requires_grad_()
    with pytest.raises(TraceError) as caught:
        trace(Subject("s", Model(), (x,), training=False))

    text = str(caught.value)
    assert caught.value.location is not None
    assert "if x.sum() > 0" in caught.value.location.code
    assert text.count("decides by the values") == 1
    assert "torch.where" in text


@pytest.mark.parametrize(
    ("is_other", "tried"),
    [
        (lambda samples: samples > 20, 21),
        (lambda samples: samples > 1000, 1001),
        (lambda samples: samples in (32, 64), 32),
        (lambda samples: 150 < samples < 200, 151),
        (lambda samples: samples % 50 < 3 and samples > 4, 51),
    ],
)
def test_a_branch_on_a_number_of_samples_beyond_the_example_is_refused(is_other, tried):
    class Model(nn.Module):
        def forward(self, x):
            return x * 2 if is_other(x.shape[0]) else x

    with pytest.raises(TraceError, match=f"batch {tried}: output is off"):
        trace(Subject("s", Model(), (torch.randn(4, 4),), training=False))


def test_a_branch_that_changes_no_number_is_taken():
    class Model(nn.Module):
        def forward(self, x):
            parts = x.split(500) if x.shape[0] > 500 else (x,)
            return torch.cat([part.tanh() for part in parts])

    graph = trace(Subject("s", Model(), (torch.randn(4, 4),), training=False))

    (rule,) = graph.sample_rules
    assert rule.samples == 501
    assert "parts = x.split(500)" in rule.source.code


def _too_slow(monkeypatch):
    monkeypatch.setattr(check, "may_be_tried", lambda *_: False)


def test_what_tells_one_sample_from_several_is_no_limit_on_a_slow_machine(monkeypatch):
    class Model(nn.Module):
        def forward(self, x):
            x = x.transpose(1, 2)
            return x.reshape(x.shape[0], -1, 2) if x.is_contiguous() else x.flatten(1) + 1

    _too_slow(monkeypatch)

    graph = trace(Subject("s", Model(), (torch.randn(4, 1, 4),), training=False))

    assert graph.untried is None


@pytest.mark.parametrize(("samples", "untried"), [(6, None), (5, None), (4, 5)])
def test_the_batch_of_the_example_is_tried_however_slow(monkeypatch, samples, untried):
    class Model(nn.Module):
        def forward(self, x):
            return x.tanh() if x.shape[0] >= 5 else torch.tanh(x)

    _too_slow(monkeypatch)

    graph = trace(Subject("s", Model(), (torch.randn(samples, 4),), training=False))

    assert (None if graph.untried is None else graph.untried.samples) == untried


def test_the_graph_is_refused_when_python_state_decides_what_is_computed():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x) * (2 if torch.compiler.is_compiling() else 3)

    with pytest.raises(TraceError, match="differs from the model"):
        trace(Subject("s", Model(), (torch.randn(4, 4),), loss=LossChoice.SUM_OF_SQUARES))


def test_hugging_face_gpt2_is_traced_with_its_own_loss():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=17, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    ids = torch.randint(0, 17, (3, 6))
    model = transformers.GPT2LMHeadModel(config)

    graph = trace(Subject("gpt2", model, (), {"input_ids": ids, "labels": ids}))

    assert [source.name for source in graph.inputs] == ["input_ids", "labels"]
    assert next(iter(graph.outputs)) == "logits"
    assert len(graph.outputs) == 2  # and its cache, of which versions have other names
    assert graph.state["transformer.wte.weight"].aliases == ("lm_head.weight",)
    assert all(op.mode is Mode.ALWAYS for op in graph.ops)


def test_a_default_type_that_stages_would_not_have_is_refused():
    torch.set_default_dtype(torch.float64)
    try:
        subject = Subject("s", Small(), (torch.randn(4, 4),), training=False)
        with pytest.raises(TraceError, match=r"default type is torch\.float64"):
            trace(subject)
    finally:
        torch.set_default_dtype(torch.float32)
