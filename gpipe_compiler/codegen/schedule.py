"""`schedule.py`: the plan as a PipelineSpec, with a drawing of who works when."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeVar

from gpipe_compiler.codegen import loss_weight
from gpipe_compiler.codegen.constants import UnwritableError, quote, write_literal, write_nest
from gpipe_compiler.codegen.diagram import diagram
from gpipe_compiler.codegen.imports import Imports, from_lines
from gpipe_compiler.codegen.layout import WIDTH, Expression, call, dict_of, lay_out, name, tuple_of
from gpipe_compiler.codegen.loss_weight import WeightSource
from gpipe_compiler.codegen.stage import StageSource, has_separate_loss
from gpipe_compiler.codegen.templating import render
from gpipe_compiler.errors import EmitError
from gpipe_compiler.ir import ByMode, Graph, Input, LossTerm, LossWeight, Ref, StateKind
from gpipe_compiler.passes.joined_outputs import joined_outputs
from gpipe_compiler.plan import Plan
from gpipe_compiler.runtime.schedule import Joint
from gpipe_compiler.runtime.schedule.actions import Phase, format_order
from gpipe_compiler.runtime.schedule.clock import needs_of
from gpipe_compiler.runtime.spec import (
    BatchNorm,
    Crossing,
    Joined,
    OutputClass,
    Precision,
    Remat,
    Samples,
)

Item = TypeVar("Item")


def write_schedule(
    plan: Plan, graph: Graph, stages: Sequence[StageSource], weight: WeightSource | None
) -> str:
    """The source of `schedule.py`.

    Args:
        weight: of the loss; None for a mean over samples, or a sum.

    Raises:
        EmitError: when the structure of the outputs cannot be written down.
    """
    imports = Imports()
    if plan.crossings:
        imports.torch()
    spec = _pipeline(plan, graph, stages, weight, imports)
    used = {"Leaf", "LossSpec", "LossTerm", "Reduction", "Crossing", "Input"}
    used |= {"Joined", "OutputClass", "Samples"}
    modules = [loss_weight.MODULE] if weight is not None else []
    modules += sorted(f"stage_{index}" for index in range(len(stages)))
    return schedule_text(
        plan,
        spec,
        {*_SPEC_TYPES, *_manner_enums(plan)},
        home=".runtime.spec",
        kind=plan.schedule.value,
        imports=imports.lines(),
        modules=from_lines(".", modules),
    )


_SPEC_TYPES = frozenset(
    {"PipelineSpec", "ScheduleKind", "StageSpec", "Leaf", "LossSpec", "LossTerm", "Reduction"}
    | {"Crossing", "Input", "Joined", "OutputClass", "Samples"}
)


def schedule_text(
    plan: Plan,
    spec: Expression,
    types: Collection[str],
    *,
    home: str,
    kind: str,
    imports: Sequence[str] = (),
    modules: Sequence[str] = (),
) -> str:
    """The source of a `schedule.py`: a drawing of the plan's orders, the orders, and a spec.

    Args:
        types: what a spec may be made of; what occurs in this one is imported.
        home: the module of the package that has them.
        kind: of the schedule, in words.
        imports, modules: further lines of imports: before those of the package, and among them.
    """
    text = "\n".join(lay_out(spec, prefix="SPEC = "))
    orders, wrapped = _orders(plan)
    used = sorted(item for item in types if f"{item}(" in text or f"{item}." in text)
    return render(
        "schedule.py.jinja",
        name=plan.name,
        stages=len(plan.stages),
        microbatches=plan.microbatches,
        kind=kind,
        legend=_legend(plan),
        together=_together(plan),
        drawing=_drawing(plan),
        imports=imports,
        spec_import=from_lines(home, used),
        modules=modules,
        orders=orders,
        wrapped=wrapped,
        spec=text.splitlines(),
    )


def _unlike(plan: Plan) -> Mapping[Precision, str]:
    return {} if plan.graph is None else plan.graph.unlike


def _manner_enums(plan: Plan) -> list[str]:
    """The types that say how the stages compute, where that is not as by default."""
    found = []
    if plan.batchnorm is not BatchNorm.MICRO:
        found.append(BatchNorm.__name__)
    if plan.precision is not Precision.FP32 or _unlike(plan):
        found.append(Precision.__name__)
    if any(stage.remat is not Remat.NONE for stage in plan.stages):
        found.append(Remat.__name__)
    return found


def _together(plan: Plan) -> list[str]:
    """What to know of the stages that take all micro-batches as one."""
    if not plan.joint:
        return []
    numbers = ", ".join(map(str, plan.joint))
    text = (
        f"Stage {numbers} takes all micro-batches as one, for exact BatchNorm: it starts when they "
        "have all come, and hands on nothing before they are all done."
    )
    if len(plan.joint) > 1:
        text = (
            f"Stages {numbers} take all micro-batches as one, for exact BatchNorm: they start when "
            "these have all come, and hand on nothing before they are all done."
        )
    return textwrap.wrap(text, WIDTH)


def _legend(plan: Plan) -> list[str]:
    """How to read the drawing."""
    several = len(plan.orders) < len(plan.stages)
    phases = {action.phase for order in plan.orders for action in order}
    split = Phase.WEIGHT in phases
    mark = "0" if several else ""
    where = " in stage 0." if several else "."
    if phases <= {Phase.FORWARD}:
        text = "Time runs to the right, every forward drawn equally long; "
        return textwrap.wrap(f"{text}{mark}F0 is the forward of micro-batch 0{where}", WIDTH)
    text = f"Time runs to the right, {'every part' if split else 'forward and backward'} drawn "
    text += f"equally long; {mark}F0 and {mark}B0 are the forward and the backward of micro-batch 0"
    text += where
    if split:
        text += (
            f" {mark}B0 makes only the gradients of what the stage received, {mark}W0 those of "
            "its parameters."
        )
    return textwrap.wrap(text, WIDTH)


def _drawing(plan: Plan) -> list[str]:
    """The diagram of the schedule, cut off at the right where it is too wide."""
    joint = Joint.of(plan.joint, plan.orders)
    lines = diagram(plan.orders, needs_of(plan.crossings, joint)).splitlines()
    room = WIDTH - 8
    if max(map(len, lines)) <= room:
        return lines
    return [f"{line[: room - 4]} ..." if len(line) > room else line for line in lines]


def _orders(plan: Plan) -> tuple[list[str], bool]:
    """Each device's actions, a line each; or, and whether, wrapped with empty lines between."""
    paragraphs = [
        textwrap.wrap(format_order(order), WIDTH - 4, break_long_words=False)
        for order in plan.orders
    ]
    if all(len(lines) <= 1 for lines in paragraphs):
        return [line for lines in paragraphs for line in lines or ["-"]], False
    lines = itertools.chain.from_iterable([*paragraph, ""] for paragraph in paragraphs)
    return list(lines)[:-1], True


