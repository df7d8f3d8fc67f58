"""ONNX stages of an ONNX model: its own nodes, carried over."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from gpipe_compiler.cluster import Device, is_here, this_machine
from gpipe_compiler.codegen.package import Progress
from gpipe_compiler.errors import GPipeCompilerError, ModelError, PlanError, UsageError
from gpipe_compiler.ir import Graph
from gpipe_compiler.ir.sizes import SampleRule
from gpipe_compiler.onnx import OnnxFile
from gpipe_compiler.onnx.codegen.package import write_onnx
from gpipe_compiler.onnx.frontend.graph import graph_of, unshaped
from gpipe_compiler.onnx.frontend.nodes import constant_ops, node_of
from gpipe_compiler.onnx.frontend.reading import OnnxModel, read_model
from gpipe_compiler.onnx.frontend.sample_rules import sample_rules
from gpipe_compiler.onnx.frontend.sizes import InputSizes, input_sizes
from gpipe_compiler.onnx.passes.cost import onnx_measured, onnx_rooflines
from gpipe_compiler.onnx.validate import random_inputs, refuse_meeting, validate_onnx
from gpipe_compiler.options import Auto, CompileOptions
from gpipe_compiler.passes.atoms import atoms
from gpipe_compiler.passes.cost import Costs
from gpipe_compiler.passes.effects import Effects
from gpipe_compiler.passes.measure import on_kinds
from gpipe_compiler.passes.saved_tensors import SavedTensors
from gpipe_compiler.plan import Plan
from gpipe_compiler.plan.pareto import Frontier
from gpipe_compiler.planner.batch_outputs import check_rows, in_one_piece
from gpipe_compiler.planner.cut_problem import CutFacts, MicrobatchGraph
from gpipe_compiler.planner.planner import MICROBATCHES_PER_STAGE, Planner
from gpipe_compiler.runtime.spec import Precision
from gpipe_compiler.targets.planning import plan_as_asked
from gpipe_compiler.validate.launching import Launch
from gpipe_compiler.validate.package import Validation


@dataclass(frozen=True, eq=False)
class OnnxStages:
    """An ONNX model, to be compiled to ONNX stages with its own nodes; see `Target`."""

    under_torchrun: ClassVar[bool] = True

    options: CompileOptions
    model: OnnxModel
    sizes: InputSizes
    planner: Planner
    batch: str = ""

    @classmethod
    def open(
        cls, file: OnnxFile, options: CompileOptions, progress: Progress, _: Launch
    ) -> OnnxStages:
        """Reads a model; an `OpenTarget`."""
        _refuse_unfit(options)
        progress("reading the model")
        model = read_model(file.path, file.custom_ops)
        sizes = input_sizes(model, file.inputs)
        options = dataclasses.replace(
            options, training=False, remedies=False, microbatches=_microbatches(options, sizes)
        )
        return cls(options, model, sizes, planner_of(model, sizes, options))

    def plan(self, progress: Progress) -> tuple[Plan, Frontier | None]:
        try:
            made, frontier = plan_as_asked(self.planner, self.options, progress)
        except PlanError as error:
            raise _explained(error, self.planner.graph) from error
        _refuse_parts(made)
        made = in_one_piece(made, self._refuse)
        return self._with_limit(made), frontier

    def _with_limit(self, plan: Plan) -> Plan:
        """The plan whose graph says up to how many samples it can be cut into micro-batches."""
        graph = plan.known_graph
        rules = sample_rules(self.model.proto).items()
        above = [SampleRule(n, self.model.at(node)) for n, node in rules if n > plan.batch_size]
        if self.sizes.fixed or graph.whole_batch or not above:
            return plan
        rule: SampleRule | None = above[0]
        if self.options.validate:
            rule = refuse_meeting(self.model, self.sizes, plan, above, seed=self.options.seed)
        return dataclasses.replace(plan, graph=graph.replace(untried_in_pieces=rule))

    def _refuse(self, plan: Plan) -> None:
        """Raises ModelError where micro-batches do not give what the batch does."""
        _refuse_parts(plan)
        if self.options.validate and not self.sizes.fixed:
            refuse_meeting(self.model, self.sizes, plan, (), seed=self.options.seed)

    def write(self, plan: Plan, folder: Path, progress: Progress) -> None:
        write_onnx(plan, self.model, self.sizes, folder, progress)

    def validate(self, plan: Plan, folder: Path) -> Validation:
        return validate_onnx(self.model, self.sizes, plan, folder, seed=self.options.seed)

    def timed(self, plan: Plan, folder: Path, progress: Progress) -> Plan:
        """As in `Target`: ONNX Runtime's times of the nodes are all there is."""
        return plan


