"""The one Jinja environment of the emitted files."""

from __future__ import annotations

from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from gpipe_compiler.runtime.wording import printable
from gpipe_compiler.text import escaping


class _Escaped(str):
    """Text that is safe where it stands, the ends of its lines included."""

    __slots__ = ()


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("gpipe_compiler.templates", ""),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # the files are Python and Markdown, not HTML
        finalize=_written,
    )
    environment.filters |= {
        "docstring": lambda text: _Escaped(escaping.docstring(text)),
        "markdown": escaping.markdown,
        "code_span": escaping.code_span,
    }
    return environment


def _written(value: object) -> object:
    """What stands for a value: no name, wherever it comes from, begins a line of code.

    Of a list, each item is a line.
    """
    if isinstance(value, list | tuple):
        return "\n".join(map(printable, value))
    return printable(value) if type(value) is str else value


def render(template: str, **values: Any) -> str:
    """The text of a template; a value it needs and does not get is an error."""
    return _environment().get_template(template).render(**values)
