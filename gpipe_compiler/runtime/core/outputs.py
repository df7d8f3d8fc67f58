"""What the model returns, from the outputs of the micro-batches, in the model's own classes."""

from __future__ import annotations

import collections
import dataclasses
import functools
import importlib
import math
import types
from collections.abc import Mapping, Sequence
from keyword import iskeyword
from typing import Any

import torch

from ..errors import UsageError
from ..sizes import Expression, Sizes, value_at
from ..spec import Joined, Leaf, OutputClass, OutputTerm, Samples, Structure, Unreturned
from .loss_weights import divisor
from .nest import CACHES, Path


def join(leaf: Leaf, pieces: Sequence[torch.Tensor], samples: Sequence[int]) -> torch.Tensor:
    """An output of the mini-batch from those of the micro-batches.

    Raises:
        UsageError: for several micro-batches whose outputs say nothing of the mini-batch's.
    """
    first = pieces[0]
    if leaf.joined is Joined.STACKED:
        return torch.stack(list(pieces))
    if len(pieces) == 1 or (leaf.joined is Joined.SAME and leaf.batch_dim is None):
        return first
    if leaf.batch_dim is not None:
        return torch.cat(list(pieces), leaf.batch_dim)
    stacked = torch.stack(list(pieces))
    wide = stacked.double() if first.is_floating_point() else stacked
    match leaf.joined:
        case Joined.SUM:
            return wide.sum(0).to(first.dtype)
        case Joined.MEAN:
            weights = torch.tensor(samples, dtype=wide.dtype, device=wide.device) / sum(samples)
            shape = (-1, *(1,) * first.dim())
            return (weights.view(shape) * wide).sum(0).to(first.dtype)
        case Joined.MAX:
            return stacked.amax(0)
        case Joined.MIN:
            return stacked.amin(0)
    raise UsageError(
        f"the output {leaf.value} of several micro-batches says nothing of that of the mini-batch",
        hint="make the pipeline with microbatches=1, or leave it out of what is asked for",
    )


def rebuild(
    structure: Structure,
    values: Mapping[str, torch.Tensor],
    samples: Sequence[int],
    sizes: Sizes,
    training: bool,
) -> object:
    """The structure that the pipeline returns, with a tensor at every leaf."""

    def inner(item: Structure) -> object:
        return rebuild(item, values, samples, sizes, training)

    def stands(item: Structure) -> bool:
        return not isinstance(item, Unreturned) or item.keyed or not item.is_left_out(training)

    match structure:
        case Unreturned() if structure.is_left_out(training):
            return None
        case Leaf(terms=terms) if terms:
            return _sum_of_terms(terms, values, samples)
        case Leaf(value=value):
            return values[value]
        case Samples(factor=factor):
            return value_at(factor, sizes) * sum(samples)
        case Expression():
            return structure.at(sizes)
        case dict():
            return {key: inner(item) for key, item in structure.items() if stands(item)}
        case list():
            return list(map(inner, structure))
        case tuple():
            return tuple(map(inner, structure))
        case _:
            return structure


def _sum_of_terms(
    terms: Sequence[OutputTerm], values: Mapping[str, torch.Tensor], samples: Sequence[int]
) -> torch.Tensor:
    """An output of the mini-batch from its terms in every micro-batch, each with its own weight."""
    total = torch.zeros((), dtype=torch.float64)
    for part in terms:
        pieces = values[part.value].cpu()
        counts = values[part.weight].tolist() if part.weight else [*map(float, samples)]
        whole = divisor(part.term, sum(counts))
        # Where nothing counts the plain model divides by nothing, too; elsewhere that is no term.
        shares = [divisor(part.term, count) / whole if whole else math.nan for count in counts]
        total += sum(
            piece.double() * share for piece, share in zip(pieces, shares, strict=True) if share
        )
    made = [values[part.value] for part in terms]
    kind = functools.reduce(torch.promote_types, (pieces.dtype for pieces in made))
    return total.to(made[0].device, kind)


class Fields(dict[Any, Any]):
    """What a class of the model's own holds, where that class cannot be imported.

    A field is an attribute and an item.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def as_returned(nest: object, classes: Sequence[OutputClass]) -> object:
    """The same nest with objects of the model's classes where it has them."""
    return _walk(nest, {known.path: known for known in classes}, ()) if classes else nest


