"""The body of a method: ops as statements, nested, guarded and commented.

Comments say shapes, with the batch as B, and the user's file and line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import PurePath

from gpipe_compiler.codegen.layout import INDENT, WIDTH, Expression, lay_out
from gpipe_compiler.errors import SourceLocation
from gpipe_compiler.ir import Graph, Mode, Value, ValueKind, sizes
from gpipe_compiler.runtime.sizes import Expression as SizeExpression
from gpipe_compiler.runtime.wording import printable

BATCH = "B"
"""Stands for the samples in a micro-batch."""


def shape_text(value: Value, batch_size: int) -> str:
    """`(B, 64, 56, 56)`: the batch dimension in terms of B."""
    dims = [_dim_text(value, index, batch_size) for index in range(len(value.shape))]
    return f"({dims[0]},)" if len(dims) == 1 else f"({', '.join(dims)})"


def _dim_text(value: Value, index: int, batch_size: int) -> str:
    dim = value.dims[index]
    if isinstance(dim, SizeExpression):
        return dim.python({sizes.BATCH.name: BATCH})
    return _batch_text(dim, batch_size) if index == value.batch_dim else str(dim)


def _batch_text(size: int, batch_size: int) -> str:
    if size % batch_size == 0:
        times = size // batch_size
        return BATCH if times == 1 else f"{times}*{BATCH}"
    return f"{BATCH}/{batch_size // size}" if size and batch_size % size == 0 else str(size)


def value_text(graph: Graph, name: str) -> str:
    """Shape and dtype of a value, as far as they are known."""
    value = graph.values.get(name)
    if value is None:
        return "tensor"
    if value.kind is not ValueKind.TENSOR:
        return "number" if value.kind is ValueKind.SCALAR else "object"
    dtype = str(value.dtype).removeprefix("torch.")
    if not value.shape:
        return f"{dtype} scalar"
    return f"{shape_text(value, graph.batch_size)} {dtype}"


def file_name(path: str) -> str:
    """The file's own name: `model.py`."""
    return printable(PurePath(path).name)


def where(source: SourceLocation | None) -> str:
    """`model.py:12`, or nothing where the line is not known."""
    return f"{file_name(source.file)}:{source.line}" if source is not None else ""


def call_path(path: tuple[str | int, ...]) -> str:
    """Where an input stands in the model's call, in words: `the model's args[0]`."""
    first, *rest = path
    suffix = "".join(f"[{item!r}]" for item in rest).replace("'", '"')
    if first == "target":
        return f"the target{suffix}"
    return f"the model's {first}{suffix}"


def group_comment(module: str, sources: Iterable[SourceLocation | None]) -> str:
    """`# layer1.0 (model.py:12-19)`: over the statements of one module."""
    known = [source for source in sources if source is not None]
    files = dict.fromkeys(source.file for source in known)
    places = []
    for file in files:
        lines = sorted({source.line for source in known if source.file == file})
        span = str(lines[0]) if len(lines) == 1 else f"{lines[0]}-{lines[-1]}"
        places.append(f"{file_name(file)}:{span}")
    if module and places:
        return comment(f"{module} ({', '.join(places)})")
    return comment(module or ", ".join(places))


