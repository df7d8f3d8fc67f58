"""Traces of stages, compared with runs of the same stage on real tensors.

The truth is torch's own allocator on the host, as the profiler tells it (`live_bytes.py`): every
block that comes or goes, in order, through the forward, the backward of the first micro-batch and
that of a later one. Equal means equal to the byte, at every op.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stage_values import ends
from torch import nn
from torch.nn import functional as F

from gpipe_compiler.compile import trace
from gpipe_compiler.ir import Graph
from gpipe_compiler.ir.interpret import Interpreter
from gpipe_compiler.passes.allocation_trace import AllocationTrace, BlockKind, StageTraces
from gpipe_compiler.passes.memory_trace import MemoryTraces
from gpipe_compiler.passes.memory_trace.part import GraphPart, part_module, stage_run
from gpipe_compiler.passes.saved_tensors import saved_tensors
from gpipe_compiler.passes.shapes import annotate
from gpipe_compiler.runtime.core.precision import run_of_device, run_of_devices
from gpipe_compiler.runtime.spec import Precision

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

from live_bytes import Delta, grouped, measured, peak

WIDTH = 16


class Real:
    """A stage on real tensors, one action after another, as the engine asks for them."""

    def __init__(self, memory_traces: MemoryTraces, part: GraphPart, *, split: bool) -> None:
        value = memory_traces._value
        self.part = part
        self.forms = {name: value(name) for name in part.inputs}
        sizes = {name: value(name) for name in part.unreceived}
        state = part.graph.state
        self.states = {
            name: like(part.graph.tensors[name]).requires_grad_(
                state[name].requires_grad and part.training
            )
            for name in part.states
        }
        interpreter = Interpreter(part.graph, self.states, part.training)
        self.module = part_module(part, interpreter, sizes, lambda position: None)
        needs = {name for name, tensor in self.forms.items() if tensor.requires_grad}
        wiring = part.wiring(needs, split=split)
        numbers = tuple(range(100)) if part.draws else ()
        spec = dataclasses.replace(wiring.spec, random_ops=numbers)
        self.wiring = dataclasses.replace(wiring, spec=spec)

    def start(self) -> None:
        self.run = stage_run(self.part, self.module, self.wiring)
        self.received = [like(self.forms[name]) for name in self.part.inputs]

    def forward(self) -> None:
        found = self.run.forward(0, self.received, waits=True)
        self.returned = {
            name: torch.empty_like(found.outputs[name], device="meta")
            for name in self.part.returned
        }
        del self.received, found

    def receive(self) -> None:
        self.graph = self.run.graph(0)
        self.gradients = [like(self.returned[name]) for name in self.graph.outputs]

    def backward(self) -> None:
        roots = [root.edge for root in self.graph.outputs.values()]
        losses = [loss for loss in self.graph.losses if loss is not None]
        roots.extend(loss.edge for loss in losses)
        self.gradients.extend(torch.full_like(loss.like, 1.0) * 1.0 for loss in losses)
        sent = self.run.backward(0, roots, self.gradients, self.graph.leaves)
        del self.graph, self.gradients, losses, roots, sent

    def weight(self) -> None:
        self.run.weight(0)

    def actions(self, number: int) -> Iterator[tuple[str, Callable[[], object]]]:
        yield "", self.start
        yield f"forward {number}", self.forward
        if self.part.training:
            yield "", self.receive
            yield f"backward {number}", self.backward
            if self.wiring.split:
                yield f"weight {number}", self.weight


def like(form: torch.Tensor) -> torch.Tensor:
    """A real tensor of a fake one's form, as it comes from another device: of no larger storage."""
    dense = torch.empty_like(form)
    tensor = torch.empty_strided(form.shape, dense.stride(), dtype=form.dtype)
    return tensor.normal_() if form.dtype.is_floating_point else tensor.zero_()


def really(real: Real) -> dict[str, list[Delta]]:
    precision = real.part.graph.precision
    with (
        torch.set_grad_enabled(real.part.training),
        run_of_devices(precision),
        run_of_device(precision),
    ):
        for _, action in real.actions(0):  # what torch sets up at its first call
            action()
        for state in real.states.values():
            state.grad = None
        torch.clear_autocast_cache()
        return measured([*real.actions(0), *real.actions(1)])


