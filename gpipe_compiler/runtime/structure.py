"""What the model returns: a structure of tensors, and how micro-batches make it together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

from .errors import UsageError
from .sizes import Dim


class Reduction(Enum):
    """How the loss of a mini-batch follows from those of its micro-batches."""

    MEAN = "mean"
    SUM = "sum"


class Joined(Enum):
    """How an output without a batch dimension follows from those of the micro-batches.

    SAME: all have the same. SUM, MAX, MIN: over them, element by element; for booleans, MAX is
    whether any is true, MIN whether all are. MEAN: weighed by their samples. TERMS: each term of it
    by what that is a mean over. STACKED: one after another. APART: not at all.
    """

    SAME = "same"
    SUM = "sum"
    MEAN = "mean"
    MAX = "max"
    MIN = "min"
    TERMS = "terms"
    STACKED = "stacked"
    APART = "apart"


@dataclass(frozen=True, slots=True)
class OutputClass:
    """A class of the model's own that it returns.

    Attributes:
        path: the way to it in the structure that is returned.
        module, name: where it is to be imported from.
        fields: of a named tuple, in order; () for what holds its fields by name.
        factory: the module and the name of what makes the missing items of a defaultdict; () where
            there is none.
    """

    path: tuple[str | int, ...]
    module: str
    name: str
    fields: tuple[str, ...] = ()
    factory: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LossTerm:
    """A summand of a loss: a sum over samples, or a mean over things of its own.

    Attributes:
        counted: whether it is a mean over what `LossSpec.weight` counts; otherwise it is one over
            samples, or a sum.
        floor, offset: where it is counted, it is divided by `max(weight, floor) + offset`, as a
            model writes it where nothing may count.
        above: where it is counted, it is 0 where the weight of the mini-batch is not above this.
        least: where it is counted, that of a micro-batch is divided by no less than this: its own
            weight may be 0, or negative, where that of the mini-batch is neither.
        per_sample: otherwise, of how many things per sample it is the mean: as `tokens` of one over
            all tokens. It matters where micro-batches differ in sizes, which are refused where it
            is None: not known. Batches of an evaluation then weigh by samples.
    """

    reduction: Reduction
    counted: bool = False
    floor: float = -math.inf
    offset: float = 0.0
    above: float = -math.inf
    per_sample: Dim | None = 1
    least: float = -math.inf


@dataclass(frozen=True, slots=True)
class OutputTerm:
    """A summand of an output that is a loss.

    Attributes:
        weight: the value that says how much it is a mean over; "" for samples, and for a sum.
    """

    value: str
    term: LossTerm
    weight: str = ""


@dataclass(frozen=True, slots=True)
class Leaf:
    """The place of a tensor in the structure that the pipeline returns.

    Attributes:
        terms: of an output that is put together by them.
    """

    value: str
    batch_dim: int | None = 0
    joined: Joined = Joined.SAME
    terms: tuple[OutputTerm, ...] = ()


@dataclass(frozen=True, slots=True)
class Samples:
    """The place of a number in that structure that is a multiple of the mini-batch's samples."""

    factor: Dim


@dataclass(frozen=True)
class Unreturned:
    """What the model returns in this place and no stage can hand out, such as a cache of keys.

    Whatever is done with it is refused, but for seeing whether it is None.

    Attributes:
        training: the mode in which alone it is returned; None for both.
        keyed: in the other mode None stands there, and not even its key is missing in a dict.
    """

    path: tuple[Any, ...]
    cls: str
    training: bool | None = None
    keyed: bool = True

    def is_left_out(self, training: bool) -> bool:
        """Whether the model returns no such thing in a mode."""
        return self.training is not None and self.training is not training

    def _refuse(self, *_: object) -> Any:
        raise UsageError(
            f"what the model returns in {'.'.join(map(str, self.path)) or 'all'} is an object of "
            f"the class {self.cls}, which no stage can hand out",
            hint="have the model return its tensors in a tuple, a dict or a dataclass; a cache is "
            "handed out by packages that are compiled with --mode infer",
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python asks for these by itself, to copy or to print it
            raise AttributeError(name)
        return self._refuse()

    __bool__ = __call__ = __contains__ = __getitem__ = __iter__ = __len__ = _refuse


Structure: TypeAlias = Any
"""Tuples, lists and dicts (nested) of `Leaf`, `Samples`, expressions of sizes, and constants."""
