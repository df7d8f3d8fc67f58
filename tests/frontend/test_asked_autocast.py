"""Autocast on CUDA, compiled for it on a machine that need not have any."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from gpipe_compiler.compile import trace
from gpipe_compiler.errors import Notice, TraceError
from gpipe_compiler.frontend.asked_autocast import autocast_as_asked
from gpipe_compiler.frontend.source import load
from gpipe_compiler.ir import Autocast, Graph

HALF = Autocast("cuda", torch.float16, enabled=True)
OFF = Autocast("cuda", torch.float16, enabled=False)


@pytest.fixture(autouse=True)
def no_cuda() -> Iterator[None]:
    with mock.patch.object(torch.cuda, "is_available", return_value=False):
        yield


class Within(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.float16):
            x = self.linear(x)
            with torch.autocast("cuda", dtype=torch.float16, enabled=False):
                return x.float().tanh()


def decorated(enabled: bool) -> nn.Module:
    class Decorated(Within):
        @torch.autocast("cuda", dtype=torch.float16, enabled=enabled)
        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

    return Decorated()


def contexts(graph: Graph) -> list[list[object]]:
    return [[region.context for region in op.regions] for op in graph.ops]


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_it_is_on_where_the_model_wants_it_on() -> None:
    graph = trace(Within(), torch.randn(4, 4), training=False)

    assert contexts(graph) == [[HALF], [HALF, OFF], [HALF, OFF]]


@pytest.mark.parametrize(("enabled", "wanted"), [(True, HALF), (False, OFF)])
def test_decorators_are_asked_when_they_are_made(enabled: bool, wanted: Autocast) -> None:
    with autocast_as_asked():
        model = decorated(enabled)

    assert contexts(trace(model, torch.randn(4, 4), training=False)) == [[wanted]]


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_one_that_was_made_before_is_refused() -> None:
    with pytest.raises(TraceError, match="is not known") as refused:
        trace(decorated(True), torch.randn(4, 4), training=False)

    assert refused.value.location is not None
    assert "in forward" in (refused.value.hint or "")


FILE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @torch.autocast("cuda", dtype=torch.float16)
    def forward(self, x):
        return self.linear(x)

def build_model():
    return Model()

def example_inputs():
    return (torch.randn(4, 4),)
"""


def test_a_model_file_is_loaded_so(tmp_path: Path) -> None:
    (tmp_path / "half.py").write_text(FILE)
    subject = load(str(tmp_path / "half.py"), training=False)

    graph = trace(subject.model, *subject.args, training=False)

    assert contexts(graph) == [[HALF]]


class WhereThereIsCuda(Within):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", enabled=torch.cuda.is_available()):
            return self.linear(x)


def test_a_line_that_asks_whether_there_is_cuda_is_told() -> None:
    with pytest.warns(Notice, match=r"test_asked_autocast.py:\d+.*where there is no CUDA"):
        graph = trace(WhereThereIsCuda(), torch.randn(4, 4), training=False)

    assert all(not region.context.enabled for op in graph.ops for region in op.regions)
