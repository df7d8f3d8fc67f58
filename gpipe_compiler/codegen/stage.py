"""One stage of a plan as the source of one nn.Module."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpipe_compiler.codegen.blocks import StageBlocks, StageMethods
from gpipe_compiler.codegen.body import write_body
from gpipe_compiler.codegen.constants import quote
from gpipe_compiler.codegen.construction import buffer_types
from gpipe_compiler.codegen.constructors import outermost, renamed_table, state_of
from gpipe_compiler.codegen.expressions import ExpressionWriter, grouped
from gpipe_compiler.codegen.facts import CodeFacts, Randoms
from gpipe_compiler.codegen.found_blocks import find_stage_blocks, write_blocks
from gpipe_compiler.codegen.initial import initial_lines, initial_steps
from gpipe_compiler.codegen.layout import WIDTH, lay_out, name, tuple_of
from gpipe_compiler.codegen.method_text import MethodBody, docstring, method_text
from gpipe_compiler.codegen.methods import (
    Method,
    forward_method,
    loss_method,
    modules_run_again,
    segments_lines,
    split_off,
    unpacked,
)
from gpipe_compiler.codegen.module_tree import OF_STAGE
from gpipe_compiler.codegen.parameter_names import loss_names
from gpipe_compiler.codegen.statements import call_path, value_text, where
from gpipe_compiler.codegen.templating import render
from gpipe_compiler.codegen.value_names import names_apart
from gpipe_compiler.ir import Graph, Op
from gpipe_compiler.ir.blocks import BlockCall
from gpipe_compiler.ir.contents import prefixes
from gpipe_compiler.ir.ops import autocasts
from gpipe_compiler.plan import Plan, Stage
from gpipe_compiler.runtime.spec import Steps
from gpipe_compiler.runtime.wording import listed

FORWARD, LOSS = "forward", "loss"
"""The methods of a stage that the engine calls."""


@dataclass(frozen=True)
class StageSource:
    """A stage module, and what `schedule.py` says about it.

    Attributes:
        inputs, outputs, loss_inputs: values in the order of arguments and results.
        state: the stage's own state names to the canonical ones of the model.
        renamed: whether some of the former are no names of the model.
        random_ops: the random aten ops that it runs in training.
        random_in_eval: those that it runs in eval mode.
        initial: by the model's names, how the state of a model without weights begins.
        writes: the stage's own names of the buffers that training writes to, or of modules for
            all their buffers.
        once: the same of those that a forward writes to without looking at samples.
        segments: of the methods that run again in the backward, the buffers of `writes` that each
            reads or writes.
        mixes: whether samples meet in it.
        autocasts: whether the model itself runs some of its ops under autocast.
    """

    index: int
    class_name: str
    text: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    loss_inputs: tuple[str, ...]
    state: Mapping[str, str]
    renamed: bool
    random_ops: Randoms
    random_in_eval: Randoms
    initial: Mapping[str, Steps]
    writes: tuple[str, ...] = ()
    once: tuple[str, ...] = ()
    mixes: bool = False
    autocasts: bool = False
    segments: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def has_separate_loss(plan: Plan, graph: Graph) -> bool:
    """Whether the loss is computed by the last stage's `loss`, and not by a `forward`."""
    if not plan.training or graph.loss is None:
        return False
    maker = graph.producer.get(graph.loss.value)
    return maker is not None and maker.name in graph.loss_only


@dataclass(frozen=True)
class Sources:
    """The stages of a package, and `layers.py`: the classes that several have, "" for none."""

    stages: tuple[StageSource, ...]
    layers: str


