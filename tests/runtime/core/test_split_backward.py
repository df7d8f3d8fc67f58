"""Backwards in two parts, compared with the backward of autograd itself.

Every module is run twice: once with `torch.autograd.backward`, once in two parts, in double
precision. Arithmetic is counted by torch's own counter; what is kept is seen by weak references.
"""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from backward_modules import (
    MODULES,
    WIDTH,
    Adapted,
    Attending,
    Convolved,
    Custom,
    Layers,
    SameMatrix,
    Scaled,
    Twice,
    Words,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from gpipe_compiler.runtime.core.split_backward import split_backward

F64 = torch.float64


def run_forward(module, x):
    torch.manual_seed(1)
    made = module(x)
    return [y for y in (made if isinstance(made, tuple) else (made,)) if y.requires_grad]


def gradients_for(outputs):
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(y.shape, generator=generator, dtype=y.dtype) for y in outputs]


def close(expected, actual):
    if expected is None or actual is None:
        assert expected is actual
    else:
        torch.testing.assert_close(actual.to_dense(), expected.to_dense(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("received", [True, False])
@pytest.mark.parametrize("kind", MODULES)
def test_both_parts_make_what_the_whole_makes(kind, received):
    """Three micro-batches, whose second parts run after all first ones, in another order."""
    torch.manual_seed(0)
    expected = kind().double()
    actual = copy.deepcopy(expected)
    data = torch.randn(3, 4, WIDTH, dtype=F64)
    xs = [x.clone().requires_grad_(received) for x in data]
    later = []
    for x in xs:
        outputs = run_forward(expected, x)
        if outputs:
            torch.autograd.backward(outputs, gradients_for(outputs))
        mine = x.detach().clone().requires_grad_(received)
        outputs = run_forward(actual, mine)
        leaves = {"x": mine} if received else {}
        found, second = split_backward(outputs, gradients_for(outputs), leaves)
        assert list(found) == list(leaves)
        later.append(second)
        if received:
            close(x.grad, found["x"])
            assert mine.grad is None
    for second in (later[1], later[0], later[2]):
        second.run()
    for mine, theirs in zip(actual.parameters(), expected.parameters(), strict=True):
        close(theirs.grad, mine.grad)


@st.composite
def programs(draw):
    """Modules of random ops over two inputs, four matrices and what was made so far."""
    count = draw(st.integers(1, 8))
    ops = st.sampled_from(["matmul", "turned", "add", "mul", "tanh", "bias", "split"])
    number = st.integers(0, 99)
    steps = draw(st.lists(st.tuples(ops, number, number), min_size=count, max_size=count))
    outputs = draw(st.lists(number, min_size=1, max_size=3))
    return steps, outputs, draw(st.sampled_from([(), (0,), (1,), (0, 1)]))


def run_program(steps, outputs, inputs, matrices):
    values = list(inputs)
    for op, first, second in steps:
        a, b = values[-1 - first % min(3, len(values))], values[second % len(values)]
        matrix = matrices[second % len(matrices)]
        match op:
            case "matmul":
                made = a @ matrix
            case "turned":
                made = F.linear(a, matrix, matrices[0][0])
            case "add":
                made = a + b
            case "mul":
                made = a * b
            case "tanh":
                made = torch.tanh(a)
            case "bias":
                made = a + matrix[0]
            case _:
                made = torch.cat(a.chunk(2, 1)[::-1], 1)
        values.append(made)
    return [values[-1 - number % len(values)] for number in outputs]


@settings(max_examples=150, deadline=None)
@given(programs())
def test_any_graph(program):
    """Matrices used any number of times, on any way to the outputs."""
    steps, outputs, received = program
    generator = torch.Generator().manual_seed(3)
    numbers = [torch.randn(4, 4, generator=generator, dtype=F64) / 2 for _ in range(6)]
    results = []
    for split in (False, True):
        tensors = [number.clone().requires_grad_() for number in numbers]
        for index in {0, 1}.difference(received):
            tensors[index].requires_grad_(False)
        inputs, matrices = tensors[:2], tensors[2:]
        made = [y for y in run_program(steps, outputs, inputs, matrices) if y.requires_grad]
        gradients = gradients_for(made)
        if split:
            leaves = {str(index): inputs[index] for index in received}
            found, second = split_backward(made, gradients, leaves)
            second.run()
            results.append([*found.values(), *(w.grad for w in matrices)])
        else:
            if made:
                torch.autograd.backward(made, gradients)
            results.append([*(inputs[i].grad for i in received), *(w.grad for w in matrices)])
    for expected, actual in zip(*results, strict=True):
        if expected is None or actual is None:
            assert expected is actual
        else:
            torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("received", [True, False])
@pytest.mark.parametrize("kind", [Layers, Attending, Convolved, Words, Adapted])
def test_no_product_is_computed_twice(kind, received):
    """The arithmetic of both parts together is that of the whole; neither part has all of it."""
    module = kind()
    counts = []
    for split in (False, True):
        x = torch.randn(4, WIDTH, requires_grad=received)
        (output,) = run_forward(module, x)
        gradients = gradients_for([output])
        with FlopCounterMode(display=False) as first:
            if split:
                leaves = {"x": x} if received else {}
                _, second = split_backward([output], gradients, leaves)
            else:
                torch.autograd.backward([output], gradients)
        counts.append(first.get_total_flops())
    with FlopCounterMode(display=False) as last:
        second.run()
    assert counts[1] + last.get_total_flops() == counts[0] > 0
    assert counts[1] > 0 or not received or kind is Convolved
    assert last.get_total_flops() > 0


def test_parameters_wait_for_the_second_part():
    module = Attending()
    x = torch.randn(4, WIDTH, requires_grad=True)
    (output,) = run_forward(module, x)
    _, second = split_backward([output], gradients_for([output]), {"x": x})
    assert all(parameter.grad is None for parameter in module.parameters())
    second.run()
    assert all(parameter.grad is not None for parameter in module.parameters())


@pytest.mark.parametrize("kind", [Layers, Twice, SameMatrix, Custom])
def test_hooks_of_parameters_run_once(kind):
    """On the whole gradient of a micro-batch, as in one backward: one may clip it."""
    found = []
    for split in (False, True):
        torch.manual_seed(0)
        module = kind().double()
        calls = []
        for name, parameter in module.named_parameters():
            parameter.register_hook(lambda g: g.clamp(-0.1, 0.1) * 2)
            parameter.register_post_accumulate_grad_hook(
                lambda p, name=name, calls=calls: calls.append((name, p.grad.clone()))
            )
        x = torch.randn(4, WIDTH, dtype=F64, generator=torch.Generator().manual_seed(0))
        x.requires_grad_()
        outputs = run_forward(module, x)
        if split:
            split_backward(outputs, gradients_for(outputs), {"x": x})[1].run()
        else:
            torch.autograd.backward(outputs, gradients_for(outputs))
        used = [parameter for parameter in module.parameters() if parameter.grad is not None]
        assert len(calls) == len(used) >= 3
        found.append(dict(calls))
    for name, gradient in found[0].items():
        close(gradient, found[1][name])


def test_functions_written_in_python_run_once():
    module = Custom().double()
    x = torch.randn(4, WIDTH, dtype=F64, requires_grad=True)
    outputs = run_forward(module, x)
    Scaled.runs = 0
    split_backward(outputs, gradients_for(outputs), {"x": x})[1].run()
    assert Scaled.runs == 1


def test_what_is_kept_between_the_parts():
    """What a layer was given, and what came back to it; no activation function's result."""
    module = nn.Sequential(nn.Linear(4, 6), nn.Sigmoid(), nn.Softmax(1), nn.Linear(6, 4))
    made = {}

    def remember(layer, _, output):
        made[type(layer), output.shape[1]] = StorageWeakRef(output.untyped_storage())

    for layer in module:
        layer.register_forward_hook(remember)
    x = torch.randn(2, 4, requires_grad=True)
    output = module(x * 1)
    back = torch.ones_like(output)
    gradient = StorageWeakRef(back.untyped_storage())
    _, second = split_backward([output], [back], {"x": x})
    del output, back

    def lives(kind, width):
        return not made[kind, width].expired()

    assert not lives(nn.Sigmoid, 6)
    assert lives(nn.Softmax, 6)
    assert not gradient.expired()
    second.run()
    assert not lives(nn.Softmax, 6)
    assert gradient.expired()


def test_gradients_are_no_views_of_those_of_parameters():
    """What was sent back stays as it is when the same numbers are added to a parameter."""
    w = torch.zeros(3, requires_grad=True)
    x = torch.zeros(3, requires_grad=True)
    for _ in range(2):
        y = (x + w) + w
        found, second = split_backward([y], [torch.ones(3)], {"x": x})
        second.run()
        assert torch.equal(found["x"], torch.ones(3))
        with torch.no_grad():
            w.grad.add_(5)
        assert torch.equal(found["x"], torch.ones(3))


def test_nothing_came_back():
    """No output has a gradient: a micro-batch that does not count."""
    x = torch.ones(2, requires_grad=True)
    found, second = split_backward([], [], {"x": x})
    second.run()
    assert found == {"x": None}


def test_no_warnings():
    """Nothing here is deprecated, nor reads .grad where it is none."""
    module = Attending()
    x = torch.randn(4, WIDTH, requires_grad=True)
    (output,) = run_forward(module, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        split_backward([output], gradients_for([output]), {"x": x})[1].run()
