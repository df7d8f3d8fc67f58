"""Makes a batch that is not the example: other values, another number of samples.

A package that equals its model on the example alone may hold something of the example fast: its
number of tokens that are no padding, a mask, a branch. The second batch differs in what the model
leaves open: floats are mixed from the example's samples, integers are drawn over the range that
their use allows, masks are padded, and some targets become the index that the loss ignores.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from gpipe_compiler.dispatching import DispatchWatch
from gpipe_compiler.frontend.entry import Entry
from gpipe_compiler.frontend.signature import Signature
from gpipe_compiler.frontend.state import state_restored
from gpipe_compiler.ir import Input

_IGNORED = 0.3
"""The share of targets that become the index which the loss ignores."""

_FEW = 8
"""Distinct values up to which a floating-point input is a choice among them, such as a mask."""

_SEEN = 1 << 16
"""Elements that are looked at to know how many distinct values there are."""


@dataclass(frozen=True, eq=False, slots=True)
class OtherBatch:
    """The tensors of one call.

    Attributes:
        inputs: in the order of the signature's inputs.
        microbatches: into which a package splits it, at most.
        what: how many samples, and how they differ from the example.
    """

    inputs: tuple[torch.Tensor, ...]
    microbatches: int
    what: str


def other_numbers(samples: int, microbatches: int, least: int) -> list[tuple[int, int]]:
    """Numbers of samples, each with how many micro-batches share them, in the order to try them.

    First the smallest batch that two micro-batches share unevenly, the second of which begins at an
    odd place: what pairs neighbours, or takes every other sample, shows there. It shows as much as
    a large one, in fewer runs of every stage. Then one close to the example's, with odd places too,
    and at last the example's own.

    Args:
        samples: of the example.
        microbatches: of the plan.
        least: samples that a micro-batch has to have.
    """
    few, next_few = (5, 9) if microbatches > 1 else (least + 1, least + 2)
    few = next_few if few == samples else few
    fewer, odd = samples - 1, samples // microbatches % 2
    close = fewer if odd and fewer >= max(microbatches, 2) * least else samples + 1
    parts = min(microbatches, 2)
    pairs = (few, parts), (close, microbatches), (samples, microbatches)
    return list(dict.fromkeys(pairs))


def other_batches(
    entry: Entry,
    numbers: Sequence[tuple[int, int]],
    seed: int,
    resized: Sequence[tuple[Mapping[str, int], Signature]] = (),
    few: int = 0,
) -> Iterator[OtherBatch]:
    """Batches, from the one most unlike the example to the one most like it; none of a model that
    has no batch.

    The first that plain PyTorch takes is the one to compare on.

    Args:
        numbers: as `other_numbers` gives them, the example's own at the end.
        resized: sizes other than the example's, where some are free, and the signature at them.
        few: samples on which the model is watched; by default as many as in the example.
    """
    sources = entry.signature.inputs
    if not any(source.batched for source in sources):
        return
    uses = integer_uses(entry, entry.signature.samples(few or numbers[-1][0]))
    same: Mapping[str, int] = {}
    kinds = [(*pair, same, entry.signature) for pair in numbers]
    kinds[:0] = [(*pair, *of) for of in resized for pair in numbers[:-1]]
    for samples, microbatches, sizes, signature in kinds:
        at_sizes = "".join(f", {name} {size}" for name, size in sizes.items())
        possible = {name: use.at(sizes.values()) for name, use in uses.items()}
        for fresh in (True, False):
            maker = _Maker(samples, possible, torch.Generator().manual_seed(seed))
            inputs = [
                maker.change(source, tensor, fresh=fresh)
                for source, tensor in zip(sources, signature.samples(samples), strict=True)
            ]
            values = "other values" if fresh else "the example's samples in another order"
            what = f"{samples} samples, {values}{at_sizes}"
            yield OtherBatch(tuple(inputs), microbatches, what)


class _Maker:
    """Draws the tensors of one batch."""

    def __init__(self, samples: int, uses: Mapping[str, Use], random: torch.Generator) -> None:
        self._uses = uses
        self._random = random
        self._order = torch.randperm(samples, generator=random)
        self._filled = torch.rand(samples, generator=random)  # of each sample, the rest is padding

    def change(self, source: Input, tensor: torch.Tensor, *, fresh: bool) -> torch.Tensor:
        """Other values for an input; without `fresh` the example's own, in another order.

        What all samples share stays as it is.
        """
        if source.batch_dim is None:
            return tensor
        rows = tensor.cpu().movedim(source.batch_dim, 0)[self._order]
        rows = self._fresh(source.name, rows) if fresh else rows
        return rows.movedim(0, source.batch_dim).contiguous().to(tensor.device)

    def _fresh(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        if rows.is_floating_point() or rows.is_complex():
            return self._floats(rows)
        if name in self._uses:
            return self._used(rows, self._uses[name])
        first = rows.flatten()[0]
        if bool((rows == first).all()):
            return self._padded(rows) if first in (0, 1) else rows
        if rows.dtype == torch.bool:
            return rows
        low, high = int(rows.min()), int(rows.max())
        return torch.randint(low, high + 1, rows.shape, generator=self._random).to(rows.dtype)

    def _floats(self, rows: torch.Tensor) -> torch.Tensor:
        """Mixtures of pairs of samples, which stay within any convex domain, such as distributions;
        of few distinct values, each sample as it is; of a single value, numbers up to it."""
        first = rows.flatten()[:1]
        if bool((rows == first).all()):
            shares = self._rand(rows.shape).to(rows.dtype)
            return torch.where(rows == 0, shares, rows * shares)
        numbers = torch.view_as_real(rows) if rows.is_complex() else rows
        few = len(torch.unique(numbers.flatten()[:_SEEN])) <= _FEW
        if few or not bool(rows.isfinite().all()):
            return rows
        share = self._rand((rows.shape[0], *(1,) * (rows.ndim - 1))).to(rows.dtype)
        return (share * rows + (1 - share) * rows.roll(1, 0)).to(rows.dtype)

    def _used(self, rows: torch.Tensor, use: Use) -> torch.Tensor:
        drawn = torch.randint(use.least, use.count, rows.shape, generator=self._random)
        if use.lengths:
            drawn = drawn.sort(descending=True).values
        if use.ignored is not None and rows.numel() > 1:
            ignored = self._rand(rows.shape) < _IGNORED
            ignored.view(-1)[0], ignored.view(-1)[-1] = False, True  # also of few targets
            drawn[ignored] = use.ignored
        return drawn.to(rows.dtype)

    def _padded(self, rows: torch.Tensor) -> torch.Tensor:
        """A mask that is the same everywhere, with the end of each sample left out."""
        if rows.ndim < 2:
            return rows
        length = rows.shape[-1]
        kept = (self._filled * length).ceil().clamp(min=1)
        kept = kept.reshape(-1, *(1,) * (rows.ndim - 1))
        return torch.where(torch.arange(length) < kept, rows, 1 - rows.to(torch.int64)).to(
            rows.dtype
        )

    def _rand(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.rand(shape, generator=self._random)


# --- the values that a model takes in its integer inputs: rows of a table, classes of a loss -----

_SAME_VALUES = frozenset(
    {
        *("view", "_unsafe_view", "reshape", "expand", "permute", "transpose", "t", "unsqueeze"),
        *("squeeze", "slice", "select", "alias", "detach", "clone", "_to_copy", "copy_", "split"),
        *("split_with_sizes", "unbind", "cat", "stack", "as_strided", "flip", "roll", "repeat"),
        *("masked_fill", "masked_fill_", "where", "constant_pad_nd", "lift_fresh", "contiguous"),
        *("_reshape_alias", "narrow", "fill_", "masked_select", "sort"),
    }
)
"""Aten ops whose results hold values of what they are given (and perhaps some constants)."""


@dataclass(frozen=True, slots=True)
class Use:
    """What the values of an integer input have to be.

    Attributes:
        count: values run to one below this, from 0, or from 1 where they are lengths.
        ignored: a value besides, which a loss leaves out.
        lengths: whether they are those of sequences that are packed, which may have to be sorted.
    """

    count: int
    ignored: int | None = None
    lengths: bool = False

    @property
    def least(self) -> int:
        return int(self.lengths)

    def and_of(self, other: Use) -> Use:
        ignored = self.ignored if self.ignored == other.ignored else None
        return Use(min(self.count, other.count), ignored, self.lengths or other.lengths)

    def at(self, sizes: Iterable[int]) -> Use:
        """The same where some sizes are others: no sequence is longer than any of these."""
        most = min((self.count, *(size + 1 for size in sizes))) if self.lengths else self.count
        return replace(self, count=most)


def integer_uses(entry: Entry, inputs: Sequence[torch.Tensor]) -> Mapping[str, Use]:
    """The use of each integer input that is looked up or is a class of a loss, by its name.

    Found by watching one run of the model, in the mode that the entry is in. An input on which
    arithmetic is done first is not in the table, nor is one that is used in no such way.

    Raises:
        Exception: whatever the model raises on these inputs.
    """
    copies = [tensor.clone() for tensor in inputs]
    watch = _UseWatch()
    for source, tensor in zip(entry.signature.inputs, copies, strict=True):
        if not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool):
            watch.holds[tensor] = frozenset({source.name})
    if watch.holds:
        with state_restored(entry.model), torch.random.fork_rng(), torch.no_grad(), watch:
            entry(*copies)
    return watch.uses


class _UseWatch(DispatchWatch):
    """Follows integers from the inputs to where they are used.

    Attributes:
        holds: the inputs whose values a tensor has.
    """

    def __init__(self) -> None:
        super().__init__()
        self.holds: Any = WeakIdKeyDictionary()
        self.uses: dict[str, Use] = {}

    def saw(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], returned: object
    ) -> None:
        name = func.overloadpacket.__name__
        for tensor, use in _uses(name, args):
            for source in self._held(tensor):
                known = self.uses.get(source)
                self.uses[source] = use if known is None else known.and_of(use)
        if name in _SAME_VALUES:
            sources = frozenset[str]().union(*map(self._held, tree_leaves((args, kwargs))))
            made = tree_leaves(returned)[: 1 if name == "sort" else None]
            for tensor in made if sources else ():
                if isinstance(tensor, torch.Tensor) and not tensor.is_floating_point():
                    self.holds[tensor] = sources | self._held(tensor)

    def _held(self, leaf: object) -> frozenset[str]:
        held = self.holds.get(leaf) if isinstance(leaf, torch.Tensor) else None
        return held or frozenset()


def _uses(name: str, args: tuple[Any, ...]) -> Iterable[tuple[Any, Use]]:
    """The tensors of integers among the arguments of an op, with what they have to be."""
    match name, args:
        case "embedding" | "embedding_bag" | "_embedding_bag", (table, indices, *_):
            yield indices, Use(table.shape[0])
        case "nll_loss_forward" | "nll_loss2d_forward", (scores, target, _, _, ignored, *_):
            yield target, Use(scores.shape[1 if scores.ndim > 1 else 0], ignored)
        case "_pack_padded_sequence", (padded, lengths, batch_first):
            yield lengths, Use(padded.shape[1 if batch_first else 0] + 1, lengths=True)
        case "_ctc_loss" | "_cudnn_ctc_loss", (scores, targets, *_):
            yield targets, Use(scores.shape[-1])
        case "gather" | "index_select" | "scatter" | "scatter_" | "scatter_add" | "index_add", (
            whole,
            int() as dim,
            index,
            *_,
        ):
            yield index, Use(whole.shape[dim] if whole.ndim else 1)
        case "index" | "index_put" | "index_put_", (whole, indices, *_):
            for dim, index in enumerate(indices):
                if index is not None:
                    yield index, Use(whole.shape[dim])
