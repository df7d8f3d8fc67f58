"""`loss_weight.py`: the module that counts what the mean of the loss is taken over."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass

from gpipe_compiler.codegen.body import write_body
from gpipe_compiler.codegen.comments import call_path, value_text
from gpipe_compiler.codegen.constructors import state_of, state_table
from gpipe_compiler.codegen.expressions import Writer
from gpipe_compiler.codegen.imports import Imports
from gpipe_compiler.codegen.initial import initial_lines, initial_steps
from gpipe_compiler.codegen.layout import WIDTH
from gpipe_compiler.codegen.method_text import docstring, method_text
from gpipe_compiler.codegen.methods import Method
from gpipe_compiler.codegen.templating import render
from gpipe_compiler.ir import Graph
from gpipe_compiler.plan import Plan
from gpipe_compiler.runtime.spec import Steps

MODULE = "loss_weight"
CLASS = "LossWeight"


@dataclass(frozen=True)
class WeightSource:
    """The module of the loss's weight, and what `schedule.py` says about it.

    Attributes:
        text: the source of `loss_weight.py`.
        inputs: inputs of the pipeline, in the order of arguments.
        state: its own state names to the model's.
        initial: by the model's names, how the state of a model without weights begins.
    """

    text: str
    inputs: tuple[str, ...]
    state: Mapping[str, str]
    initial: Mapping[str, Steps]
    floor: float
    offset: float


def write_loss_weight(plan: Plan, graph: Graph) -> WeightSource | None:
    """The source of the weight; None where the loss has none.

    Raises:
        EmitError: naming the user's line, when something in it has no spelling.
    """
    weight = graph.loss.weight if graph.loss is not None and plan.training else None
    if weight is None:
        return None
    imports = Imports()
    imports.from_torch("Tensor")
    imports.from_torch("nn")
    state = state_of(graph, weight.ops, (), imports)
    method = Method(weight.ops, weight.inputs, (weight.value,), batch_sizes=frozenset())
    body = write_body(graph, method, Writer(imports, state.places, state.modules))
    sources = {source.name: source for source in graph.inputs}
    described = docstring(
        "What counts in one micro-batch of B samples.",
        [
            f"{argument}: {value_text(graph, value)}, {call_path(sources[value].path)}."
            for value, argument in zip(weight.inputs, body.arguments, strict=True)
        ],
        [],
    )
    initial = initial_steps(graph, state.originals.values())
    text = render(
        "stage.py.jinja",
        title=_title(plan.name, weight.what),
        imports=imports.lines(),
        class_name=CLASS,
        constructor=state.lines,
        methods=[method_text("forward", body, "Tensor", described)],
        state=state_table(state) if state.originals else [],
        initial=initial_lines(initial, imports),
    )
    return WeightSource(text, weight.inputs, state.originals, initial, weight.floor, weight.offset)


def _title(name: str, what: str) -> str:
    """The docstring of the file."""
    text = (
        f"The loss of {name} is a mean over {what}. Micro-batches weigh in the loss of the "
        "mini-batch by it; it is computed from the inputs, before the step."
    )
    return "\n".join(["What the loss is a mean over.", "", *textwrap.wrap(text, WIDTH), ""])
