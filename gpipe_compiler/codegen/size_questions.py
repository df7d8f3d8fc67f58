"""How users ask tensors for their sizes."""

from __future__ import annotations

import ast


def is_size(expression: ast.expr | None) -> bool:
    """Whether it asks for sizes: `x.shape`, `x.shape[0]`, `x.size(0)`, `len(x)` or the like."""
    match expression:
        case ast.Attribute(attr="shape") | ast.Call(func=ast.Attribute(attr="size")):
            return True
        case ast.Call(func=ast.Name(id="len")):
            return True
        case ast.Subscript(value=value):
            return is_size(value)
        case _:
            return False


def size_asked(expression: ast.expr | None) -> int | None:
    """The dimension of which alone an expression asks for the size; None for several, or none."""
    match expression:
        case (
            ast.Subscript(value=ast.Attribute(attr="shape"), slice=index)
            | ast.Subscript(value=ast.Call(func=ast.Attribute(attr="size"), args=[]), slice=index)
            | ast.Call(func=ast.Attribute(attr="size"), args=[index])
        ):
            return _number(index)
        case ast.Call(func=ast.Name(id="len")):
            return 0
        case _:
            return None


def first_asked(expression: ast.expr | None) -> int | None:
    """The first of the dimensions of which an expression asks for the sizes in their order, as
    `x.shape` and `x.shape[-2:]` do; None for a single one, or none."""
    match expression:
        case ast.Attribute(attr="shape") | ast.Call(func=ast.Attribute(attr="size"), args=[]):
            return 0
        case ast.Subscript(value=value, slice=ast.Slice(lower=lower, step=None)):
            return first_asked(value) if lower is None else _number(lower)
        case _:
            return None


def _number(index: ast.expr) -> int | None:
    match index:
        case ast.Constant(value=int(number)):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(number))):
            return -number
        case _:
            return None
