"""What a method returns: an expression where it needs no name, a tensor for type checkers.

What a module returns has no type for them, nor what is computed of it by operators and methods. So
a variable of which a method returns such a thing is declared to be a tensor.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from gpipe_compiler.codegen.layout import name
from gpipe_compiler.codegen.statements import Statement
from gpipe_compiler.ir import Mode


@dataclass(frozen=True, slots=True)
class Body:
    """A written method: names of its arguments, its statements, what it returns.

    Attributes:
        returns: empty where the last statement returns.
    """

    arguments: tuple[str, ...]
    statements: tuple[Statement, ...]
    returns: tuple[str, ...]

    @property
    def ends(self) -> bool:
        """Whether the last statement returns."""
        return bool(self.statements) and self.statements[-1].target == "return "


def with_type(body: Body, modules: Collection[str], *, direct: bool) -> Body:
    """A method that returns one tensor, in such a way that a type checker knows it for one.

    Args:
        modules: the expressions for modules.
        direct: return the last expression where it is only bound to be returned.
    """
    if not body.statements or len(body.returns) != 1:
        return body
    (variable,), (*before, last) = body.returns, body.statements
    typed = _Typed(modules, dict.fromkeys(body.arguments, True))
    typed.walk(before)
    ends = last.target == f"{variable} = " and last.mode is Mode.ALWAYS
    if direct and ends and typed.knows(last):
        returned = dataclasses.replace(last, target="return ")
        return dataclasses.replace(body, statements=(*before, returned), returns=())
    typed.walk([last])
    if variable in body.arguments or typed.variables.get(variable, True):
        return body
    return dataclasses.replace(body, statements=_declared(body.statements, variable))


def _declared(statements: tuple[Statement, ...], variable: str) -> tuple[Statement, ...]:
    """The statements with a type for a variable: where it is bound first, or before."""
    binding = (i for i, item in enumerate(statements) if variable in _all_targets(item))
    place = next(binding)
    first = statements[place]
    if first.target == f"{variable} = ":
        made = [dataclasses.replace(first, target=f"{variable}: Tensor = ")]
    else:
        made = [Statement(f"{variable}: Tensor", name(""), first.mode, first.module), first]
    return (*statements[:place], *made, *statements[place + 1 :])


def _targets(statement: Statement) -> list[str]:
    """The variables that a statement binds."""
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
            self.walk(statement.body)

    def knows(self, statement: Statement) -> bool:
        """Whether the type of a right-hand side is known."""
        return self._known(ast.parse(statement.expression.flat, mode="eval").body)

    def _known(self, node: ast.expr) -> bool:
        match node:
            case ast.Call(func=ast.Attribute(value=around) as function):
                spelled = ast.unparse(function)
                if spelled.startswith(("F.", "torch.")):
                    return not spelled.startswith("torch.ops.")
                return spelled not in self._spelled and self._known(around)
            case ast.Call():
                return False  # a module of a list, or a loop's variable
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