def _pipeline(
    plan: Plan,
    graph: Graph,
    stages: Sequence[StageSource],
    weight: WeightSource | None,
    imports: Imports,
) -> Expression:
    inputs = [item for item in graph.inputs if plan.training or item.path[0] != "target"]
    written = [
        _stage(stage, planned.remat) for stage, planned in zip(stages, plan.stages, strict=True)
    ]
    options = {
        "name": quoted(plan.name),
        "stages": tuple_of(written, exploded=True),
        "inputs": one_a_line(inputs, lambda source: _input(source, imports)),
        "crossings": one_a_line(plan.crossings, lambda crossing: _crossing(crossing, imports)),
        "outputs": _outputs(graph, imports),
        "loss": _loss(plan, graph, weight, imports),
        "schedule": name(f"ScheduleKind.{plan.schedule.name}"),
        "microbatches": name(str(plan.microbatches)),
        "microbatch_size": name(str(plan.microbatch_size)),
        "orders": name("ORDERS"),
    }
    if graph.classes:
        options["classes"] = one_a_line(graph.classes, _class)
    if plan.placement and plan.placement != tuple(range(len(stages))):
        options["placement"] = number_tuple(plan.placement)
    if plan.seats and plan.seats != tuple(range(len(plan.orders))):
        options["device_order"] = number_tuple(plan.seats)
    aliases = {
        alias: state.name
        for state in graph.state.values()
        if state.kind is not StateKind.CONSTANT
        for alias in state.aliases
    }
    if aliases:
        pairs = [(quoted(alias), quoted(own)) for alias, own in aliases.items()]
        options["aliases"] = dict_of(pairs, exploded=True)
    if plan.batchnorm is not BatchNorm.MICRO:
        options["batchnorm"] = name(f"BatchNorm.{plan.batchnorm.name}")
    if plan.precision is not Precision.FP32:
        options["precision"] = name(f"Precision.{plan.precision.name}")
    if plan.replicas > 1:
        options["replicas"] = name(str(plan.replicas))
    if _unlike(plan):
        options["unlike"] = dict_of(
            [
                (name(f"Precision.{other.name}"), quoted(why))
                for other, why in _unlike(plan).items()
            ],
            exploded=True,
        )
    if graph.whole_batch:
        options["whole_batch"] = quoted(graph.whole_batch)
    return call_with("PipelineSpec", options, exploded=True)


