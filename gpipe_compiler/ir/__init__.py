"""The intermediate representation: Graph, Op and Value, what is legal, how it prints and runs."""

from gpipe_compiler.ir.arguments import Argument, ByMode, Ref, StateRef
from gpipe_compiler.ir.graph import Graph
from gpipe_compiler.ir.losses import Loss, LossTerm, LossWeight
from gpipe_compiler.ir.ops import (
    Autocast,
    Call,
    Context,
    FunctionCall,
    MethodCall,
    Mode,
    ModuleCall,
    ModuleSpec,
    NoGrad,
    Op,
    Region,
    Result,
    called,
)
from gpipe_compiler.ir.stretches import Stretch
from gpipe_compiler.ir.values import State, StateKind, Value, ValueKind
from gpipe_compiler.runtime.spec import Input, Reduction

__all__ = [
    "Argument",
    "Autocast",
    "ByMode",
    "Call",
    "Context",
    "FunctionCall",
    "Graph",
    "Input",
    "Loss",
    "LossTerm",
    "LossWeight",
    "MethodCall",
    "Mode",
    "ModuleCall",
    "ModuleSpec",
    "NoGrad",
    "Op",
    "Reduction",
    "Ref",
    "Region",
    "Result",
    "State",
    "StateKind",
    "StateRef",
    "Stretch",
    "Value",
    "ValueKind",
    "called",
]
