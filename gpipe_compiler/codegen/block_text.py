"""The classes of blocks and containers as text, and what their constructors are given."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gpipe_compiler.codegen.imports import Imports
from gpipe_compiler.codegen.layout import call, lay_out, name
from gpipe_compiler.codegen.names import Names
from gpipe_compiler.codegen.nested import Holder
from gpipe_compiler.ir import Op, RegionCall, StateKind
from gpipe_compiler.ir.blocks import Parameter
from gpipe_compiler.ir.forms import Slot

_BY_POSITION = ("in_", "out_", "num_", "normalized_")
"""How parameters begin that people pass by position."""


@dataclass(frozen=True, eq=False)
class WrittenBlock:
    """A block as a class.

    Attributes:
        passed: the inputs of a call that are passed, by their places.
        parameters: what its constructor is given: names, and the parameters of the block.
        inline: whether it is an nn.Sequential, constructed where it stands.
        shared: whether it stands in `layers.py`.
    """

    name: str
    passed: tuple[int, ...]
    parameters: Mapping[str, Parameter]
    inline: bool = False
    shared: bool = False


@dataclass(eq=False)
class SourceFile:
    """A file with classes of modules: that of a stage, or `layers.py` for what several have.

    Attributes:
        names: of its classes, and those that none of them takes.
        classes: the lines of each, inner ones first.
        containers: by their lines, the names of those that only hold modules.
    """

    names: Names
    shared: bool = False
    imports: Imports = field(default_factory=Imports)
    classes: list[tuple[str, ...]] = field(default_factory=list)
    containers: dict[tuple[str, ...], str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Arguments:
    """What a constructor is given.

    Attributes:
        names: the arguments that stand for numbers.
        types: their annotations, by their names.
    """

    names: Mapping[Slot, str] = field(default_factory=dict)
    types: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, parameters: Mapping[str, Parameter]) -> Arguments:
        """Those of a block."""
        return cls(
            {slot: own for own, item in parameters.items() for slot in item.slots},
            {own: _type(item.values.values()) for own, item in parameters.items()},
        )


def class_lines(
    header: str, buffers: Sequence[str], constructor: Sequence[str], forward: Sequence[str]
) -> tuple[str, ...]:
    """A class; each part may be empty."""
    parts = [part for part in (buffers, constructor, forward) if part]
    spaced = [line for part in parts for line in ("", *part)]
    return (f"class {header}:", *spaced[1:])


def buffer_types(holder: Holder, imports: Imports) -> list[str]:
    """`mask: Tensor` for each buffer that a module registers, as type checkers ask for it."""
    found = [
        f"    {own}: Tensor"
        for own, state in holder.tensors()
        if state.kind is not StateKind.PARAMETER and holder.place_of(own) == f"{holder.place}.{own}"
    ]
    if found:
        imports.from_torch("Tensor")
    return found


def init_lines(types: Mapping[str, str], lines: Sequence[str]) -> list[str]:
    """The constructor of a class; none where it makes nothing."""
    if not lines:
        return []
    parameters = [name(f"{own}: {kind}") for own, kind in types.items()]
    head = lay_out(call("def __init__", [name("self"), *parameters]), suffix=" -> None:", indent=1)
    return [*head, "        super().__init__()", *lines]


def relative(op: Op, root: str) -> Op:
    """An op whose module is called as the module at `root` calls it."""
    made = op.call
    if isinstance(made, RegionCall):
        body = dataclasses.replace(
            made.body, ops=tuple(relative(inner, root) for inner in made.body.ops)
        )
        made = dataclasses.replace(made, body=body)
    module = op.module.removeprefix(root).removeprefix(".")
    return dataclasses.replace(op, call=made, module=module)


def by_position(parameter: str) -> bool:
    """Whether people pass a parameter without its name."""
    return parameter.startswith(_BY_POSITION)


def _type(values: Iterable[object]) -> str:
    """The annotation for a parameter that has these values."""
    kinds = dict.fromkeys(_kind(value) for value in values)
    return " | ".join(sorted(kinds, key=lambda kind: (kind == "None", kind)))


def _kind(value: object) -> str:
    if isinstance(value, tuple) and value and all(type(v) is type(value[0]) for v in value):
        return f"tuple[{', '.join(_kind(v) for v in value)}]"
    if value is None:
        return "None"
    known = type(value) in (bool, int, float, str, tuple, list)
    return type(value).__name__ if known else "object"
