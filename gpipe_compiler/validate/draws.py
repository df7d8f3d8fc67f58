"""The random numbers of a model: as its package draws them, and for a mini-batch in one piece.

A random op of the plain model that is given the whole mini-batch runs once for each micro-batch: on
its share of the arguments and from its seed. What these return, put together along the batch, is
what the op returns. How an argument grows with the batch shows when a micro-batch runs first.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeAlias

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from gpipe_compiler.frontend.deciding import Decisions
from gpipe_compiler.ir import Graph
from gpipe_compiler.passes.dry_run import like_strides
from gpipe_compiler.passes.random_ops import first_numbers, numbers_of, random_ops, shared_draws
from gpipe_compiler.runtime.core.random import SeededRandom, seed_in_eval, seeded

_Described: TypeAlias = tuple[Any, tuple[object, ...]]
"""A random op and what it was called with: tensors on meta, everything else as it is."""


@dataclass(frozen=True, slots=True)
class Draws:
    """The random numbers of a model in one mode, as its package draws them in its first call.

    Attributes:
        numbers: of its random ops, in their order.
        shared: those that draw once for all micro-batches.
        ops: the op of the graph that each of `numbers` belongs to.
        keeps: as in the graph.
        layers: how many random ops each layer runs that may be left out, by its number.
    """

    seed: int
    numbers: tuple[int, ...]
    shared: frozenset[int]
    ops: tuple[str, ...]
    keeps: bool = False
    layers: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: Graph, seed: int, *, training: bool) -> Draws:
        """Those of a graph, in a package with this seed."""
        known = shared_draws(graph, training=training and graph.loss is not None)
        counts = {name: len(shared) for name, shared in known.items()}
        first = first_numbers(graph, counts if training else random_ops(graph))
        numbers = numbers_of(graph.ops, first, counts)
        drawing = [op.name for op in graph.ops if op.name in known]
        shared = [shared for name in drawing for shared in known[name]]
        return cls(
            seed if training else seed_in_eval(seed, 0),
            numbers,
            frozenset(number for number, alike in zip(numbers, shared, strict=True) if alike),
            tuple(name for name in drawing for _ in known[name]),
            graph.keeps,
            dict(
                Counter(
                    int(op.layer) for op in graph.ops if op.layer for _ in known.get(op.name, ())
                )
            ),
        )

    def seeded(self, microbatch: int) -> contextlib.AbstractContextManager[object]:
        """Around one call of the graph, on one micro-batch; nothing where it draws nothing."""
        if not self.numbers:  # torch compiles nothing, flex attention neither, inside of a mode
            return contextlib.nullcontext()
        return SeededRandom(self.seed, 0, microbatch, self.numbers, self.shared)

    def of_model(self) -> contextlib.AbstractContextManager[object]:
        """Around one call of the model, on one micro-batch that is all of the mini-batch."""
        return DrawsOfModel(self, 0) if self.numbers else contextlib.nullcontext()


class ApartError(Exception):
    """What an op draws for a mini-batch is not what its micro-batches draw put together.

    Attributes:
        op: the name of the op in the graph.
        reason: what it draws, for the message.
        inside: whether a kernel draws in its inside, and keeps for its backward what it drew.
    """

    def __init__(self, op: str, reason: str, *, inside: bool = False) -> None:
        super().__init__(reason)
        self.op = op
        self.reason = reason
        self.inside = inside


class DrawsOfModel(SeededRandom):  # type: ignore[no-untyped-call]  # torch's own base
    """Around one call of the model.

    Where it leaves a layer out, what that would have drawn is passed over: the graph draws it.
    """

    def __init__(self, draws: Draws, microbatch: int) -> None:
        super().__init__(draws.seed, 0, microbatch, draws.numbers, draws.shared)
        self.draws = draws
        self._layers = itertools.count()
        self._decisions = Decisions(self._decide)

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's own
        if self.draws.layers:
            self._decisions.__enter__()  # type: ignore[no-untyped-call]  # torch's own
        return self

    def __exit__(self, *raised: Any) -> None:
        if self.draws.layers:
            self._decisions.__exit__(*raised)  # type: ignore[no-untyped-call]  # torch's own
        super().__exit__(*raised)  # type: ignore[no-untyped-call]  # torch's own

    def _decide(self, asked: torch.Tensor) -> bool:
        answer, layer = bool(asked), next(self._layers)
        if answer is not self.draws.keeps:
            self.pass_over(self.draws.layers.get(layer, 0))
        return answer


class DrawsOfOne(DrawsOfModel):  # type: ignore[no-untyped-call]  # torch's own base
    """Around the model's call on one micro-batch: notes what its random ops are called with."""

    def __init__(self, draws: Draws, microbatch: int) -> None:
        super().__init__(draws, microbatch)
        self.calls: list[_Described] = []

    def pass_over(self, count: int) -> None:
        super().pass_over(count)
        self.calls.extend([(None, ())] * count)

    def draw(self, number: int, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        leaves, _ = tree_flatten((tuple(args), dict(kwargs)))
        self.calls.append((func, tuple(map(_described, leaves))))
        return super().draw(number, func, args, kwargs)


class DrawsOfAll(DrawsOfModel):  # type: ignore[no-untyped-call]  # torch's own base
    """Around the model's call on the whole mini-batch.

    Args:
        calls: of a micro-batch of a number of samples, by `DrawsOfOne`; of the first at least.
        sizes: samples in each micro-batch.
        inner: where a dimension holds several entries for each sample, whether the samples follow
            each other fastest (time by batch), and not the entries (batch by time).

    Attributes:
        flattened: whether there was such a dimension.
    """

    def __init__(
        self,
        draws: Draws,
        calls: Mapping[int, Sequence[_Described]],
        sizes: Sequence[int],
        *,
        inner: bool,
    ) -> None:
        super().__init__(draws, 0)
        self.flattened = False
        self._calls = calls
        self._sizes = sizes
        self._inner = inner

    def draw(self, number: int, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What the micro-batches draw, put together; a shared draw as it is."""
        if number in self.shared:
            return super().draw(number, func, args, kwargs)
        position = self.position - 1
        first = self._calls[self._sizes[0]]
        known = first[position] if position < len(first) else (None, ())
        leaves, tree = tree_flatten((tuple(args), dict(kwargs)))
        if known[0] is not func or len(known[1]) != len(leaves):
            raise self._apart("draws otherwise for a micro-batch than for the batch")
        cuts = [self._cut(leaf, part) for leaf, part in zip(leaves, known[1], strict=True)]
        if func is torch.ops.aten.randperm.default or _pairs(args, cuts, tree):
            raise self._apart("draws for pairs of samples")
        written = _written(func, args, kwargs)
        copies = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        again, named = tree_unflatten(copies, tree)
        # Shows the shapes that the whole has, and which arguments are returned.
        whole, form = tree_flatten(seeded(0, func, again, named))
        pieces = []
        for microbatch, (start, size) in enumerate(_places(self._sizes)):
            self.key = (*self.key[:2], microbatch)
            _, laid_out = self._calls.get(size, first)[position]
            own = [
                leaf if cut is None else cut.piece(leaf, start, size, part)
                for leaf, cut, part in zip(leaves, cuts, laid_out, strict=True)
            ]
            positional, keywords = tree_unflatten(own, tree)
            returned = seeded(self.seed_of(number), func, positional, keywords)
            for leaf, cut, piece in zip(leaves, cuts, own, strict=True):
                if id(leaf) in written and cut is not None:
                    cut.put(leaf, start, size, piece)
            pieces.append(tree_flatten(returned)[0])
        places = {id(copy): place for place, copy in enumerate(copies)}
        results = [
            leaves[places[id(item)]] if id(item) in places else self._join(item, parts)
            for item, parts in zip(whole, zip(*pieces, strict=True), strict=True)
        ]
        return tree_unflatten(results, form)

    def _cut(self, leaf: object, part: object) -> _Cut | None:
        """How a leaf of the whole's arguments is cut, from that of the first micro-batch."""
        if isinstance(leaf, torch.Tensor) and isinstance(part, torch.Tensor):
            pairs = zip(leaf.shape, part.shape, strict=False)
            grown = [dim for dim, (more, few) in enumerate(pairs) if more != few]
            if leaf.dim() == part.dim() and not grown:
                return None
            if leaf.dim() == part.dim() and len(grown) == 1:
                (dim,) = grown
                return self._proportional(leaf.shape[dim], part.shape[dim], dim)
        elif not isinstance(leaf, torch.Tensor) and leaf == part:
            return None
        elif isinstance(leaf, int) and isinstance(part, int):
            return self._proportional(leaf, part, None)
        raise self._apart("draws numbers that grow with the batch in another way than one by one")

    def _proportional(self, whole: int, part: int, dim: int | None) -> _Cut:
        each, rest = divmod(whole, sum(self._sizes))
        if rest or part != each * self._sizes[0]:
            raise self._apart("draws numbers that do not grow in proportion to the batch")
        self.flattened = self.flattened or each > 1
        return _Cut(dim, each, self._inner)

    def _join(self, whole: object, parts: Sequence[Any]) -> object:
        """One of the results, from those of the micro-batches."""
        first = parts[0]
        if not isinstance(whole, torch.Tensor):
            return first
        if whole.shape == first.shape:
            raise self._apart("draws inside a kernel", inside=True)
        cut = self._cut(whole, first)
        assert cut is not None
        return cut.join(parts)

    def _apart(self, reason: str, *, inside: bool = False) -> ApartError:
        position = self.position - 1
        names = self.draws.ops
        return ApartError(names[position] if position < len(names) else "", reason, inside=inside)


@dataclass(frozen=True, slots=True)
class _Cut:
    """How a tensor, or a number of entries, is cut into micro-batches.

    Attributes:
        each: entries for one sample.
        inner: whether the samples follow each other fastest.
    """

    dim: int | None
    each: int
    inner: bool

    def piece(self, whole: Any, start: int, size: int, laid_out: Any) -> Any:
        """The share of some samples: of a tensor a dense copy, laid out as another is."""
        if self.dim is None:
            return self.each * size
        view = self._view(whole, start, size)
        shape = [size * self.each if d == self.dim else n for d, n in enumerate(whole.shape)]
        copy = torch.empty_strided(
            shape, like_strides(laid_out, shape), dtype=whole.dtype, device=whole.device
        )
        return copy.copy_(view.reshape(shape))

    def put(self, whole: torch.Tensor, start: int, size: int, piece: torch.Tensor) -> None:
        view = self._view(whole, start, size)
        view.copy_(piece.reshape(view.shape))

    def join(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        assert self.dim is not None
        if not self.inner:
            return torch.cat(list(pieces), self.dim)
        return torch.cat(list(map(self._apart, pieces)), self.dim + 1).flatten(
            self.dim, self.dim + 1
        )

    def _view(self, whole: torch.Tensor, start: int, size: int) -> torch.Tensor:
        assert self.dim is not None
        if self.inner:
            return self._apart(whole).narrow(self.dim + 1, start, size)
        return whole.narrow(self.dim, start * self.each, size * self.each)

    def _apart(self, tensor: torch.Tensor) -> torch.Tensor:
        """With a dimension of the entries of a sample, and after it one of the samples."""
        assert self.dim is not None
        sizes = tensor.shape
        return tensor.reshape(*sizes[: self.dim], self.each, -1, *sizes[self.dim + 1 :])


def _described(leaf: object) -> object:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), device="meta")


def _places(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    return zip((0, *itertools.accumulate(sizes)), sizes, strict=False)


def _pairs(args: Sequence[Any], cuts: Sequence[_Cut | None], tree: Any) -> bool:
    positional, _ = tree_unflatten(list(cuts), tree)
    sizes = (cut for arg, cut in zip(args, positional, strict=True) if isinstance(arg, list))
    return any(len([item for item in cut if item is not None]) > 1 for cut in sizes)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> frozenset[int]:
    return frozenset(
        id(args[place] if place < len(args) else kwargs.get(argument.name))
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
