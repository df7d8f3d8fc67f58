"""The mini-batches of a command: the example, a safetensors file, or those of the user."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.progress import Progress, RandomState
from ..core.inputs import Inputs, bind_call
from ..core.pipeline import Pipeline
from ..core.weights import load_file
from ..core.wiring import inputs_for, most_work
from ..errors import PipelineError, UsageError
from ..sizes import Sizes, shape_at
from ..spec import Input, PipelineSpec
from ..wording import said
from .hooks import has_state
from .own_rows import Rows, ShareSampler, takes_share, with_own_rows

EXAMPLE = Path("weights", "example.safetensors")


@dataclass(frozen=True, slots=True)
class InputChoice:
    """What the model is run on, where the user's own data is not.

    Attributes:
        file: named tensors; None for the example.
        samples: of the example; None for as many as it was compiled with.
        sizes: of the example, by name; others are those that it was compiled with.
    """

    file: Path | None = None
    samples: int | None = None
    sizes: Sizes = field(default_factory=dict)


def call_on(spec: PipelineSpec, directory: Path, choice: InputChoice) -> tuple[object, object]:
    """Inputs and target of what was chosen; raises as `named_input` or `example_call`."""
    if choice.file is not None:
        return named_input(spec, choice.file)
    return example_call(spec, directory, choice)


def example_call(spec: PipelineSpec, directory: Path, choice: InputChoice) -> tuple[object, object]:
    """Inputs and target of the example that the package was compiled with.

    Args:
        choice: the samples and sizes that the example is repeated or cut to.

    Raises:
        UsageError: when the package has no example.
    """
    path = directory / EXAMPLE
    if not path.is_file():
        raise UsageError(
            f"this package has no example batch ({path} is missing)",
            hint="offer train_data() in the model's file and compile again, or pass --input",
        )
    tensors = load_file(path)
    sizes = {size.name: size.example for size in spec.sizes} | {**choice.sizes}
    shapes = {
        source.name: _shape_at(source, tensors[source.name], choice.samples, sizes)
        for source in spec.inputs
        if source.name in tensors
    }
    _refuse_too_large(tensors, shapes)
    for name, shape in shapes.items():
        for dim, size in enumerate(shape):
            tensors[name] = resized(tensors[name], dim, size)
    return call_of(spec, tensors)


def _shape_at(
    source: Input, tensor: torch.Tensor, samples: int | None, sizes: Sizes
) -> tuple[int, ...]:
    shape = [*(tensor.shape if source.shape is None else shape_at(source.shape, sizes))]
    if source.batch_dim is not None:
        shape[source.batch_dim] = tensor.shape[source.batch_dim] if samples is None else samples
    return tuple(shape)


def _refuse_too_large(
    tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, Sequence[int]]
) -> None:
    size = sum(math.prod(shape) * tensors[name].itemsize for name, shape in shapes.items())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > memory:
        raise UsageError(f"a batch of {size:,} bytes is larger than the memory of this machine")


TOKENS = "tokens"
"""The name of a size which is that of a sample in tokens."""


def has_tokens(spec: PipelineSpec) -> bool:
    """Whether a size of the pipeline is called so."""
    return any(size.name == TOKENS for size in spec.sizes)


def counts_of(
    spec: PipelineSpec, microbatches: int, inputs: object, target: object
) -> tuple[int, int]:
    """The samples in a mini-batch, and its tokens, padding too; none where no size is called so.

    Where nothing is batched, micro-batches are as planned.
    """
    needed = inputs_for(spec, most_work(spec))
    bound = bind_call(inputs, target, spec, needed, microbatches)
    pairs = zip(bound.samples, bound.sizes, strict=True)
    return sum(bound.samples), sum(samples * sizes.get(TOKENS, 0) for samples, sizes in pairs)


def call_of(spec: PipelineSpec, tensors: Mapping[str, torch.Tensor]) -> tuple[object, object]:
    """Named tensors as the inputs and the target of a call."""
    call: dict[object, object] = {"args": {}, "kwargs": {}}
    for source in spec.inputs:
        if source.name in tensors:
            *way, last = source.path
            inner: Any = call
            for key in way:  # nested containers become dicts by key or index
                inner = inner.setdefault(key, {})
            inner[last] = tensors[source.name]
    positional: Any = call["args"]
    args = tuple(positional.get(index) for index in range(max(positional, default=-1) + 1))
    return (args, call["kwargs"]), call.get("target")


def named_input(spec: PipelineSpec, path: Path) -> tuple[object, object]:
    """The call that a safetensors file holds: tensors by input name; one tensor needs no name.

    Raises:
        UsageError: when the file holds something else.
    """
    tensors = load_file(path)
    wanted = [source.name for source in spec.inputs if source.path[0] != "target"]
    if len(tensors) == 1 and len(wanted) == 1:
        tensors = {wanted[0]: next(iter(tensors.values()))}
    unknown = sorted(tensors.keys() - {source.name for source in spec.inputs})
    if unknown:
        raise UsageError(
            f"{path} holds {', '.join(unknown)}, which {spec.name} does not take",
            hint=f"its inputs are {', '.join(wanted)}",
        )
    return call_of(spec, tensors)


def resized(tensor: torch.Tensor, dim: int | None, samples: int) -> torch.Tensor:
    """A tensor cut or repeated to a number of samples; itself where it has no batch dimension."""
    if dim is None or tensor.shape[dim] == samples:
        return tensor
    return tensor.index_select(dim, torch.arange(samples) % tensor.shape[dim])


# --- pass after pass over the data ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Batch:
    """A mini-batch: what the model is called with, and what the loss compares with.

    Attributes:
        place: where it stands in the data, for messages: "batch 3 of pass 1 of train_data() ...".
        rows: the share of this replica, where it has read no more than that; None for all of it.
        own: whether the user's code has given this replica its share.
    """

    inputs: object = None
    target: object = None
    place: str = ""
    rows: Rows | None = None
    own: bool = False


NOTHING = Batch()
"""What ranks that read no data pass to the pipeline."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where batches come from.

    Attributes:
        name: for messages: "train_data() of model.py".
        begin: gives an iterable of pairs (inputs, target), anew for every pass.
        own: whether they are this replica's share of each batch.
    """

    name: str
    begin: Callable[[], Iterable[object]]
    own: bool = False

    @classmethod
    def of_hook(cls, name: str, hook: Callable[..., Iterable[object]], pipe: Pipeline) -> Source:
        """The user's, which gives this replica its share where it asks which one that is."""
        own = takes_share(hook)
        begin = partial(hook, pipe.replica, pipe.replicas) if own else hook
        return cls(name, begin, own and pipe.replicas > 1)

    @classmethod
    def repeated(cls, inputs: object, target: object) -> Source:
        """One batch over and over, in a pass that never ends."""
        return cls("the example", lambda: itertools.repeat((inputs, target)))


