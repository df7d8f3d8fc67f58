"""Writes traced hooks down as functions of a package's file."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from gpipe_compiler.errors import TraceError
from gpipe_compiler.frontend.locate import calling_line
from gpipe_compiler.runtime.core.random import may_draw

_IMPORTS: Mapping[str, str] = {
    "torch": "import torch",
    "math": "import math",
    "_operator": "import operator as _operator",
    "operator": "import operator",
    "inf": "from math import inf",
    "nan": "from math import nan",
}
"""What the text of a traced graph may name, and how it is imported."""


def file_text(*parts: str) -> str:
    """A file that makes some functions and classes, with what they import."""
    text = "\n\n".join(parts)
    names = {part.id for part in ast.walk(ast.parse(text)) if isinstance(part, ast.Name)}
    imports = [statement for name, statement in _IMPORTS.items() if name in names]
    return "\n".join((*imports, "", "", text))


def function_text(name: str, module: fx.GraphModule) -> str:
    """A function that computes what a graph without state does, of its placeholders in order.

    Raises:
        TraceError: where it draws random numbers, holds tensors of its own, or calls what a package
            cannot name.
    """
    for node in module.graph.nodes:
        if node.op == "get_attr":
            raise _unwritable(node, "it reads a tensor that it makes while it is traced")
        if node.op == "call_function" and may_draw(node.target):
            raise _unwritable(node, "it draws random numbers")
    _follow_devices(module.graph)
    for node in module.graph.nodes:
        node.type = None
    written = module.graph.python_code("self").src
    (function,) = (part for part in ast.parse(written).body if isinstance(part, ast.FunctionDef))
    function.name, function.returns = name, None
    del function.args.args[0]
    local = {argument.arg for argument in function.args.args}
    names = [part for part in ast.walk(function) if isinstance(part, ast.Name)]
    local.update(part.id for part in names if isinstance(part.ctx, ast.Store))
    for used in sorted(
        {part.id for part in names} - local - _IMPORTS.keys() - vars(builtins).keys()
    ):
        raise TraceError(f"a hook on a gradient uses {used}, which a package cannot import")
    function.body = [statement for statement in function.body if not _releases(statement)]
    return ast.unparse(function) + "\n"


def _releases(statement: ast.stmt) -> bool:
    """Whether a statement is `x = None`, by which generated code releases what it has read."""
    value = statement.value if isinstance(statement, ast.Assign) else None
    return isinstance(value, ast.Constant) and value.value is None


def _unwritable(node: fx.Node, why: str) -> TraceError:
    return TraceError(
        f"the model computes {node.target} in a hook on a gradient, and "
        f"{why}: that cannot be written into a package",
        location=node.meta.get("source") or calling_line(),
        hint="compute it before, and hand it in",
    )


def _follow_devices(graph: fx.Graph) -> None:
    """Devices that were fixed by tracing become that of the first argument."""
    tensors = [n for n in graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    given = [node for node in tensors if node.op == "placeholder"]
    for node in list(graph.nodes):
        leaves = (*node.args, *node.kwargs.values())
        if not given or not any(isinstance(leaf, torch.device) for leaf in leaves):
            continue
        with graph.inserting_before(node):
            device = graph.call_function(getattr, (given[0], "device"))

        def change(leaf: Any, device: fx.Node = device) -> Any:
            return device if isinstance(leaf, torch.device) else leaf

        node.args = tuple(map(change, node.args))
        node.kwargs = {key: change(leaf) for key, leaf in node.kwargs.items()}
