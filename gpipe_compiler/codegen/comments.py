"""What comments say: shapes with the batch as B, the user's file and line."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePath

from gpipe_compiler.errors import SourceLocation
from gpipe_compiler.ir import Graph, Value, ValueKind
from gpipe_compiler.runtime.wording import printable

BATCH = "B"
"""Stands for the samples in a micro-batch."""


def shape_text(value: Value, batch_size: int) -> str:
    """`(B, 64, 56, 56)`: the batch dimension in terms of B."""
    sizes = [
        _batch_text(size, batch_size) if index == value.batch_dim else str(size)
        for index, size in enumerate(value.shape)
    ]
    return f"({sizes[0]},)" if len(sizes) == 1 else f"({', '.join(sizes)})"


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