class Batches:
    """Iterates over the mini-batches of a source; its position can be saved and restored.

    A pass depends on the generators of the process when it began, and on nothing else that a run
    changes; or else its iterable has `state_dict` and `load_state_dict`, as those of torchdata do.
    """

    def __init__(self, source: Source, sharing: Pipeline | None = None) -> None:
        """Batches from the first pass on.

        Args:
            sharing: the pipeline, where each of its replicas is to load its own rows alone.
        """
        self.source = source
        self.sharing = sharing
        self.passes = 0
        self.taken = 0
        self._began = RandomState.now()
        self._data: object = None
        self._iterator: Iterator[object] | None = None

    def take(self, count: int) -> list[Batch]:
        """The next mini-batches of the present pass: fewer at its end, none when it has ended.

        After none, the next call begins the next pass.

        Raises:
            PipelineError: when the user's code raises, or the pass is empty.
            UsageError: when a batch is no pair of inputs and target.
        """
        if self._iterator is None:
            self._begin()
        found: list[Batch] = []
        while len(found) < count:
            item = self._next()
            if item is None:
                break
            found.append(item)
        if not found:
            if self.taken == 0:
                raise PipelineError(f"{self.source.name} gives no batches")
            self.passes, self.taken = self.passes + 1, 0
            self._iterator = None
            self._began = RandomState.now()
        return found

    def length(self) -> int | None:
        """The batches of the present pass, where its iterable has a `len`."""
        if self._iterator is None:
            self._begin()
        try:
            return len(self._data)  # type: ignore[arg-type]  # it is asked whether it has one
        except TypeError:
            return None

    def place(self, progress: Progress) -> Progress:
        state = None
        if self._iterator is not None and has_state(self._data) and not self.source.own:
            state = self._data.state_dict()  # type: ignore[attr-defined]  # it was asked for
        return dataclasses.replace(
            progress,
            epoch=self.passes,
            batch=self.taken,
            random=self._began,
            current=RandomState.now(),
            data=state,
        )

    def go_to(self, progress: Progress) -> None:
        """Restore the position of a checkpoint, in a new process as in the first.

        Raises:
            PipelineError: when the pass does not reach so far: the data is not what it was.
        """
        if progress.random is not None:
            progress.random.restore()
            self._began = progress.random
        self.passes, self.taken = progress.epoch, 0
        self._iterator = None
        if progress.batch:
            # A replica's share has no place that others could go on from but its number.
            state = None if self.source.own or self.sharing is not None else progress.data
            self._begin(state)
            if state is None:
                self._skip(progress.batch)
            self.taken = progress.batch
        if progress.current is not None:
            progress.current.restore()

    def _begin(self, state: object = None) -> None:
        self._began = RandomState.now()
        try:
            self._data = self.source.begin()
            if self.sharing is not None:
                self._data = with_own_rows(self._data, self.sharing)
            if state is not None:
                if not has_state(self._data):
                    raise TypeError("it has no load_state_dict any more, as the checkpoint's had")
                self._data.load_state_dict(state)  # type: ignore[attr-defined]  # it was asked for
            self._iterator = iter(self._data)
        except (Exception, SystemExit) as error:  # whatever the user's code raises
            raise self._failed(error) from error

    def _skip(self, count: int) -> None:
        for number in range(count):
            if self._next() is None:
                raise PipelineError(
                    f"{self.source.name} gives {number} batches in pass {self.passes + 1}, {count} "
                    "have been trained on: the data is not that of the checkpoint"
                )

    def _next(self) -> Batch | None:
        assert self._iterator is not None
        try:
            item = next(self._iterator)
        except StopIteration:
            return None
        except PipelineError:
            raise
        except (Exception, SystemExit) as error:  # whatever the user's code raises
            raise self._failed(error) from error
        self.taken += 1
        place = f"batch {self.taken} of pass {self.passes + 1} of {self.source.name}"
        sampler = getattr(self._data, "batch_sampler", None)
        rows = sampler.given.popleft() if isinstance(sampler, ShareSampler) else None
        return Batch(*pair(item, place), place, rows, self.source.own)

    def _failed(self, error: BaseException) -> PipelineError:
        return PipelineError(
            f"{self.source.name} failed at batch {self.taken + 1} of pass {self.passes + 1}: "
            f"{said(error)}"
        )