def _stage(stage: StageSource, remat: Remat) -> Expression:
    module = f"stage_{stage.index}"
    options = {
        "module": name(f"{module}.{stage.class_name}"),
        "inputs": quoted_all(stage.inputs),
        "outputs": quoted_all(stage.outputs),
    }
    if stage.renamed:
        options["renamed"] = name(f"{module}.RENAMED")
    if stage.loss_inputs:
        options["loss_inputs"] = quoted_all(stage.loss_inputs)
    randoms = {
        "random_ops": stage.random_ops.numbers,
        "random_in_eval": stage.random_in_eval.numbers,
        "shared_random": stage.random_ops.shared,
        "shared_in_eval": stage.random_in_eval.shared,
    }
    options |= {option: number_tuple(numbers) for option, numbers in randoms.items() if numbers}
    if stage.initial:
        options["initial"] = name(f"{module}.INITIAL")
    if stage.writes:
        options["writes"] = name(f"{module}.WRITES")
    if stage.mixes:
        options["mixes"] = name("True")
    if remat is not Remat.NONE:
        options["remat"] = name(f"Remat.{remat.name}")
    if stage.segments:
        options["segments"] = name(f"{module}.SEGMENTS")
    return call_with("StageSpec", options, exploded=True)


def _input(source: Input, imports: Imports) -> Expression:
    items = [quoted(source.name), tuple_of([_path(item) for item in source.path])]
    if source.batch_dim != 0:
        items.append(name(f"batch_dim={source.batch_dim}"))
    if source.shape is not None and source.dtype is not None:
        items.append(write_literal(source.shape, imports).prefixed("shape="))
        items.append(write_literal(source.dtype, imports).prefixed("dtype="))
    return call("Input", items)


def _path(item: str | int) -> Expression:
    return quoted(item) if isinstance(item, str) else name(str(item))


def _class(known: OutputClass) -> Expression:
    items = [tuple_of([_path(key) for key in known.path]), quoted(known.module), quoted(known.name)]
    if known.fields:
        items.append(quoted_all(known.fields))
    if known.factory:
        items.append(quoted_all(known.factory).prefixed("factory="))
    return call("OutputClass", items)


def _crossing(crossing: Crossing, imports: Imports) -> Expression:
    items = [
        quoted(crossing.value),
        name(str(crossing.source)),
        write_literal(crossing.targets, imports),
        write_literal(crossing.shape, imports),
        write_literal(crossing.dtype, imports),
    ]
    if crossing.batch_dim != 0:
        items.append(name(f"batch_dim={crossing.batch_dim}"))
    if not crossing.gradient:
        items.append(name("gradient=False"))
    return call("Crossing", items)


