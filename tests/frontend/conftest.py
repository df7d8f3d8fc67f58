"""What the tests of the frontend share.

A graph compared with the eager model, to the last bit; and model files that are loaded.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gpipe_compiler.frontend.entry import Entry
from gpipe_compiler.frontend.source import load
from gpipe_compiler.frontend.state import isolated
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.ir import Graph
from gpipe_compiler.ir.arguments import value_names
from gpipe_compiler.ir.interpret import Interpreter

Tensors = dict[str, torch.Tensor]


def _samples(entry: Entry, count: int) -> list[torch.Tensor]:
    """Inputs of which no two samples are alike."""
    generator = torch.Generator().manual_seed(count)

    def vary(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        return tensor + torch.randn(tensor.shape, generator=generator).to(tensor.dtype) / 4

    return [vary(tensor) for tensor in entry.signature.samples(count)]


def run_eager(subject: Subject, training: bool, inputs: Sequence[torch.Tensor]) -> Tensors:
    """Outputs, loss, gradients and buffers of the model itself."""
    entry = Entry(subject, training)
    entry.model = isolated(subject.model, share_parameters=False).train(training)
    torch.manual_seed(7)
    returned = entry(*(tensor.clone() for tensor in inputs))
    found = {f"returned {index}": tensor for index, tensor in enumerate(returned)}
    if entry.has_loss and returned[0].requires_grad:
        returned[0].backward()
    names = {id(t): n for n, t in entry.model.named_parameters()}
    for name, parameter in entry.model.named_parameters():
        assert names[id(parameter)] == name
        if parameter.grad is not None:
            found[f"gradient {name}"] = parameter.grad
    found |= {f"buffer {name}": tensor for name, tensor in entry.model.named_buffers()}
    return {name: tensor.detach() for name, tensor in found.items()}


def run_graph(graph: Graph, training: bool, inputs: Sequence[torch.Tensor]) -> Tensors:
    """The same of a graph."""
    tensors = {
        name: tensor.detach().clone().requires_grad_(tensor.requires_grad)
        for name, tensor in graph.tensors.items()
    }
    torch.manual_seed(7)
    named = {
        source.name: tensor.clone() for source, tensor in zip(graph.inputs, inputs, strict=True)
    }
    values = Interpreter(graph, tensors, training).run(named)
    leaves = [values[name] for name in value_names(graph.outputs)]
    returned = leaves if graph.loss is None else [values[graph.loss.value], *leaves]
    found = {f"returned {index}": tensor for index, tensor in enumerate(returned)}
    if graph.loss is not None and returned[0].requires_grad:
        returned[0].backward()
    for name, tensor in tensors.items():
        if tensor.grad is not None:
            found[f"gradient {name}"] = tensor.grad
        if graph.state[name].kind.value == "buffer":
            found[f"buffer {name}"] = tensor
    return {name: tensor.detach() for name, tensor in found.items()}


SameAsEager = Callable[..., None]


@pytest.fixture
def same_as_eager() -> SameAsEager:
    """Asserts that a graph computes what the model computes, bit by bit, at two batch sizes.

    `tolerance` is for models that compute otherwise while they are traced.
    """

    def compare(
        graph: Graph, subject: Subject, training: bool, *, tolerance: float = 0, sizes: Any = (2, 5)
    ) -> None:
        entry = Entry(subject, training)
        for size in sizes:
            inputs = _samples(entry, size)
            expected = run_eager(subject, training, inputs)
            actual = run_graph(graph, training, inputs)

            assert sorted(expected) == sorted(actual)
            different = [n for n in expected if not _equal(expected[n], actual[n], tolerance)]
            assert different == []

    return compare


def _equal(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if tolerance:
        return torch.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)
    return torch.equal(one.nan_to_num(7.25), other.nan_to_num(7.25))


HEAD = """\
import torch
from torch import nn

def build_model():
    return nn.Linear(3, 2)
"""
"""Five lines, so that what a test adds begins at line 6."""

Loader = Callable[..., Subject]


@pytest.fixture
def plain_model() -> str:
    """The text of a model file with nothing but a model."""
    return HEAD


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current directory, and a fresh interpreter's import state afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def load_text(workplace: Path) -> Loader:
    """Loads the plain model file with the given text added, or another head, as model.py."""

    def write_and_load(text: str, head: str = HEAD, **options: Any) -> Subject:
        (workplace / "model.py").write_text(head + textwrap.dedent(text))
        return load("model.py", **options)

    return write_and_load
