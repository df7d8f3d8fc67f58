"""The mini-batches of training, pass after pass over the data, and the position in them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ..checkpoint.progress import Progress, RandomState
from ..errors import PipelineError, UsageError
from ..wording import said


@dataclass(frozen=True, slots=True)
class Batch:
    """A mini-batch: what the model is called with, and what the loss compares with.

    Attributes:
        place: where it stands in the data, for messages: "batch 3 of pass 1 of train_data() ...".
    """

    inputs: object = None
    target: object = None
    place: str = ""


NOTHING = Batch()
"""What ranks that read no data pass to the pipeline."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where batches come from.

    Attributes:
        name: for messages: "train_data() of model.py".
        begin: gives an iterable of pairs (inputs, target), anew for every pass.
    """

    name: str
    begin: Callable[[], Iterable[object]]

    @classmethod
    def repeated(cls, inputs: object, target: object) -> Source:
        """One batch over and over, in a pass that never ends."""
        return cls("the example", lambda: itertools.repeat((inputs, target)))


class Batches:
    """Iterates over the mini-batches of a source; its position can be saved and restored.

    A pass depends on the generators of the process when it began, and on nothing else that a run
    changes; or else its iterable has `state_dict` and `load_state_dict`, as those of torchdata do.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
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
        """Progress with the place of the next batch."""
        state = None
        if self._iterator is not None and _has_state(self._data):
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
            self._begin(progress.data)
            if progress.data is None:
                self._skip(progress.batch)
            self.taken = progress.batch
        if progress.current is not None:
            progress.current.restore()

    def _begin(self, state: object = None) -> None:
        self._began = RandomState.now()
        try:
            self._data = self.source.begin()
            if state is not None:
                if not _has_state(self._data):
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
        except (Exception, SystemExit) as error:  # whatever the user's code raises
            raise self._failed(error) from error
        self.taken += 1
        place = f"batch {self.taken} of pass {self.passes + 1} of {self.source.name}"
        return Batch(*pair(item, place), place)

    def _failed(self, error: BaseException) -> PipelineError:
        return PipelineError(
            f"{self.source.name} failed at batch {self.taken + 1} of pass {self.passes + 1}: "
            f"{said(error)}"
        )


def disagreement(batches: Batches) -> PipelineError:
    """The error of a replica whose data ends elsewhere than rank 0's."""
    return PipelineError(
        f"{batches.source.name} gives other batches here than on rank 0",
        hint="every replica reads the same data and takes its share of each batch",
    )


def located(error: PipelineError, batch: Batch, step: int | None = None) -> PipelineError:
    """The error of a batch with its place in training and in the data, where that is known."""
    places = [*([] if step is None else [f"step {step}"]), *([batch.place] if batch.place else [])]
    problem = f"{', '.join(places)}: {error.problem}" if places else error.problem
    return type(error)(problem, hint=error.hint)


def pair(item: object, place: str) -> tuple[object, object]:
    """A batch as inputs and target.

    Raises:
        UsageError: when it is something else.
    """
    if not isinstance(item, tuple | list) or len(item) != 2:
        what = type(item).__name__
        if isinstance(item, tuple | list):
            what += f" of {len(item)}"
        raise UsageError(f"{place}: a {what} is no pair", hint="give (inputs, target)")
    return item[0], item[1]


def _has_state(data: object) -> bool:
    methods = (getattr(data, name, None) for name in ("state_dict", "load_state_dict"))
    return all(callable(method) for method in methods)
