"""Compiles a PyTorch model into a pipeline of stages.

    graph = trace(model, args)
    made = plan(graph, stages=4)
    emit(made, Path("model_x4"))

or all of it, with the proof that the package equals the model: `compile`.
"""

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
from gpipe_compiler.ir import Graph
from gpipe_compiler.plan import Plan
from gpipe_compiler.policy import Policy, RematChoice
from gpipe_compiler.runtime.spec import BatchNorm, Precision, ScheduleKind
from gpipe_compiler.validate import Validation

__all__ = [
    "BatchNorm",
    "CompileOptions",
    "Compiled",
    "Frontend",
    "GPipeCompilerError",
    "Graph",
    "Plan",
    "Policy",
    "Precision",
    "RematChoice",
    "ScheduleKind",
    "Subject",
    "Validation",
    "compile",
    "emit",
    "plan",
    "trace",
]
