"""The initialisation table of a stage, for a model that has no weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gpipe_compiler.codegen.constants import quote, write_literal
from gpipe_compiler.codegen.imports import Imports
from gpipe_compiler.codegen.layout import Expression, braces, call, lay_out, name, tuple_of
from gpipe_compiler.errors import ModelError
from gpipe_compiler.frontend.init_program import UNKNOWN
from gpipe_compiler.ir import Graph, ModuleSpec, StateKind
from gpipe_compiler.runtime.spec import Steps, layer_name

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


def initial_lines(
    initial: Mapping[str, Steps], names: Iterable[str], imports: Imports
) -> list[str]:
    """`INITIAL = {...}`: one entry for all tensors that begin in the same way.

    Args:
        names: of all state of the stage, as in the model.
    """
    if not initial:
        return []
    shared: dict[str, tuple[Steps, list[str]]] = {}
    for key, steps in _of_layers(initial, names).items():
        shared.setdefault(repr(steps), (steps, []))[1].append(key)
    items: list[Expression] = []
    for steps, keys in shared.values():
        written = write_literal(steps, imports)
        if len(keys) == 1:
            items.append(written.prefixed(f"{quote(keys[0])}: "))
        else:
            listed = tuple_of([name(quote(key)) for key in keys])
            items.append(call("**dict.fromkeys", [listed, written]))
    return lay_out(braces(items, exploded=True), prefix="INITIAL = ")


def _of_layers(initial: Mapping[str, Steps], names: Iterable[str]) -> dict[str, Steps]:
    """The steps by name; of tensors that layers have in common, by `layer_name` where most of them
    begin alike, and the others beside it."""
    groups: dict[str, list[str]] = {}
    for state in dict.fromkeys(names):
        groups.setdefault(layer_name(state), []).append(state)
    found: dict[str, Steps] = {}
    for common, members in groups.items():
        steps = [initial[state] for state in members if state in initial]
        texts = [repr(item) for item in steps]  # 0.0 and -0.0 are equal
        if len(members) == len(steps) > 1 and common not in members:
            found[common] = max(steps, key=lambda item: texts.count(repr(item)))
        for state in members:
            if state in initial and repr(found.get(common)) != repr(initial[state]):
                found[state] = initial[state]
    return found
