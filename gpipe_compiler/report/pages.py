"""Renders the templates that people look at: HTML and SVG, everything in them escaped."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined

from gpipe_compiler.runtime.wording import printable_lines
from gpipe_compiler.text import units


def _printable(value: object) -> object:
    """What stands for a value: XML takes no control characters, and a reader no hidden ones."""
    return printable_lines(value) if type(value) is str else value


def render(template: str, **context: object) -> str:
    """The text of a template.

    Args:
        context: what the template names; a name that is missing raises.
    """
    environment = Environment(
        loader=PackageLoader("gpipe_compiler.templates", ""),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=_printable,
    )
    environment.globals["type_of"] = units.format_type
    environment.filters |= {
        "bytes": units.format_bytes,
        "seconds": units.format_seconds,
        "share": units.format_share,
        "source": units.format_source,
    }
    return environment.get_template(template).render(**context)
