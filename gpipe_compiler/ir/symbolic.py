"""Symbolic shapes as torch computes them, in terms of the named sizes of a graph.

torch works with sympy expressions; a graph, and the package that is made of it, with the
expressions of `runtime.sizes`.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import sympy
import torch
from torch.fx.experimental import _config
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.functions import CleanDiv, FloorDiv, Max, Min, Mod, PythonMod
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from gpipe_compiler.ir.arguments import map_argument
from gpipe_compiler.ir.rounded_sizes import rounded_in_integers
from gpipe_compiler.ir.sizes import BATCH, SMALLEST
from gpipe_compiler.runtime.sizes import Dim, Relation, Requirement, Size, larger, sizes_in, smaller

Symbols: TypeAlias = Mapping[Any, Dim]
"""Sizes by their symbols."""


class InexpressibleError(Exception):
    """An expression has no form in terms of sizes.

    Attributes:
        symbols: those in it.
    """

    def __init__(self, expression: Any) -> None:
        super().__init__(str(expression))
        self.symbols = frozenset(expression.free_symbols)


@contextlib.contextmanager
def general() -> Iterator[None]:
    """While it is open, torch takes sizes for neither 0 nor 1 without a guard that says so, and
    rounds quotients of them in integers."""
    patched: Any = _config
    with patched.patch(backed_size_oblivious=True), rounded_in_integers():
        yield


def _points(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A function that makes a number of points, which may be a symbol: then without values."""

    def make(start: Any, end: Any, steps: Any, **options: Any) -> torch.Tensor:
        if not is_symbolic(steps):
            return function(start, end, steps, **options)
        kind = {name: options[name] for name in ("dtype", "device") if name in options}
        return torch.empty(steps, **kind)

    return make


AT_SYMBOLS: Mapping[object, Callable[..., Any]] = {
    float: torch.sym_float,
    int: torch.sym_int,
    torch.linspace: _points(torch.linspace),
    torch.logspace: _points(torch.logspace),
}
"""What stands for functions that would make a number of a size that is free."""


def dim_of(size: Any, symbols: Symbols) -> Dim:
    """A size that torch computed: a number, or a SymInt.

    Raises:
        InexpressibleError: where it has another form.
    """
    return size if isinstance(size, int) else _dim(expression_of(size), symbols)


def is_symbolic(size: object) -> bool:
    """Whether a size may vary."""
    return isinstance(size, torch.SymInt) and bool(expression_of(size).free_symbols)


def expression_of(size: Any) -> Any:
    """The sympy expression of a number of torch's, in the symbols that are left."""
    environment = size.node.shape_env
    if environment is None:
        return size.node.expr
    expression = environment.replace(size.node.expr)
    settled = {
        extreme: found
        for extreme in expression.atoms(Min, Max)
        if (found := _settled(extreme, environment.var_to_range)) is not None
    }
    return expression.xreplace(settled) if settled else expression


def _settled(extreme: Any, ranges: dict[Any, ValueRanges[Any]]) -> Any:
    """What a minimum or maximum of two comes to by what torch relied on; None where that differs,
    such as the end of a slice of a table that no index is beyond."""
    if len(extreme.args) != 2:
        return None
    one, other = extreme.args
    ahead = bound_sympy(one - other, ranges)
    if ahead.upper <= 0:
        return one if isinstance(extreme, Min) else other
    if ahead.lower >= 0:
        return other if isinstance(extreme, Min) else one
    return None