def _outputs(graph: Graph, imports: Imports) -> Expression:
    """The structure of the outputs with a `Leaf` at every tensor."""
    joined = joined_outputs(graph) if graph.values else {}

    def leaf(item: object) -> Expression:
        match item:
            case Ref(name=value):
                known = graph.values.get(value)
                batch_dim = 0 if known is None else known.batch_dim
                options = [] if batch_dim == 0 else [name(f"batch_dim={batch_dim}")]
                way = joined.get(value, Joined.SAME)
                if way is not Joined.SAME:
                    options.append(name(f"joined=Joined.{way.name}"))
                return call("Leaf", [quoted(value), *options])
            case Samples(factor=factor):
                return call("Samples", [name(str(factor))])
            case ByMode():
                raise EmitError(
                    "the model returns one thing in train mode and another in eval mode",
                    hint="return the same structure in both modes, or compile with --mode infer",
                )
            case _:
                return write_literal(item, imports)

    try:
        return write_nest(graph.outputs, leaf)
    except UnwritableError as error:
        raise EmitError(f"the model's outputs cannot be written down: {error}") from error


def _loss(plan: Plan, graph: Graph, weight: WeightSource | None, imports: Imports) -> Expression:
    if graph.loss is None or not plan.training:
        return name("None")
    items = [
        quoted(graph.loss.value),
        name(f"Reduction.{graph.loss.reduction.name}"),
        name(f"separate={has_separate_loss(plan, graph)}"),
    ]
    if weight is not None:
        items.append(_weight(weight).prefixed("weight="))
    if graph.loss.terms:
        terms = [call("LossTerm", _term(term, imports)) for term in graph.loss.terms]
        items.append(tuple_of(terms, exploded=True).prefixed("terms="))
    else:
        items += _guard(graph.loss.weight, imports)
    return call("LossSpec", items)


def _term(term: LossTerm, imports: Imports) -> list[Expression]:
    items = [name(f"Reduction.{term.reduction.name}")]
    if term.weight is not None:
        items.append(name("counted=True"))
    return items + _guard(term.weight, imports)


def _guard(weight: LossWeight | None, imports: Imports) -> list[Expression]:
    items = []
    if weight is not None and weight.floor > -math.inf:
        items.append(write_literal(weight.floor, imports).prefixed("floor="))
    if weight is not None and weight.offset:
        items.append(write_literal(weight.offset, imports).prefixed("offset="))
    return items


def _weight(weight: WeightSource) -> Expression:
    options = {
        "module": name(f"{loss_weight.MODULE}.{loss_weight.CLASS}"),
        "inputs": quoted_all(weight.inputs),
        "outputs": quoted_all(weight.outputs),
    }
    if weight.renamed:
        options["renamed"] = name(f"{loss_weight.MODULE}.RENAMED")
    if weight.initial:
        options["initial"] = name(f"{loss_weight.MODULE}.INITIAL")
    return call_with("StageSpec", options, exploded=True)


def number_tuple(numbers: Sequence[int]) -> Expression:
    """Numbers as a tuple, long runs of them as ranges."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts: list[Expression] = []
    for run in runs:
        if len(run) > 3:
            start = f"{run[0]}, " if run[0] else ""
            parts.append(name(f"*range({start}{run[-1] + 1})"))
        else:
            parts.extend(name(str(number)) for number in run)
    if len(parts) == 1 and parts[0].flat.startswith("*"):
        return call("tuple", [name(parts[0].flat[1:])])
    return tuple_of(parts)


def call_with(callee: str, options: dict[str, Expression], *, exploded: bool) -> Expression:
    """A call with keyword arguments."""
    items = [value.prefixed(f"{key}=") for key, value in options.items()]
    return call(callee, items, exploded=exploded)


def one_a_line(items: Iterable[Item], write: Callable[[Item], Expression]) -> Expression:
    """A tuple with one item a line."""
    written = [write(item) for item in items]
    return tuple_of(written, exploded=len(written) > 1)


def quoted(text: str) -> Expression:
    """A text as a literal."""
    return name(quote(text))


def quoted_all(texts: Iterable[str]) -> Expression:
    """A tuple of texts."""
    return tuple_of([quoted(text) for text in texts])
