"""All that bears on where an ONNX graph is cut; see `planner.cut_problem.Facts`."""

from __future__ import annotations

from gpipe_compiler.ir import Graph
from gpipe_compiler.onnx.frontend.constants import constant_ops
from gpipe_compiler.passes.atoms import atoms
from gpipe_compiler.passes.cost import Costs
from gpipe_compiler.passes.effects import Effects
from gpipe_compiler.passes.saved_tensors import SavedTensors
from gpipe_compiler.planner.cut_problem import Facts


def onnx_facts(graph: Graph, costs: Costs) -> Facts:
    """The facts of a graph whose ops write nothing in place and keep nothing for a backward."""
    effects = Effects()
    copied = constant_ops(graph)
    tied = atoms(graph, effects, copied)
    return Facts(graph, costs, effects, copied, tied, SavedTensors(), {}, graph)
