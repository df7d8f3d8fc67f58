"""What is selected at the places of a mask, in the graphs of models that do so."""

import pytest
import torch
from traced import graph_of

from gpipe_compiler.ir.interpret import Interpreter


def rows():
    return torch.randn(4, 3), torch.randint(3, (4,))


@pytest.mark.parametrize(
    "compute",
    [
        lambda x, y: x + x[torch.nonzero(y != 2).squeeze(1)].sum(0),
        lambda x, y: x + x[(y != 2).nonzero().view(-1)].sum(0),
        lambda x, y: x + x[(y != 2).nonzero(as_tuple=True)[0]].sum(0),
        lambda x, y: x + x[torch.where(x > 0)].sum(),
        lambda x, y: x + x.index_select(0, torch.where(y != 2)[0]).sum(0),
        lambda x, y: x / (torch.nonzero(y != 2).flatten().numel() + 1),
    ],
)
def test_the_mask_selects(compute):
    torch.manual_seed(0)
    graph = graph_of(compute, *rows())

    text = str(graph)
    assert "nonzero" not in text
    assert "where" not in text
    inputs = rows()  # of other numbers than those it was traced with
    values = Interpreter(graph, graph.tensors, training=False).run(
        dict(zip([source.name for source in graph.inputs], inputs, strict=True)),
        keep=graph.output_values,
    )
    (output,) = (values[name] for name in graph.output_values)
    torch.testing.assert_close(output, compute(*inputs))


def test_masks_that_are_computed_alike_select_as_many():
    def compute(x, y):
        chosen = (y != 2) & (y > 0)
        return torch.stack([x[chosen], x[(y != 2) & (y > 0)]]).sum() + x

    graph_of(compute, *rows())  # which fails where these may be of other sizes


def put_back(x, y):
    places = torch.nonzero(y != 2).squeeze(1)
    return x.index_add(0, places, x[places])


def of_others(x, y):
    places = torch.nonzero(y != 2).squeeze(1)
    return x + torch.arange(12.0).view(6, 2)[places].sum()


def written_between(x, y):
    mask = y != 2
    places = torch.nonzero(mask).squeeze(1)
    mask.zero_()
    return x + x[places].sum(0) + mask[:, None]


@pytest.mark.parametrize("compute", [put_back, of_others, written_between])
def test_places_stay_where_a_mask_would_be_something_else(compute):
    assert "nonzero" in str(graph_of(compute, *rows()))
