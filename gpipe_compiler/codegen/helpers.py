"""The user's functions, as blocks: which ops a call of one runs.

An op knows the lines that led to it from a module's `forward`. Ops in a row of one call get a path
below that of their module, such as `attn.rotate_half()mul_1`, and blocks are found by paths.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise

from gpipe_compiler.codegen.sources import calls_at, is_closure, is_repeated, statement_at
from gpipe_compiler.codegen.value_names import kind_of
from gpipe_compiler.errors import SourceLocation
from gpipe_compiler.ir import Op
from gpipe_compiler.ir.contents import prefixes

_CALL = "()"


def module_path(path: str) -> str:
    """The path of the module that makes a call, or the path itself where it is that of a module."""
    return path.partition(_CALL)[0].rpartition(".")[0] if _CALL in path else path


@dataclass(frozen=True, slots=True)
class HelperCall:
    """A call of a function: its name, and the line that calls it."""

    name: str
    site: SourceLocation


@dataclass
class HelperCalls:
    """The calls of functions in the methods of a stage, by their paths."""

    found: dict[str, HelperCall] = field(default_factory=dict)

    @property
    def names(self) -> Mapping[str, str]:
        """Those of the functions."""
        return {path: called.name for path, called in self.found.items()}

    def enter(self, ops: Sequence[Op]) -> tuple[Op, ...]:
        """The ops of a method, with the paths of the calls that they are in as those of modules."""
        within = Counter(path for op in ops for path in {"", *prefixes(op.module)})
        entered: dict[str, Op] = {}
        for module in dict.fromkeys(op.module for op in ops):
            own = [op for op in ops if op.module == module]
            entered.update(self._group(own, 0, module, within[module]))
        return tuple(entered[op.name] for op in ops)

    def _group(
        self, ops: Sequence[Op], depth: int, path: str, around: int
    ) -> Iterator[tuple[str, Op]]:
        """The ops of a module or call, by name, in the calls that it makes.

        Args:
            around: ops that it runs, those of modules that it calls included.
        """
        for _, group in groupby(_numbered(ops, depth), key=lambda pair: pair[0]):
            members = [op for _, op in group]
            chain = _chain(members[0])
            if len(chain) <= depth:
                yield from ((op.name, dataclasses.replace(op, module=path)) for op in members)
                continue
            for part in _apart(members, depth, chain[depth]):
                own = path
                if len(part) < around:
                    own = f"{path}.{chain[depth].name}{_CALL}{part[0].name}".removeprefix(".")
                    self.found[own] = chain[depth]
                yield from self._group(part, depth + 1, own, len(part))


def _chain(op: Op) -> tuple[HelperCall, ...]:
    """The calls of functions that an op is made in, outermost first; of closures, those around."""
    if op.source is None:
        return ()
    pairs = pairwise((*op.source.callers, op.source))
    calls = (
        HelperCall(_function_name(inner.function), outer)
        for outer, inner in pairs
        if not is_closure(inner)
    )
    return tuple(call for call in calls if call.name.isidentifier())


def _apart(ops: list[Op], depth: int, called: HelperCall) -> list[list[Op]]:
    """The ops of several calls that stand in one statement, each by itself: `f(x) + f(y)`.

    A function of several statements begins again where its lines do, which separates its calls.
    """
    count = calls_at(called.site, called.name)
    size, rest = divmod(len(ops), max(count, 1))
    chains = [(*op.source.callers, op.source)[depth + 1 :] for op in ops if op.source is not None]
    alike = [kind_of(op) for op in ops] == [kind_of(op) for op in ops[:size]] * count
    if count < 2 or rest or not alike or len({chain[0].line for chain in chains}) > 1:
        return [ops]
    return [ops[start : start + size] for start in range(0, len(ops), size)]


def _function_name(text: str) -> str:
    """The user's name; Python changes `__x` inside classes."""
    return text.strip("_") if text.startswith("__") else text


def _numbered(ops: Sequence[Op], depth: int) -> Iterator[tuple[int, Op]]:
    """The ops with the numbers of the calls that make them at some depth."""
    number, before = 0, None
    for op in ops:
        chain = _chain(op)
        called = chain[depth] if len(chain) > depth else None
        line = 0
        if called is not None:
            assert op.source is not None
            frames = (*op.source.callers, op.source)
            inside = frames[frames.index(called.site) + 1] if called.site in frames else op.source
            statement = statement_at(inside)
            line = statement.line if statement else inside.line
            if is_repeated(inside):
                line = 0
        if before is not None and (called != before[0] or line < before[1]):
            number += 1
        before = called, line
        yield number, op
