"""The text of one method: signature, docstring, statements, and what it returns.

What a module returns has no type for type checkers, nor what is computed of it by operators and
methods. So a variable of which a method returns such a thing is declared to be a tensor.
"""

from __future__ import annotations

import ast
import dataclasses
import re
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from gpipe_compiler.codegen.imports import Imports
from gpipe_compiler.codegen.layout import INDENT, WIDTH, call, lay_out, name
from gpipe_compiler.codegen.methods import Method, is_tensor, value_kind
from gpipe_compiler.codegen.sources import statement_at
from gpipe_compiler.codegen.statements import Statement, write_statements
from gpipe_compiler.ir import Graph, Mode, ValueKind
from gpipe_compiler.text import escaping


@dataclass(frozen=True, slots=True)
class MethodBody:
    """A written method: names of its arguments, its statements, what it returns.

    Attributes:
        returns: empty where the last statement returns; `*outputs` for all that is in a list.
        lists: the variables of lists, by the values in them.
    """

    arguments: tuple[str, ...]
    statements: tuple[Statement, ...]
    returns: tuple[str, ...]
    lists: Mapping[tuple[str, ...], str] = field(default_factory=dict)

    @property
    def ends(self) -> bool:
        last = self.statements[-1] if self.statements else None
        while last is not None and last.target == "with ":
            last = last.body[-1]
        return last is not None and last.target == "return "


def with_type(body: MethodBody, modules: Collection[str], *, direct: bool) -> MethodBody:
    """A method that returns one tensor, in such a way that a type checker knows it for one.

    Args:
        direct: return the last expression where it is only bound to be returned.
    """
    if not body.statements or len(body.returns) != 1:
        return body
    (variable,), (*before, last) = body.returns, body.statements
    typed = _Typed(modules, dict.fromkeys(body.arguments, True))
    typed.walk(before)
    returning = _returning(last, variable, typed) if direct else None
    if returning is not None:
        return dataclasses.replace(body, statements=(*before, returning), returns=())
    typed.walk([last])
    if variable in body.arguments or typed.variables.get(variable, True):
        return body
    return dataclasses.replace(body, statements=_declared(body.statements, variable))


def _returning(last: Statement, variable: str, typed: _Typed) -> Statement | None:
    """A statement that only binds a variable, or ends so in its `with` block, as one that returns
    what it binds; None for others, and where a type checker does not know that for a tensor."""
    if last.mode is not Mode.ALWAYS:
        return None
    if last.target == "with ":
        *before, inner = last.body
        typed.walk(before)
        returning = _returning(inner, variable, typed)
        return returning and dataclasses.replace(last, body=(*before, returning))
    ends = last.target == f"{variable} = " and typed.knows(last)
    return dataclasses.replace(last, target="return ") if ends else None


def without_names(body: MethodBody) -> MethodBody:
    """A method that returns several things where the user names none: `return x + y, z`."""
    last = body.statements[-len(body.returns) :]
    targets = [item.target.removesuffix(" = ") for item in last]
    texts = tuple(item.expression.flat for item in last)
    users = {statement_at(item.sources[-1]) if item.sources else None for item in last}
    unnamed = all(one is not None and one.function for one in users) and len(users) == 1
    plain = all(item.mode is Mode.ALWAYS and not item.body for item in last)
    reads = any(re.search(rf"\b{own}\b", text) for own in targets for text in texts)
    fits = len(_return(texts, 2)) == 1
    if not (unnamed and plain and fits and targets == [*body.returns]) or reads:
        return body
    return dataclasses.replace(body, statements=body.statements[: -len(last)], returns=texts)


def _declared(statements: tuple[Statement, ...], variable: str) -> tuple[Statement, ...]:
    """The statements with a type for a variable: where it is bound first, or before."""
    binding = (i for i, item in enumerate(statements) if variable in _all_targets(item))
    place = next(binding)
    first = statements[place]
    if first.target == f"{variable} = ":
        made = [dataclasses.replace(first, target=f"{variable}: Tensor = ")]
    elif first.target == "with ":
        made = [dataclasses.replace(first, body=_declared(first.body, variable))]
    else:
        made = [Statement(f"{variable}: Tensor", name(""), first.mode, first.module), first]
    return (*statements[:place], *made, *statements[place + 1 :])


def _targets(statement: Statement) -> list[str]:
    if not statement.target.endswith(" = "):
        return []
    return statement.target.removesuffix(" = ").removesuffix(",").split(", ")


def _all_targets(statement: Statement) -> list[str]:
    inner = (own for item in statement.body for own in _all_targets(item))
    return [*_targets(statement), *inner]


