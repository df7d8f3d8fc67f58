"""The text of one method: signature, docstring, statements."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from gpipe_compiler import escaping
from gpipe_compiler.codegen.body import Body
from gpipe_compiler.codegen.layout import WIDTH, call, lay_out, name
from gpipe_compiler.codegen.statements import write_statements

NO_TYPES: Mapping[str, str] = MappingProxyType({})


def method_text(
    label: str,
    body: Body,
    returned: str,
    described: Sequence[str],
    types: Mapping[str, str] = NO_TYPES,
) -> list[str]:
    """The lines of a method of a class.

    Args:
        returned: its return annotation.
        described: the lines of its docstring.
        types: of its arguments that are no tensors; "" where there is no telling.
    """
    typed = ((own, types.get(own, "Tensor")) for own in body.arguments)
    written = (f"{own}: {kind}" if kind else own for own, kind in typed)
    parameters = [name("self"), *map(name, written)]
    lines = lay_out(call(f"def {label}", parameters), suffix=f" -> {returned}:", indent=1)
    lines.extend(described)
    lines.extend(write_statements(body.statements, 2))
    lines.extend(_return(body.returns))
    return lines


def _return(values: Sequence[str]) -> list[str]:
    if not values:
        return ["        return ()"]
    flat = f"        return {', '.join(values)}"
    if len(values) == 1 or len(flat) <= WIDTH:
        return [flat]
    return ["        return (", *(f"            {value}," for value in values), "        )"]


def docstring(summary: str, arguments: Sequence[str], returns: Sequence[str]) -> list[str]:
    """The docstring of a method; arguments and returns are entries such as `x: what it is.`

    Args:
        summary: its first line, text of our own.
    """
    if not arguments and not returns:
        return [f'        """{summary}"""']
    lines = []
    for heading, entries in (("Args:", arguments), ("Returns:", returns)):
        if entries:
            lines.extend(["", f"        {heading}"])
            for entry in entries:
                lines.extend(
                    textwrap.wrap(
                        entry,
                        WIDTH,
                        initial_indent=" " * 12,
                        subsequent_indent=" " * 16,
                        break_long_words=False,
                        break_on_hyphens=False,
                    )
                )
    return [f'        """{summary}', *map(escaping.docstring, lines), '        """']
