"""Compiles a PyTorch model into a pipeline of stages.

    graph = trace(model, args, target=target, loss_fn=loss_fn)
    made = plan(graph, stages=4)
    emit(made, Path("model_x4"))

or all of it, with the proof that the package equals the model: `compile`. Graphs that did not come
from torch are planned too: `plan_graph(read_graph(Path("graph.json")), BareSetting(stages=4))`.

A name is imported when it is first asked for: most need torch, which takes seconds to import, and
plans of graphs from elsewhere do not.
"""

from __future__ import annotations

import importlib
import sys
import types
import typing

if typing.TYPE_CHECKING:
    from gpipe_compiler.codegen.package import emit
    from gpipe_compiler.compile import (
        Compiled,
        compile,  # noqa: A004  # the word for what it does
        plan,
        trace,
    )
    from gpipe_compiler.errors import GPipeCompilerError
    from gpipe_compiler.frontend.subject import Subject
    from gpipe_compiler.graph_json.file import BareGraph, BareOp, parse_graph, read_graph
    from gpipe_compiler.graph_json.plan import BarePlan, plan_graph
    from gpipe_compiler.graph_json.stages import BareSetting
    from gpipe_compiler.ir import Graph
    from gpipe_compiler.options import (
        Auto,
        CompileOptions,
        Constraints,
        LossChoice,
        Objective,
        Policy,
        RematChoice,
    )
    from gpipe_compiler.plan import Plan
    from gpipe_compiler.report.text import format_plan
    from gpipe_compiler.runtime.spec import BatchNorm, OptimizerKind, Precision, ScheduleKind
    from gpipe_compiler.validate.package import Validation

_EXPORTS = {
    "codegen.package": ("emit",),
    "compile": ("Compiled", "compile", "plan", "trace"),
    "errors": ("GPipeCompilerError",),
    "frontend.subject": ("Subject",),
    "graph_json.file": ("BareGraph", "BareOp", "parse_graph", "read_graph"),
    "graph_json.plan": ("BarePlan", "plan_graph"),
    "graph_json.stages": ("BareSetting",),
    "ir": ("Graph",),
    "options": (
        *("Auto", "CompileOptions", "Constraints", "LossChoice", "Objective", "Policy"),
        "RematChoice",
    ),
    "plan": ("Plan",),
    "report.text": ("format_plan",),
    "runtime.spec": ("BatchNorm", "OptimizerKind", "Precision", "ScheduleKind"),
    "validate.package": ("Validation",),
}
"""What is exported, by the module that defines it."""

_HOMES = {name: module for module, names in _EXPORTS.items() for name in names}

__all__ = [
    "Auto",
    "BareGraph",
    "BareOp",
    "BarePlan",
    "BareSetting",
    "BatchNorm",
    "CompileOptions",
    "Compiled",
    "Constraints",
    "GPipeCompilerError",
    "Graph",
    "LossChoice",
    "Objective",
    "OptimizerKind",
    "Plan",
    "Policy",
    "Precision",
    "RematChoice",
    "ScheduleKind",
    "Subject",
    "Validation",
    "compile",
    "emit",
    "format_plan",
    "parse_graph",
    "plan",
    "plan_graph",
    "read_graph",
    "trace",
]


class _Exporting(types.ModuleType):
    """This module, with what it exports."""

    def __getattr__(self, name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if _HOMES[name] == "compile":
            importlib.import_module(f"{self.__name__}.frontend.torch_inside").check_torch()
        found = getattr(importlib.import_module(f"{self.__name__}.{_HOMES[name]}"), name)
        self.__dict__[name] = found
        return found

    def __setattr__(self, name: str, value: object) -> None:
        # Python puts every module that is imported from here in its place, also those that are
        # called like what they define: `compile`, `plan`.
        if not (isinstance(value, types.ModuleType) and name in _HOMES):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_HOMES})


sys.modules[__name__].__class__ = _Exporting
