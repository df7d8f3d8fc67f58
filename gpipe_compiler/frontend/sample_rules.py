"""Finds the numbers of samples at which a model decides otherwise while it is traced."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.functions import FloorDiv, Max, Min, Mod, PythonMod

from gpipe_compiler.frontend.noted_sizes import NotedSizes
from gpipe_compiler.frontend.signature import Signature
from gpipe_compiler.ir.sizes import LARGEST_BATCH, SMALLEST, SampleRule, in_order
from gpipe_compiler.ir.symbolic import expression_of, is_symbolic

_ORDERS = frozenset({"<", "<=", ">", ">="})


def sample_rules(
    signature: Signature, placeholders: Sequence[fx.Node], noted: NotedSizes
) -> tuple[SampleRule, ...]:
    """Numbers of samples for which a model may be another program than its trace, in order.

    What torch compares, to see whether sizes are equal, distinguishes no batches, but for counts
    of pieces, as of `x.split(300)`; what the user's own code asks does.
    """
    sizes: list[Any] = [
        known.shape[source.batch_dim]
        for source, node in zip(signature.inputs, placeholders, strict=True)
        if source.batch_dim is not None and isinstance(known := node.meta.get("val"), torch.Tensor)
    ]
    symbolic = [size for size in sizes if is_symbolic(size)]
    if not symbolic:
        return ()
    symbols = {symbol for size in symbolic for symbol in expression_of(size).free_symbols}
    environment: ShapeEnv = symbolic[0].node.shape_env
    found: list[SampleRule] = []
    for guard in environment.guards:
        condition = environment.replace(guard.expr)
        if not condition.free_symbols <= symbols or guard.expr in noted.of_kernels:
            continue
        numbers: set[int] = set()
        if getattr(condition, "rel_op", "") in _ORDERS or condition.has(FloorDiv):
            numbers = _turning_points(condition)
        elif guard.expr in noted.asked:
            numbers = {int(number) for number in condition.atoms(sympy.Integer)}
        where = noted.guards.get(guard.expr)
        found.extend(SampleRule(n, where) for n in numbers if SMALLEST < n <= LARGEST_BATCH)
    for guard, where in noted.guards.items():
        numbers = {*_of_extremes(environment.replace(guard), symbols)}
        found.extend(SampleRule(number, where) for number in numbers)
    for question, where in noted.settled.items():
        condition = environment.replace(question)
        known = condition.free_symbols <= symbols
        if known and _holds(condition, 1) != _holds(condition, SMALLEST):
            found.append(SampleRule(SMALLEST, where))
    return in_order(found)


def _of_extremes(condition: Any, symbols: Collection[Any]) -> Iterator[int]:
    """The numbers of samples from which on a minimum or maximum in a condition is another.

    That is how torch computes the ends of slices where other sizes are free too.

    Args:
        symbols: of the number of samples.
    """
    for extreme in condition.atoms(Min, Max):
        if extreme.free_symbols and extreme.free_symbols <= symbols:
            for one, other in itertools.combinations(extreme.args, 2):
                yield from _turning_points(sympy.Le(one, other))


def _holds(condition: Any, samples: int) -> bool | None:
    """Whether it does for this number; None where that is no number, as with a part of one."""
    try:
        return bool(condition.subs(dict.fromkeys(condition.free_symbols, samples)))
    except ZeroDivisionError:
        return None


def _turning_points(condition: Any) -> set[int]:
    """Numbers of samples from which on a condition on them is another.

    What goes up and down with them, as `len(x) % 50 < 3`, has many: by its own numbers it is tried.
    """
    steps = condition.has(FloorDiv, Mod, PythonMod)
    own = {int(number) + 1 for number in condition.atoms(sympy.Integer)} if steps else set()

    least, most = SMALLEST, LARGEST_BATCH
    last = _holds(condition, most)
    if _holds(condition, least) == last:
        return own
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (least, middle) if _holds(condition, middle) == last else (middle, most)
    return {most, *own}
