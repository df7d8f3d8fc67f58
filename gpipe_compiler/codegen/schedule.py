"""`schedule.py`: the plan as a PipelineSpec, with a drawing of who works when."""

from __future__ import annotations

import dataclasses
import itertools
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from gpipe_compiler.codegen import loss_weight
from gpipe_compiler.codegen.expressions import RawText
from gpipe_compiler.codegen.imports import Imports
from gpipe_compiler.codegen.layout import WIDTH, Expression, lay_out
from gpipe_compiler.codegen.loss_weight import WeightSource
from gpipe_compiler.codegen.records import RecordWriter
from gpipe_compiler.codegen.stage import StageSource, has_separate_loss
from gpipe_compiler.codegen.templating import render
from gpipe_compiler.errors import EmitError
from gpipe_compiler.frontend.own_statements import UnwritableError
from gpipe_compiler.ir import Argument, Graph, Ref, StateKind, StateRef
from gpipe_compiler.ir.arguments import choices, map_argument
from gpipe_compiler.ir.branches import required_lines
from gpipe_compiler.ir.contents import prefixes
from gpipe_compiler.ir.sizes import UNKNOWN_LINE, SampleRule, at_batch
from gpipe_compiler.passes.atoms import types_left_open
from gpipe_compiler.passes.batch_rules import taken_together, takes_several
from gpipe_compiler.passes.free_sizes import required
from gpipe_compiler.passes.joined_outputs import joined_outputs
from gpipe_compiler.passes.loss_divisors import per_sample
from gpipe_compiler.plan import Plan
from gpipe_compiler.runtime.core.calls import registered_names
from gpipe_compiler.runtime.limits import NO_GROUP
from gpipe_compiler.runtime.schedule import Joint
from gpipe_compiler.runtime.schedule.actions import Orders, Phase, format_order, split_stages
from gpipe_compiler.runtime.schedule.clock import Needs, needs_of, timeline
from gpipe_compiler.runtime.spec import (
    Carried,
    Joined,
    Leaf,
    LossSpec,
    LossTerm,
    PipelineSpec,
    Precision,
    Remat,
    SampleGroup,
    SampleLimit,
    StageSpec,
)


def write_schedule(
    plan: Plan, graph: Graph, stages: Sequence[StageSource], weight: WeightSource | None
) -> str:
    """The source of `schedule.py`.

    Args:
        weight: of the loss; None for a mean over samples, or a sum.

    Raises:
        EmitError: when the structure of the outputs cannot be written down.
    """
    records = RecordWriter(Imports(), ".runtime.spec")
    spec = _pipeline(plan, graph, stages, weight, records)
    sizes = [line for size in graph.sizes for line in records.size(size)]
    return schedule_text(plan, spec, records.imports, kind=plan.schedule.value, sizes=sizes)


