"""The table of a stage that says how its state begins, for a model that has no weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gpipe_compiler.codegen.constants import quote, write_literal
from gpipe_compiler.codegen.imports import Imports
from gpipe_compiler.codegen.layout import WIDTH, Expression, call, dict_of, lay_out, name, tuple_of
from gpipe_compiler.errors import ModelError
from gpipe_compiler.frontend.steps import UNKNOWN
from gpipe_compiler.ir import Graph, ModuleSpec, StateKind
from gpipe_compiler.runtime.spec import Steps

_RULES = ("reset_parameters", "_reset_parameters")


def initial_steps(graph: Graph, names: Iterable[str]) -> dict[str, Steps]:
    """How each of these states begins, where they are on meta and it is known.

    Raises:
        ModelError: for state that the package could not fill as the model's code does.
    """
    found: dict[str, Steps] = {}
    lost = []
    covered = {
        state for spec in graph.modules.values() if _has_rule(spec) for state in spec.state.values()
    }
    for state_name in dict.fromkeys(names):
        state, tensor = graph.state[state_name], graph.tensors.get(state_name)
        if tensor is None or not tensor.is_meta:
            continue
        if state.initial == UNKNOWN:
            lost.append(state_name)
        elif state.initial:
            found[state_name] = state.initial
        elif state.kind is not StateKind.PARAMETER and state_name not in covered:
            lost.append(state_name)
    if lost:
        verb = "begin" if len(lost) > 1 else "begins"
        raise ModelError(
            f"it is not known how {', '.join(lost)} {verb}: the model is on the meta device",
            hint="fill it inside build_model() with ops of torch on the meta device (not with "
            "NumPy or a file), or build the whole model on the CPU",
        )
    return found


def _has_rule(spec: ModuleSpec) -> bool:
    return any(callable(getattr(spec.cls, rule, None)) for rule in _RULES)


def initial_lines(initial: Mapping[str, Steps], imports: Imports) -> list[str]:
    """`INITIAL = {...}`; long steps that several names share are written once."""
    if not initial:
        return []
    shared: dict[Steps, list[str]] = {}
    for state, steps in initial.items():
        shared.setdefault(steps, []).append(state)
    items: list[Expression] = []
    done: set[Steps] = set()
    for state, steps in initial.items():
        written = write_literal(steps, imports)
        if len(f"    {quote(state)}: {written.flat},") <= WIDTH or len(shared[steps]) == 1:
            items.append(written.prefixed(f"{quote(state)}: "))
        elif steps not in done:
            done.add(steps)
            names = tuple_of([name(quote(item)) for item in shared[steps]])
            items.append(call("**dict.fromkeys", [names, written]))
    return lay_out(_dict(items), prefix="INITIAL = ")


def _dict(items: list[Expression]) -> Expression:
    made = dict_of([], exploded=True)
    return Expression(
        "{" + ", ".join(item.flat for item in items) + "}",
        binding=made.binding,
        opening="{",
        items=tuple(items),
        closing="}",
        exploded=True,
    )