def comment(text: str) -> str:
    """`# text`, on one line whatever it is; "" for no text."""
    return f"# {printable(text)}" if text else ""


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement of a method.

    Attributes:
        target: the left-hand side with its operator (`x = `, `x += `), "" for none.
        expression: the right-hand side.
        note: what a comment at the end of the line says, such as a shape.
        body: the statements inside a `with` or `for`; `target` is then what that line begins with.
        around: the lines of the `with` blocks that it is to stand in, the outermost first; None
            where it is not known yet.
    """

    target: str
    expression: Expression
    mode: Mode = Mode.ALWAYS
    module: str = ""
    sources: tuple[SourceLocation | None, ...] = ()
    note: str = ""
    body: tuple[Statement, ...] = ()
    around: tuple[Statement, ...] | None = None


def in_blocks(statements: Sequence[Statement], depth: int = 0) -> tuple[Statement, ...]:
    """Statements in the `with` blocks around them; those in a row share one.

    Args:
        depth: of these blocks, those that are written around all of the statements.
    """

    def line(statement: Statement) -> Statement | None:
        around = statement.around or ()
        return around[depth] if len(around) > depth else None

    written: list[Statement] = []
    for _, group in groupby(statements, key=lambda statement: id(line(statement))):
        inside = list(group)
        block = line(inside[0])
        if block is None:
            written.extend(replace(s, body=in_blocks(s.body, len(s.around or ()))) for s in inside)
            continue
        modes = {statement.mode for statement in inside}
        mode = modes.pop() if len(modes) == 1 else Mode.ALWAYS
        written.append(replace(block, mode=mode, body=in_blocks(guarded(inside, mode), depth + 1)))
    return tuple(written)


def guarded(statements: Sequence[Statement], mode: Mode) -> Sequence[Statement]:
    """Statements within one that is of a mode: a guard stands around it, and not around them."""
    if mode is Mode.ALWAYS:
        return statements
    return [replace(statement, mode=Mode.ALWAYS) for statement in statements]


def write_statements(
    statements: Sequence[Statement], indent: int, previous: str | None = None
) -> list[str]:
    """Lines of code, with a comment over the statements of each module and guards by mode.

    Args:
        previous: the module that the last comment before was about.
    """
    lines: list[str] = []
    guards = groupby(_settled(statements), key=lambda statement: statement.mode)
    last_mode = Mode.ALWAYS
    guard = ""
    for mode, guarded in guards:
        depth = indent
        members = list(guarded)
        if mode is not Mode.ALWAYS:
            if last_mode is Mode.ALWAYS and members[0].module != previous:
                lines.extend(_heading(members, indent, spaced=bool(lines)))
                previous = members[0].module
            guard = _guard(mode, guard)
            lines.append(INDENT * indent + guard)
            depth = indent + 1
        else:
            guard = ""
        for module, group in groupby(members, key=lambda statement: statement.module):
            grouped = list(group)
            if module != previous:
                lines.extend(_heading(grouped, depth, spaced=bool(lines) and depth == indent))
                previous = module
            for statement in grouped:
                lines.extend(_write(statement, depth))
        last_mode = mode
    return lines


def _settled(statements: Sequence[Statement]) -> list[Statement]:
    """A single statement of a module inside is told of the one around it."""
    settled: list[Statement] = []
    for place, statement in enumerate(statements):
        around = settled[-1].module if settled else statement.module
        after = statements[place + 1].module if place + 1 < len(statements) else ""
        inside = not around or statement.module.startswith(f"{around}.")
        told = around if inside and after != statement.module else statement.module
        settled.append(replace(statement, module=told))
    return settled


def _guard(mode: Mode, before: str) -> str:
    """What stands over statements of one mode; `before` stands over those right before them."""
    if before.startswith("if"):
        return "else:"
    return "if self.training:" if mode is Mode.TRAIN else "if not self.training:"


def _heading(statements: Sequence[Statement], indent: int, *, spaced: bool) -> list[str]:
    module = statements[0].module
    own = [statement for statement in statements if statement.module == module]
    text = group_comment(module, (source for statement in own for source in _sources(statement)))
    return ([""] if spaced else []) + ([INDENT * indent + text] if text else [])


def _sources(statement: Statement) -> Iterator[SourceLocation | None]:
    yield from statement.sources
    for inner in statement.body:
        if inner.module == statement.module:
            yield from _sources(inner)


def _write(statement: Statement, indent: int) -> Iterator[str]:
    if statement.body:
        yield from lay_out(statement.expression, prefix=statement.target, suffix=":", indent=indent)
        yield from write_statements(statement.body, indent + 1, statement.module)
        return
    lines = lay_out(statement.expression, prefix=statement.target, indent=indent)
    if statement.note and len(lines) == 1:
        noted = f"{lines[0]}  # {statement.note}"
        if len(noted) <= WIDTH:
            lines = [noted]
    yield from lines
