"""The segments of a stage that run again in the backward: calls of modules, else methods."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from gpipe_compiler.codegen.constants import quote
from gpipe_compiler.codegen.expressions import RawText, again
from gpipe_compiler.codegen.facts import CodeFacts
from gpipe_compiler.codegen.layout import Expression, consecutive, lay_out, name, tuple_of
from gpipe_compiler.codegen.method_text import is_tensor
from gpipe_compiler.codegen.methods import Method
from gpipe_compiler.codegen.names import Identifiers
from gpipe_compiler.ir import Graph, Op, Ref
from gpipe_compiler.ir.sizes import asked
from gpipe_compiler.plan import Stage


def modules_run_again(facts: CodeFacts, stage: Stage, forward: Method) -> frozenset[str]:
    """The paths of the modules of which one call may be a segment, as far as the stage has it."""
    runs = _runs(forward.ops, stage)
    here = [facts.graph.op_of[name] for name in stage.ops]
    dead = set(stage.ops).difference(op.name for op in forward.ops)
    return frozenset(
        module
        for index, run in runs
        if index is not None and (module := _module_of(here, run, dead))
    )


def split_off(
    facts: CodeFacts,
    stage: Stage,
    forward: Method,
    attributes: Iterable[str],
    again: Collection[str],
) -> tuple[Method, dict[str, Method]]:
    """The `forward` that calls the segments of its stage as methods, and these by name.

    Args:
        attributes: what the stage calls its modules and tensors.
        again: the paths of modules that run again where they are called.
    """
    names = Identifiers(attributes)
    here = [facts.graph.op_of[name] for name in stage.ops]
    dead = set(stage.ops).difference(op.name for op in forward.ops)
    ops: list[Op] = []
    segments: dict[str, Method] = {}
    unnamed = 0
    for index, run in _runs(forward.ops, stage):
        module = "" if index is None else _module_of(here, run, dead)
        method = None if index is None or module in again else _method(facts.graph, run, forward)
        if method is None:
            ops.extend(run)
            continue
        unnamed += not module
        own = names.take(module or f"segment_{unnamed}")
        segments[own] = method
        ops.append(_call(facts.graph, own, method))
    return dataclasses.replace(forward, ops=tuple(ops)), segments


def _runs(ops: Sequence[Op], stage: Stage) -> list[tuple[int | None, list[Op]]]:
    """The ops of each segment of a stage, and those between them."""
    of_op = {name: index for index, inside in enumerate(stage.segments) for name in inside}
    runs = itertools.groupby(ops, key=lambda op: of_op.get(op.name))
    return [(index, list(run)) for index, run in runs]


def _method(graph: Graph, ops: Sequence[Op], forward: Method) -> Method | None:
    """What a segment computes; None where nothing of it is used."""
    made = {value for op in ops for value in op.outputs}
    inside = {op.name for op in ops}
    read_after = {value for op in forward.ops if op.name not in inside for value in op.inputs}
    returns = tuple(v for op in ops for v in op.outputs if v in read_after.union(forward.returns))
    if not returns:
        return None
    fixed = tuple(item for item in forward.given if not asked(item.template))
    known = made.union(item.value for item in fixed)
    arguments = tuple(dict.fromkeys(v for op in ops for v in op.inputs if v not in known))
    tensors = [v for v in arguments if is_tensor(graph, v)]
    if not tensors:
        # Devices that were fixed by tracing become that of a tensor, where the stage is given any.
        tensors = [v for v in forward.arguments if is_tensor(graph, v)][:1]
    others = (v for v in arguments if not is_tensor(graph, v))
    read = {value for op in ops for value in op.inputs}
    return Method(
        ops=tuple(ops),
        arguments=(*tensors, *others),
        returns=returns,
        multiples=forward.multiples,
        given=tuple(item for item in fixed if item.value in read),
    )


def _module_of(here: Sequence[Op], ops: Sequence[Op], dead: Collection[str]) -> str:
    """The path of the module of which the stage runs all of these ops and no others, else "".

    Args:
        here: the ops of the stage.
        dead: ops that nobody writes.
    """
    common = ops[0].path.split(".")
    for op in ops:
        pairs = zip(common, op.path.split("."), strict=False)
        common = [word for word, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]
    module = ".".join(common)
    names = {op.name for op in ops}.union(dead)
    within = (op.name for op in here if f"{op.path}.".startswith(f"{module}."))
    return module if module and names.issuperset(within) else ""


def _call(graph: Graph, name: str, method: Method) -> Op:
    """The op by which `forward` calls a segment: it stands where its last result is made."""
    result = method.returns[0] if len(method.returns) == 1 else method.returns
    source = graph.producer[method.returns[-1]].source
    return Op(name, again(RawText(f"self.{name}"), map(Ref, method.arguments)), result, source)


def segments_lines(held: Mapping[str, Sequence[str]]) -> list[str]:
    """`SEGMENTS = {...}`; layers in a row with the like buffers are one entry."""
    entries: list[Expression] = []
    for (before, after, rests), group in itertools.groupby(
        held, lambda label: _layer(label, held[label])
    ):
        labels = list(group)
        span = consecutive([own.removeprefix(before).removesuffix(after) for own in labels])
        if span and len(labels) > 1:
            own = f"{before}{{i}}{after}"
            names = ", ".join(f'f"{own}{rest}"' for rest in rests)
            listed = f"({names}{',' if len(rests) == 1 else ''})"
            entries.append(name(f'**{{f"{own}": {listed} for i in {span}}}'))
            continue
        for own in labels:
            buffers = [name(quote(buffer)) for buffer in held[own]]
            listing = tuple_of(buffers, exploded=len(buffers) > 1)
            entries.append(listing.prefixed(f"{quote(own)}: "))
    lines = (line for entry in entries for line in lay_out(entry, suffix=",", indent=1))
    return ["SEGMENTS = {", *lines, "}"] if held else []


def _layer(label: str, buffers: Sequence[str]) -> tuple[str, str, tuple[str, ...]]:
    """What stands before and after the number of a layer, and its buffers by their names in it."""
    numbered = re.fullmatch(r"((?:[\w.]*\.)?)\d+((?:\.[A-Za-z_]\w*)*)", label)
    inside = tuple(own.removeprefix(label) for own in buffers if own.startswith(label))
    plain = all(re.fullmatch(r"[\w.]*", own) for own in inside)
    if numbered is None or len(inside) < len(buffers) or not plain:
        return label, "", ()
    return numbered[1], numbered[2], inside
