"""The documentation's code runs, and the files that it names are there."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from gpipe_compiler.frontend.auto import trace
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.ir import Graph, ModuleCall
from gpipe_compiler.ir.interpret import Interpreter

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [ROOT / "README.md"]
    + [
        page
        for folder in ("docs", "examples", "benchmarks")
        for page in (ROOT / folder).glob("*.md")
    ]
)


class Twice(nn.Module):
    """One layer called twice, with identities between."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.skip = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.skip(self.layer(x)) + self.layer(self.skip(x))


@pytest.fixture(scope="module")
def graph() -> Graph:
    return trace(Subject(name="twice", model=Twice(), args=(torch.randn(4, 4),), training=False))


def passes_of_the_page(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Everything that the Python blocks of the page on passes define."""
    text = (ROOT / "docs" / "writing_passes.md").read_text()
    found: dict[str, object] = {}
    for index, block in enumerate(re.findall(r"```python\n(.*?)```", text, re.DOTALL)):
        module = ModuleType(f"documented_pass_{index}")
        monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look there
        exec(compile(block, f"writing_passes.md, block {index}", "exec"), vars(module))
        found |= vars(module)
    return found


def test_the_documented_analysis_finds_the_layer_that_is_called_twice(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    use = passes_of_the_page(monkeypatch)["parameter_use"](graph)

    assert {"layer.weight", "layer.bias"} == set(use.shared)


def test_the_documented_transformation_changes_no_number(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    smaller = passes_of_the_page(monkeypatch)["drop_identities"](graph)
    x = torch.randn(4, 4)

    def output(of: Graph) -> Tensor:
        interpreter = Interpreter(of, of.tensors, training=False)
        return interpreter.resolve(of.outputs, interpreter.run({of.inputs[0].name: x}))

    left = [op for op in smaller.ops if isinstance(op.call, ModuleCall)]

    assert {"layer"} == {graph.modules[op.call.module].path for op in left}
    assert torch.equal(output(graph), output(smaller))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    local = [target for target in targets if "://" not in target]

    assert [target for target in local if not (page.parent / target).exists()] == []
