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
    from gpipe_compiler.compile import Compiled as Compiled
    from gpipe_compiler.compile import compile as compile  # noqa: A004  # the word for what it does
    from gpipe_compiler.compile import plan as plan
    from gpipe_compiler.compile import trace as trace
    from gpipe_compiler.errors import GPipeCompilerError as GPipeCompilerError
    from gpipe_compiler.frontend.subject import Subject as Subject
    from gpipe_compiler.graph_json.file import BareGraph as BareGraph
    from gpipe_compiler.graph_json.file import BareOp as BareOp
    from gpipe_compiler.graph_json.file import parse_graph as parse_graph
    from gpipe_compiler.graph_json.file import read_graph as read_graph
    from gpipe_compiler.graph_json.plan import BarePlan as BarePlan
    from gpipe_compiler.graph_json.plan import plan_graph as plan_graph
    from gpipe_compiler.graph_json.stages import BareSetting as BareSetting
    from gpipe_compiler.ir import Graph as Graph
    from gpipe_compiler.options import Auto as Auto
    from gpipe_compiler.options import CompileOptions as CompileOptions
    from gpipe_compiler.options import Constraints as Constraints
    from gpipe_compiler.options import LossChoice as LossChoice
    from gpipe_compiler.options import Objective as Objective
    from gpipe_compiler.options import Policy as Policy
    from gpipe_compiler.options import RematChoice as RematChoice
    from gpipe_compiler.plan import Plan as Plan
    from gpipe_compiler.report.text import format_plan as format_plan
    from gpipe_compiler.runtime.spec import BatchNorm as BatchNorm
    from gpipe_compiler.runtime.spec import OptimizerKind as OptimizerKind
    from gpipe_compiler.runtime.spec import Precision as Precision
    from gpipe_compiler.runtime.spec import ScheduleKind as ScheduleKind
    from gpipe_compiler.targets.torch_stages import emit as emit
    from gpipe_compiler.validate.package import Validation as Validation

__version__ = "0.1.0"

_EXPORTS = {
    "targets.torch_stages": ("emit",),
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

__all__ = list(_HOMES)


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
