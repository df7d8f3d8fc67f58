"""What the user's loops call what they run over, and what they count by."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from gpipe_compiler.codegen.sources import parsed
from gpipe_compiler.errors import SourceLocation


def names_in_loops(
    location: SourceLocation | None, lists: Sequence[str]
) -> tuple[dict[str, str], str]:
    """What the loops around a line, or around those that called it, call the items of lists of
    modules, and the number by which they take them or parts of tensors; "" for none.

    Args:
        lists: the attributes that hold them.
    """
    ones: dict[str, str] = {}
    index = ""
    for loop in _loops_around(location):
        subscripts = [node for node in ast.walk(loop) if isinstance(node, ast.Subscript)]
        for target, over, counts in _side_by_side(loop.target, loop.iter):
            run_over = [own for own in map(_attribute, ast.walk(over)) if own in lists]
            if not counts:
                ones = {**dict.fromkeys(run_over, target), **ones}
                continue
            taken = (_attribute(node.value) for node in subscripts if target in _indices(node))
            counted = (own in lists for own in (*run_over, *taken)) if lists else map(bool, taken)
            index = index or (target if any(counted) else "")
    return ones, index


def _attribute(node: ast.AST) -> str:
    """`layers` for `self.layers`; a local name by itself."""
    return getattr(node, "attr", "") or getattr(node, "id", "")


def _indices(node: ast.Subscript) -> set[str]:
    """The names by which it takes something, by themselves."""
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    return {part.id for part in parts if isinstance(part, ast.Name)}


def _loops_around(location: SourceLocation | None) -> Iterator[ast.For]:
    """The loops around a line and its callers, the inner ones first."""
    lines = () if location is None else (location, *(line for _, line in location.calls[::-1]))
    for place in (frame for line in lines for frame in (line, *line.callers[::-1])):
        nodes = (node for node in ast.walk(parsed(place.file)) if isinstance(node, ast.For))
        around = [node for node in nodes if node.lineno <= place.line <= (node.end_lineno or 0)]
        yield from sorted(around, key=lambda node: -node.lineno)


def _side_by_side(target: ast.expr, over: ast.expr) -> Iterator[tuple[str, ast.expr, bool]]:
    """The names that a loop gives, what each runs over, and whether it counts that."""
    match target, over:
        case ast.Tuple(elts=targets), ast.Call(func=ast.Name(id="zip"), args=items):
            for one, item in zip(targets, items, strict=False):
                yield from _side_by_side(one, item)
        case ast.Tuple(elts=[ast.Name(id=own), one]), ast.Call(
            func=ast.Name(id="enumerate"), args=[item, *_]
        ):
            yield own, item, True
            yield from _side_by_side(one, item)
        case ast.Name(id=own), ast.Call(func=ast.Name(id="range")):
            yield own, over, True
        case ast.Name(id=own), _:
            yield own, over, False
