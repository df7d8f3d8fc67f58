"""The user's lines that look at sizes while a model is traced, and the numbers of samples at which
it decides otherwise.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.functions import FloorDiv, Max, Min, Mod, PythonMod, TruncToInt

from gpipe_compiler.errors import SourceLocation
from gpipe_compiler.frontend.locate import (
    calling_line,
    chooses_kernel,
    is_asked_by_user,
    is_in_layer,
)
from gpipe_compiler.frontend.signature import Signature
from gpipe_compiler.ir.rounded_sizes import is_in_integers
from gpipe_compiler.ir.sizes import LARGEST_BATCH, SMALLEST, UNKNOWN_LINE, SampleRule, in_order
from gpipe_compiler.ir.symbolic import expression_of, is_symbolic

_LONGEST = 100
"""Symbols, numbers and operators in a condition on sizes that torch still reasons about: as many
make a trace a few times slower, and what follows of them no one can read."""


@dataclass
class NotedSizes:
    """The user's lines that looked at sizes while a model was traced.

    Attributes:
        fixed: by the symbol of a size, the line that turned it into a number.
        made_numbers: those of them that the user's own code did, and no function that it called.
        of_layers: those that a module of torch.nn has fixed, such as features.
        guards: by what they compared.
        of_kernels: what decides which kernel of a convolution runs, to the same result.
        asked: what the user's own code compared, and no function that it called.
        settled: of that, with its lines, what torch answers without a guard.
        ties: dimensions of inputs, by the number of the input, that are of one size: the batch,
            and those that are to be free.
    """

    ties: Sequence[Sequence[tuple[int, int]]] = ()
    fixed: dict[Any, SourceLocation] = field(default_factory=dict)
    made_numbers: set[Any] = field(default_factory=set)
    of_layers: set[Any] = field(default_factory=set)
    guards: dict[Any, SourceLocation] = field(default_factory=dict)
    of_kernels: set[Any] = field(default_factory=set)
    asked: set[Any] = field(default_factory=set)
    settled: dict[Any, SourceLocation | None] = field(default_factory=dict)
    _examples: Mapping[Any, int] = field(default_factory=dict)

    def begin(self, inputs: Sequence[torch.Tensor], *, must: bool) -> None:
        """Has torch rely on what is of one size, before a model is run on inputs.

        Args:
            must: whether sizes have to be free, however long that takes.
        """
        for (one, dim), *others in filter(None, self.ties):
            for other, place in others:
                bool(inputs[one].shape[dim] == inputs[other].shape[place])
        sizes: list[Any] = [inputs[i].shape[d] for places in self.ties[1:] for i, d in places]
        self._examples = {
            expression_of(n): n.node.hint for n in sizes if is_symbolic(n) and not must
        }

    def whole(self, size: torch.SymFloat) -> Any:
        """What `int()` makes of a fraction of sizes.

        Where it is no whole number in terms of them, all but the batch are fixed.
        """
        made = _whole(size)
        if not isinstance(made, int) and not is_in_integers(made):
            self._fix(size.node.shape_env, size.node.expr)
            made = _whole(size)
        return made if isinstance(made, int) or is_in_integers(made) else int(size)

    def fix_long(self, environment: ShapeEnv, guard: Any) -> None:
        """Fixes the sizes in a guard that torch would take too long to reason about."""
        if sum(1 for _ in sympy.preorder_traversal(guard)) > _LONGEST:
            self._fix(environment, guard)

    def _fix(self, environment: ShapeEnv, expression: Any) -> None:
        for symbol in self._examples.keys() & expression.free_symbols:
            value = sympy.Integer(self._examples[symbol])
            environment._set_replacement(symbol, value, "one size alone is followed")

    def made_number(self, size: Any) -> SourceLocation | None:
        """The user's own line that took a size for a number, as `range(length)` does, or what
        follows from it, as `int(length * 0.7)`."""
        symbol = size.node._expr if isinstance(size, torch.SymInt) else None
        if symbol in self.made_numbers:
            return self.fixed.get(symbol)
        rounded = (guard for guard in self.asked if isinstance(guard, sympy.Eq))
        rounded = (guard for guard in rounded if isinstance(guard.lhs, TruncToInt))
        lines = (self.guards.get(guard) for guard in rounded if symbol in guard.free_symbols)
        return next(filter(None, lines), None)

    def fitting(self, size: Any) -> SourceLocation | None:
        """The line that fits one size only, as of `x + self.positions`; None for the features of a
        layer."""
        symbol = size.node._expr if isinstance(size, torch.SymInt) else None
        return None if symbol in self.of_layers else self.fixed.get(symbol)

    def line_of(self, size: Any) -> SourceLocation | None:
        """The line that fixed a size, by itself or together with others."""
        if not isinstance(size, torch.SymInt):
            return next(iter(self.fixed.values()), None)
        symbol = size.node._expr  # before it was replaced by what it was found to be
        guards = (line for guard, line in self.guards.items() if symbol in guard.free_symbols)
        return self.fixed.get(symbol) or next(guards, None)

    def where(self, guard: Any) -> str:
        """The line that compared something, with what stands there."""
        found = self.guards.get(guard)
        return UNKNOWN_LINE if found is None else found.brief


def _whole(size: torch.SymFloat) -> Any:
    return math.floor(size) if size >= 0 else math.ceil(size)


@contextlib.contextmanager
def noting_sizes() -> Iterator[NotedSizes]:
    """Collects the user's lines that look at sizes, while it is open."""
    noted = NotedSizes()
    replaced, logged = ShapeEnv._set_replacement, ShapeEnv._log_guard
    evaluated = ShapeEnv.evaluate_expr

    def replace(environment: ShapeEnv, symbol: Any, value: Any, *rest: Any) -> None:
        where = calling_line() if value.is_number else None
        if where is not None:
            noted.fixed.setdefault(symbol, where)
            if is_asked_by_user():
                noted.made_numbers.add(symbol)
            if is_in_layer():
                noted.of_layers.add(symbol)
        replaced(environment, symbol, value, *rest)

    def log(environment: ShapeEnv, prefix: str, guard: Any, *rest: Any, **named: Any) -> None:
        where = calling_line()
        if where is not None:
            noted.guards.setdefault(guard, where)
        if is_asked_by_user():
            noted.asked.add(guard)
        if chooses_kernel():
            noted.of_kernels.add(guard)
        logged(environment, prefix, guard, *rest, **named)
        noted.fix_long(environment, guard)

    def evaluate(environment: ShapeEnv, asked: Any, *rest: Any, **named: Any) -> Any:
        if asked.is_Relational and asked.free_symbols and is_asked_by_user():
            noted.settled.setdefault(asked, calling_line())
        return evaluated(environment, asked, *rest, **named)

    with (
        mock.patch.object(ShapeEnv, "_set_replacement", replace),
        mock.patch.object(ShapeEnv, "_log_guard", log),
        mock.patch.object(ShapeEnv, "evaluate_expr", evaluate),
    ):
        yield noted