def write_stages(plan: Plan, facts: CodeFacts, stages: Sequence[Stage] | None = None) -> Sources:
    """The source of stages, all of the plan unless some are given; one alone imports no other file.

    Raises:
        EmitError: naming the user's line, when something in it has no spelling.
    """
    names = names_apart(facts.graph, ((one.inputs, one.outputs) for one in plan.stages))
    chosen = stages or plan.stages
    again: dict[int, frozenset[str] | None] = dict.fromkeys(stage.index for stage in chosen)
    found: tuple[StageBlocks, ...] = ()
    while not found or any(one.own.again != one.again for one in found):
        again |= {one.own.stage.index: one.again for one in found}
        drafts = (_draft(plan, facts, stage, names, again[stage.index]) for stage in chosen)
        found = find_stage_blocks(facts, drafts)
    layers = write_blocks(found)
    before: dict[str, str] = {}
    sources = tuple(_source(plan, blocks, before) for blocks in found)
    if not layers.classes:
        return Sources(sources, "")
    text = render(
        "layers.py.jinja", name=plan.name, imports=layers.imports.lines(), blocks=layers.classes
    )
    return Sources(sources, text)


def _draft(
    plan: Plan,
    facts: CodeFacts,
    stage: Stage,
    names: Mapping[str, str],
    again: frozenset[str] | None,
) -> StageMethods:
    """What a stage is to do.

    Args:
        names: what values are called in all stages.
        again: the modules that run again where they are called; None for all that may.
    """
    graph = facts.graph
    separate = has_separate_loss(plan, graph) and stage.index == len(plan.stages) - 1
    outputs = _outputs(plan, graph, stage)
    whole = replace(forward_method(facts, stage, outputs), names=names)
    losses = (_loss(facts, stage, outputs, names),) if separate else ()
    ops = tuple(op for method in (whole, *losses) for op in method.ops)
    state = state_of(graph, ops, stage.state, methods=(LOSS,) if losses else ())
    if again is None:
        again = modules_run_again(facts, stage, whole)
    taken = OF_STAGE | state.attributes
    forward, segments = split_off(facts, stage, whole, taken, again)
    methods = {FORWARD: forward, **segments}
    return StageMethods(stage, state, ops, outputs, methods, losses, again)


def _run_again(own: StageMethods) -> dict[str, list[Op]]:
    """The ops of each segment, by the path of its module or the name of its method."""
    _, *methods = own.methods.items()
    found = {label: list(method.ops) for label, method in methods}
    for op in own.ops:
        for path in own.again.intersection(prefixes(op.path)):
            found.setdefault(path, []).append(op)
    return found


def _source(plan: Plan, blocks: StageBlocks, before: dict[str, str]) -> StageSource:
    """The source of a stage, whose blocks are written.

    Args:
        before: what the stages before call what they return, to which this one's are added.
    """
    facts, own = blocks.facts, blocks.own
    graph, stage, state = facts.graph, own.stage, own.state
    imports = blocks.file.imports
    imports.name("torch", "nn")
    methods = _methods(plan, blocks, before)
    buffers = _buffers(graph, state.originals)
    changed: tuple[str, ...] = ()
    if plan.training:
        changed = _written(facts, own.ops, buffers, facts.effects.written_states)
    writes = outermost(changed, buffers)
    once = outermost(_written(facts, own.ops, buffers, facts.once), buffers)
    held: dict[str, tuple[str, ...]] = {}
    for label, ops in _run_again(own).items():
        touched = {name for op in ops for name in facts.effects.states_of(graph, op)}
        held[label] = outermost([name for name in changed if buffers[name] in touched], buffers)
    initial = initial_steps(graph, state.originals.values())
    initial_text = initial_lines(initial, state.originals.values(), imports)
    constructor = blocks.construction(blocks.file).lines(state.root)
    registered = buffer_types(state.root, imports)
    text = render(
        "stage.py.jinja",
        title=_title(plan, stage, own.ops),
        imports=imports.lines(),
        blocks=blocks.file.classes,
        class_name=own.class_name,
        base=state.root.cls.__name__,
        buffers=registered,
        constructor=constructor,
        methods=methods,
        renamed=renamed_table(state),
        writes=_names_lines("WRITES", writes),
        once=_names_lines("ONCE", once),
        segments=segments_lines(held),
        initial=initial_text,
    )
    return StageSource(
        index=stage.index,
        class_name=own.class_name,
        text=text,
        inputs=own.methods[FORWARD].arguments,
        outputs=own.outputs,
        loss_inputs=own.losses[0].arguments if own.losses else (),
        state=state.originals,
        renamed=bool(state.renamed),
        random_ops=facts.random_ops(own.ops, training=True),
        random_in_eval=facts.random_ops(own.ops, training=False),
        initial=initial,
        writes=writes,
        once=once,
        mixes=plan.training and any(op.name in facts.mixing for op in own.ops),
        autocasts=any(map(autocasts, own.ops)),
        segments=held,
    )


