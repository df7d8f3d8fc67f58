"""The intermediate representation: Graph, Op and Value, what is legal, how it prints and runs."""

from gpipe_compiler.ir.arguments import Argument, ByMode, Ref, StateRef
from gpipe_compiler.ir.graph import (
    Graph,
    Loss,
    LossWeight,
    State,
    StateKind,
    Stretch,
    Value,
    ValueKind,
)
from gpipe_compiler.ir.ops import (
    Autocast,
    Block,
    Call,
    Context,
    FunctionCall,
    MethodCall,
    Mode,
    ModuleCall,
    ModuleSpec,
    NoGrad,
    Op,
    RegionCall,
    Result,
)
from gpipe_compiler.runtime.spec import Input, Reduction

__all__ = [
    "Argument",
    "Autocast",
    "Block",
    "ByMode",
    "Call",
    "Context",
    "FunctionCall",
    "Graph",
    "Input",
    "Loss",
    "LossWeight",
    "MethodCall",
    "Mode",
    "ModuleCall",
    "ModuleSpec",
    "NoGrad",
    "Op",
    "Reduction",
    "Ref",
    "RegionCall",
    "Result",
    "State",
    "StateKind",
    "StateRef",
    "Stretch",
    "Value",
    "ValueKind",
]