open_target = OnnxStages.open


def _refuse_parts(plan: Plan) -> None:
    """Raises ModelError for outputs that have no rows for the samples of micro-batches."""
    check_rows(plan, {op.name for op in plan.known_graph.ops if node_of(op).op_type in _SHAPES})


def _explained(error: PlanError, graph: Graph) -> GPipeCompilerError:
    """The error; with the nodes that cannot be cut apart, where these may be the cause."""
    nodes = unshaped(graph)
    if not nodes:
        return error
    more = f" and {len(nodes) - _MOST} more" if len(nodes) > _MOST else ""
    return ModelError(
        f"{error.problem}; what {', '.join(nodes[:_MOST])}{more} makes has no known shape, so it "
        "cannot be handed from stage to stage",
        hint=error.hint or "ask for fewer stages, or keep such nodes out of the model",
    )


_MOST = 5
"""Nodes that a message names."""

_SHAPES = ("Shape", "Size")
"""Operators that read nothing but a shape."""


def _microbatches(options: CompileOptions, sizes: InputSizes) -> int | Auto | None:
    """The micro-batches asked for, or a number of them where the model itself gives their size.

    A mini-batch of such a model is as many micro-batches as are asked for, not a given number of
    samples.
    """
    if not sizes.fixed or isinstance(options.microbatches, int):
        return options.microbatches
    return MICROBATCHES_PER_STAGE * (options.stages if isinstance(options.stages, int) else 1)


def planner_of(model: OnnxModel, sizes: InputSizes, options: CompileOptions) -> Planner:
    kinds = options.cluster.kinds

    def analysed(samples: int, _: Precision) -> MicrobatchGraph:
        graph = graph_of(model, sizes, samples)
        costs = tuple(
            _measured(model, sizes, graph, kinds)
            if options.measured
            else onnx_rooflines(graph, kinds)
        )
        return MicrobatchGraph(graph, costs, _facts(graph, costs[0]))

    whole = graph_of(model, sizes, sizes.batch)
    if sizes.fixed:
        assert isinstance(options.microbatches, int)
        whole = whole.replace(batch_size=sizes.batch * options.microbatches)
    return Planner(whole, options.cluster, options.measured, options.constraints, analysed)


def _facts(graph: Graph, costs: Costs) -> CutFacts:
    """The facts of a graph whose ops write nothing in place and keep nothing for a backward."""
    effects = Effects()
    copied = constant_ops(graph)
    tied = atoms(graph, effects, copied)
    return CutFacts(graph, costs, effects, copied, tied, SavedTensors(), {}, graph)


def _measured(
    model: OnnxModel, sizes: InputSizes, graph: Graph, kinds: Sequence[Device]
) -> list[Costs]:
    """Costs on each kind of device, by the clock of this machine."""
    here = next(filter(is_here, kinds), None) or this_machine()
    estimated = onnx_rooflines(graph, [here, *kinds])
    inputs = random_inputs(sizes, graph.batch_size, seed=0)
    return on_kinds(onnx_measured(model, graph, inputs, estimated[0]), estimated, kinds)


def _refuse_unfit(options: CompileOptions) -> None:
    """Raises UsageError for what says something about training, or about another precision."""
    if options.precision is not Precision.FP32:
        raise UsageError(
            f"--precision {options.precision.value}: an ONNX model computes in its own types",
            hint="leave it out; onnxconverter-common converts models to 16 bits",
        )
    if options.data_parallel != 1:
        raise UsageError(
            "--data-parallel: an ONNX model is not trained, so there is nothing to keep equal",
            hint="start the package several times",
        )
