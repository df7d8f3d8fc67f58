"""The text of one method: signature, docstring, statements."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from gpipe_compiler.codegen.layout import WIDTH, call, lay_out, name
from gpipe_compiler.codegen.returning import Body
from gpipe_compiler.codegen.statements import write_statements
from gpipe_compiler.ir import Graph, ValueKind
from gpipe_compiler.text import escaping

MANY_OUTPUTS = 4
"""From so many on, the types of the outputs are not told one by one."""

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
    if not body.ends:
        lines.extend(_return(body.returns))
    return lines


def is_tensor(graph: Graph, value: str) -> bool:
    """Whether a value is one; what the graph does not know, such as a state, is."""
    known = graph.values.get(value)
    return known is None or known.kind is ValueKind.TENSOR


def types_of(graph: Graph, values: Sequence[str], arguments: Sequence[str]) -> dict[str, str]:
    """The types of the arguments that are no tensors, as `method_text` has them."""
    return {
        own: "int" if graph.values[value].kind is ValueKind.SCALAR else ""
        for value, own in zip(values, arguments, strict=True)
        if not is_tensor(graph, value)
    }


def returned_type(returns: Sequence[bool]) -> str:
    """The annotation for results of which these are tensors."""
    if not all(returns):
        return "object" if len(returns) == 1 else "tuple[object, ...]"
    if len(returns) == 1:
        return "Tensor"
    if not returns:
        return "tuple[()]"
    if len(returns) >= MANY_OUTPUTS:
        return "tuple[Tensor, ...]"
    return f"tuple[{', '.join(['Tensor'] * len(returns))}]"


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
