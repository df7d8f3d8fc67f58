"""ONNX stages of an ONNX model: its own nodes, carried over."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from onnx import NodeProto

from gpipe_compiler.cluster import Device, is_here, this_machine
from gpipe_compiler.codegen.package import Progress
from gpipe_compiler.errors import GPipeCompilerError, ModelError, PlanError, UsageError
from gpipe_compiler.ir import Graph
from gpipe_compiler.ir.sizes import SampleRule
from gpipe_compiler.onnx import OnnxFile
from gpipe_compiler.onnx.codegen.package import write_onnx
from gpipe_compiler.onnx.frontend.graph import graph_of, unshaped
from gpipe_compiler.onnx.frontend.nodes import constant_ops, node_of, title, with_inner
from gpipe_compiler.onnx.frontend.reading import OnnxModel, read_model
from gpipe_compiler.onnx.frontend.sample_rules import sample_rules
from gpipe_compiler.onnx.frontend.sizes import InputSizes, input_sizes
from gpipe_compiler.onnx.meeting import refuse_mixing
from gpipe_compiler.onnx.passes.cost import onnx_measured, onnx_rooflines
from gpipe_compiler.onnx.passes.quantised import quantised_units
from gpipe_compiler.onnx.passes.state import state_ties
from gpipe_compiler.onnx.validate import SamplesMeetError, refuse_meeting, validate_onnx
from gpipe_compiler.options import Auto, CompileOptions
from gpipe_compiler.passes.atoms import Tie, atoms
from gpipe_compiler.passes.cost import Costs
from gpipe_compiler.passes.effects import Effects
from gpipe_compiler.passes.measure import on_kinds
from gpipe_compiler.passes.saved_tensors import SavedTensors
from gpipe_compiler.plan import Plan
from gpipe_compiler.plan.pareto import Frontier
from gpipe_compiler.planner.batch_outputs import check_rows
from gpipe_compiler.planner.cut_problem import CutFacts, MicrobatchGraph
from gpipe_compiler.planner.microbatch_count import MICROBATCHES_PER_STAGE
from gpipe_compiler.planner.planner import Planner
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
    state: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def open(
        cls, file: OnnxFile, options: CompileOptions, progress: Progress, _: Launch
    ) -> OnnxStages:
        """Reads a model; an `OpenTarget`."""
        _refuse_unfit(options)
        progress("reading the model")
        model = read_model(file.path, file.custom_ops)
        sizes = input_sizes(model, file.inputs, file.batch_dims)
        progress("looking whether a batch can be split")
        sizes = _as_split(model, sizes, options)
        options = dataclasses.replace(
            options, training=False, remedies=False, microbatches=_microbatches(options, sizes)
        )
        planner = planner_of(model, sizes, options, file.state)
        _check_state(planner.graph, file.state)
        return cls(options, model, sizes, planner, _batch_note(sizes), file.state)

    def plan(self, progress: Progress) -> tuple[Plan, Frontier | None]:
        try:
            made, frontier = plan_as_asked(self.planner, self.options, progress)
        except PlanError as error:
            raise _explained(error, self.planner.graph) from error
        if made.microbatches > 1 and not self.sizes.requests:
            _check_rows(made.known_graph)
            if _several(self.options, self.sizes) and self.options.validate:
                samples = max(_LEAST, made.batch_size // 2 * 2)
                _refuse_hidden(self.model, self.sizes, made.known_graph, samples, self.options.seed)
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
            size, counts = plan.microbatch_size, (plan.batch_size, plan.batch_size + 1)
            seed = self.options.seed
            rule = refuse_meeting(self.model, self.sizes, graph, size, counts, above, seed=seed)
        return dataclasses.replace(plan, graph=graph.replace(untried_in_pieces=rule))

    def write(self, plan: Plan, folder: Path, progress: Progress) -> None:
        write_onnx(plan, self.model, self.sizes, self.state, folder, progress)

    def validate(self, plan: Plan, folder: Path) -> Validation:
        return validate_onnx(self.model, self.sizes, plan, folder, seed=self.options.seed)

    def timed(self, plan: Plan, folder: Path, progress: Progress) -> Plan:
        """As in `Target`: ONNX Runtime's times of the nodes are all there is."""
        return plan


open_target = OnnxStages.open


