"""A model and its inputs without numbers: tensors whose free sizes are symbols."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._guards import Source
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from gpipe_compiler.frontend.entry import Entry
from gpipe_compiler.frontend.free_sizes import FreePlaces
from gpipe_compiler.frontend.trace_fakes import HOST

SMALLEST_BATCH = 2
"""A batch of one is taken for a constant by torch."""


@dataclass(frozen=True)
class _Named(Source):
    """Where torch is told that a size or tensor comes from; its own sources take long to import."""

    text: str

    @property
    def _name_template(self) -> str:
        return self.text


def inputs_without_numbers(
    entry: Entry, mode: FakeTensorMode, environment: ShapeEnv, free: FreePlaces
) -> list[torch.Tensor]:
    """Inputs without numbers; sizes that are free are symbols, one for each of their names."""
    signature = entry.signature
    symbols: dict[str, Any] = {}

    def size(name: str, example: int) -> Any:
        if name not in symbols:
            source = _Named(f"size_{len(symbols)}")
            symbol = environment.create_symbol(
                example, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None
            )
            symbols[name] = environment.create_symintnode(symbol, hint=example, source=source)
        return symbols[name]

    made = []
    for source, example in zip(
        signature.inputs, signature.samples(max(signature.batch_size, SMALLEST_BATCH)), strict=True
    ):
        shape: list[Any] = list(example.shape)
        for dim, number in enumerate(shape):
            if dim == source.batch_dim:
                shape[dim] = size("", number)
            elif (source.name, dim) in free:
                shape[dim] = size(free[source.name, dim], number)
        device = HOST if example.is_meta else example.device
        with mode:
            made.append(
                torch.empty_strided(
                    shape, _strides(example, shape), dtype=example.dtype, device=device
                ).requires_grad_(example.requires_grad)
            )
    return made


def _strides(example: torch.Tensor, shape: list[Any]) -> list[Any]:
    """The strides of an example with other sizes."""
    strides: list[Any] = list(example.stride())
    reached: Any = 1
    for dim in sorted(range(example.ndim), key=lambda d: (example.stride(d), -d)):
        if strides[dim]:
            strides[dim], reached = reached, reached * shape[dim]
    return strides


def _is_table(held: object) -> bool:
    return type(held) in (dict, OrderedDict)


@contextlib.contextmanager
def state_without_numbers(
    entry: Entry, mode: FakeTensorMode
) -> Iterator[Mapping[str, tuple[torch.Tensor, torch.Tensor]]]:
    """Lets an entry have parameters and buffers without numbers, and be as it was afterwards.

    Yields:
        The entry's own, and what it has in their place, by the first of their names.
    """
    modules = list(entry.modules())
    # Hooks, too: a model that installs its own in its first call notes that beside them.
    before = [
        (module, dict(vars(module)), [(d, dict(d)) for d in vars(module).values() if _is_table(d)])
        for module in modules
    ]
    made: dict[int, torch.Tensor] = {}
    names: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    try:
        for path, module in entry.named_modules():
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in made:
                        made[id(tensor)] = mode.from_tensor(
                            tensor, static_shapes=True, source=_Named(f"state_{len(made)}")
                        )
                        names[f"{path}.{name}" if path else name] = tensor, made[id(tensor)]
                    table[name] = made[id(tensor)]
        yield names
    finally:
        for module, attributes, contents in before:
            vars(module).clear()
            vars(module).update(attributes)
            for table, content in contents:
                table.clear()
                table.update(content)