def told(traces: StageTraces, expected: AllocationTrace) -> list[Delta]:
    sizes = ((traces.blocks[event.block].bytes, event.alive) for event in expected)
    return grouped([size if alive else -size for size, alive in sizes])


def hold(
    graph: Graph, *, ops: slice = slice(None), split: bool = False, **more: Any
) -> StageTraces:
    """The traces of some ops of a graph, which are as a real run's."""
    memory_traces = MemoryTraces(graph)
    names = [op.name for op in graph.ops][ops]
    inputs, outputs = ends(graph, names)
    whole = len(names) == len(graph.ops)
    returned = [] if whole else None
    traces = memory_traces.of(names, inputs, outputs, returned=returned, split=split, **more)
    part = memory_traces._part(names, inputs, outputs, returned, more.get("segments", ()))
    found = really(Real(memory_traces, part, split=split))
    expected = {"forward 0": traces.forward}
    if part.training:
        expected |= {"backward 0": traces.first_backward, "backward 1": traces.backward}
    if split:
        assert traces.first_weight is not None
        assert traces.weight is not None
        expected |= {"weight 0": traces.first_weight, "weight 1": traces.weight}
    for action, allocations in expected.items():
        assert told(traces, allocations) == found[action], action
    assert any(peak(deltas) for deltas in found.values())
    return traces