def schedule_text(
    plan: Plan, spec: Expression, imports: Imports, *, kind: str, sizes: Sequence[str] = ()
) -> str:
    """The source of a `schedule.py`: a drawing of the plan's orders, the orders, and a spec.

    Args:
        kind: of the schedule, in words.
        sizes: the lines that name the sizes which are free.
    """
    orders, wrapped = _orders(plan)
    return render(
        "schedule.py.jinja",
        name=plan.name,
        stages=len(plan.stages),
        microbatches=plan.microbatches,
        kind=kind,
        legend=[*_legend(plan), *_together(plan)],
        drawing=_drawing(plan),
        imports=imports.lines(),
        orders=orders,
        wrapped=wrapped,
        sizes=sizes,
        spec=lay_out(spec, prefix="SPEC = "),
    )


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
    records: RecordWriter,
) -> Expression:
    """The spec; what the modules of the stages define stands in it by name."""
    asked = [item for item in graph.inputs if plan.training or item.path[0] != "target"]
    known = [item.shape is not None and item.dtype is not None for item in asked]
    pairs = zip(stages, plan.stages, strict=True)
    aliases = {
        alias: state.name
        for state in graph.state.values()
        if state.kind is not StateKind.CONSTANT
        for alias in state.aliases
    }
    values = {
        "name": plan.name,
        "stages": tuple(_stage(stage, planned.remat, records) for stage, planned in pairs),
        "inputs": tuple(
            item if whole else dataclasses.replace(item, shape=None, dtype=None)
            for item, whole in zip(asked, known, strict=True)
        ),
        "crossings": plan.crossings,
        "outputs": _outputs(graph),
        "loss": _loss(plan, graph, weight, records),
        "schedule": plan.schedule,
        "microbatches": plan.microbatches,
        "microbatch_size": plan.microbatch_size,
        "orders": RawText("ORDERS"),
        "placement": _unless_in_order(plan.placement, len(stages)),
        "device_order": _unless_in_order(plan.slots, len(plan.orders)),
        "aliases": aliases,
        "reordered": tuple(reordered(graph, [stage.state.values() for stage in stages], aliases)),
        "batchnorm": plan.batchnorm,
        "precision": plan.precision,
        "replicas": plan.replicas,
        "sharding": plan.sharding,
        "unlike": {**_open_types(plan, graph), **graph.unlike},
        "whole_batch": graph.whole_batch,
        "requires": required(graph),
        "alone": {training: where(rule) for training, rule in graph.alone.items()},
        "fused": graph.fused,
        "packs": graph.packs,
        "several": takes_several(graph),
        "group": _group(graph),
        "limits": tuple(sample_limits(graph)),
        "left_out": graph.left_out,
        "decides": bool(required_lines(graph.ops)),
        "classes": graph.classes,
        "given": graph.given,
        "carried": tuple(_carried(graph)),
    }
    try:
        return records.record(PipelineSpec, values)
    except UnwritableError as error:
        raise EmitError(f"the model's outputs cannot be written down: {error}") from error


def reordered(
    graph: Graph, stages: Iterable[Iterable[str]], aliases: Mapping[str, str]
) -> Iterator[str]:
    """The members of modules that stand otherwise stage by stage than in the model, in its order.

    So `parameters()` of a pipeline gives them as the model does.

    Args:
        stages: the names of the tensors of each, in the order of its modules.
        aliases: further names of tied tensors to these.
    """
    held = dict.fromkeys(itertools.chain.from_iterable(stages))
    found: dict[tuple[str, StateKind | None], dict[str, None]] = {}
    for name in registered_names(held, aliases):
        for path in prefixes(name):
            kind = graph.state[name].kind if path in graph.state else None
            found.setdefault((path.rpartition(".")[0], kind), {})[path] = None
    for members in found.values():
        known = [path for path in members if path in graph.registered]
        in_order = sorted(known, key=graph.registered.__getitem__)
        if known != in_order:
            yield from in_order


def _carried(graph: Graph) -> Iterator[Carried]:
    for past, place in graph.carried:
        value = graph.values[graph.presents[past]]
        shape = tuple(at_batch(dim, graph.batch_size) for dim in value.dims)
        yield Carried(past, value.name, place, shape)


def sample_limits(graph: Graph) -> Iterator[SampleLimit]:
    """Of the samples in a mini-batch, below the rules for which none was tried."""
    for rule, in_pieces in ((graph.untried, False), (graph.untried_in_pieces, True)):
        if rule is not None:
            yield SampleLimit(rule.samples - 1, where(rule), in_pieces)


def _group(graph: Graph) -> SampleGroup:
    rule = taken_together(graph)
    if rule.samples == 1:
        return NO_GROUP
    alone = taken_together(graph, by_loss=False).samples == 1
    return SampleGroup(rule.samples, where(rule), in_loss=alone)


def where(rule: SampleRule) -> str:
    """The line of a rule, in words."""
    return UNKNOWN_LINE if rule.source is None else rule.source.brief


def _unless_in_order(numbers: tuple[int, ...], count: int) -> tuple[int, ...]:
    return () if numbers == tuple(range(count)) else numbers


def _stage(stage: StageSource, remat: Remat, records: RecordWriter) -> Expression:
    values = {
        "inputs": stage.inputs,
        "outputs": stage.outputs,
        "loss_inputs": stage.loss_inputs,
        "random_ops": stage.random_ops.numbers,
        "random_in_eval": stage.random_in_eval.numbers,
        "shared_random": stage.random_ops.shared,
        "shared_in_eval": stage.random_in_eval.shared,
        "mixes": stage.mixes,
        "autocasts": stage.autocasts,
        "remat": remat,
    }
    return _module(f"stage_{stage.index}", stage.class_name, stage, values, records)