_ORDERS = frozenset({"<", "<=", ">", ">="})


def batch_sizes(signature: Signature, placeholders: Sequence[fx.Node]) -> list[Any]:
    """The number of samples as the inputs of a trace have it, where it is free."""
    sizes = (
        known.shape[source.batch_dim]
        for source, node in zip(signature.inputs, placeholders, strict=True)
        if source.batch_dim is not None and isinstance(known := node.meta.get("val"), torch.Tensor)
    )
    return [size for size in sizes if is_symbolic(size)]


def sample_rules(
    signature: Signature, placeholders: Sequence[fx.Node], noted: NotedSizes
) -> tuple[SampleRule, ...]:
    """Numbers of samples for which a model may be another program than its trace, in order.

    What torch compares, to see whether sizes are equal, distinguishes no batches, but for counts
    of pieces, as of `x.split(300)`; what the user's own code asks does.
    """
    symbolic = batch_sizes(signature, placeholders)
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


# --- lists of samples -----------------------------------------------------------------------------

_JOINED: Mapping[object, Callable[[torch.Tensor], torch.Tensor]] = {
    **dict.fromkeys((torch.cat, torch.concat, torch.concatenate), lambda x: x.flatten(0, 1)),
    torch.stack: lambda x: x,
}
"""What puts samples together along dimension 0, and what that is of the batch."""

_LISTING = (torch.Tensor.__len__, torch.Tensor.unbind, torch.unbind)


@dataclass(frozen=True, slots=True)
class SampleList:
    """The samples of a tensor, one by one, and the user's line that asked for them."""

    whole: torch.Tensor
    samples: Sequence[torch.Tensor]
    line: SourceLocation | None


class SampleLists:
    """Samples that Python holds one by one, as many as the example has.

    All of them joined in order are the batch, at every number of samples. Whatever else is done
    with one of them, or with their number, is right for the example's number alone.

    Args:
        sizes: what is noted of them.
        batch: the number of samples, as tensors have it.
    """

    def __init__(self, sizes: NotedSizes, batch: Iterable[Any] = ()) -> None:
        self._sizes = sizes
        self._batch = {expression_of(size) for size in batch if is_symbolic(size)}
        self._lists: dict[int, SampleList] = {}

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._lists)

    def listed(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The samples that `list(x)` or `x.unbind()` takes; None where it is no batch."""
        if func not in _LISTING:
            return None
        whole, *dim = (*args, *kwargs.values())
        first = dim in ([], [0]) and isinstance(whole, torch.Tensor) and whole.dim() > 0
        size: Any = whole.shape[0] if first else 0
        if not is_symbolic(size) or expression_of(size) not in self._batch:
            return None
        if func is torch.Tensor.__len__:
            raise TypeError("Python's list() may ask how many there are, and does without")
        samples = tuple(whole.select(0, 0) for _ in range(size.node.hint))
        found = SampleList(whole, samples, calling_line())
        self._lists.update((id(sample), found) for sample in samples)
        return samples

    def joined(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What joins all samples of a list in order, of the tensor that they are of; or None."""
        if func not in _JOINED or not self._lists:
            return None
        parts, *dim = (*args, *kwargs.values())
        found = self._lists.get(id(parts[0])) if isinstance(parts, list | tuple) and parts else None
        if found is None or dim not in ([], [0]) or kwargs.keys() - {"tensors", "dim"}:
            return None
        same = list(map(id, parts)) == list(map(id, found.samples))
        return _JOINED[func](found.whole).clone() if same and found.whole.dim() > 1 else None

    def taken(self, items: Sequence[Any]) -> SampleList | None:
        """The list of one of these, which is none any more: its length is fixed at its line."""
        found = next((self._lists[id(item)] for item in items if id(item) in self._lists), None)
        if found is not None:
            for sample in found.samples:
                del self._lists[id(sample)]
            if found.line is not None:
                self._sizes.fixed.setdefault(expression_of(found.whole.shape[0]), found.line)
        return found
