"""What a call comes to, from what each device made: its loss, and what the model returns, in the
model's own classes."""

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
from ..spec import (
    Joined,
    Leaf,
    OutputClass,
    OutputTerm,
    PipelineSpec,
    Samples,
    Structure,
    Unreturned,
)
from .call import Call
from .engine import DeviceResult
from .loss_weights import divisor, total_of
from .nest import CACHE_LAYERS, CACHES, Path
from .request import StepRequest, Values
from .topology import Topology
from .wiring import makers, output_leaves


class Results:
    """Puts together what devices made; every rank makes the same calls.

    Attributes:
        made: the values of the stages that the model returns.
    """

    def __init__(self, spec: PipelineSpec, topology: Topology) -> None:
        self._spec = spec
        self._topology = topology
        returned = {leaf.value for leaf in output_leaves(spec.outputs)}
        self.made = frozenset(returned - {source.name for source in spec.inputs})
        self._makers = makers(spec)

    def loss(self, results: Sequence[DeviceResult], request: StepRequest) -> torch.Tensor | None:
        """The loss of the mini-batch, over all replicas, on every rank; None where none is made."""
        assert self._spec.loss is not None
        pipeline = self._topology.pipeline
        losses = {m: terms for result in results for m, terms in result.losses.items()}
        # What a term is where nothing in the mini-batch counts.
        empty = [0.0 if t.above > -math.inf else math.nan for t in self._spec.loss.terms]
        mine = self._over_replicas(total_of(losses, request.loss_weights, empty), request, empty)
        if pipeline.size == 1:
            return mine
        told = (None, None) if mine is None else (mine.tolist(), mine.dtype)
        source = self._topology.rank_of(self._makers[self._spec.loss.value])
        terms, dtype = pipeline.broadcast_object(told, source, "the loss")
        if terms is None:
            return None
        return torch.tensor(terms, dtype=dtype, device=pipeline.device)

    def _over_replicas(
        self, total: torch.Tensor | None, request: StepRequest, empty: Sequence[float]
    ) -> torch.Tensor | None:
        if total is None or self._topology.replicas == 1:
            return total
        # A replica in whose share nothing counts has no such term, and adds nothing.
        counts = total.new_tensor(
            [any(column) for column in zip(*request.loss_weights, strict=True)]
        )
        rows = torch.stack([torch.where(counts > 0, total, 0.0), counts])
        value, replicas = self._topology.peers.sum(rows.double(), "the loss")
        mean = value / self._topology.replicas
        return torch.where(replicas > 0, mean, mean.new_tensor(empty)).to(total.dtype)

    def gathered(
        self,
        results: Sequence[DeviceResult],
        request: StepRequest,
        groups: Sequence[Sequence[int]],
        leaves: Sequence[Leaf],
    ) -> Sequence[Values]:
        """The outputs of each group of micro-batches, on rank 0.

        One after another, in the same order on all ranks.
        """
        pipeline, outputs = self._topology.pipeline, [Values() for _ in groups]
        for leaf in leaves:
            if leaf.value not in request.kept or leaf.value not in self.made:
                continue
            source = self._topology.rank_of(self._makers[leaf.value])
            for group, made in zip(groups, outputs, strict=True):
                mine: torch.Tensor | None = None
                for result in results:
                    if leaf.value in result.results[group[0]]:
                        pieces = [result.results[m][leaf.value] for m in group]
                        mine = join(leaf, pieces, [request.samples[m] for m in group])
                if source != 0 and pipeline.rank in (0, source):
                    mine = pipeline.pass_on(mine, source, f"output {leaf.value}")
                if mine is not None and pipeline.rank == 0:
                    made[leaf.value] = mine
        return outputs

    def returned(
        self,
        structure: Structure,
        values: Values,
        call: Call,
        group: Sequence[int],
        loss: torch.Tensor | None,
    ) -> object:
        """What the model returns for the micro-batches that were passed together.

        Args:
            loss: the terms of the one that the model itself returns.
        """
        samples, sizes = [call.samples[m] for m in group], call.sizes[group[0]]
        made = rebuild(structure, values, samples, sizes, call.training)
        if loss is not None and isinstance(made, dict):
            made = {"loss": loss.sum(), **made}
        return as_returned(made, self._spec.classes)


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
        divisors = [divisor(part.term, max(count, part.term.least)) for count in counts]
        shares = [divided / whole if whole else math.nan for divided in divisors]
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
    try:
        made = _object(known, cls, held)
    except Exception:  # noqa: BLE001  # whatever the user's class raises, or another version of it
        made = None
    return Fields(held) if made is None else made


def _object(known: OutputClass, cls: Any, held: Mapping[Any, Any]) -> object:
    """An object of a class that holds this as it is; None where none does."""
    if isinstance(cls, type) and dataclasses.is_dataclass(cls):
        made = _dataclass(cls, held)
        if all(getattr(made, name) is value for name, value in held.items()):
            return made
    if known.module == CACHES:
        return _cache(cls, held)
    made = cls()  # a mapping that is made empty and then filled, as those of Python are
    if known.factory:
        made.default_factory = _imported(*known.factory)
        if made.default_factory is None:
            return None
    made.update(held)
    same = all(made[key] is value for key, value in held.items())
    return made if same and len(made) == len(held) else None


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
    if "layers" not in held:
        return cls(*held.values())
    made = cls()
    made.layers.extend(map(_cache_layer, held["layers"]))
    return made


def _cache_layer(held: Mapping[str, Any]) -> object:
    name = next(name for name, parts in CACHE_LAYERS.items() if held.keys() <= set(parts))
    states = {part: held.get(part, {}) for part in ("conv_states", "recurrent_states")}
    layer: Any = _imported(CACHES, name)
    layer = layer(number_of_states=len(states["conv_states"])) if any(states.values()) else layer()
    if "keys" in held:
        layer.lazy_initialization(held["keys"], held["values"])
        layer.keys, layer.values = held["keys"], held["values"]
    for part, by_number in states.items():
        for number, state in by_number.items():
            if state is not None:
                layer.lazy_initialization(**{part: state}, state_idx=number)
                getattr(layer, part)[number] = state
                layer.has_previous_state[number] = True
    return layer


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
