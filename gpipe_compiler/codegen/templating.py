"""The one Jinja environment of the emitted files."""

from __future__ import annotations

from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("gpipe_compiler.templates", ""),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # the files are Python and Markdown, not HTML
    )


def render(template: str, **values: Any) -> str:
    """The text of a template; a value it needs and does not get is an error."""
    return _environment().get_template(template).render(**values)
