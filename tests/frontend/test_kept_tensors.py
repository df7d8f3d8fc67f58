"""Numbers that are read from tensors, in the graphs of models that compute with them."""

import logging

import pytest
import torch
import torch.nn.functional as F
from traced import graph_of

from gpipe_compiler.ir.interpret import Interpreter


def x_and_counts():
    return torch.randn(4, 3), torch.randint(1, 9, (4,))


@pytest.mark.parametrize(
    ("compute", "written"),
    [
        (lambda x, n: x / n.sum().item(), "truediv(given_0, sum_)"),
        (lambda x, n: x * max(n.sum().item(), 7), "sum_.clamp(min=7)"),
        (lambda x, n: x * min(n.sum().item(), 7), "sum_.clamp(max=7)"),
        (lambda x, n: x * max(n.sum().item(), n.max().item()), "maximum"),
        (lambda x, n: x - 1 / (n.sum().item() + 2), "sum_"),
        (lambda x, n: x * x.sum().item(), "detach"),
        (lambda x, n: x[n > 4].sum(0) / x[n > 4].shape[0] + x, "sum_"),
    ],
)
def test_a_number_that_is_only_computed_with_stays_a_tensor(compute, written):
    torch.manual_seed(0)
    graph = graph_of(compute, *x_and_counts())

    text = str(graph)
    assert written in text
    assert ".item()" not in text
    inputs = x_and_counts()  # of other numbers than those it was traced with
    values = Interpreter(graph, graph.tensors, training=False).run(
        dict(zip([source.name for source in graph.inputs], inputs, strict=True)),
        keep=graph.output_values,
    )
    (output,) = (values[name] for name in graph.output_values)
    torch.testing.assert_close(output, compute(*inputs))


def test_a_number_keeps_the_type_of_what_it_divides():
    """In 16 bits a tensor of one element and 32 beside it would decide the type."""

    def compute(x, n):
        return x + x.sum() / (n.sum().item() + 1e-3)

    graph = graph_of(compute, *x_and_counts())

    assert "type_as" in str(graph)


def test_a_number_of_what_is_written_to_later_stays_a_number():
    def compute(x, n):
        found = n.sum()
        number = found.item()
        found.mul_(2)
        return x * number + found

    assert ".item()" in str(graph_of(compute, *x_and_counts()))


def test_a_count_that_is_added_to_nothing_is_not_read():
    """As in a log line: no op of the graph is left of it."""

    def compute(x, n):
        logging.debug("%d", n.sum().item())
        return F.relu(x)

    assert "sum_" not in str(graph_of(compute, *x_and_counts()))