def _methods(plan: Plan, blocks: StageBlocks, before: dict[str, str]) -> list[list[str]]:
    graph, own, imports = blocks.facts.graph, blocks.own, blocks.file.imports
    called = _called(blocks)
    for method in own.losses:
        blocks.peaks.method(BlockCall("", method.ops, method.arguments, method.returns))
        called[LOSS] = method
    if any(method.arguments or method.returns for method in called.values()):
        imports.name("torch", "Tensor")
    found = []
    for label, method in called.items():
        modules = {**own.state.modules, **blocks.places}
        writer = ExpressionWriter(imports, own.state.places, modules)
        body = write_body(graph, replace(method, before=before), writer, blocks.worth)
        if label == FORWARD:
            pairs = zip(grouped(method.returns, body.lists), body.returns, strict=True)
            before |= {v: own for (v, *more), own in pairs if own.isidentifier() and not more}
        described = docstring(*_described(plan, graph, own.stage, label, method, body))
        found.append(method_text(graph, label, method, body, imports, described))
    return found


def _called(blocks: StageBlocks) -> dict[str, Method]:
    """`forward` and the segments, by name, with calls of blocks; these read sizes for themselves,
    so that no segment returns any for them."""
    (_, forward), *segments = blocks.own.methods.items()
    forward = blocks.with_calls(0, forward)
    read = {value for op in forward.ops for value in op.inputs}.union(forward.returns)
    found: dict[str, Method] = {}
    for index, (label, method) in enumerate(segments, 1):
        returns = tuple(value for value in method.returns if value in read)
        found[label] = blocks.with_calls(index, replace(method, returns=returns or method.returns))
    results = {label: unpacked(method.returns) for label, method in found.items()}
    ops = (replace(op, result=results.get(op.name, op.result)) for op in forward.ops)
    return {FORWARD: replace(forward, ops=tuple(ops)), **found}


def _buffers(graph: Graph, own: Mapping[str, str]) -> dict[str, str]:
    """The buffers, constants and frozen parameters of a stage: its own names to the model's."""
    state = graph.state
    trained = {name for name, known in state.items() if known.requires_grad}
    return {o: model for o, model in own.items() if model not in trained}


def _written(
    facts: CodeFacts, ops: Sequence[Op], buffers: Mapping[str, str], among: Collection[str]
) -> tuple[str, ...]:
    """The buffers among some states, by a stage's own names, that its ops write to."""
    written = {name for op in ops for name in facts.effects.state_writes.get(op.name, ())}
    return tuple(own for own, model in buffers.items() if model in written and model in among)


def _names_lines(table: str, owns: Sequence[str]) -> list[str]:
    if not owns:
        return []
    names = [name(quote(own)) for own in owns]
    return lay_out(tuple_of(names, exploded=len(names) > 1), prefix=f"{table} = ")


def _loss(
    facts: CodeFacts, stage: Stage, outputs: Sequence[str], names: Mapping[str, str]
) -> Method:
    own, graph = loss_method(facts, stage, outputs), facts.graph
    ops = [graph.op_of[name] for name in stage.ops if name in graph.loss_only]
    return replace(own, names={**names, **loss_names(ops, own.arguments)})


