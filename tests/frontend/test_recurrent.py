"""Recurrent layers that run one step have the form that they have of all steps."""

import itertools

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.rnn import pack_sequence
from torch.utils._pytree import tree_leaves

from gpipe_compiler.ir.interpret import recurrent_forms

STEPS = 7
LAYERS = [
    cls(6, 8, num_layers=2, batch_first=first, bidirectional=both)
    for cls, first, both in itertools.product(
        (nn.GRU, nn.LSTM, nn.RNN), (True, False), (True, False)
    )
]


def forms(returned):
    return [
        (tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)
        for tensor in tree_leaves(returned)
        if isinstance(tensor, torch.Tensor)
    ]


@pytest.mark.parametrize("layer", LAYERS, ids=str)
@pytest.mark.parametrize("shape", [(STEPS, 3, 6), (STEPS, 6)], ids=["batch", "sample"])
@pytest.mark.parametrize("lower", [False, True])
def test_one_step_has_the_form_of_all(layer, shape, lower):
    with (
        FakeTensorMode(allow_non_fake_inputs=True) as mode,
        torch.autocast("cpu", torch.bfloat16, enabled=lower),
    ):
        taken = mode.from_tensor(torch.randn(shape))
        expected = forms(layer(taken))
        with recurrent_forms():
            assert forms(layer(taken)) == expected


def test_packed_sequences_run_as_they_are():
    packed = pack_sequence([torch.randn(4, 6), torch.randn(2, 6)])
    layer = nn.GRU(6, 8)
    expected = layer(packed)[0].data
    with recurrent_forms():
        assert torch.equal(layer(packed)[0].data, expected)
