"""State between calls: inputs that a session holds, and the outputs that they become."""

from __future__ import annotations

from collections.abc import Mapping

from gpipe_compiler.errors import UsageError
from gpipe_compiler.frontend.naming import identifier
from gpipe_compiler.ir import Graph, Input, Ref, Value
from gpipe_compiler.runtime.core.nest import Path, items_of

_FORM = "as in --state past_key_values=past_key_values, or --state hidden=1 for an output's place"


def with_state(graph: Graph, state: Mapping[str, str], values: Mapping[str, Value]) -> Graph:
    """The graph that says which of its inputs a session holds between calls.

    Args:
        state: the names of arguments, each with the key or the place of the output that it becomes.
        values: of the graph, by name.

    Raises:
        UsageError: for names that the model does not have, and state that does not become itself.
    """
    if graph.loss is not None:
        raise UsageError("--state is for --mode infer: nothing is trained between calls")
    outputs = dict(items_of(graph.outputs, Ref))
    carried: list[tuple[str, Path]] = []
    for past, present in state.items():
        inside = [(_inside(source, past), source) for source in graph.inputs]
        taken = {rest: source for rest, source in inside if rest is not None}
        if not taken:
            known = ", ".join(dict.fromkeys(source.name for source in graph.inputs))
            raise UsageError(
                f"--state: the model takes no {past}", hint=f"it takes {known}; {_FORM}"
            )
        place = tuple(present.split("."))
        made = {
            tuple(map(str, path[len(place) :])): path
            for path in outputs
            if tuple(map(str, path[: len(place)])) == place
        }
        if not made:
            known = ", ".join(dict.fromkeys(str(path[0]) for path in outputs if path))
            raise UsageError(
                f"--state: the model returns no {present}", hint=f"it returns {known}; {_FORM}"
            )
        if taken.keys() != made.keys():
            odd = ".".join(sorted(taken.keys() ^ made.keys())[0])
            raise UsageError(
                f"--state: {present} cannot be the next {past}: only one of them has "
                f"{odd or 'a tensor in its place'}"
            )
        for rest, source in taken.items():
            _check(source, values[outputs[made[rest]].name])
            carried.append((source.name, made[rest]))
    return graph.replace(carried=tuple(carried))


def _inside(source: Input, name: str) -> tuple[str, ...] | None:
    """Where a tensor stands in an argument of a name; None where it is in another."""
    rest = tuple(map(str, source.path[2:]))
    own = identifier("_".join((name, *rest)), digit_prefix="input")
    return rest if own == source.name and source.path[0] != "target" else None


def _check(source: Input, present: Value) -> None:
    same = present.dtype == source.dtype and present.batch_dim == source.batch_dim
    if same and len(present.dims) == len(source.shape or ()):
        return
    raise UsageError(
        f"--state: {present.name} cannot be the next {source.name}: it is {present}, and not of "
        f"{len(source.shape or ())} dimensions, {source.dtype}, with the batch in dimension "
        f"{source.batch_dim}"
    )
