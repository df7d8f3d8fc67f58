"""A run that keeps some of its values, against one that keeps all."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_compiler.compile import trace
from gpipe_compiler.ir import Op
from gpipe_compiler.ir.interpret import Interpreter

WIDTH, LAYERS, SAMPLES = 64, 20, 8


class Deep(nn.Module):
    """Layers one after another, the first of which is read again by the last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.layers[0](x).relu()
        for layer in self.layers[1:]:
            x = layer(x).relu()
        return x * first


def test_what_is_wanted_is_kept_and_of_the_rest_the_shape() -> None:
    model, inputs = Deep(), torch.randn(SAMPLES, WIDTH)
    graph = trace(model, inputs, training=False)
    interpreter = Interpreter(graph, graph.tensors, training=False)
    given = {graph.inputs[0].name: inputs}
    everything = interpreter.run(given)
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def observed(op: Op, execute: Callable[[], Any]) -> Any:
        returned = execute()
        made.append(weakref.ref(returned))
        alive.append(sum(tensor() is not None for tensor in made))
        return returned

    with torch.no_grad():
        kept = interpreter.run(given, observed, keep=graph.output_values)

    (output,) = graph.output_values
    torch.testing.assert_close(kept[output], model(inputs))
    assert kept.keys() == everything.keys()
    assert {name: x.shape for name, x in kept.items()} == {
        n: x.shape for n, x in everything.items()
    }
    rest = [x.is_meta for name, x in kept.items() if name not in (output, graph.inputs[0].name)]
    assert all(rest)
    assert max(alive) <= 4
