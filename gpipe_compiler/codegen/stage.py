"""One stage of a plan as the source of one nn.Module."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpipe_compiler.codegen.blocks import StageBlocks, StageMethods
from gpipe_compiler.codegen.body import write_body
from gpipe_compiler.codegen.constants import quote
from gpipe_compiler.codegen.construction import buffer_types
from gpipe_compiler.codegen.constructors import renamed_table, state_of
from gpipe_compiler.codegen.expressions import ExpressionWriter
from gpipe_compiler.codegen.facts import CodeFacts, Randoms
from gpipe_compiler.codegen.found_blocks import FoundBlocks, write_blocks
from gpipe_compiler.codegen.imports import Imports
from gpipe_compiler.codegen.initial import initial_lines, initial_steps
from gpipe_compiler.codegen.layout import WIDTH, lay_out, name, tuple_of
from gpipe_compiler.codegen.method_text import MethodBody, docstring, method_text
from gpipe_compiler.codegen.methods import Method, forward_method, loss_method
from gpipe_compiler.codegen.nested import OF_STAGE, outermost
from gpipe_compiler.codegen.segments import modules_run_again, path_of, segments_lines, split_off
from gpipe_compiler.codegen.statements import call_path, value_text, where
from gpipe_compiler.codegen.templating import render
from gpipe_compiler.codegen.value_names import names_apart
from gpipe_compiler.ir import Graph, Op
from gpipe_compiler.ir.blocks import BlockCall
from gpipe_compiler.ir.contents import prefixes
from gpipe_compiler.plan import Plan, Stage
from gpipe_compiler.runtime.spec import Steps
from gpipe_compiler.runtime.wording import listed

FORWARD, LOSS = "forward", "loss"
"""The methods of a stage that the engine calls."""


@dataclass(frozen=True)
class StageSource:
    """A stage module, and what `schedule.py` says about it.

    Attributes:
        text: the source of `stage_<index>.py`.
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
    names = names_apart(facts.graph, ((*one.inputs, *one.outputs) for one in plan.stages))
    drafts = [_Draft.of(plan, facts, stage, names) for stage in (stages or plan.stages)]
    found = FoundBlocks.of(facts, (draft.own for draft in drafts))
    while any(draft.own.again != found.again(place) for place, draft in enumerate(drafts)):
        drafts = [
            _Draft.of(plan, facts, draft.own.stage, names, found.again(place))
            for place, draft in enumerate(drafts)
        ]
        found = FoundBlocks.of(facts, (draft.own for draft in drafts))
    blocks, layers = write_blocks(facts, found)
    sources = tuple(
        draft.source(plan, facts, own) for draft, own in zip(drafts, blocks, strict=True)
    )
    if not layers.classes:
        return Sources(sources, "")
    text = render(
        "layers.py.jinja", name=plan.name, imports=layers.imports.lines(), blocks=layers.classes
    )
    return Sources(sources, text)


@dataclass(frozen=True)
class _Draft:
    """What a stage is to do.

    Attributes:
        ops: all, those of the loss included.
        losses: `loss`, where the stage has it.
    """

    own: StageMethods
    ops: tuple[Op, ...]
    outputs: tuple[str, ...]
    losses: tuple[Method, ...]

    @classmethod
    def of(
        cls,
        plan: Plan,
        facts: CodeFacts,
        stage: Stage,
        names: Mapping[str, str],
        again: frozenset[str] | None = None,
    ) -> _Draft:
        """A stage.

        Args:
            names: what values are called in all stages.
            again: the modules that run again where they are called; all that may unless given.
        """
        graph = facts.graph
        separate = has_separate_loss(plan, graph) and stage.index == len(plan.stages) - 1
        outputs = _outputs(plan, graph, stage)
        whole = replace(forward_method(facts, stage, outputs), names=names)
        losses = (replace(loss_method(facts, stage, outputs), names=names),) if separate else ()
        ops = tuple(op for method in (whole, *losses) for op in method.ops)
        state = state_of(graph, ops, stage.state, methods=(LOSS,) if losses else ())
        if again is None:
            again = modules_run_again(facts, stage, whole)
        taken = OF_STAGE | state.attributes
        forward, segments = split_off(facts, stage, whole, taken, again)
        methods = {FORWARD: forward, **segments}
        own = StageMethods(stage, f"Stage{stage.index}", state, methods, again)
        return cls(own, ops, outputs, losses)

    @property
    def run_again(self) -> dict[str, list[Op]]:
        """The ops of each segment, by the path of its module or the name of its method."""
        _, *methods = self.own.methods.items()
        found = {label: list(method.ops) for label, method in methods}
        for op in self.ops:
            for path in self.own.again.intersection(prefixes(path_of(op))):
                found.setdefault(path, []).append(op)
        return found

    def source(self, plan: Plan, facts: CodeFacts, blocks: StageBlocks) -> StageSource:
        graph, own, stage, state = facts.graph, self.own, self.own.stage, self.own.state
        imports = blocks.file.imports
        imports.name("torch", "nn")
        written = _bodies(blocks, own.methods, self.losses)
        buffers = _buffers(graph, state.originals)
        changed: tuple[str, ...] = ()
        if plan.training:
            changed = _written(facts, self.ops, buffers, facts.effects.written_states)
        writes = outermost(changed, buffers)
        once = outermost(_written(facts, self.ops, buffers, facts.once), buffers)
        held: dict[str, tuple[str, ...]] = {}
        for label, ops in self.run_again.items():
            touched = {name for op in ops for name in facts.effects.states_of(graph, op)}
            held[label] = outermost([own for own in changed if buffers[own] in touched], buffers)
        initial = initial_steps(graph, state.originals.values())
        initial_text = initial_lines(initial, state.originals.values(), imports)
        constructor = blocks.construction(blocks.file).lines(state.root)
        registered = buffer_types(state.root, imports)
        methods = [_method_lines(plan, graph, stage, item, imports) for item in written]
        text = render(
            "stage.py.jinja",
            title=_title(plan, stage, self.ops),
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
            outputs=self.outputs,
            loss_inputs=self.losses[0].arguments if self.losses else (),
            state=state.originals,
            renamed=bool(state.renamed),
            random_ops=facts.random_ops(self.ops, training=True),
            random_in_eval=facts.random_ops(self.ops, training=False),
            initial=initial,
            writes=writes,
            once=once,
            mixes=plan.training and any(op.name in facts.mixing for op in self.ops),
            segments=held,
        )


