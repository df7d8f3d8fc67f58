"""Writes a layer that may be left out: run where it is not, and passed over where it is."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from gpipe_compiler.codegen.expressions import ExpressionWriter
from gpipe_compiler.codegen.layout import Binding, Expression, call, name
from gpipe_compiler.codegen.statements import Statement
from gpipe_compiler.ir import ByMode, Graph, Mode, Op, Ref
from gpipe_compiler.runtime.core.random import passed_on


def draws_within(
    op: Op, ops: Sequence[Op], draws: Mapping[str, int] | None, nested: Collection[str]
) -> int | None:
    """How many random ops are left out with what nests in an op that may leave out its layer.

    None where that is not to nest: what draws in the layer stands elsewhere, too, or the layer may
    be left out in eval mode, in which it may draw otherwise.
    """
    if draws is None:
        return None
    inside = {item.name for item in ops if item.layer == op.layer and item.name in draws}
    trains = isinstance(op.call.args[0], ByMode) and op.call.args[0].evaluation is False
    if not inside.issubset(nested) or (inside and not trains):
        return None
    return sum(draws[own] for own in inside)


@dataclass(frozen=True, slots=True)
class Ways:
    """The two ways of an op that may leave out its layer.

    Attributes:
        left_out: the condition.
        passed: what is passed on.
    """

    left_out: Expression
    passed: Expression

    @classmethod
    def of(cls, graph: Graph, writer: ExpressionWriter, op: Op, draws: int) -> Ways:
        """Those of an op with which this many random ops are left out."""
        left_out, made, given = op.call.args
        known = graph.values.get(made.name) if isinstance(made, Ref) else None
        items = [writer.argument(given)]
        if draws:
            items.append(name(str(draws)))
        if known is not None and not known.requires_grad:
            items.append(name("gradient=False"))
        writer.imports.name(".runtime.core.random", passed_on.__name__)
        return cls(writer.argument(left_out), call(passed_on.__name__, items))

    def chosen(self, made: Expression) -> Expression:
        """The choice where the layer has run in any case."""
        passed, left_out = (item.within(Binding.NOT) for item in (self.passed, self.left_out))
        return Expression(f"{passed} if {left_out} else {made.flat}", Binding.CONDITIONAL)

    def statements(self, made: Statement) -> tuple[Statement, Statement]:
        """The statements in place of the one that runs the layer."""
        inner = replace(made, mode=Mode.ALWAYS)
        passed = replace(inner, expression=self.passed, note="")
        around = replace(made, note="", sources=())
        return (
            replace(made, target="if ", expression=self.left_out, note="", body=(passed,)),
            replace(around, target="", expression=name("else"), body=(inner,)),
        )