def _as_split(model: OnnxModel, sizes: InputSizes, options: CompileOptions) -> InputSizes:
    """The sizes as they are, or for whole calls where a batch cannot be split.

    Several micro-batches that the user asks for are not looked at: the error then says why there
    are none.
    """
    if not sizes.batch_dims:
        return sizes.in_requests("none of its inputs has a batch")
    if _several(options, sizes):
        return sizes
    samples = sizes.batch if sizes.fixed else max(_LEAST, sizes.batch // 2 * 2)
    try:
        graph = graph_of(model, sizes, samples)
        _check_rows(graph)
        _refuse_ranges(graph)
        if options.validate and not sizes.fixed:
            refuse_meeting(model, sizes, graph, samples // 2, (samples,), seed=options.seed)
            _refuse_hidden(model, sizes, graph, samples, options.seed)
    except ModelError as error:
        return sizes.in_requests(error.problem)
    return sizes


def _several(options: CompileOptions, sizes: InputSizes) -> bool:
    """Whether the user asks for a number of micro-batches that the model does not give itself."""
    asked = options.microbatches
    return isinstance(asked, int) and asked > 1 and not sizes.fixed


def _refuse_hidden(
    model: OnnxModel, sizes: InputSizes, graph: Graph, samples: int, seed: int
) -> None:
    """Makes sure that samples meet in no value, nor in outputs of random numbers.

    The user's samples may be alike, which hides that they meet.

    Raises:
        ModelError: where they do. Other numbers than the user's may not run.
    """
    if sizes.data:
        random = dataclasses.replace(sizes, data={})
        try:
            refuse_meeting(model, random, graph, samples // 2, (samples,), seed=seed)
        except ModelError as error:
            if isinstance(error, SamplesMeetError):
                raise
    if not _ranges(graph):
        refuse_mixing(model, sizes, seed=seed)


_LEAST = 4
"""Samples that are tried, two in each of two micro-batches."""


def _refuse_ranges(graph: Graph) -> None:
    """Raises ModelError for a node that rounds by the largest number of a whole batch."""
    for node in _ranges(graph):
        raise ModelError(
            f"{title(node)} rounds the samples of a batch by the largest number in any of them"
        )


def _ranges(graph: Graph) -> list[NodeProto]:
    """The nodes that round by the largest number of what they are given."""
    return [
        node
        for op in graph.ops
        if not graph.batched.isdisjoint(op.inputs)
        for node in with_inner([node_of(op)])
        if node.op_type.startswith("DynamicQuantize")
    ]


def _check_rows(graph: Graph) -> None:
    """Raises ModelError for outputs that have no rows for the samples of micro-batches."""
    check_rows(graph, {op.name for op in graph.ops if node_of(op).op_type in _SHAPES})
    apart = [name for name in graph.output_values if not graph.values[name].splittable]
    if apart:
        raise ModelError(
            f"the rows of {', '.join(apart)} are not those of the samples of a batch",
            hint="compile with --microbatches 1",
        )


def _check_state(graph: Graph, state: Mapping[str, str]) -> None:
    """Raises UsageError for state that is no input and output of one type."""
    inputs = [source.name for source in graph.inputs]
    for past, present in state.items():
        for name, known, what in (
            (past, inputs, "input"),
            (present, graph.output_values, "output"),
        ):
            if name not in known:
                hint = f"its {what}s are {', '.join(known)}"
                raise UsageError(f"--state: the model has no {what} {name}", hint=hint)
        one, other = graph.values[past], graph.values[present]
        if one.dtype is not other.dtype or len(one.shape) != len(other.shape):
            raise UsageError(
                f"--state: {present} cannot be the next {past}: it is {other.shape} {other.dtype}, "
                f"not {one.shape} {one.dtype}"
            )


def _batch_note(sizes: InputSizes) -> str:
    """What the plan says of the batch, where there is something to say."""
    if sizes.requests:
        return f"a micro-batch is a whole call of the model: {sizes.requests}"
    other = [f"{dim} of {name}" for name, dim in sizes.batch_dims.items() if dim]
    return f"the batch is dimension {', '.join(other)}" if other else ""


def _explained(error: PlanError, graph: Graph) -> GPipeCompilerError:
    """The error; with the nodes that cannot be cut apart, where these may be the cause."""
    nodes = unshaped(graph)
    if not nodes:
        return error
    more = f" and {len(nodes) - _MOST} more" if len(nodes) > _MOST else ""
    return ModelError(
        f"{error.problem}; what {', '.join(nodes[:_MOST])}{more} makes has no known shape, "
        "or is of 4 bits, so it cannot be handed from stage to stage",
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
    if not (sizes.fixed or sizes.requests) or isinstance(options.microbatches, int):
        return options.microbatches
    return MICROBATCHES_PER_STAGE * (options.stages if isinstance(options.stages, int) else 1)


def planner_of(
    model: OnnxModel,
    sizes: InputSizes,
    options: CompileOptions,
    state: Mapping[str, str] | None = None,
) -> Planner:
    """What plans a model; a state stays in the stage that takes it, where one stage can."""
    kinds = options.cluster.kinds
    share = 1 / options.stages if isinstance(options.stages, int) else _AUTO_SHARE

    def analysed(samples: int, _: Precision) -> MicrobatchGraph:
        graph = graph_of(model, sizes, samples)
        costs = tuple(
            _measured(model, sizes, graph, kinds)
            if options.measured
            else onnx_rooflines(graph, kinds)
        )
        ties = state_ties(graph, costs[0], state or {}, share)
        return MicrobatchGraph(graph, costs, _facts(graph, costs[0], ties))

    whole = graph_of(model, sizes, sizes.batch)
    if sizes.fixed or sizes.requests:
        assert isinstance(options.microbatches, int)
        whole = whole.replace(batch_size=whole.batch_size * options.microbatches)
    return Planner(whole, options.cluster, options.measured, options.constraints, analysed)


_AUTO_SHARE = 0.5
"""Of the work, where it is not said how many stages there are: there are two or more."""


def _facts(graph: Graph, costs: Costs, further: Iterable[Tie]) -> CutFacts:
    """The facts of a graph whose ops write nothing in place and keep nothing for a backward."""
    effects = Effects()
    copied = constant_ops(graph)
    tied = atoms(graph, effects, copied, [*quantised_units(graph, copied), *further])
    return CutFacts(graph, costs, effects, copied, tied, SavedTensors(), {}, graph)


def _measured(
    model: OnnxModel, sizes: InputSizes, graph: Graph, kinds: Sequence[Device]
) -> list[Costs]:
    """Costs on each kind of device, by the clock of this machine."""
    here = next(filter(is_here, kinds), None) or this_machine()
    estimated = onnx_rooflines(graph, [here, *kinds])
    inputs = sizes.arrays(sizes.batch if sizes.requests else graph.batch_size, seed=0)
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
