"""Python's own numbers in what a model returns: the same for every batch, or so many per sample."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gpipe_compiler.errors import ModelError, SourceLocation
from gpipe_compiler.frontend.structure import Slot, Template
from gpipe_compiler.runtime.core.nest import Path
from gpipe_compiler.runtime.spec import Samples


def has_numbers(template: Template) -> bool:
    """Whether anything stands in it that may depend on the batch and is no tensor."""
    match template:
        case tuple() | list():
            return any(map(has_numbers, template))
        case dict():
            return any(map(has_numbers, template.values()))
        case _:
            return not (template is None or isinstance(template, Slot | torch.dtype))


def with_numbers(
    template: Template,
    count: int,
    others: Mapping[int, Template],
    location: SourceLocation | None,
    path: Path = (),
) -> Template:
    """The template with `Samples` for every number that is a multiple of the samples.

    Args:
        count: the samples that it was seen with.
        others: the templates seen with other numbers of samples.
        location: of what returns it.

    Raises:
        ModelError: for a number that differs between batches in any other way.
    """

    def part(key: str | int) -> Template:
        parts = {samples: other[key] for samples, other in others.items()}
        return with_numbers(template[key], count, parts, location, (*path, key))

    alike = [other for other in others.values() if type(other) is type(template)]
    match template:
        case tuple() | list() if len(alike) == len(others):
            if any(len(other) != len(template) for other in alike):
                return template  # another structure, which whoever runs the model finds
            return type(template)(map(part, range(len(template))))
        case dict() if all(other.keys() == template.keys() for other in alike):
            return {key: part(key) for key in template} if len(alike) == len(others) else template
        case tuple() | list() | dict() | Slot():
            return template
    if all(repr(other) == repr(template) for other in others.values()):
        return template
    factor, rest = divmod(template, count) if type(template) is int else (0, 1)
    if not rest and all(other == factor * samples for samples, other in others.items()):
        return Samples(factor)
    seen = [f"{item!r} for {samples}" for samples, item in {count: template, **others}.items()]
    where = "".join(f"[{key!r}]" for key in path)
    raise ModelError(
        f"output{where} is no tensor and differs between batches: {', '.join(seen)} samples; only "
        "multiples of the number of samples can be told for other batches",
        location=location,
        hint="return it as a tensor, or leave it out of what the model returns; --microbatches 1 "
        "does not help, for it would be that of the example",
    )
