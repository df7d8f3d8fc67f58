"""The source of a user's class, as a package holds it."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from gpipe_compiler.codegen.package import own_files
from gpipe_compiler.frontend.own_code import is_installed, written
from gpipe_compiler.frontend.own_statements import UnwritableError
from gpipe_compiler.ir import FunctionCall, Graph, Op, Ref
from gpipe_compiler.ir.own_functions import WrittenClass, own_function

MODEL = """
import math
import os.path as paths, torch
from torch.autograd import Function as Base
from toolbox_xyz import halved as half, UNUSED

SCALE, SHIFT = 2.0, 1
TABLE = {"a": math.pi}
unused = print

def double(x):
    return half(x) * 4

class Parent(Base):
    @staticmethod
    def backward(ctx, gradient):
        return gradient * SCALE

class Child(Parent):
    @staticmethod
    def forward(ctx, x):
        unused_local = [SHIFT for _ in range(2)]
        return double(x) + TABLE["a"]

if __name__ == "__main__":
    double = None
"""
TOOLS = """
UNUSED = 3
PART = 0.5

def halved(x):
    return x * PART
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    (tmp_path / "model_xyz.py").write_text(MODEL)
    (tmp_path / "toolbox_xyz.py").write_text(TOOLS)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("model_xyz")
    for name in ("model_xyz", "toolbox_xyz"):
        sys.modules.pop(name, None)


def write(found: WrittenClass, folder: Path) -> ModuleType:
    """The class's file, imported from a package where the user's files are not."""
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    for file, held in found.files:
        (folder / f"{file}.py").write_text("\n".join(text for _, text in held))
    sys.path.insert(0, str(folder.parent))
    try:
        return importlib.import_module(f"{folder.name}{found.module}")
    finally:
        sys.path.remove(str(folder.parent))


def test_a_class_stands_alone_with_all_that_it_uses(model: ModuleType, tmp_path: Path) -> None:
    found = written(model.Child)
    del sys.modules["model_xyz"], sys.modules["toolbox_xyz"]
    sys.path.remove(str(tmp_path))

    alone = write(found, tmp_path / "package_xyz").Child

    x = torch.ones(2, requires_grad=True)
    alone.apply(x).sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 2.0))
    assert torch.equal(alone.apply(x), model.Child.apply(x))


def test_what_it_does_not_use_stays_away(model: ModuleType) -> None:
    text = repr(written(model.Child).files)

    assert "UNUSED" not in text
    assert "unused =" not in text
    assert "paths" not in text


def test_a_constant_that_was_changed_is_refused(model: ModuleType) -> None:
    model.TABLE = {"a": 1}  # no literal: taken as the file says
    written(model.Child)
    sys.modules["toolbox_xyz"].PART = 0.25

    with pytest.raises(UnwritableError, match="PART, which is not what line 3 says"):
        written(model.Child)


TWO = """
import math, torch, torch.nn
from toolbox_xyz import halved, UNUSED as other
LIMIT: float = 0.5

class First(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return halved(x) * LIMIT * math.pi

class Second(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.nn.functional.relu(x) * other

class Inner(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        from toolbox_xyz import halved
        return halved(x)
"""


@pytest.fixture
def two(model: ModuleType, tmp_path: Path) -> Iterator[ModuleType]:
    (tmp_path / "two_xyz.py").write_text(TWO)
    yield importlib.import_module("two_xyz")
    del sys.modules["two_xyz"]


def test_functions_of_one_file_share_its_imports(two: ModuleType) -> None:
    calls = [
        FunctionCall(own_function(cls, written(cls)), (Ref("x"),))
        for cls in (two.First, two.Second)
    ]
    ops = tuple(Op(f"f{n}", call, f"f{n}") for n, call in enumerate(calls))
    graph = Graph("twice", inputs=(), ops=ops, outputs=(), state={}, modules={}, batch_size=1)

    text = own_files(graph)["own_two_xyz.py"]

    ast.parse(text)
    for line in ("import math", "import torch, torch.nn", "from .own_toolbox_xyz import halved"):
        assert line in text.splitlines()
    assert "from .own_toolbox_xyz import UNUSED as other" in text.splitlines()
    assert text.count("class First") == text.count("class Second") == 1


def test_an_annotated_constant_that_was_changed_is_refused(two: ModuleType) -> None:
    two.LIMIT = 0.25

    with pytest.raises(UnwritableError, match="LIMIT, which is not what line 4 says"):
        written(two.First)


def test_what_is_imported_inside_is_refused(two: ModuleType) -> None:
    with pytest.raises(UnwritableError, match="it imports toolbox_xyz, which is not installed"):
        written(two.Inner)


def test_a_module_of_the_users_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tools_xyz.py").write_text("f = abs\n")
    (tmp_path / "uses_xyz.py").write_text(
        "import torch\nimport tools_xyz\n"
        "class A(torch.autograd.Function):\n"
        "    @staticmethod\n    def forward(ctx, x):\n        return tools_xyz.f(x)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(UnwritableError, match="tools_xyz, which is not installed"):
        written(importlib.import_module("uses_xyz").A)


def test_names_that_a_star_brings_are_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "all_xyz.py").write_text(
        "import math, torch\nimport torch.nn.functional as F\nLIMIT = 3.0\n_HIDDEN = 1\n"
    )
    (tmp_path / "star_xyz.py").write_text(
        "from all_xyz import *\n"
        "class A(torch.autograd.Function):\n"
        "    @staticmethod\n    def forward(ctx, x):\n        return F.relu(x) + LIMIT\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = written(importlib.import_module("star_xyz").A)
    for name in ("star_xyz", "all_xyz"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.undo()

    apart = write(found, tmp_path / "star_apart")
    assert float(apart.A.apply(torch.ones(()))) == 4.0
    texts = dict(found.files)["own_star_xyz"]
    assert "math" not in "".join(text for _, text in texts)


def test_a_class_of_an_installed_package_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "site-packages" / "installed_xyz"
    place.mkdir(parents=True)
    (place / "__init__.py").write_text("")
    (place / "ops.py").write_text("import torch\nclass A(torch.autograd.Function): pass\n")
    monkeypatch.syspath_prepend(place.parent)

    assert written(importlib.import_module("installed_xyz.ops").A) == WrittenClass(
        "installed_xyz.ops"
    )


def test_a_class_without_a_file_is_refused() -> None:
    made = type("Made", (torch.autograd.Function,), {"__module__": "nowhere"})

    with pytest.raises(UnwritableError, match="stands in no file"):
        written(made)


def test_what_is_installed() -> None:
    assert is_installed("torch.nn")
    assert is_installed("math")
    assert not is_installed("nowhere_to_be_found")
