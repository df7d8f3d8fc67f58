"""Modules of one op, such as activations, as part of the statement that calls them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from gpipe_compiler.codegen.sources import statement_at
from gpipe_compiler.ir import Op, RegionCall


def with_callers(ops: Sequence[Op]) -> tuple[Op, ...]:
    """The ops of a method; one that is all of a module, between ops of its caller, as of that.

    `self.down(self.act(self.up(x)))` is one statement of the caller, whose only ops are those of
    `up` and `down`; in `act`, the op belongs to another statement.
    """
    maker = {value: op for op in ops for value in op.outputs}
    readers: dict[str, list[Op]] = {}
    counts: dict[str, int] = {}
    for op in ops:
        counts[op.module] = counts.get(op.module, 0) + 1
        for value in op.inputs:
            readers.setdefault(value, []).append(op)
    return tuple(_as_of_caller(op, maker, readers) if counts[op.module] == 1 else op for op in ops)


def _as_of_caller(op: Op, maker: Mapping[str, Op], readers: Mapping[str, Sequence[Op]]) -> Op:
    around = [maker[value] for value in op.inputs if value in maker]
    around += [reader for value in op.outputs for reader in readers.get(value, ())]
    if len(around) != len(op.inputs) + 1 or isinstance(op.call, RegionCall):
        return op
    caller = around[-1]
    inside = not caller.module or op.module.startswith(f"{caller.module}.")
    statement = statement_at(caller.source)
    alike = all(
        other.module == caller.module and statement_at(other.source) == statement
        for other in around
    )
    if not inside or not alike or statement is None or op.module == caller.module:
        return op
    return dataclasses.replace(op, module=caller.module, source=caller.source)
