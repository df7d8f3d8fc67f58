"""Compiles a PyTorch model into a pipeline of stages.

    graph = trace(model, args)
    made = plan(graph, stages=4)
    emit(made, Path("model_x4"))

or all of it, with the proof that the package equals the model: `compile`. Graphs that did not come
from torch are planned too: `plan_graph(read_graph(Path("graph.json")), BareSetting(stages=4))`.
"""

from gpipe_compiler.bare_plan import BarePlan, plan_graph
from gpipe_compiler.bare_setting import BareSetting
from gpipe_compiler.codegen.package import emit
from gpipe_compiler.compile import (
    Compiled,
    CompileOptions,
    compile,  # noqa: A004  # the word for what it does
    plan,
    trace,
)
from gpipe_compiler.errors import GPipeCompilerError
from gpipe_compiler.frontend.auto import Frontend
from gpipe_compiler.frontend.subject import Subject
from gpipe_compiler.graph_file import BareGraph, BareOp, parse_graph, read_graph
from gpipe_compiler.ir import Graph
from gpipe_compiler.passes.constraints import Constraints
from gpipe_compiler.passes.cut.setting import Objective
from gpipe_compiler.plan import Plan
from gpipe_compiler.policy import Auto, Policy, RematChoice
from gpipe_compiler.runtime.spec import BatchNorm, OptimizerKind, Precision, ScheduleKind
from gpipe_compiler.validate import Validation

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
    "Frontend",
    "GPipeCompilerError",
    "Graph",
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
    "parse_graph",
    "plan",
    "plan_graph",
    "read_graph",
    "trace",
]