def _outputs(plan: Plan, graph: Graph, stage: Stage) -> tuple[str, ...]:
    """What `forward` returns: never the loss where `loss` makes it, always where it does not."""
    names = list(stage.outputs)
    loss = graph.loss.value if graph.loss is not None else None
    if loss is None:
        return tuple(names)
    maker = graph.producer.get(loss)
    if maker is not None and maker.name in graph.loss_only:
        return tuple(value for value in names if value != loss)
    made_here = maker is not None and maker.name in stage.ops
    if plan.training and made_here and loss not in names:
        names.append(loss)
    return tuple(names)


def _title(plan: Plan, stage: Stage, ops: Sequence[Op]) -> str:
    text = (
        f"Stage {stage.index} of {plan.name}, the {_ordinal(stage.index + 1)} of {len(plan.stages)}"
    )
    spans = list(dict.fromkeys(op.path for op in ops if op.path))
    if not spans:
        return f"{text}."
    span = spans[0] if len(spans) == 1 else f"{spans[0]} to {spans[-1]}"
    full = f"{text}: {span}."
    if len(full) <= WIDTH - 6:
        return full
    span = f"From {span}."
    return f"{text}.\n\n{span if len(span) <= WIDTH else span.replace(' to ', chr(10) + 'to ')}\n"


def _ordinal(number: int) -> str:
    suffix = (
        "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    )
    return f"{number}{suffix}"


def _described(
    plan: Plan, graph: Graph, stage: Stage, label: str, method: Method, body: MethodBody
) -> tuple[str, list[str], list[str]]:
    """What a method does, and what its arguments and its results are."""
    if label not in (LOSS, FORWARD):
        return "Runs again in the backward; only arguments are kept.", [], []
    arguments = _argument_lines(graph, plan, stage, method, body, inside=label == LOSS)
    if label == FORWARD:
        summary = "One micro-batch of B samples; sizes in comments are for it."
        return summary, arguments, _return_lines(graph, plan, stage, method, body)
    if len(method.returns) == 1:
        return "The loss of one micro-batch.", arguments, []
    summary = "The terms of the loss of one micro-batch, each a sum or a mean by itself."
    return summary, arguments, []


def _argument_lines(
    graph: Graph, plan: Plan, stage: Stage, method: Method, body: MethodBody, *, inside: bool
) -> list[str]:
    inputs = {source.name: source for source in graph.inputs}
    source_stage = {crossing.value: crossing.source for crossing in plan.crossings}
    entries = []
    for value, argument in zip(method.arguments, body.arguments, strict=True):
        if value in inputs:
            origin = call_path(inputs[value].path)
        elif inside and value in stage.outputs:
            origin = "what forward returned"
        else:
            place = where(graph.producer[value].source)
            origin = f"from stage {source_stage.get(value, stage.index)}"
            origin += f", made at {place}" if place else ""
        entries.append(f"{argument}: {value_text(graph, value)}, {origin}.")
    return entries


def _return_lines(
    graph: Graph, plan: Plan, stage: Stage, method: Method, body: MethodBody
) -> list[str]:
    targets = {
        crossing.value: crossing.targets
        for crossing in plan.crossings
        if crossing.source == stage.index
    }
    entries = []
    groups = grouped(method.returns, body.lists)
    for group, expression in zip(groups, body.returns, strict=True):
        variable, _, condition = expression.partition(" if ")
        crossed = dict.fromkeys(target for value in group for target in targets.get(value, ()))
        users = [f"stage {target}" for target in crossed]
        if not set(group).isdisjoint(graph.output_values):
            users.append("the caller")
        if graph.loss is not None and graph.loss.value in group:
            users.append("the loss")
        use = f", for {listed(users)}" if users else ""
        if condition:
            use += ", in one mode alone"
        texts = [*dict.fromkeys(value_text(graph, value) for value in group)]
        each = f"{len(group)} of " if len(texts) == 1 < len(group) else ""
        entries.append(f"{variable}: {each}{'; '.join(texts)}{use}.")
    return entries
