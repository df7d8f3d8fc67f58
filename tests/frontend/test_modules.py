"""Modules are constructed anew from what a person would have written, or not at all."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpipe_compiler.frontend.modules import is_leaf, rebuild
from gpipe_compiler.ir.interpret import construct

WRITTEN = [
    (lambda: nn.Linear(8, 4), (8, 4), {}),
    (lambda: nn.Linear(8, 4, bias=False), (8, 4), {"bias": False}),
    (
        lambda: nn.Linear(8, 4, dtype=torch.bfloat16),
        (8, 4),
        {"dtype": torch.bfloat16},
    ),
    (lambda: nn.Bilinear(3, 4, 5), (3, 4, 5), {}),
    (lambda: nn.Conv2d(3, 8, 1), (3, 8), {"kernel_size": 1}),
    (
        lambda: nn.Conv2d(3, 8, 7, 2, 3, bias=False),
        (3, 8),
        {"kernel_size": 7, "stride": 2, "padding": 3, "bias": False},
    ),
    (
        lambda: nn.Conv2d(4, 8, (1, 7), padding=(0, 3), groups=4),
        (4, 8),
        {"kernel_size": (1, 7), "padding": (0, 3), "groups": 4},
    ),
    (
        lambda: nn.Conv1d(4, 8, 3, padding="same", padding_mode="reflect", dilation=2),
        (4, 8),
        {"kernel_size": 3, "padding": "same", "dilation": 2, "padding_mode": "reflect"},
    ),
    (lambda: nn.Conv3d(1, 2, 3), (1, 2), {"kernel_size": 3}),
    (
        lambda: nn.ConvTranspose2d(4, 2, 2, stride=2, output_padding=1),
        (4, 2),
        {"kernel_size": 2, "stride": 2, "output_padding": 1},
    ),
    (lambda: nn.Embedding(11, 4), (11, 4), {}),
    (lambda: nn.Embedding(11, 4, padding_idx=0), (11, 4), {"padding_idx": 0}),
    (lambda: nn.EmbeddingBag(11, 4, mode="sum"), (11, 4), {"mode": "sum"}),
    (lambda: nn.BatchNorm2d(8), (8,), {}),
    (lambda: nn.BatchNorm1d(8, eps=1e-3, momentum=None), (8,), {"eps": 1e-3, "momentum": None}),
    (
        lambda: nn.BatchNorm3d(8, affine=False, track_running_stats=False),
        (8,),
        {"affine": False, "track_running_stats": False},
    ),
    (lambda: nn.InstanceNorm2d(8, affine=True), (8,), {"affine": True}),
    (lambda: nn.LayerNorm(8), (8,), {}),
    (lambda: nn.LayerNorm((4, 8), bias=False), ((4, 8),), {"bias": False}),
    (lambda: nn.LayerNorm(8, elementwise_affine=False), (8,), {"elementwise_affine": False}),
    (lambda: nn.RMSNorm(8, eps=1e-6), (8,), {"eps": 1e-6}),
    (lambda: nn.GroupNorm(2, 8), (2, 8), {}),
    (lambda: nn.LocalResponseNorm(5, k=2.0), (), {"size": 5, "k": 2.0}),
    (nn.ReLU, (), {}),
    (lambda: nn.ReLU(inplace=True), (), {"inplace": True}),
    (lambda: nn.LeakyReLU(0.2), (0.2,), {}),
    (lambda: nn.GELU("tanh"), ("tanh",), {}),
    (lambda: nn.Hardtanh(-2.0, 2.0), (-2.0,), {"max_val": 2.0}),
    (lambda: nn.PReLU(4), (4,), {}),
    (lambda: nn.Softmax(dim=-1), (), {"dim": -1}),
    (nn.GLU, (), {}),
    (lambda: nn.Threshold(0.1, 20.0), (0.1, 20.0), {}),
    (nn.SiLU, (), {}),
    (lambda: nn.Dropout(0.1), (0.1,), {}),
    (nn.Dropout2d, (), {}),
    (lambda: nn.MaxPool2d(3, 2, 1), (), {"kernel_size": 3, "stride": 2, "padding": 1}),
    (lambda: nn.MaxPool2d(2), (), {"kernel_size": 2}),
    (lambda: nn.AvgPool2d((2, 3)), (), {"kernel_size": (2, 3)}),
    (lambda: nn.AdaptiveAvgPool2d((1, 1)), ((1, 1),), {}),
    (lambda: nn.AdaptiveAvgPool2d(1), (1,), {}),
    (lambda: nn.AdaptiveMaxPool2d((None, 7)), ((None, 7),), {}),
    (lambda: nn.LPPool2d(2, 3), (2,), {"kernel_size": 3}),
    (lambda: nn.LSTM(8, 16, batch_first=True), (8, 16), {"batch_first": True}),
    (
        lambda: nn.LSTM(8, 16, num_layers=2, bidirectional=True, dropout=0.2, proj_size=4),
        (8, 16),
        {"num_layers": 2, "dropout": 0.2, "bidirectional": True, "proj_size": 4},
    ),
    (lambda: nn.GRU(8, 16, bias=False), (8, 16), {"bias": False}),
    (lambda: nn.RNN(8, 16, nonlinearity="relu"), (8, 16), {"nonlinearity": "relu"}),
    (lambda: nn.LSTMCell(8, 16), (8, 16), {}),
    (lambda: nn.MultiheadAttention(8, 2), (8, 2), {}),
    (
        lambda: nn.MultiheadAttention(8, 2, dropout=0.1, bias=False, kdim=4, batch_first=True),
        (8, 2),
        {"dropout": 0.1, "bias": False, "kdim": 4, "batch_first": True},
    ),
    (lambda: nn.PixelShuffle(2), (2,), {}),
    (
        lambda: nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False),
        (),
        {"scale_factor": 2.0, "mode": "bilinear", "align_corners": False},
    ),
    (nn.Flatten, (), {}),
    (lambda: nn.Flatten(0, 2), (0,), {"end_dim": 2}),
    (lambda: nn.Unflatten(1, (2, 4)), (), {"dim": 1, "unflattened_size": (2, 4)}),
    (lambda: nn.Fold((4, 4), 2), ((4, 4),), {"kernel_size": 2}),
    (lambda: nn.Unfold(3, padding=1), (), {"kernel_size": 3, "padding": 1}),
    (nn.Identity, (), {}),
    (lambda: nn.ZeroPad2d(1), ((1, 1, 1, 1),), {}),
    (lambda: nn.ConstantPad1d((1, 2), 0.5), ((1, 2), 0.5), {}),
    (lambda: nn.ReflectionPad2d(2), ((2, 2, 2, 2),), {}),
    (lambda: nn.CosineSimilarity(dim=2), (), {"dim": 2}),
    (lambda: nn.CrossEntropyLoss(label_smoothing=0.1), (), {"label_smoothing": 0.1}),
    (lambda: nn.MSELoss(reduction="sum"), (), {"reduction": "sum"}),
    (lambda: nn.SmoothL1Loss(beta=0.5), (), {"beta": 0.5}),
    (lambda: nn.TripletMarginLoss(margin=2.0), (2.0,), {}),
]


@pytest.mark.parametrize(("make", "args", "kwargs"), WRITTEN)
def test_arguments_are_those_that_a_person_would_write(make, args, kwargs):
    module = make()

    spec = rebuild("some.path", module)

    assert spec is not None
    if isinstance(module, nn.ZeroPad2d | nn.ReflectionPad2d):
        args = (args[0][0],)
    assert (args, kwargs) == (spec.args, dict(spec.kwargs))


@pytest.mark.parametrize("make", [case[0] for case in WRITTEN])
def test_the_module_constructed_anew_computes_the_same_with_the_same_state(make):
    module = make().eval()
    spec = rebuild("m", module)
    assert spec is not None

    twin = construct(spec, training=False)

    assert module.extra_repr() == twin.extra_repr()
    assert {n: t.shape for n, t in module.state_dict().items()} == {
        n: t.shape for n, t in twin.state_dict().items()
    }
    assert {name: f"m.{name}" for name in module.state_dict()} == dict(spec.state)


def _with_hook() -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_forward_hook(lambda *_: None)
    return module


def _with_own_forward() -> nn.Module:
    module = nn.Linear(2, 2)
    module.forward = lambda x: x
    return module


class _Subclass(nn.Linear):
    pass


@pytest.mark.parametrize(
    "make",
    [
        _with_hook,
        _with_own_forward,
        lambda: _Subclass(2, 2),
        lambda: nn.Sequential(nn.ReLU()),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
        lambda: nn.CrossEntropyLoss(weight=torch.ones(3)),
        lambda: nn.TransformerEncoderLayer(8, 2),
        lambda: nn.ModuleList([nn.ReLU()]),
        lambda: nn.TripletMarginWithDistanceLoss(distance_function=torch.dist),
    ],
)
def test_what_cannot_be_written_as_a_constructor_call_is_refused(make):
    assert rebuild("m", make()) is None


def test_attributes_hung_on_a_module_by_others_do_not_matter():
    module = nn.Linear(2, 2)
    module._is_hf_initialized = True
    module.note = "mine"

    assert rebuild("m", module) is not None


def test_an_attribute_changed_afterwards_is_read_from_the_module():
    module = nn.Dropout(0.1)
    module.p = 0.7

    spec = rebuild("m", module)

    assert spec is not None
    assert spec.args == (0.7,)


def test_a_module_whose_weight_has_another_shape_than_it_says_is_refused():
    module = nn.Linear(4, 4)
    module.weight = nn.Parameter(torch.zeros(2, 4))

    assert rebuild("m", module) is None


def test_a_module_frozen_in_eval_mode_is_no_leaf_of_a_model_that_trains():
    module = nn.BatchNorm1d(4).eval()

    assert not is_leaf("m", module, training=True)
    assert is_leaf("m", module, training=False)


def test_rebuilding_draws_no_random_numbers():
    state = torch.get_rng_state()

    rebuild("m", nn.LSTM(4, 4).to("meta"))
    torch.set_rng_state(state)
    rebuild("m", construct(rebuild("m", nn.Linear(3, 3, device="meta"))))

    assert torch.equal(state, torch.get_rng_state())
