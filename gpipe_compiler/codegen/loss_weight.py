"""`loss_weight.py`: the module that counts what the mean of the loss is taken over."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpipe_compiler.codegen.body import write_body
from gpipe_compiler.codegen.construction import Construction, SourceFile, buffer_types
from gpipe_compiler.codegen.constructors import renamed_table, state_of
from gpipe_compiler.codegen.expressions import ExpressionWriter
from gpipe_compiler.codegen.imports import Imports
from gpipe_compiler.codegen.initial import initial_lines, initial_steps
from gpipe_compiler.codegen.layout import WIDTH
from gpipe_compiler.codegen.method_text import docstring, method_text
from gpipe_compiler.codegen.methods import Method
from gpipe_compiler.codegen.names import Identifiers
from gpipe_compiler.codegen.statements import call_path, value_text
from gpipe_compiler.codegen.templating import render
from gpipe_compiler.ir import Graph, LossTerm
from gpipe_compiler.plan import Plan
from gpipe_compiler.runtime.spec import Steps
from gpipe_compiler.runtime.wording import listed

MODULE = "loss_weight"
CLASS = "LossWeight"


@dataclass(frozen=True)
class WeightSource:
    """The module of the loss's weight, and what `schedule.py` says about it.

    Attributes:
        inputs: inputs of the pipeline, in the order of arguments.
        outputs: what it counts.
        renamed: whether some of its own state names are no names of the model.
        initial: by the model's names, how the state of a model without weights begins.
    """

    text: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    renamed: bool
    initial: Mapping[str, Steps]


def write_loss_weight(plan: Plan, graph: Graph) -> WeightSource | None:
    """The source of the weight; None where the loss has none.

    Raises:
        EmitError: naming the user's line, when something in it has no spelling.
    """
    terms = graph.loss.summands if graph.loss is not None and plan.training else ()
    weights = [term.weight for term in terms if term.weight is not None]
    if not weights:
        return None
    imports = Imports()
    imports.name("torch", "Tensor")
    imports.name("torch", "nn")
    ops = tuple({op.name: op for weight in weights for op in weight.ops}.values())
    inputs = tuple(dict.fromkeys(name for weight in weights for name in weight.inputs))
    values = tuple(weight.value for weight in weights)
    state = state_of(graph, ops)
    method = Method(ops, inputs, values, multiples={})
    body = write_body(graph, method, ExpressionWriter(imports, state.places, state.modules))
    sources = {source.name: source for source in graph.inputs}
    described = docstring(
        "What counts in one micro-batch of B samples.",
        [
            f"{argument}: {value_text(graph, value)}, {call_path(sources[value].path)}."
            for value, argument in zip(inputs, body.arguments, strict=True)
        ],
        [],
    )
    initial = initial_steps(graph, state.originals.values())
    file = SourceFile(Identifiers(), imports=imports)
    constructor = Construction(graph, state, file).lines(state.root)
    initial_text = initial_lines(initial, state.originals.values(), imports)
    methods = [method_text(graph, "forward", method, body, imports, described)]
    text = render(
        "stage.py.jinja",
        title=_title(plan.name, terms),
        imports=imports.lines(),
        blocks=(),
        class_name=CLASS,
        base=state.root.cls.__name__,
        buffers=buffer_types(state.root, imports),
        constructor=constructor,
        methods=methods,
        renamed=renamed_table(state),
        writes=(),
        once=(),
        segments=(),
        initial=initial_text,
    )
    return WeightSource(text, inputs, values, bool(state.renamed), initial)


def _title(name: str, terms: Sequence[LossTerm]) -> str:
    whats = [term.weight.what for term in terms if term.weight is not None]
    text = (
        f"The loss of {name} is a mean over {listed(whats)}. Micro-batches weigh in the loss of "
        "the mini-batch by it; it is computed from the inputs, before the step."
    )
    if len(terms) > 1:
        text = (
            f"The loss of {name} adds up means over different things, among them "
            f"{listed(whats)}. Each weighs in that of the mini-batch by what it is taken over, "
            "which is computed from the inputs, before the step."
        )
    return "\n".join(["What the loss is a mean over.", "", *textwrap.wrap(text, WIDTH), ""])