def _walk(item: object, classes: Mapping[Path, OutputClass], path: Path) -> object:
    made: object
    match item:
        case dict():
            made = {key: _walk(value, classes, (*path, key)) for key, value in item.items()}
        case list() | tuple():
            made = type(item)(_walk(value, classes, (*path, i)) for i, value in enumerate(item))
        case _:
            return item
    return made if path not in classes else _made(classes[path], made)


def _made(known: OutputClass, held: Any) -> object:
    cls: Any = _imported(known.module, known.name)
    if known.fields:
        if getattr(cls, "_fields", None) == known.fields:
            return cls._make(held)
        name = known.name.split(".")[-1]
        named = name if name.isidentifier() and not iskeyword(name) else "Output"
        plain: Any = collections.namedtuple(named, known.fields)  # type: ignore[misc]  # made at run time
        return plain(*held)
    if isinstance(held, tuple | list):
        return held if cls is None else of_class(cls, held)
    if cls is types.SimpleNamespace:
        return cls(**held)
    if isinstance(cls, type) and dataclasses.is_dataclass(cls):
        try:
            made = _dataclass(cls, held)
            if all(getattr(made, name) is value for name, value in held.items()):
                return made
        except Exception:  # noqa: BLE001  # whatever the user's class raises
            return Fields(held)
    if known.module == CACHES:
        return Fields(held) if cls is None else _cache(cls, held)
    factory = _imported(*known.factory) if known.factory else None
    lacking = cls is None or (known.factory and factory is None)
    return Fields(held) if lacking else _mapping(cls, held, factory)


def of_class(cls: Any, held: Sequence[Any]) -> Any:
    """The same items in a tuple or list of another class, such as torch.Size; as they are where it
    does not take them so."""
    try:
        made = cls(held)
        alike = (a is b or (isinstance(a, int) and a == b) for a, b in zip(made, held, strict=True))
        return made if all(alike) else held
    except Exception:  # noqa: BLE001  # whatever the user's class raises
        return held


def _dataclass(cls: Any, held: Mapping[str, Any]) -> Any:
    """An object of a dataclass; what its constructor does not take is set, as it was returned."""
    set_later = {field.name for field in dataclasses.fields(cls) if not field.init}
    taken = {name: value for name, value in held.items() if name not in set_later}
    made = cls(**{**dict.fromkeys(_needed(cls)), **taken})
    for name in set_later & held.keys():
        object.__setattr__(made, name, held[name])
    return made


def _cache(cls: Any, held: Mapping[str, Any]) -> object:
    """A cache of transformers that holds these tensors, as they are."""
    try:
        if "layers" not in held:
            return cls(*held.values())
        made, layer_class = cls(), _imported(CACHES, "DynamicLayer")
        for own in held["layers"]:
            layer: Any = layer_class()  # type: ignore[operator]  # what is no class raises
            if own:
                layer.lazy_initialization(own["keys"], own["values"])
                layer.keys, layer.values = own["keys"], own["values"]
            made.layers.append(layer)
        return made
    except Exception:  # noqa: BLE001  # whatever another version of it raises
        return Fields(held)


def _mapping(cls: Any, held: Mapping[Any, Any], factory: object) -> object:
    """A mapping of a class that is made empty and then filled, as those of Python are."""
    try:
        made = cls()
        if factory is not None:
            made.default_factory = factory
        made.update(held)
        same = all(made[key] is value for key, value in held.items())
        return made if same and len(made) == len(held) else Fields(held)
    except Exception:  # noqa: BLE001  # whatever the user's class raises
        return Fields(held)


def _needed(cls: Any) -> list[str]:
    """The fields that an object cannot be made without; those that are None are not known."""
    missing = dataclasses.MISSING
    return [
        field.name
        for field in dataclasses.fields(cls)
        if field.init and field.default is missing and field.default_factory is missing
    ]


def _imported(module: str, name: str) -> object:
    """What can be imported by this name, None where nothing can."""
    try:
        found: object = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception:  # noqa: BLE001  # whatever the user's module raises
        return None
    return found