def _bodies(
    blocks: StageBlocks, methods: Mapping[str, Method], losses: Sequence[Method]
) -> list[_Written]:
    """The methods of a stage, with calls of blocks in all but the loss."""
    called = {
        label: blocks.with_calls(index, method)
        for index, (label, method) in enumerate(methods.items())
    }
    for method in losses:
        blocks.peaks.method(BlockCall("", method.ops, method.arguments, method.returns))
        called[LOSS] = method
    imports, state = blocks.file.imports, blocks.own.state
    if any(method.arguments or method.returns for method in called.values()):
        imports.name("torch", "Tensor")
    written = []
    for label, method in called.items():
        writer = ExpressionWriter(imports, state.places, {**state.modules, **blocks.places})
        body = write_body(blocks.facts.graph, method, writer, blocks.peaks.worth)
        written.append(_Written(label, method, body))
    return written


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


@dataclass(frozen=True, slots=True)
class _Written:
    label: str
    method: Method
    body: MethodBody


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
    """The docstring of the file."""
    text = (
        f"Stage {stage.index} of {plan.name}, the {_ordinal(stage.index + 1)} of {len(plan.stages)}"
    )
    spans = list(dict.fromkeys(path for op in ops if (path := path_of(op))))
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


def _method_lines(
    plan: Plan, graph: Graph, stage: Stage, written: _Written, imports: Imports
) -> list[str]:
    label, method, body = written.label, written.method, written.body
    match label:
        case _ if label == LOSS:
            described = docstring(
                "The loss of one micro-batch."
                if len(method.returns) == 1
                else "The terms of the loss of one micro-batch, each a sum or a mean by itself.",
                _argument_lines(graph, plan, stage, written, inside=True),
                [],
            )
        case _ if label == FORWARD:
            described = docstring(
                "One micro-batch of B samples; sizes in comments are for it.",
                _argument_lines(graph, plan, stage, written, inside=False),
                _return_lines(graph, plan, stage, written),
            )
        case _:
            described = docstring("Runs again in the backward; only arguments are kept.", [], [])
    return method_text(graph, label, method, body, imports, described)


def _argument_lines(
    graph: Graph, plan: Plan, stage: Stage, written: _Written, *, inside: bool
) -> list[str]:
    """What every argument is and where it comes from."""
    inputs = {source.name: source for source in graph.inputs}
    source_stage = {crossing.value: crossing.source for crossing in plan.crossings}
    entries = []
    for value, argument in zip(written.method.arguments, written.body.arguments, strict=True):
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


def _return_lines(graph: Graph, plan: Plan, stage: Stage, written: _Written) -> list[str]:
    targets = {
        crossing.value: crossing.targets
        for crossing in plan.crossings
        if crossing.source == stage.index
    }
    entries = []
    for value, expression in zip(written.method.returns, written.body.returns, strict=True):
        variable, _, condition = expression.partition(" if ")
        users = [f"stage {target}" for target in targets.get(value, ())]
        if value in graph.output_values:
            users.append("the caller")
        if graph.loss is not None and value == graph.loss.value:
            users.append("the loss")
        use = f", for {listed(users)}" if users else ""
        if condition:
            use += ", in one mode alone"
        entries.append(f"{variable}: {value_text(graph, value)}{use}.")
    return entries