class Calls(nn.Module):
    """A model that is one function of its layers and its input."""

    def __init__(self, function: Callable[..., torch.Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def squares(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def calls(function: Callable[..., torch.Tensor], loss: Any = squares, **layers: nn.Module) -> Graph:
    x = torch.randn(4, 6, WIDTH)
    return trace(Calls(function, **layers), x, target=torch.randn(4, 6, WIDTH), loss_fn=loss)


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.view(x.shape[0], x.shape[1], 2, WIDTH // 2).transpose(1, 2)


class Layer(nn.Module):
    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), linear()
        self.wide, self.back = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = map(heads, self.qkv(self.norm(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).reshape(x.shape)))
        return x + self.dropout(self.back(F.gelu(self.wide(self.norm2(x)))))


class Language(nn.Module):
    """A decoder whose embedding is its output layer too."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(layers)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.layers(self.embed(x)), self.embed.weight)


def over_tokens(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def language(layers: int = 2) -> Graph:
    tokens = torch.arange(24).view(4, 6)
    return trace(Language(layers), tokens, target=tokens, loss_fn=over_tokens)


GRAPHS: dict[str, Callable[[], Graph]] = {
    "in place": lambda: calls(lambda m, x: m.a(x).mul_(2).relu_(), a=linear()),
    "met gradients": lambda: calls(
        lambda m, x: (lambda y: y * y + y.sin() + y)(m.a(x)), a=linear()
    ),
    "views": lambda: calls(
        lambda m, x: torch.cat([part * 2 for part in m.a(x).chunk(2, -1)], -1), a=linear()
    ),
    "expanded": lambda: calls(
        lambda m, x: m.a(x) + m.a(x).mean(1, keepdim=True).expand(-1, 6, -1), a=linear()
    ),
    "selected": lambda: calls(lambda m, x: m.a(x).max(1, keepdim=True)[0] + x, a=linear()),
    "sorted": lambda: calls(lambda m, x: m.a(x).sort(1)[0], a=linear()),
    "gathered": lambda: calls(
        lambda m, x: m.a(x).gather(1, torch.zeros(x.shape, dtype=torch.long)), a=linear()
    ),
    "masked attention": lambda: calls(
        lambda m, x: (
            F.scaled_dot_product_attention(
                *(heads(item) for item in (m.a(x), m.b(x), x)), attn_mask=m.c.weight[:6, :6]
            )
            .transpose(1, 2)
            .flatten(2)
        ),
        **{name: linear() for name in "abc"},
    ),
    "attention": lambda: calls(
        lambda m, x: m.a(x, x, x, need_weights=False)[0],
        a=nn.MultiheadAttention(WIDTH, 2, batch_first=True),
    ),
    "group norm": lambda: calls(
        lambda m, x: m.b(m.a(x).flatten(0, 1)).view(x.shape), a=linear(), b=nn.GroupNorm(4, WIDTH)
    ),
    "mean of squares": lambda: calls(lambda m, x: m.a(x), F.mse_loss, a=linear()),
    "logits": lambda: calls(lambda m, x: m.a(x), F.binary_cross_entropy_with_logits, a=linear()),
    "language": language,
}


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", GRAPHS)
def test_a_model_takes_what_the_traces_say(name: str, split: bool) -> None:
    if name == "sorted" and torch.__version__ < (2, 13):
        pytest.skip("its sort keeps one row of indices longer")
    hold(GRAPHS[name](), split=split)


def test_a_convolutional_network_with_batch_norm_in_place(convnet: Graph) -> None:
    traces = hold(annotate(convnet, 4))
    hold(annotate(convnet, 4), split=True)

    # Copies of the running statistics and the counter stand in for them.
    copies = [block for block in traces.blocks.values() if block.kind is BlockKind.BUFFER]
    assert sorted(block.bytes for block in copies) == [8, 24, 24]


@pytest.mark.parametrize("split", [False, True])
def test_weights_are_cast_once_for_all_micro_batches(split: bool) -> None:
    graph = annotate(language(), 4, Precision.BF16)
    traces = hold(graph, split=split)

    casts = [block for block in traces.blocks.values() if block.kind is BlockKind.CAST]
    cast = {name for name in graph.state if "norm" not in name}
    assert sum(block.bytes for block in casts) == sum(graph.state[n].bytes // 2 for n in cast)


@pytest.mark.parametrize("part", [slice(0, 12), slice(12, 30), slice(30, None)])
def test_a_stage_in_the_middle_hands_on_and_gets_gradients_back(part: slice) -> None:
    graph = language()
    traces = hold(graph, ops=part)

    inner = {name for name in traces.received if graph.values[name].requires_grad}
    assert set(traces.sent_back) == inner
    assert all(graph.values[name].requires_grad for name in traces.arriving)


@pytest.mark.parametrize("split", [False, True])
def test_segments_that_run_again(split: bool) -> None:
    graph = language(3)
    names = [op.name for op in graph.ops]
    start = next(i for i, op in enumerate(graph.ops) if op.module.startswith("layers.0"))
    stop = next(i for i, op in enumerate(graph.ops) if op.module.startswith("layers.1"))
    plain = hold(graph)
    traces = hold(graph, segments=(names[start:stop],), split=split)

    def kept(found: StageTraces) -> int:
        return sum(found.blocks[number].bytes for number in found.kept)

    assert kept(traces) < kept(plain)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_model_takes_what_the_traces_say(data: Any, random_graphs: Any) -> None:
    hold(annotate(data.draw(random_graphs()), 6), split=data.draw(st.booleans()))


def test_inference_keeps_nothing(convnet: Graph) -> None:
    traces = hold(annotate(convnet.replace(loss=None), 2))

    assert not traces.kept
    assert not traces.backward


def test_what_is_kept_is_what_autograd_saves(convnet: Graph) -> None:
    graph = annotate(convnet, 4)
    names = [op.name for op in graph.ops]
    traces = MemoryTraces(graph).of(
        names, [i.name for i in graph.inputs], list(graph.output_values)
    )

    known = saved_tensors(graph)
    kinds = (BlockKind.ACTIVATION, BlockKind.RECEIVED)
    kept = [traces.blocks[number] for number in traces.kept]
    large = sum(block.bytes for block in kept if block.kind in kinds and block.bytes > 8)
    assert large == sum(size for size in saved_sizes(known, names) if size > 8)


def saved_sizes(known: Any, names: list[str]) -> list[int]:
    numbers = {number for name in names for number in known.by_op.get(name, ())}
    return [known.bytes[number] for number in numbers]


def test_a_stage_is_traced_once_and_one_of_equal_structure_alike() -> None:
    graph = language(4)
    memory_traces = MemoryTraces(graph)
    found = []
    for layer in range(1, 3):
        names = [op.name for op in graph.ops if op.module.startswith(f"layers.{layer}")]
        inputs, outputs = ends(graph, names)
        traces = memory_traces.of(names, inputs, outputs)
        assert traces.ops == tuple(names)
        assert set(traces.received) == set(inputs)
        assert set(traces.returned) == set(outputs)
        assert memory_traces.of(names, inputs, outputs) is traces
        assert MemoryTraces(graph).of(names, inputs, outputs) == traces
        found.append(traces)
    one, other = found
    assert one.blocks == other.blocks
    assert one.backward == other.backward