@dataclass
class _Typed:
    """Which variables a type checker knows to be tensors, by their last assignments."""

    modules: Collection[str]
    variables: dict[str, bool] = field(default_factory=dict)

    def walk(self, statements: Sequence[Statement]) -> None:
        for statement in statements:
            for own in _targets(statement):
                self.variables[own] = self.knows(statement)
            if statement.body:  # what a loop runs over are modules, of any class
                head = statement.target.removeprefix("for ").removesuffix(" in ")
                self.variables.update(dict.fromkeys(head.split(", "), False))
            self.walk(statement.body)

    def knows(self, statement: Statement) -> bool:
        return self._known(ast.parse(statement.expression.flat, mode="eval").body)

    def _known(self, node: ast.expr) -> bool:
        match node:
            case ast.Call(func=ast.Attribute(value=around) as function):
                spelled = ast.unparse(function)
                if spelled.startswith(("F.", "torch.")):
                    return not spelled.startswith("torch.ops.")
                return spelled not in self._spelled and self._known(around)
            case ast.Call(func=ast.Name(id=own)):
                return own in self.modules  # a function, and not a loop's variable
            case ast.Call():
                return False  # a module of a list
            case ast.Name(id=own):
                return self.variables.get(own, True)
            case ast.BinOp(left=left, right=right) | ast.IfExp(body=left, orelse=right):
                return self._known(left) and self._known(right)
            case ast.Compare(left=left, comparators=others):
                return all(map(self._known, (left, *others)))
            case ast.UnaryOp(operand=value) | ast.Subscript(value=value):
                return self._known(value)
            case ast.Attribute(value=ast.Name(id="self")):
                return True
            case ast.Attribute(value=value):
                return self._known(value)
            case _:
                return True

    @property
    def _spelled(self) -> set[str]:
        return {place.replace('"', "'") for place in self.modules}


MANY_OUTPUTS = 4
"""From this many on, the types of the outputs are not listed one by one."""


def method_text(
    graph: Graph,
    label: str,
    method: Method,
    body: MethodBody,
    imports: Imports,
    described: Sequence[str] = (),
) -> list[str]:
    """The lines of a method of a class.

    Args:
        described: the lines of its docstring.
    """
    given = {"self": "", **types_of(graph, method.arguments, body.arguments, imports)}
    tensors = [is_tensor(graph, value) for value in method.returns]
    return _definition(label, given, _returned(tensors, body), described, body, 1)


def function_text(
    graph: Graph,
    label: str,
    method: Method,
    body: MethodBody,
    imports: Imports,
    also: Mapping[str, str],
) -> list[str]:
    """The lines of a function, which returns tensors.

    Args:
        also: its last arguments, which the body does not name, and their types.
    """
    given = {**types_of(graph, method.arguments, body.arguments, imports), **also}
    return _definition(label, given, _returned([True] * len(method.returns), body), (), body, 0)


def _definition(
    label: str,
    given: Mapping[str, str],
    returned: str,
    described: Sequence[str],
    body: MethodBody,
    indent: int,
) -> list[str]:
    parameters = [name(f"{own}: {kind}" if kind else own) for own, kind in given.items()]
    lines = lay_out(call(f"def {label}", parameters), suffix=f" -> {returned}:", indent=indent)
    lines.extend(described)
    lines.extend(write_statements(body.statements, indent + 1))
    return lines if body.ends else [*lines, *_return(body.returns, indent + 1)]


def types_of(
    graph: Graph, values: Sequence[str], arguments: Sequence[str], imports: Imports
) -> dict[str, str]:
    """The types of arguments; of what has no telling (a dtype), any."""
    found = {
        own: _TYPES.get(value_kind(graph, value), "Any")
        for value, own in zip(values, arguments, strict=True)
    }
    if "Any" in found.values():
        imports.name("typing", "Any")
    return found


_TYPES = {ValueKind.TENSOR: "Tensor", ValueKind.SCALAR: "int"}


def _returned(returns: Sequence[bool], body: MethodBody) -> str:
    """The annotation for results of which these are tensors."""
    if not all(returns):
        return "object" if len(returns) == 1 else "tuple[object, ...]"
    if len(returns) == 1:
        return "Tensor"
    if not returns:
        return "tuple[()]"
    if len(returns) >= MANY_OUTPUTS or any(item.startswith("*") for item in body.returns):
        return "tuple[Tensor, ...]"
    return f"tuple[{', '.join(['Tensor'] * len(returns))}]"


def _return(values: Sequence[str], indent: int) -> list[str]:
    margin = INDENT * indent
    if len(values) == 1 and values[0].startswith("*"):
        values = [f"tuple({values[0][1:]})"]
    flat = f"{margin}return {', '.join(values) or '()'}"
    if len(values) < 2 or len(flat) <= WIDTH:
        return [flat]
    return [f"{margin}return (", *(f"{margin}{INDENT}{value}," for value in values), f"{margin})"]


def docstring(summary: str, arguments: Sequence[str], returns: Sequence[str]) -> list[str]:
    """The docstring of a method; arguments and returns are entries such as `x: what it is.`

    Args:
        summary: its first line, text of our own.
    """
    if not arguments and not returns:
        return [f'        """{summary}"""']
    lines = []
    for heading, entries in (("Args:", arguments), ("Returns:", returns)):
        if entries:
            lines.extend(["", f"        {heading}"])
            for entry in entries:
                lines.extend(
                    textwrap.wrap(
                        entry,
                        WIDTH,
                        initial_indent=" " * 12,
                        subsequent_indent=" " * 16,
                        break_long_words=False,
                        break_on_hyphens=False,
                    )
                )
    return [f'        """{summary}', *map(escaping.docstring, lines), '        """']
