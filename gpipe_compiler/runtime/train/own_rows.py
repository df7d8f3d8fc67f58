"""Replicas that load their own rows of every mini-batch, where the data set can be indexed."""

from __future__ import annotations

import inspect
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from torch.utils.data import DataLoader, IterableDataset, Sampler

from ..core.call import too_small
from ..core.pipeline import Pipeline
from ..core.sharding import bounds


@dataclass(frozen=True, slots=True)
class Rows:
    """A replica's share of a mini-batch.

    Attributes:
        mark: of the indices of the whole mini-batch; never 0.
        count: the rows of the share.
    """

    mark: int
    count: int


class ShareSampler(Sampler[list[Any]]):
    """The batches of another sampler, of each of them the consecutive rows of a replica's share.

    What the other one draws, it draws as in a process alone, so that mini-batches are those of
    plain training.

    Attributes:
        given: the shares that were handed to the loader, which may be ahead, in order.
    """

    def __init__(self, batches: Iterable[Sequence[Any]], pipe: Pipeline) -> None:
        self.batches = batches
        self.pipe = pipe
        self.given: deque[Rows] = deque()

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]  # where it has none, it raises as that

    def __iter__(self) -> Iterator[list[Any]]:
        pipe = self.pipe
        self.given.clear()
        for batch in self.batches:
            indices = list(batch)
            parts = pipe.replicas, pipe.microbatches
            last, _ = bounds(pipe.spec, len(indices), pipe.replicas - 1, *parts)
            if last == len(indices):
                raise too_small(len(indices), pipe.replicas)
            start, stop = bounds(pipe.spec, len(indices), pipe.replica, *parts)
            mark = zlib.crc32(repr(indices).encode()) + 1
            self.given.append(Rows(mark, stop - start))
            yield indices[start:stop]


def with_own_rows(data: Iterable[object], pipe: Pipeline) -> Iterable[object]:
    """The data with a replica's own rows alone; itself where it is not of a kind that has such: a
    `DataLoader` over a data set with indices, which collects them into batches.

    Torchdata's `StatefulDataLoader` becomes one of torch, whose place is found by its pass.
    """
    if not _is_loader(data) or data.batch_sampler is None:
        return data
    if isinstance(data.dataset, IterableDataset):
        return data
    return DataLoader(
        data.dataset,
        batch_sampler=ShareSampler(data.batch_sampler, pipe),
        num_workers=data.num_workers,
        collate_fn=data.collate_fn,
        pin_memory=data.pin_memory,
        timeout=data.timeout,
        worker_init_fn=data.worker_init_fn,
        multiprocessing_context=data.multiprocessing_context,
        generator=data.generator,
        prefetch_factor=data.prefetch_factor if data.num_workers else None,
        persistent_workers=data.persistent_workers,
    )


def _is_loader(data: object) -> TypeGuard[DataLoader[Any]]:
    stateful = getattr(sys.modules.get(_TORCHDATA), "StatefulDataLoader", DataLoader)
    return type(data) in (DataLoader, stateful)


_TORCHDATA = "torchdata.stateful_dataloader"


def takes_share(hook: Callable[..., object] | None) -> bool:
    """Whether `train_data` or `eval_data` asks which replica it reads for, as rank and world."""
    if hook is None:
        return False
    try:
        names = list(inspect.signature(hook).parameters)
    except (TypeError, ValueError):
        return False
    return names[:2] == ["rank", "world"]