def same_shape(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Whether shapes that torch computed are the same, or torch relied on that they are."""
    return len(left) == len(right) and all(map(_same, left, right))


def _same(left: Any, right: Any) -> bool:
    known = [item for item in (left, right) if isinstance(item, torch.SymInt)]
    if not known:
        return bool(left == right)
    environment: Any = known[0].node.shape_env  # torch says since 2.14 that there may be none
    sides = [expression_of(n) if isinstance(n, torch.SymInt) else n for n in (left, right)]
    relied_on = {environment.replace(guard.expr) for guard in environment.guards}
    return sides[0] == sides[1] or not relied_on.isdisjoint(
        {sympy.Eq(*sides, evaluate=False), sympy.Eq(*sides[::-1], evaluate=False)}
    )


_OPERATORS: Mapping[Any, Callable[[Any, Any], Dim]] = {
    FloorDiv: operator.floordiv,
    CleanDiv: operator.floordiv,
    Mod: operator.mod,
    PythonMod: operator.mod,
    Min: smaller,
    Max: larger,
}


def _dim(expression: Any, symbols: Symbols) -> Dim:
    arguments = expression.args
    if expression.is_Integer:
        return int(expression)
    if expression in symbols:
        return symbols[expression]
    if expression.is_Add:
        return _sum(expression, symbols)
    if expression.is_Mul and all(item.is_Integer for item in arguments if item.is_number):
        return _joined(operator.mul, arguments, symbols)
    if expression.is_Pow and arguments[1].is_Integer and arguments[1] > 0:
        return _joined(operator.mul, [arguments[0]] * int(arguments[1]), symbols)
    if expression.func in _OPERATORS:
        return _joined(_OPERATORS[expression.func], arguments, symbols)
    raise InexpressibleError(expression)


def _joined(function: Callable[[Any, Any], Dim], arguments: Iterable[Any], symbols: Symbols) -> Dim:
    return functools.reduce(function, [_dim(item, symbols) for item in arguments])


def _sum(expression: Any, symbols: Symbols) -> Dim:
    """A sum with what is added first and the number last: `tokens - 1`, not `-1 + tokens`."""
    terms = sorted(expression.args, key=lambda term: (term.is_Integer, _is_taken_away(term)))
    total = _dim(terms[0], symbols)
    for term in terms[1:]:
        if _is_taken_away(term):
            total = total - _dim(-term, symbols)
        else:
            total = total + _dim(term, symbols)
    return total


def _is_taken_away(term: Any) -> bool:
    return bool(term.could_extract_minus_sign())


# --- what must hold ------------------------------------------------------------------------------

_RELATIONS: Mapping[str, Relation] = {
    "==": Relation.EQUAL,
    "!=": Relation.UNEQUAL,
    "<": Relation.LESS,
    "<=": Relation.AT_MOST,
}


def requirements(
    environment: ShapeEnv, symbols: Symbols, where: Callable[[Any], str]
) -> Iterator[Requirement]:
    """What torch relied on of the sizes while it computed, and is not so for all of them.

    A size that it took for a number, or for another size, has to be that. What concerns the
    number of samples alone is left out.

    Args:
        where: the user's line behind a guard of torch's, in words.

    Raises:
        InexpressibleError: for what cannot be said in terms of sizes, or not without that number.
    """
    for guard in environment.guards:
        for condition in _conditions(environment.replace(guard.expr), symbols):
            free = [symbols[item] for item in condition.free_symbols if item in symbols]
            if any(size is not BATCH for size in free) and not _always(condition):
                yield _requirement(condition, symbols, where(guard.expr))
    for symbol, size in symbols.items():
        fixed = environment.replace(symbol)
        if fixed != symbol and not (size is BATCH and fixed.is_number):
            by = next((g.expr for g in environment.guards if symbol in g.expr.free_symbols), None)
            yield _requirement(sympy.Eq(symbol, fixed, evaluate=False), symbols, where(by))


def _conditions(guard: Any, symbols: Symbols) -> Iterator[Any]:
    """What has to hold; where one of several is enough, as that a size is another's or one, that
    which holds in the example."""
    # Sympy's own make_args() gives a set, of another order in each process.
    for condition in guard.args if isinstance(guard, sympy.And) else (guard,):
        if isinstance(condition, sympy.Or):
            sizes = ((n, size) for n, size in symbols.items() if size is not BATCH)
            example = {n: size.example for n, size in sizes if isinstance(size, Size)}
            held = (part for part in condition.args if part.subs(example) is sympy.S.true)
            part = next(held, None)
            if part is not None:
                yield from _conditions(part, symbols)
                continue
        yield condition


def _always(condition: Any) -> bool:
    """Whether a relation holds whatever the sizes, each of which is at least 2."""
    if not isinstance(condition, sympy.core.relational.Relational):
        return False
    least = ValueRanges(SMALLEST, sympy.oo)
    # In factors, as torch writes it at first: of `batch * length - batch` no bound is known.
    difference = sympy.factor(condition.lhs - condition.rhs)
    known = bound_sympy(difference, dict.fromkeys(difference.free_symbols, least))
    match condition.rel_op:
        case "!=":
            # A product of whole numbers, one of which is at least 2, is never 1.
            large = condition.rhs == 1 and any(n.is_Symbol for n in condition.lhs.args)
            several = (
                condition.lhs.is_Mul and large and all(n.is_integer for n in condition.lhs.args)
            )
            return several or bool(known.lower > 0 or known.upper < 0)
        case "<":
            return bool(known.upper < 0)
        case "<=":
            return bool(known.upper <= 0)
        case ">":
            return bool(known.lower > 0)
        case ">=":
            return bool(known.lower >= 0)
        case _:
            return bool(difference == 0)


def _requirement(condition: Any, symbols: Symbols, where: str) -> Requirement:
    try:
        return _expressed(condition, symbols, where)
    except InexpressibleError as error:
        raise InexpressibleError(condition) from error


def _expressed(condition: Any, symbols: Symbols, where: str) -> Requirement:
    if not isinstance(condition, sympy.core.relational.Relational):
        raise InexpressibleError(condition)
    left, right = _without_common_factors(condition.lhs, condition.rhs)
    relation = condition.rel_op
    if relation in (">", ">="):
        left, right, relation = right, left, relation.replace(">", "<")
    for whole, one in ((left, right), (right, left)):
        if relation == "==" and whole.func is Min and one in whole.args and len(whole.args) == 2:
            (other,) = [item for item in whole.args if item != one]
            left, right, relation = one, other, "<="
    if relation == "==" and left.func in (Mod, PythonMod) and right == 0:
        dims = [_dim(item, symbols) for item in left.args]
        made = Requirement(dims[0], Relation.DIVISIBLE, dims[1], where)
    else:
        dims = [_dim(left, symbols), _dim(right, symbols)]
        made = Requirement(dims[0], _RELATIONS[relation], dims[1], where)
    if BATCH in sizes_in(dims):
        raise InexpressibleError(condition)
    return made


def _without_common_factors(left: Any, right: Any) -> tuple[Any, Any]:
    """Both sides of a relation, divided by the positive factors that they share.

    Where one side is 0, those of the other that are positive make no difference.
    """
    if right == 0:
        factors = sympy.Mul.make_args(sympy.factor(left))
        rest = [item for item in factors if not (item.is_Symbol or item.is_positive)]
        return (sympy.Mul(*rest), right) if len(factors) > 1 else (left, right)
    common = sympy.gcd(left, right) if left != 0 and right != 0 else sympy.Integer(1)
    if common.is_positive and common != 1:
        return sympy.cancel(left / common), sympy.cancel(right / common)
    return left, right


def plain_of(value: Any, symbols: Symbols) -> Any:
    """What is no tensor, with the sizes in it as expressions: a number, a `torch.Size`, a nest.

    Raises:
        InexpressibleError: where a number in it has no form in terms of sizes.
    """

    def leaf(item: Any) -> Any:
        if isinstance(item, torch.SymFloat | torch.SymBool):
            raise InexpressibleError(expression_of(item))
        return dim_of(item, symbols) if isinstance(item, torch.SymInt) else item

    return map_argument(leaf, value)


def shape_of(shape: Sequence[Any], symbols: Symbols) -> tuple[Dim, ...]:
    """The shape of a tensor, sizes as expressions."""
    return tuple(dim_of(size, symbols) for size in shape)