def share_read(pipe: Pipeline, batch: Batch) -> tuple[Inputs, object]:
    """This replica's share of a mini-batch, of which it may have read no more.

    Raises:
        PipelineError: when rows of the data set have become another number of samples.
    """
    if batch.own:
        return batch.inputs, batch.target
    if batch.rows is None:
        return pipe.shard(batch.inputs, batch.target)
    rows = batch.rows
    found, _ = counts_of(pipe.spec, pipe.microbatches, batch.inputs, batch.target)
    if found != rows.count:
        raise PipelineError(
            f"{batch.place}: {rows.count} rows of the data set became {found} samples",
            hint="with --read batches every replica reads whole batches, and takes its share "
            "of the samples",
        )
    pipe.note_read(rows.mark)
    return batch.inputs, batch.target


def disagreement(batches: Batches) -> PipelineError:
    """The error of a replica whose data ends elsewhere than rank 0's."""
    return PipelineError(
        f"{batches.source.name} gives other batches here than on rank 0",
        hint="every replica reads the same data and takes its share of each batch, or is given it, "
        "of as many batches, by a hook that takes rank and world",
    )


def located(error: PipelineError, batch: Batch, step: int | None = None) -> PipelineError:
    """The error of a batch with its place in training and in the data, where that is known."""
    places = [*([] if step is None else [f"step {step}"]), *([batch.place] if batch.place else [])]
    problem = f"{', '.join(places)}: {error.problem}" if places else error.problem
    return type(error)(problem, hint=error.hint)


def pair(item: object, place: str) -> tuple[object, object]:
    """A batch as inputs and target."""
    if not isinstance(item, tuple | list) or len(item) != 2:
        what = type(item).__name__
        if isinstance(item, tuple | list):
            what += f" of {len(item)}"
        raise UsageError(f"{place}: a {what} is no pair", hint="give (inputs, target or None)")
    return item[0], item[1]
