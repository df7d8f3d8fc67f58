"""Small graphs built by hand or drawn at random, and the eager truth about them."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from gpipe_compiler.ir import (
    Argument,
    FunctionCall,
    Graph,
    Input,
    Loss,
    MethodCall,
    Mode,
    ModuleCall,
    ModuleSpec,
    Op,
    Ref,
    State,
    StateKind,
    StateRef,
)
from gpipe_compiler.ir.interpret import Interpreter
from gpipe_compiler.ir.legality import check

# The models next to the tests are imported by name.
sys.path.insert(0, str(Path(__file__).parent))


class Builder:
    """Puts a graph together op by op; every method returns a reference to what it made."""

    def __init__(self, **examples: torch.Tensor) -> None:
        self.examples = examples
        self.ops: list[Op] = []
        self.state: dict[str, State] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.modules: dict[str, ModuleSpec] = {}

    def call(self, function: Callable[..., Any], *args: Argument, **options: Any) -> Any:
        return self._add(options, lambda kw: FunctionCall(function, args, kw), function.__name__)

    def method(self, method: str, *args: Argument, **options: Any) -> Any:
        return self._add(options, lambda kw: MethodCall(method, args, kw), method)

    def module(self, path: str, *args: Argument, **options: Any) -> Any:
        return self._add(options, lambda kw: ModuleCall(path, args, kw), path)

    def add_module(self, path: str, cls: type[nn.Module], *args: object, **kwargs: object) -> None:
        module = cls(*args, **kwargs)
        names = {}
        for local, tensor in (*module.named_parameters(), *module.named_buffers()):
            ref = self.add_state(f"{path}.{local}", tensor.detach(), tensor.requires_grad)
            names[local] = ref.name
        self.modules[path] = ModuleSpec(path, cls, args, kwargs, names)

    def add_state(self, name: str, tensor: torch.Tensor, trainable: bool = False) -> StateRef:
        kind = StateKind.PARAMETER if trainable else StateKind.BUFFER
        self.state[name] = State(name, kind, tuple(tensor.shape), tensor.dtype, trainable)
        self.tensors[name] = tensor
        return StateRef(name)

    def graph(self, outputs: Argument, loss: Ref | None = None, unbatched: tuple[str, ...] = ()):
        inputs = tuple(
            Input(name, ("kwargs", name), batch_dim=None if name in unbatched else 0)
            for name in self.examples
        )
        batch = next(iter(self.examples.values())).shape[0]
        graph = Graph(
            "built",
            inputs,
            tuple(self.ops),
            outputs,
            self.state,
            self.modules,
            batch,
            Loss(loss.name) if loss else None,
            tensors=self.tensors,
            example=self.examples,
        )
        return check(graph, after="building")

    def _add(self, options: dict[str, Any], make: Callable[[dict[str, Any]], Any], base: str):
        results = options.pop("results", None)
        mode = options.pop("mode", Mode.ALWAYS)
        name = options.pop("name", f"{base.replace('.', '_')}_{len(self.ops)}")
        result = tuple(f"{name}_{i}" for i in range(results)) if results else name
        self.ops.append(Op(name, make(options), result, mode=mode))
        return tuple(map(Ref, result)) if results else Ref(name)


class Eager:
    """A graph run for real, with fresh copies of its state."""

    def __init__(self, graph: Graph, batch_size: int, training: bool = True) -> None:
        self.graph = graph
        self.states = {
            name: tensor.clone().requires_grad_(graph.state[name].requires_grad)
            for name, tensor in graph.tensors.items()
        }
        self.inputs = {
            source.name: repeat(graph.example[source.name], batch_size, source.batched)
            for source in graph.inputs
        }
        self.interpreter = Interpreter(graph, self.states, training)

    def run(self, observer: Any = None) -> dict[str, Any]:
        torch.manual_seed(0)
        return self.interpreter.run(self.inputs, observer)


def repeat(example: torch.Tensor, batch_size: int, batched: bool) -> torch.Tensor:
    if not batched:
        return example.clone()
    rows = torch.arange(batch_size) % example.shape[0]
    return example[rows].clone()


WIDTH = 4

STEPS = (
    "linear",
    "norm",
    "relu",
    "relu_",
    "add",
    "add_",
    "view",
    "half",
    "split",
    "dropout",
    "count",
    "buffer",
    "ones",
    "batch",
    "fill",
)


def build_random(steps: list[tuple[str, int, int]]) -> Graph:
    """A graph of [batch, 4] tensors: each step takes two earlier values by number."""
    torch.manual_seed(1)
    b = Builder(x=torch.randn(3, WIDTH), y=torch.randn(3, WIDTH))
    b.add_module("shared_norm", nn.BatchNorm1d, WIDTH)
    counter = b.add_state("counter", torch.zeros(WIDTH))
    scale = b.add_state("scale", torch.full((WIDTH,), 1.5))
    values: list[Ref] = [Ref("x"), Ref("y")]
    for number, (kind, first, second) in enumerate(steps):
        u, v = values[first % len(values)], values[second % len(values)]
        match kind:
            case "linear":
                b.add_module(f"linear{number}", nn.Linear, WIDTH, WIDTH)
                values.append(b.module(f"linear{number}", u))
            case "norm":
                values.append(b.module("shared_norm", u))
            case "relu":
                values.append(b.call(torch.relu, u))
            case "relu_":
                values.append(b.call(torch.relu_, u))
            case "add":
                values.append(b.call(operator.add, u, v))
            case "add_":
                values.append(b.method("add_", u, v))
            case "view":
                values.append(b.method("view_as", u, u))
            case "half":
                half = b.call(operator.getitem, u, (slice(None), slice(0, 2)))
                b.method("mul_", half, 0.5)
                values.append(u)
            case "split":
                left, right = b.method("chunk", u, 2, 1, results=2)
                values.append(b.call(torch.cat, [right, left], 1))
            case "dropout":
                values.append(b.call(F.dropout, u, 0.5))
            case "count":
                detached = b.method("detach", u)
                mean = b.method("mean", detached, 0)
                b.method("add_", counter, mean)
            case "buffer":
                values.append(b.call(operator.mul, u, counter if second % 2 else scale))
            case "ones":
                n = b.method("size", u, 0)
                table = b.call(torch.ones, n, WIDTH)
                values.append(b.call(operator.add, v, table))
            case "batch":
                n = b.call(getattr, u, "shape")
                first_size = b.call(operator.getitem, n, 0)
                values.append(b.call(operator.truediv, v, first_size))
            case "fill":
                n = b.method("size", u, 0)
                table = b.call(torch.zeros, n, WIDTH)
                b.method("fill_", table, 2.0)
                values.append(b.call(operator.mul, table, v))
    loss = b.method("sum", values[-1])
    return b.graph((values[-1], values[-2]), loss)


def draw_graphs(max_size: int = 10, kinds: tuple[str, ...] = STEPS) -> st.SearchStrategy[Graph]:
    step = st.tuples(st.sampled_from(kinds), st.integers(0, 30), st.integers(0, 30))
    return st.lists(step, min_size=1, max_size=max_size).map(build_random).filter(_is_valid)


def _is_valid(graph: Graph) -> bool:
    """Whether autograd accepts the writes in place: not on some views, nor on what it has saved."""
    assert graph.loss is not None
    try:
        loss = Eager(graph, 2).run()[graph.loss.value]
        if loss.requires_grad:
            loss.backward()
    except RuntimeError:
        return False
    return True


@pytest.fixture(scope="session")
def builder() -> type[Builder]:
    return Builder


@pytest.fixture(scope="session")
def eager() -> type[Eager]:
    return Eager


def pytest_configure() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def convnet() -> Graph:
    """Convolution, normalisation and in-place activation with a shortcut, then a classifier."""
    torch.manual_seed(0)
    b = Builder(image=torch.randn(2, 3, 8, 8), target=torch.tensor([1, 3]))
    b.add_module("conv", nn.Conv2d, 3, 6, 3, padding=1)
    b.add_module("bn", nn.BatchNorm2d, 6)
    b.add_module("conv2", nn.Conv2d, 6, 6, 3, padding=1, bias=False)
    b.add_module("relu", nn.ReLU, inplace=True)
    b.add_module("fc", nn.Linear, 6, 5)
    conv = b.module("conv", Ref("image"), name="a_conv")
    norm = b.module("bn", conv, name="a_bn")
    first = b.module("relu", norm, name="a_relu")
    second = b.module("conv2", first, name="b_conv")
    added = b.call(operator.iadd, second, first, name="b_add")
    out = b.module("relu", added, name="b_relu")
    pooled = b.call(F.adaptive_avg_pool2d, out, 1, name="pool")
    flat = b.call(torch.flatten, pooled, 1, name="flat")
    scores = b.module("fc", flat, name="scores")
    loss = b.call(F.cross_entropy, scores, Ref("target"), name="loss")
    return b.graph(scores, loss)


@pytest.fixture(scope="session")
def random_graphs() -> Callable[..., st.SearchStrategy[Graph]]:
    """Drawn with `data.draw(random_graphs())`."""
    return draw_graphs