def _module(
    file: str,
    class_name: str,
    source: StageSource | WeightSource,
    values: Mapping[str, object],
    records: RecordWriter,
) -> Expression:
    """A `StageSpec`, with what the file of its module says by name."""
    tables = {
        table: RawText(f"{file}.{table.upper()}")
        for table in ("renamed", "initial", "writes", "once", "segments")
        if getattr(source, table, None)
    }
    records.imports.name(".", file)
    module = RawText(f"{file}.{class_name}")
    return records.record(StageSpec, {"module": module, **values, **tables})


def _open_types(plan: Plan, graph: Graph) -> dict[Precision, str]:
    """The precisions in which stages would be sent another type where layers are left out."""
    sent = {crossing.value for crossing in plan.crossings}
    others = (other for other in Precision if other not in (*graph.unlike, plan.precision))
    return {
        other: "where it leaves layers out, values of another type are sent"
        for other in others
        if not sent.isdisjoint(types_left_open(graph, other))
    }


def _outputs(graph: Graph) -> Argument:
    """The structure of the outputs with a `Leaf` at every tensor."""
    joined = joined_outputs(graph) if graph.values else {}

    def leaf(item: object) -> object:
        match item:
            case Ref(name=value):
                known = graph.values.get(value)
                batch_dim = 0 if known is None else known.batch_dim
                terms = graph.output_terms.get(value, ())
                return Leaf(value, batch_dim, joined.get(value, Joined.SAME), terms)
            case StateRef(name=value):
                raise EmitError(
                    f"the model returns {value} itself, a tensor that no stage makes",
                    hint="return a copy of it (.clone()), or take it from the package: "
                    f"Pipeline().state_dict()[{value!r}]",
                )
            case _:
                return item

    if any(choices(graph.outputs)):
        raise EmitError(
            "the model returns one thing in train mode and another in eval mode",
            hint="return the same structure in both modes, or compile with --mode infer",
        )
    return map_argument(leaf, graph.outputs)


def _loss(
    plan: Plan, graph: Graph, weight: WeightSource | None, records: RecordWriter
) -> LossSpec | None:
    if graph.loss is None or not plan.training:
        return None
    terms = []
    for term in graph.loss.summands:
        made = LossTerm(term.reduction, per_sample=per_sample(graph, term))
        if (by := term.weight) is not None:
            made = dataclasses.replace(made, counted=True, floor=by.floor, offset=by.offset)
            made = dataclasses.replace(made, above=by.above, least=by.least)
        terms.append(made)
    counted: Any = None
    if weight is not None:
        values = {"inputs": weight.inputs, "outputs": weight.outputs}
        counted = _module(loss_weight.MODULE, loss_weight.CLASS, weight, values, records)
    loss, separate = graph.loss, has_separate_loss(plan, graph)
    return LossSpec(loss.value, tuple(terms), separate, counted, loss.over_batch, loss.returned)


# --- the drawing ---------------------------------------------------------------------------------


def diagram(orders: Orders, needs: Needs) -> str:
    """A drawing with one column per unit of time.

    Forwards and backwards take one each, and so do both parts of a backward in two parts. A cell
    shows phase and micro-batch, after the stage where devices hold several.
    """
    split = bool(split_stages(orders))
    several = any(len({action.stage for action in order}) > 1 for order in orders)
    rows: list[dict[int, str]] = [{} for _ in orders]
    for timed in timeline(orders, needs, forward=1, backward=2 if split else 1, weight=1):
        action = timed.action
        text = str(action) if several else f"{action.phase.value}{action.microbatch}"
        rows[timed.device][int(timed.start)] = text
    width = max((len(cell) for row in rows for cell in row.values()), default=1) + 1
    lines = []
    for device, row in enumerate(rows):
        cells = [row.get(time, ".").ljust(width) for time in range(max(row, default=-1) + 1)]
        lines.append(f"device {device} | {''.join(cells)}".rstrip())
    return "\n".join(lines)
