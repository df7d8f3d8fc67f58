"""Source text of expressions, broken over lines the way Black and ruff would break them.

Only bracketed lists break: arguments of a call, items of a tuple, list or dict, parameters of a
function. Anything else stays on one line, so callers keep such expressions short.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

WIDTH = 100
"""Columns of emitted code."""

INDENT = "    "

_KEY = re.compile(r'\["(\d+)"\]')
_ALIKE = 3
"""Items of a list from which on a comprehension is shorter to read."""


class Binding(IntEnum):
    """How tightly Python binds an expression; a looser operand needs parentheses."""

    CONDITIONAL = 0
    NOT = 1
    COMPARISON = 2
    OR = 3
    XOR = 4
    AND = 5
    SHIFT = 6
    SUM = 7
    PRODUCT = 8
    UNARY = 9
    POWER = 10
    ATOM = 11


@dataclass(frozen=True, slots=True)
class Expression:
    """A piece of Python.

    Attributes:
        flat: the text on one line.
        opening: for what may break: the text through the bracket, such as `torch.cat(`.
        items: what stands between the brackets.
        fills: whether all items may share one line inside broken brackets (calls do, tuples not).
        exploded: always one item a line, as a trailing comma asks for.
        comma: what stands after items that do not share the line of the opening.
        instead: the same, to be broken inside the receiver of the method that it calls.
    """

    flat: str
    binding: Binding = Binding.ATOM
    opening: str = ""
    items: tuple[Expression, ...] = ()
    closing: str = ""
    fills: bool = False
    exploded: bool = False
    comma: str = ","
    instead: Expression | None = None

    def within(self, loosest: Binding) -> str:
        """The flat text, in parentheses where it binds looser than its surroundings allow."""
        return f"({self.flat})" if self.binding < loosest else self.flat

    def prefixed(self, prefix: str) -> Expression:
        """The same after `prefix`, such as the `dim=` of a keyword argument."""
        return replace(
            self,
            flat=prefix + self.flat,
            opening=prefix + self.opening if self.opening else "",
            instead=self.instead.prefixed(prefix) if self.instead else None,
        )


def name(text: str) -> Expression:
    """A name or a literal."""
    return Expression(text)


def call(callee: str, items: Iterable[Expression], *, exploded: bool = False) -> Expression:
    """`callee(items)`."""
    return _bracketed(f"{callee}(", tuple(items), ")", fills=True, exploded=exploded)


def tuple_of(items: Iterable[Expression], *, exploded: bool = False) -> Expression:
    """`(items)`, with the comma that a single item needs."""
    made = _bracketed("(", tuple(items), ")", fills=False, exploded=exploded)
    if len(made.items) == 1:
        # Ruff keeps a one-tuple's comma without taking it for a wish to break.
        return replace(made, flat=f"({made.items[0].flat},)")
    return made


def method_call(receiver: Expression, method: str, items: Sequence[Expression]) -> Expression:
    """`receiver.method(items)`."""
    made = call(f"{receiver.within(Binding.ATOM)}.{method}", items)
    if not receiver.items or receiver.binding < Binding.ATOM:
        return made
    end = made.flat.removeprefix(receiver.flat)
    instead = replace(receiver, flat=made.flat, closing=receiver.closing + end, instead=None)
    return replace(made, instead=instead)


def list_of(items: Iterable[Expression]) -> Expression:
    """`[items]`; those in a row that differ by the key of a list of modules as a comprehension."""
    found = tuple(items)
    return _by_key(found) or _bracketed("[", found, "]", fills=False, exploded=False)


def _by_key(items: Sequence[Expression]) -> Expression | None:
    """`[self.heads[str(i)](x) for i in range(4)]`; None where items are not alike, or are few."""
    parts = [_KEY.split(item.flat) for item in items]
    if len(parts) < _ALIKE or len({tuple(own[::2]) for own in parts}) > 1:
        return None
    columns = zip(*(own[1::2] for own in parts), strict=True)
    differing = {column for column in columns if len(set(column)) > 1}
    span = consecutive(next(iter(differing))) if len(differing) == 1 else ""
    first, text = parts[0], parts[0][0]
    for place in range(1, len(first), 2):
        same = first[place] == parts[1][place]
        text += (f'["{first[place]}"]' if same else "[str(i)]") + first[place + 1]
    if not span or re.search(r"\bi\b", text.replace("str(i)", "")):
        return None
    return comprehension("[", Expression(text), f"for i in {span}", "]")


def dict_of(
    items: Iterable[tuple[Expression, Expression]], *, exploded: bool = False
) -> Expression:
    """`{key: value}`."""
    return braces((value.prefixed(f"{key.flat}: ") for key, value in items), exploded=exploded)


def braces(items: Iterable[Expression], *, exploded: bool = False) -> Expression:
    """`{items}`, the items of a dict or set as they are."""
    return _bracketed("{", tuple(items), "}", fills=False, exploded=exploded)


def comprehension(opening: str, item: Expression, clause: str, closing: str) -> Expression:
    """`{item for i in range(3)}`, where `clause` begins with `for`."""
    flat = f"{opening}{item.flat} {clause}{closing}"
    parts = (item, name(clause))
    return Expression(
        flat,
        opening=opening,
        items=parts,
        closing=closing,
        fills=True,
        exploded=item.exploded,
        comma="",
    )


def consecutive(words: Sequence[str]) -> str:
    """The `range` of which some words are the numbers, in order or reversed; "" for none."""
    if not all(word.isdecimal() and str(int(word)) == word for word in words):
        return ""
    numbers = list(map(int, words))
    start, stop = min(numbers), max(numbers) + 1
    made = f"range({start}, {stop})" if start else f"range({stop})"
    if numbers == list(range(start, stop)):
        return made
    return f"reversed({made})" if numbers[::-1] == list(range(start, stop)) else ""


def _bracketed(
    opening: str, items: tuple[Expression, ...], closing: str, *, fills: bool, exploded: bool
) -> Expression:
    flat = opening + ", ".join(item.flat for item in items) + closing
    if not items:
        return Expression(flat)
    exploded = exploded or any(item.exploded for item in items)
    return Expression(
        flat, opening=opening, items=items, closing=closing, fills=fills, exploded=exploded
    )


def lay_out(
    expression: Expression, *, prefix: str = "", suffix: str = "", indent: int = 0
) -> list[str]:
    """The lines of `prefix expression suffix`, indented by `indent` levels.

    A long right-hand side that cannot break is put in parentheses on a line of its own.
    """
    margin = INDENT * indent
    line = f"{margin}{prefix}{expression.flat}{suffix}"
    if len(line) <= WIDTH and not expression.exploded:
        return [line]
    *targets, last = prefix.removesuffix(" = ").split(", ")
    if targets and prefix.endswith(" = ") and len(f"{margin}{prefix}(") > WIDTH:
        lines = [f"{margin}{INDENT}{own}," for own in (*targets, last)]
        rest = lay_out(expression, prefix=") = ", suffix=suffix, indent=indent)
        return [f"{margin}(", *lines, *rest]  # more targets than a line holds
    if not expression.items:
        return _parenthesized(expression, prefix, suffix, indent) or [line]
    if not expression.exploded:
        whole = _parenthesized(expression, prefix, suffix, indent)
        if whole is not None and _is_chain(expression.flat):
            return whole
    if len(f"{margin}{prefix}{expression.opening}") > WIDTH:
        if expression.instead:
            return lay_out(expression.instead, prefix=prefix, suffix=suffix, indent=indent)
        whole = _parenthesized(expression, prefix, suffix, indent)
        if whole is not None and len(whole[0]) <= WIDTH:
            return whole
    inner = INDENT * (indent + 1)
    together = inner + f"{expression.comma} ".join(item.flat for item in expression.items)
    if expression.fills and not expression.exploded and len(together) <= WIDTH:
        body = [together]
    else:
        body = [
            text
            for item in expression.items
            for text in lay_out(item, suffix=expression.comma, indent=indent + 1)
        ]
    return [f"{margin}{prefix}{expression.opening}", *body, f"{margin}{expression.closing}{suffix}"]


def _is_chain(flat: str) -> bool:
    """Whether methods of results of methods are called: ruff breaks before such, not inside.

    Args:
        flat: what stands right of an assignment or a `return`.
    """
    node = ast.parse(flat, mode="eval").body if "." in flat else None
    links = 0
    while isinstance(node, ast.Call | ast.Attribute | ast.Subscript):
        inner = node.func if isinstance(node, ast.Call) else node.value
        links += isinstance(node, ast.Attribute) and isinstance(inner, ast.Call | ast.Subscript)
        node = inner
    return links > 1


def _parenthesized(
    expression: Expression, prefix: str, suffix: str, indent: int
) -> list[str] | None:
    inner = INDENT * (indent + 1) + expression.flat
    if not prefix.endswith(("= ", "return ")) or len(inner) > WIDTH:
        return None
    margin = INDENT * indent
    return [f"{margin}{prefix}(", inner, f"{margin}){suffix}"]
